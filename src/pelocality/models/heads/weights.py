"""The symmetry and the direction of each head's product of query and key weights."""

from typing import Any

import torch
from torch import Tensor

from pelocality.models._inference import inference
from pelocality.models._weights import loaded, refuse_quantised
from pelocality.models.logits.terms import known_projections
from pelocality.models.sequence_model import SequenceModel

# Weights are read with inputs of this scale: a large bias in half precision rounds small ones away.
_SCALE = 2.0**12
_OUTLIER = 2.0  # standard deviations above the mean norm, the gamma of Saponati et al.


def weight_scores(model: SequenceModel) -> tuple[Tensor, str]:
    r"""Return symmetry and direction of $M = W_q W_k^\top$ of each head, (2, layer, head), and why some are NaN.

    The layers are those of the family. Weights are read from the projections: what they give for each unit vector,
    without what they give for zeros.
    """
    scores, reason, base = [], "", model.module
    try:
        family, modules = known_projections(model), model.family.attention_layers(base)
        for module in modules:
            refuse_quantised(base, module)
    except ValueError as error:
        return torch.full((2, 0, 0), torch.nan), str(error)
    with inference(base):
        for number, module in enumerate(modules):
            with loaded(base, [module]):
                once, twice = (_weights(family, module, model, scale) for scale in (_SCALE, 2 * _SCALE))
            both = torch.stack([symmetry(*once), direction(*once)])
            if any((one - other).norm() > 0.1 * other.norm() for one, other in zip(once, twice, strict=True)):
                both = torch.full_like(both, torch.nan)  # a norm of queries or keys, as in Qwen 3
                reason = reason or f"queries and keys of layer {number} are not linear in what the layer reads"
            scores.append(both)
    return torch.stack(scores, 1), reason


def symmetry(query: Tensor, key: Tensor) -> Tensor:
    r"""Return $(\lVert M_s \rVert^2 - \lVert M_n \rVert^2) / \lVert M \rVert^2$ of $M = W_q W_k^\top$, (head,).

    $M_s$ and $M_n$ are the symmetric and the antisymmetric part. The numerator is the trace of $M^2$; both are computed
    from products of (d_head, d_head).

    Args:
        query: $W_q$ of each head, (head, d, d_head).
        key: $W_k$ of each head, (head, d, d_head).
    """
    across, queries, keys = key.mT @ query, query.mT @ query, key.mT @ key
    return (across * across.mT).sum((-2, -1)) / (queries * keys).sum((-2, -1))


def direction(query: Tensor, key: Tensor) -> Tensor:
    r"""Return by how much the norms of outlying columns of $M = W_q W_k^\top$ exceed those of rows, (head,).

    $(C - R) / (C + R)$ with $C$ the sum over columns of what their norms exceed the mean plus two standard deviations
    of the norms of columns by, and $R$ the same of rows; 0 without such columns and rows.
    """
    pairs = (query, key.mT @ key), (key, query.mT @ query)
    rows, columns = (((each @ gram) * each).sum(-1).clamp(min=0).sqrt() for each, gram in pairs)
    usual = (each.mean(-1, keepdim=True) + _OUTLIER * each.std(-1, keepdim=True) for each in (columns, rows))
    c, r = ((each - most).clamp(min=0).sum(-1) for each, most in zip((columns, rows), usual, strict=True))
    return torch.where(c + r > 0, (c - r) / (c + r), 0.0)


def _weights(family: Any, module: Any, model: SequenceModel, scale: float) -> tuple[Tensor, ...]:
    """Return the weights of queries and keys without their biases, (head, d, d_head) each, float64 on the CPU."""
    weight = next(module.parameters())
    units = torch.eye(model.config.hidden_size, dtype=model.dtype, device=weight.device)[None]
    pairs = zip(family.project(module, scale * units), family.project(module, torch.zeros_like(units)), strict=True)
    return tuple((one[0].cpu().double() - zero[0].cpu().double()) / scale for one, zero in pairs)
