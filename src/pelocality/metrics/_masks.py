"""Which tokens count, and which keys a query sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Mask = Tensor | np.ndarray | Sequence[Any]
Visible = Tensor | np.ndarray
# What an additive mask adds to the scores of a hidden key is at most this; -inf or the dtype's smallest, as a rule.
ADDITIVE = -1e4


def token_spans(mask: Mask, batch_shape: Sequence[int], n: int) -> Tensor:
    """Read the mask as one run of counting tokens per matrix.

    Args:
        mask: (*leading, n), True or 1 where a token counts, as in a Hugging Face ``attention_mask``, or additive: 0
            where it counts, -inf or at most -10,000 where it does not. The leading axes are the first ones of the
            attention, size 1 repeats; at most the last (heads) may be left off, or all. Padding may stand left or
            right.
        batch_shape: Leading shape of the attention.
        n: Number of positions.

    Returns:
        (batch, 2) integers, start and stop (exclusive) of every matrix.

    Raises:
        TypeError: It is nothing like a mask.
        ValueError: Other values, the shape does not fit, or a row's tokens are none or not one run.
    """
    flags = token_flags(mask)
    leading = tuple(flags.shape[:-1])
    fits = flags.ndim >= 1 and flags.shape[-1] == n and len(leading) <= len(batch_shape)
    if not fits or any(a not in (1, b) for a, b in zip(leading, batch_shape, strict=False)):
        raise ValueError(
            f"mask of shape {tuple(flags.shape)} does not fit attention of shape {(*batch_shape, n, n)}; "
            "wanted (*first axes of the attention, n), one flag per token"
        )
    if 0 < len(leading) < len(batch_shape) - 1:
        raise ValueError(
            f"mask of shape {tuple(flags.shape)} does not say which axes of attention {(*batch_shape, n, n)} it is "
            "for; name them all up to the heads, size 1 repeats: for (layer, batch, head, n, n) give mask[None]"
        )
    position = torch.arange(n)
    start = torch.where(flags, position, n).amin(-1)
    stop = torch.where(flags, position + 1, 0).amax(-1)
    if bool((flags.sum(-1) != stop - start).any()) or not bool(flags.any(-1).all()):
        raise ValueError(
            "mask must mark one unbroken run of tokens per sequence, at least one token long (1 or True "
            "where a token counts); cut the attention with crop() or measure the pieces one by one"
        )
    spans = torch.stack([start, stop], -1)  # (*leading, 2)
    spans = spans.reshape(*leading, *[1] * (len(batch_shape) - len(leading)), 2)
    return spans.expand(*batch_shape, 2).reshape(-1, 2)


def token_flags(mask: Mask) -> Tensor:
    """Read a mask as booleans.

    Args:
        mask: See `token_spans`.

    Returns:
        True where a token counts, of the same shape, on the CPU.

    Raises:
        TypeError: It is nothing like a mask.
        ValueError: It holds other values.
    """
    try:
        given = torch.as_tensor(mask).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"mask must be a tensor, an array or a list of one flag per token, got {type(mask).__name__}: {error}"
        ) from error
    if given.is_complex():
        raise TypeError(f"mask must hold booleans, 0 and 1, or an additive mask, got {given.dtype}")
    one = given == 1
    other = ~one & (given != 0)
    if not bool(other.any()):
        return one
    hidden = given <= ADDITIVE
    if bool((hidden | (given == 0)).all()):
        return ~hidden
    odd = given[other & ~hidden] if bool((other & ~hidden).any()) else given[hidden]
    raise ValueError(
        "mask must hold booleans, 0 and 1 (a token counts), or be additive (0 where a token counts, -inf where it does "
        f"not), got {odd[0].item():g}{' beside 1' if bool(one.any()) else ''}"
    )


def of_layer(visible: Visible | None, index: int, layers: Sequence[Any]) -> Any:
    """Return what concerns one layer of a sequence: its own part of visible, or what all layers share.

    Args:
        visible: As for `each_matrix`.
        index: Which layer.
        layers: The attention of every layer.

    Returns:
        As `each_matrix` takes it for that layer.

    Raises:
        ValueError: Visible is for another number of layers.
    """
    if visible is None or visible.ndim != getattr(layers[index], "ndim", 0) + 1:
        return visible
    if visible.shape[0] not in (1, len(layers)):
        raise ValueError(f"visible holds {visible.shape[0]} layers, the attention {len(layers)}")
    return visible[index if len(visible) > 1 else 0]


def expanded(visible: Visible, matrices: Tensor) -> Tensor:
    """Return visible in the shape of the attention, on its device.

    Args:
        visible: As for `each_matrix`.
        matrices: (..., n, n).

    Returns:
        Boolean, (..., n, n).

    Raises:
        TypeError: It is not boolean.
        ValueError: It does not fit.
    """
    given = torch.as_tensor(visible)
    if given.dtype != torch.bool:
        raise TypeError(f"visible must hold booleans, True where a query sees a key, got {given.dtype}")
    shape = tuple(matrices.shape)
    alike = given.ndim == len(shape) and all(a in (1, b) for a, b in zip(given.shape[:-2], shape[:-2], strict=True))
    if given.shape[-2:] != shape[-2:] or (given.ndim != 2 and not alike):
        raise ValueError(
            f"visible of shape {tuple(given.shape)} does not fit attention of shape {shape}; wanted (n, n), or as many "
            "axes as the attention, size 1 repeats: for (layer, n, n) beside (layer, head, n, n) give visible[:, None]"
        )
    return given.to(matrices.device).expand(shape)
