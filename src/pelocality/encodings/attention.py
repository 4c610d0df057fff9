"""Scaled dot product attention with an encoding; on a CPU without a matrix of biases where distance alone decides."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from pelocality.encodings._scores import attend, attention_weights, toeplitz, transformed
from pelocality.encodings.base import Encoding
from pelocality.encodings.relative import RelativeEncoding, unchanged
from pelocality.metrics.distances import diagonal_sums

_LONG = 2**18  # scores a head from which, on a CPU, attention without the matrix is faster
_BLOCK = 2**17  # scores that backward holds at a time, few enough for a core's own cache


def biased_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    encoding: Encoding,
    *,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """PyTorch's ``scaled_dot_product_attention`` with an encoding as its bias.

        softmax(scale Q K^T + bias) V

    Give it in place of that function, with an encoding for the ``attn_mask`` of biases. On a CPU, in long sequences
    without a mask, the bias of an encoding of distance alone is read from its 2n - 1 numbers, and the gradients of a
    learned one are summed block by block: there is no n x n tensor. Elsewhere, and for every other encoding, this is
    that function with the encoding's bias as its mask.

    Args:
        query: Q, (batch, heads, q, d).
        key: K, (batch, heads, k, d), k >= q; the last query stands at the last key.
        value: V, (batch, heads, k, d_v).
        encoding: Of as many heads, or of one that all share.
        mask: (batch or 1, heads or 1, q or 1, k) of booleans, True where a query sees a key; None: it sees all, but
            for what a causal encoding hides.
        dropout_p: Share of attention weights left out, always: the function does not know of evaluation.
        scale: What the scores are multiplied by; None: 1 / sqrt(d).

    Returns:
        (batch, heads, q, d_v); zeros for a query that sees nothing.

    Raises:
        TypeError: An encoding that is none, or a mask of anything but booleans.
        ValueError: Shapes that do not fit, or an encoding of another number of heads.

    Note:
        On CUDA it is ``encoding.score_modification`` with FlexAttention that does without the matrix.

    Examples:
        >>> from pelocality.encodings import ALiBi
        >>> query, key, value = torch.randn(3, 1, 8, 4096, 16)
        >>> biased_attention(query, key, value, ALiBi(heads=8)).shape
        torch.Size([1, 8, 4096, 16])
    """
    encoding = getattr(encoding, "_orig_mod", encoding)  # what torch.compile wraps
    _check(query, key, value, encoding, mask)
    if mask is None and dropout_p == 0:
        line = _bias_by_distance(query, key, value, encoding)
        if line is not None:
            factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
            if not (torch.is_grad_enabled() and line.requires_grad):
                return _reversed(query, key, value, line, factor)
            line = line.expand(query.shape[1], -1)
            learned: Tensor = _LearnedBias.apply(query, key, value, line, factor)  # type: ignore[no-untyped-call]
            return learned
    added = encoding.additive_mask(query.shape[-2], key.shape[-2], mask=mask, dtype=query.dtype)
    return attend(query, key, value, added, dropout_p, scale)


def _bias_by_distance(query: Tensor, key: Tensor, value: Tensor, encoding: Encoding) -> Tensor | None:
    """Return the bias as numbers per distance where attention is to be computed from them, (heads or 1, q + k - 1)."""
    queries, keys = query.shape[-2], key.shape[-2]
    if torch.compiler.is_compiling() or queries * keys < _LONG or query.numel() == 0 or query.device.type != "cpu":
        return None
    if query.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled("cpu"):
        return None  # in half precision what is rounded is the finished bias
    if not (
        isinstance(encoding, RelativeEncoding) and encoding.distance_alone and unchanged(encoding, "distinct", Encoding)
    ):
        return None
    line = encoding.by_distance(queries, keys)
    if any(type(each) not in (Tensor, nn.Parameter) for each in (query, key, value, line)):
        return None
    if transformed(query, key, value, line) or torch.promote_types(line.dtype, query.dtype) != query.dtype:
        return None
    sees_itself = bool(line[:, keys - 1].isfinite().all())  # so that no query sees nothing
    return line.to(query.dtype) if sees_itself else None


def _reversed(query: Tensor, key: Tensor, value: Tensor, line: Tensor, scale: float) -> Tensor:
    """Attend with the last query first: then the matrix of biases is a view of the line, and takes no memory."""
    bias = line.unfold(-1, key.shape[-2], 1)[None]
    return scaled_dot_product_attention(query.flip(-2), key, value, attn_mask=bias, scale=scale).flip(-2)


class _LearnedBias(torch.autograd.Function):
    """Attention whose backward pass goes by blocks of rows, for that of PyTorch's fast kernel ignores the bias.

    With A the attention, g the gradient of the output and P_ij = g_i . v_j that of the attention, the gradient of the
    logits is A_ij (P_ij - sum_k A_ik P_ik) (Dao et al., FlashAttention, 2022, appendix B); the bias gets its sums along
    diagonals.
    """

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, line: Tensor, scale: float) -> Tensor:
        # detached: the fast kernel declines what requires a gradient
        return _reversed(query.detach(), key.detach(), value.detach(), line.detach(), scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor, float], output: Tensor) -> None:
        *tensors, ctx.scale = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tensors: tuple[Tensor, Tensor, Tensor, Tensor] = ctx.saved_tensors
        query, key, value, line = tensors
        if not torch.is_grad_enabled():
            batch, heads = query.shape[:2]
            found = [
                _gradients(query[i, h], key[i, h], value[i, h], line[h], gradient[i, h], ctx.scale)
                for i, h in itertools.product(range(batch), range(heads))
            ]
            of_query, of_key, of_value, of_line = (
                torch.stack(each).reshape(batch, heads, *each[0].shape) for each in zip(*found, strict=True)
            )
            return of_query, of_key, of_value, of_line.sum(0), None
        # gradients that shall have gradients
        output = attention_weights(query, key, toeplitz(line, query.shape[-2]), ctx.scale) @ value
        wanted = [each for each in tensors if each.requires_grad]
        learned = iter(torch.autograd.grad(output, wanted, gradient, create_graph=True))
        return *(next(learned) if each.requires_grad else None for each in tensors), None


def _gradients(
    query: Tensor, key: Tensor, value: Tensor, line: Tensor, gradient: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of one head's (length, d) and line, with never more than a block of scores in memory."""
    queries, keys = len(query), len(key)
    of_query: list[Tensor] = []
    of_key, of_value, of_line = torch.zeros_like(key), torch.zeros_like(value), torch.zeros_like(line)
    step = max(1, _BLOCK // keys)
    for first in range(0, queries, step):
        stop = min(first + step, queries)
        q, g = query[first:stop] * scale, gradient[first:stop]
        bias = line[queries - stop : queries - first + keys - 1].unfold(-1, keys, 1).flip(-2)
        attention = torch.addmm(bias, q, key.mT).softmax(-1)
        change = (g @ value.mT).mul_(attention)  # A P, and then the gradient of the logits
        change.addcmul_(attention, change.sum(-1, keepdim=True), value=-1)
        of_query.append(change @ key * scale)
        of_key = of_key + change.mT @ q
        of_value = of_value + attention.mT @ g
        of_line = of_line + pad(diagonal_sums(change), (queries - stop, first))
    return torch.cat(of_query), of_key, of_value, of_line


def _check(query: Tensor, key: Tensor, value: Tensor, encoding: Encoding, mask: Tensor | None) -> None:
    """Refuse what does not fit."""
    if not isinstance(encoding, Encoding):
        raise TypeError(f"encoding must be a pelocality.encodings.Encoding, got {type(encoding).__name__}")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.ndim != 4 or tensor.shape[:2] != query.shape[:2]:
            raise ValueError(
                f"{name} must be (batch, heads, length, d) with the query's batch and heads, got shape "
                f"{tuple(tensor.shape)} beside {tuple(query.shape)}"
            )
    if key.shape[-2] < query.shape[-2]:
        raise ValueError(f"key must be as long as query or longer, got {key.shape[-2]} keys, {query.shape[-2]} queries")
    if value.shape[-2] != key.shape[-2] or key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"query (..., q, d), key (..., k, d) and value (..., k, d_v) must fit, got shapes {tuple(query.shape)}, "
            f"{tuple(key.shape)} and {tuple(value.shape)}"
        )
    if encoding.heads not in (1, query.shape[1]):
        raise ValueError(f"encoding must have 1 or {query.shape[1]} heads, as the query has, got {encoding.heads}")
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = f"a tensor of {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask must be a tensor of booleans, True where a query sees a key, got {kind}")
    wanted = (*query.shape[:3], key.shape[2])
    if mask.ndim != 4 or mask.shape[3] != wanted[3] or any(mask.shape[i] not in (1, wanted[i]) for i in range(3)):
        raise ValueError(f"mask must be {wanted}, the first three or 1, got shape {tuple(mask.shape)}")
