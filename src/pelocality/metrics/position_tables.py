"""Attention computed from a table of position embeddings alone."""

import contextlib
import math
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from pelocality._checks import check_choice, number
from pelocality.metrics._inputs import float_tensor

Similarity = Literal["dot", "cosine"]


def position_weights(
    table: Tensor | np.ndarray | nn.Embedding,
    query: Tensor | np.ndarray | None = None,
    key: Tensor | np.ndarray | None = None,
    *,
    similarity: Similarity = "dot",
    temperature: float | None = None,
) -> Tensor:
    """Return the positional weights of a table of position embeddings, one matrix per head.

        delta_ij = (p_i W_q)(p_j W_k)^T,    A = softmax_j(delta / temperature)

    delta is the positional correlation of absolute encodings (Chen et al. 2023). Without W_q and W_k, the embeddings
    are compared directly. With ``similarity="cosine"``, delta is the cosine of the two.

    Args:
        table: Position embeddings P, (n, d), or the module that holds them, such as
            ``roberta.embeddings.position_embeddings``. Rows of a module that no token reads are left out: in RoBERTa
            the rows up to its padding id, and in OPT and BART the first two.
        query: W_q, (d, d_head), or (heads, d, d_head). For a ``torch.nn.Linear``, give ``weight.T``.
        key: W_k, of the same shape. Give both or neither.
        similarity: ``"dot"``, or ``"cosine"`` of the two projected embeddings.
        temperature: Divisor of the similarity. None: sqrt(d_head) for dot products, as attention does
            (sqrt(d) without projections), and 1 for cosines.

    Returns:
        (n, n), or (heads, n, n); rows sum to 1; half precision is returned as float32.

    Raises:
        TypeError: Not float tensors or arrays, or a temperature that is not a number.
        RuntimeError: Projections that do not fit the table.
        ValueError: Another shape of the table, NaN or infinity, a row of zeros after the first row (RoBERTa's padding),
            an unknown similarity, a temperature that is not positive, similarities beyond the range of the precision.

    Note:
        At temperature 1, cosines give no key more than e^2 times the weight of another key. So even a strongly local
        table has nearly uniform weights at large n. Dot products keep the scale that the model learned.

    Examples:
        >>> import torch
        >>> position = torch.arange(4.0)[:, None]
        >>> table = torch.cat([position.cos(), position.sin()], -1)
        >>> position_weights(table, temperature=0.5)[0]
        tensor([0.6774, 0.2701, 0.0399, 0.0127])
    """
    queries, keys = project(table, query, key, similarity, temperature)
    return softmax_weights(queries, keys)


def softmax_weights(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the weights, (..., m, n), of scaled queries (..., m, d_head) and keys (..., n, d_head)."""
    weights = _product(queries, keys.transpose(-1, -2)).softmax(-1)
    if bool(weights[..., 0].isnan().any()):  # an infinite logit makes the whole row NaN
        raise ValueError(f"table has NaN, or similarities beyond the range of {queries.dtype}; raise the temperature")
    return weights


def project(
    table: Tensor | np.ndarray | nn.Embedding,
    query: Tensor | np.ndarray | None,
    key: Tensor | np.ndarray | None,
    similarity: Similarity,
    temperature: float | None,
) -> tuple[Tensor, Tensor]:
    """Return scaled queries and keys, ([heads,] n, d_head), whose products are the logits of `position_weights`."""
    if isinstance(table, nn.Embedding):  # the rows that tokens read
        skipped = getattr(table, "offset", 0) if table.padding_idx is None else table.padding_idx + 1
        table = table.weight[skipped:]
    positions = _in_float32("table", table)
    if positions.ndim != 2 or 0 in positions.shape:
        raise ValueError(f"table must be (n, d), one embedding per position, got shape {tuple(positions.shape)}")
    zeros = (positions == 0).all(-1)
    if bool(zeros[1:].any()) and not bool(zeros.all()):
        row = int(zeros[1:].nonzero()[0]) + 1
        raise ValueError(f"table has zeros in row {row}, a padding row; pass its module, or table[{row + 1}:]")
    if (query is None) != (key is None):
        raise ValueError("query and key come together: give both W_q and W_k, or neither")
    queries = keys = positions
    if query is not None:
        projections = (_in_float32(name, given).to(positions) for name, given in (("query", query), ("key", key)))
        queries, keys = (_product(positions, matrix) for matrix in projections)
    check_choice("similarity", similarity, ("dot", "cosine"))
    if similarity == "cosine":
        queries, keys = torch.nn.functional.normalize(queries, dim=-1), torch.nn.functional.normalize(keys, dim=-1)
    if temperature is None:
        temperature = math.sqrt(queries.shape[-1]) if similarity == "dot" else 1.0
    if not number("temperature", temperature) > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    return queries / temperature, keys


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right in their own precision, also inside a `torch.autocast`."""
    enabled = torch.is_autocast_enabled(left.device.type)  # a device may have no autocast
    with torch.autocast(left.device.type, enabled=False) if enabled else contextlib.nullcontext():
        return left @ right


def _in_float32(name: str, given: Any) -> Tensor:
    """Return a tensor or an array in at least float32."""
    tensor = float_tensor(name, given)
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
