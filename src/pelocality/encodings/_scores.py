"""Masked softmax, and plain attention."""

import math

import torch
from torch import Tensor
from torch.nn.functional import dropout, scaled_dot_product_attention

from pelocality._transforms import transformed


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
