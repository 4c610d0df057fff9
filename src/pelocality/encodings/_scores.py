"""Toeplitz matrices from a bias by distance and their gradients, masked softmax, and plain attention."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad, scaled_dot_product_attention

from pelocality.metrics._inputs import transformed
from pelocality.metrics.distances import diagonal_sums

_ROWS = 64  # rows of a gradient summed at a time, few enough for the cache of a CPU


def toeplitz(by_distance: Tensor, query_length: int) -> Tensor:
    """Return the Toeplitz matrix with one number per diagonal.

        M_ij = by_distance[j - i + q - 1]

    Args:
        by_distance: (heads or 1, q + k - 1), the most negative distance first.
        query_length: q.

    Returns:
        (heads or 1, q, k).
    """
    if torch.compiler.is_compiling():
        return _tiled(by_distance, query_length)
    result: Tensor = _Toeplitz.apply(by_distance, query_length)  # type: ignore[no-untyped-call]
    return result


def masked_softmax(logits: Tensor, visible: Tensor | None) -> Tensor:
    """Return the softmax over the visible keys, with zeros instead of NaN in fully masked rows.

    Args:
        logits: (..., query, key).
        visible: Broadcastable to logits, True where a query sees a key; None: where logits are above -inf.

    Returns:
        (..., query, key).
    """
    if visible is not None:
        logits = torch.where(visible, logits, -torch.inf)
    fully_masked = logits.detach().amax(-1, keepdim=True) == -torch.inf
    return torch.where(fully_masked, 0, torch.where(fully_masked, 0, logits).softmax(-1))


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, scale: float | None
) -> Tensor:
    """Return ``scaled_dot_product_attention``, with derivatives also inside `torch.func` and in forward mode.

    Args:
        query: (batch, heads, q, d).
        key: (batch, heads, k, d).
        value: (batch, heads, k, d_v).
        mask: Booleans, True where a query sees a key, or floats that are added; broadcastable to (batch, heads, q, k).
        dropout_p: Probability of dropping an attention weight.
        scale: Factor of the scores; None: 1 / sqrt(d).

    Returns:
        (batch, heads, q, d_v).
    """
    while mask is not None and mask.ndim < 4:
        mask = mask[None]
    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    if not torch.compiler.is_compiling() and transformed(*tensors):
        return dropout(attention_weights(query, key, mask, scale), dropout_p) @ value
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout_p, scale=scale)


def attention_weights(query: Tensor, key: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Return the attention weights of `attend`, (batch, heads, q, k), with zeros in fully masked rows."""
    logits = query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale) @ key.mT
    if mask is None or mask.dtype == torch.bool:
        return masked_softmax(logits, mask)
    return masked_softmax(logits + mask, None)


class _Toeplitz(torch.autograd.Function):
    """`toeplitz` as a view and one copy, with a backward pass that sums blocks of rows."""

    generate_vmap_rule = True

    @staticmethod
    def forward(by_distance: Tensor, query_length: int) -> Tensor:
        return by_distance.unfold(-1, by_distance.shape[-1] - query_length + 1, 1).flip(-2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.query_length = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        queries, keys = gradient.shape[-2:]
        total = gradient.new_zeros(*gradient.shape[:-2], queries + keys - 1)
        for first in range(0, queries, _ROWS):
            stop = min(first + _ROWS, queries)
            total = total + pad(diagonal_sums(gradient.narrow(-2, first, stop - first)), (queries - stop, first))
        return total, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return toeplitz(tangent, ctx.query_length)


def _tiled(by_distance: Tensor, query_length: int) -> Tensor:
    """Return `toeplitz` made of views, which a compiler fuses and which are not specialised to one length."""
    heads, width = by_distance.shape
    if width == 1:
        return by_distance[:, None]
    # repeated, then read in rows one shorter than itself: each row starts one number earlier
    tiles = by_distance[:, None].expand(heads, query_length + 1, width).reshape(heads, -1)
    rows = tiles[:, query_length - 1 : query_length - 1 + query_length * (width - 1)]
    return rows.reshape(heads, query_length, width - 1)[..., : width - query_length + 1]
