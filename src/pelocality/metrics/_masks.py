"""Which tokens count, and which keys a query sees."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pelocality._checks import HIDDEN, check_unmasked, count
from pelocality.metrics._row_pass import row_blocks
from pelocality.metrics._tolerance import ROW_SUM_TOLERANCE

Mask = Tensor | np.ndarray | Sequence[Any]
Visible = Tensor | np.ndarray


def token_spans(mask: Mask | None, batch_shape: Sequence[int], n: int, without_first: int = 0) -> Tensor:
    """Return the span of counting tokens of every matrix.

    Args:
        mask: (*leading, n), True or 1 where a token counts, as in a Hugging Face ``attention_mask``, or additive: 0
            where it counts, -inf or at most -1000 where it does not. The leading axes are the first ones of the
            attention, size 1 repeats; the last (heads) may be omitted, or all; (batch, 1, 1, n), as for attention,
            is (batch, 1, n). Padding may be left or right. None: every token counts.
        batch_shape: Leading shape of the attention.
        n: Number of positions.
        without_first: How many of the first tokens that count are left out.

    Returns:
        (batch, 2) integers, start and stop (exclusive) of every matrix.

    Raises:
        TypeError: without_first is not an integer.
        ValueError: Other values, floats that are all 0, the shape does not fit, a sequence has no token or a gap
            between its tokens, or without_first is negative or leaves no token.
    """
    flags = torch.ones(n, dtype=torch.bool, device="cpu") if mask is None else token_flags(mask)
    if flags.ndim == len(batch_shape) + 2 and flags.shape[-3:-1] == (1, 1):
        flags = flags.squeeze(-2)  # (batch, head, query, key): the same for all queries
    leading = tuple(flags.shape[:-1])
    fits = flags.ndim >= 1 and flags.shape[-1] == n and len(leading) in {0, len(batch_shape) - 1, len(batch_shape)}
    if not fits or any(a not in (1, b) for a, b in zip(leading, batch_shape, strict=False)):
        mismatch = f"mask of shape {tuple(flags.shape)} does not fit attention of shape {(*batch_shape, n, n)}"
        advice = "give all axes before the heads or none; keys that a query does not see are visible="
        raise ValueError(f"{mismatch}; {advice}")
    position = torch.arange(n, device="cpu")
    start = torch.where(flags, position, n).amin(-1)
    stop = torch.where(flags, position + 1, 0).amax(-1)
    if bool((flags.sum(-1) != stop - start).any()) or not bool(flags.any(-1).all()):
        raise ValueError("mask must be 1 or True at one unbroken run of tokens in each sequence, and not at padding")
    shortest = min((stop - start).flatten().tolist(), default=n)
    count("without_first", without_first, least=0, most=shortest - 1)
    spans = torch.stack([start + without_first, stop], -1)  # (*leading, 2)
    spans = spans.reshape(*leading, *[1] * (len(batch_shape) - len(leading)), 2)
    return spans.expand(*batch_shape, 2).reshape(-1, 2)


def token_flags(mask: Mask) -> Tensor:
    """Return a mask as booleans of the same shape on the CPU, True where a token counts."""
    check_unmasked("mask", mask)
    values = torch.as_tensor(mask, device="cpu").detach()
    one, zero, hidden = values == 1, values == 0, values <= HIDDEN
    if values.is_floating_point() and values.numel() and bool(zero.all()):
        raise ValueError("mask is 0 everywhere: no token, or every one if it is additive; without padding leave it out")
    if bool((one | zero).all()):
        return one
    if bool((hidden | zero).all()):
        return ~hidden
    held = sorted(set(values.flatten().tolist()))
    raise ValueError(f"mask must hold 1 (counts) and 0, or 0 (counts) and -inf, got {held[:4]}")


def visible_by_layer(visible: Tensor | None, layers: Sequence[Any]) -> Sequence[Any] | Tensor:
    """Return visible for each layer of a sequence: its first axis, or all of it where the layers share it."""
    if visible is None or visible.ndim != getattr(layers[0], "ndim", 0) + 1:
        return [visible] * len(layers)
    return visible.expand(len(layers), *visible.shape[1:])


def expand_visible(visible: Tensor, matrices: Tensor) -> Tensor:
    """Return visible as booleans in the shape of the matrices (..., n, n), on their device."""
    if visible.dtype != torch.bool:
        raise TypeError(f"visible must hold booleans, True where a query sees a key, got {visible.dtype}")
    shape = tuple(matrices.shape)
    fits = visible.ndim == len(shape) and all(a in (1, b) for a, b in zip(visible.shape[:-2], shape[:-2], strict=True))
    if visible.shape[-2:] != shape[-2:] or (visible.ndim != 2 and not fits):
        raise ValueError(f"visible must be (n, n), or fit all axes of attention {shape}, got {tuple(visible.shape)}")
    return visible.to(matrices.device).expand(shape)


def check_hidden_keys(
    weights: Tensor, seen: Tensor, argument: str = "visible", advice: str = "it is True where query i sees key j"
) -> None:
    """Raise ValueError if a query has weight on a key that it does not see, by this argument; both (batch, n, n)."""
    hidden = weights.detach().masked_fill(seen, 0).sum(-1)
    if hidden.numel() and hidden.max().item() > ROW_SUM_TOLERANCE[weights.dtype]:
        share = f"some query has {hidden.max().item():.3g} of its weight on them"
        raise ValueError(f"{argument} hides keys with attention: {share}; {advice}")


def is_causal(weights: Tensor, later: Tensor) -> Tensor:
    """Return which matrices (batch, m, n) have no weight on later keys, boolean (m, n); none if no key is later."""
    causal = (weights[:, 0] * later[0] == 0).all(-1) & later.any()
    if bool(causal.any()):  # the first row decides nearly always; only then look at the whole
        for rows in row_blocks(weights):
            causal &= ~((weights[:, rows] > 0) & later[rows]).flatten(1).any(1)
    return causal
