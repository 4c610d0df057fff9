"""Scores of pairs of positions: laid out from a number per distance, normalised into attention, and attended with."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import dropout, pad, scaled_dot_product_attention

from pelocality.metrics.distances import diagonal_sums

# A mask of numbers hides a key from here down: there exp gives 0 in float64 too (it ends at -745), with room for logits
# that stand above; bfloat16 holds the usual -1e4 as -9984.
HIDDEN = -1e3

_ROWS = 64  # so many rows of a gradient at a time stay in the cache of a CPU


def toeplitz(line: Tensor, query_length: int) -> Tensor:
    """Lay a line of numbers out so that every diagonal of the matrix holds one of them.

        M_ij = line[j - i + q - 1]

    Args:
        line: (heads or 1, q + k - 1), the distance furthest in the past first.
        query_length: q.

    Returns:
        (heads or 1, q, k).
    """
    if torch.compiler.is_compiling():
        return _tiled(line, query_length)
    result: Tensor = _Toeplitz.apply(line, query_length)  # type: ignore[no-untyped-call]
    return result


def masked_softmax(logits: Tensor, visible: Tensor | None) -> Tensor:
    """Normalise attention over the keys that are visible; a query that sees none gets zeros, never NaN.

    Args:
        logits: (..., query, key).
        visible: Broadcastable to it, True where a query sees a key; None: it sees all but those of -inf.

    Returns:
        (..., query, key).
    """
    if visible is not None:
        logits = torch.where(visible, logits, -torch.inf)
    blind = logits.detach().amax(-1, keepdim=True) == -torch.inf
    return torch.where(blind, 0, torch.where(blind, 0, logits).softmax(-1))


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, scale: float | None
) -> Tensor:
    """Return PyTorch's ``scaled_dot_product_attention``, also where its kernels have no derivative.

    Args:
        query: (batch, heads, q, d).
        key: (batch, heads, k, d).
        value: (batch, heads, k, d_v).
        mask: Booleans, True where a query sees a key, or floats that are added; broadcastable to (batch, heads, q, k).
        dropout_p: Share of attention weights left out.
        scale: What the scores are multiplied by; None: 1 / sqrt(d).

    Returns:
        (batch, heads, q, d_v).
    """
    while mask is not None and mask.ndim < 4:
        mask = mask[None]
    given = (query, key, value) if mask is None else (query, key, value, mask)
    if not torch.compiler.is_compiling() and transformed(*given):
        return dropout(attention_weights(query, key, mask, scale), dropout_p) @ value
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout_p, scale=scale)


def attention_weights(query: Tensor, key: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Return the attention that `attend` averages the values with.

    Args:
        query: As for `attend`, and so the rest.
        key: See there.
        mask: See there.
        scale: See there.

    Returns:
        (batch, heads, q, k); zeros for a query that sees nothing.
    """
    logits = query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale) @ key.mT
    if mask is None or mask.dtype == torch.bool:
        return masked_softmax(logits, mask)
    return masked_softmax(logits + mask, None)


def transformed(*tensors: Tensor) -> bool:
    """Return whether a tensor is more than its numbers: inside `torch.func`, or with a forward-mode tangent.

    Args:
        *tensors: Any tensors.

    Returns:
        Whether that is so for one of them.
    """
    for each in tensors:
        _, tangent = forward_ad.unpack_dual(each)  # type: ignore[no-untyped-call]
        if tangent is not None or torch.func.debug_unwrap(each) is not each:
            return True
    return False


class _Toeplitz(torch.autograd.Function):
    """`toeplitz` by a view and one copy; backward sums block by block, which autograd's own does not."""

    generate_vmap_rule = True

    @staticmethod
    def forward(line: Tensor, query_length: int) -> Tensor:
        return line.unfold(-1, line.shape[-1] - query_length + 1, 1).flip(-2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.query_length = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        queries, total = ctx.query_length, None
        for first in range(0, queries, _ROWS):
            stop = min(first + _ROWS, queries)
            sums = pad(diagonal_sums(gradient.narrow(-2, first, stop - first)), (queries - stop, first))
            total = sums if total is None else total + sums
        assert total is not None
        return total, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return toeplitz(tangent, ctx.query_length)


def _tiled(line: Tensor, query_length: int) -> Tensor:
    """The same out of views alone, which a compiler fuses, forward and backward, and which have no length baked in."""
    heads, width = line.shape
    if width == 1:
        return line[:, None]
    # the line over and over, read in rows one shorter than it is: each row starts one earlier
    tiles = line[:, None].expand(heads, query_length + 1, width).reshape(heads, -1)
    rows = tiles[:, query_length - 1 : query_length - 1 + query_length * (width - 1)]
    return rows.reshape(heads, query_length, width - 1)[..., : width - query_length + 1]
