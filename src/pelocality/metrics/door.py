"""The public door of the metrics: what counts as attention, what is refused, and which tokens count.

Every metric is a function of one batch of square matrices, (batch, n, n) -> (batch, ...). This file turns whatever a
user holds (a tensor, an array, the tuple a Hugging Face model returns, a result of ours) into such batches, refuses
what is not attention, leaves padding out, and folds the answers back into the user's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

Layout = Literal["matrix", "rows", "offsets"]
Kernel = Callable[[Tensor], Tensor]

# The largest |sum of a row - 1| a softmax in that precision can leave behind, with room for a few thousand keys.
ROW_SUM_TOLERANCE = {
    torch.float64: 1e-3,
    torch.float32: 1e-3,
    torch.float16: 1e-2,
    torch.bfloat16: 1e-2,
}


class HasAttention(Protocol):
    """A result that carries its matrices, such as ``PositionalAttention``."""

    @property
    def attention(self) -> Tensor:
        """Positional weights (..., n, n)."""


Attention = Tensor | np.ndarray | Sequence[Any] | HasAttention


def each_matrix(
    attention: Attention,
    kernel: Kernel,
    *,
    mask: Tensor | np.ndarray | None = None,
    layout: Layout = "matrix",
) -> Tensor:
    """Apply a kernel to every matrix of the user's attention and give the answers the user's leading shape.

    Args:
        attention: (..., n, n), or a sequence of such tensors (one a layer).
        kernel: (batch, n, n) -> (batch,), (batch, n) for ``layout="rows"`` or (batch, 2n-1) for ``layout="offsets"``.
            It receives float32 or float64 or half precision as given; it checks the rows itself or calls
            `checked`.
        mask: Which tokens count, see `token_spans`.
        layout: How an answer for fewer tokens lies in one for all n; the rest is NaN.

    Returns:
        (...) for matrices, (..., n) for rows, (..., 2n-1) for offsets; a sequence of layers adds a leading axis.

    Raises:
        TypeError: The attention is no float tensor, array or sequence of them.
        ValueError: It is not square, has no positions, or the mask does not fit.
    """
    attention = getattr(attention, "attention", attention)
    attention = getattr(attention, "attentions", attention)
    if isinstance(attention, list | tuple):
        if not attention or any(layer is None for layer in attention):
            raise ValueError(
                "attention holds no weights, as a model returns them under sdpa or flash attention; "
                "load the model with attn_implementation='eager' and call it with output_attentions=True"
            )
        return torch.stack([each_matrix(layer, kernel, mask=mask, layout=layout) for layer in attention])
    matrices = _as_tensor(attention)
    flat = matrices.reshape(-1, *matrices.shape[-2:])  # (batch, n, n)
    if mask is None:
        values = kernel(flat)
    else:
        spans = token_spans(mask, matrices.shape[:-2], matrices.shape[-1])
        values = _kernel_on_spans(flat, spans, kernel, layout)
    return values.reshape((*matrices.shape[:-2], *values.shape[1:]))


def checked(flat: Tensor) -> Tensor:
    """Return the matrices (batch, n, n) in at least float32, once their rows are known to be distributions.

    Args:
        flat: (batch, n, n).

    Returns:
        The same tensor, half precision as float32.

    Raises:
        ValueError: See `refuse_unless_distributions`.
    """
    dtype = torch.promote_types(flat.dtype, torch.float32)
    refuse_unless_distributions(flat.sum(-1, dtype=dtype), _least(flat), flat.dtype)
    return flat.to(dtype)


def refuse_unless_distributions(total: Tensor, least: float, dtype: torch.dtype) -> None:
    """Raise unless every row is a probability distribution.

    Args:
        total: The sum of every row, any shape.
        least: The smallest weight of all, or 0 where none is negative.
        dtype: Precision of the weights, which sets how exactly a row must sum to 1.

    Raises:
        ValueError: NaN or infinity, a negative weight, or rows that do not sum to 1.
    """
    if not bool(torch.isfinite(total).all()):
        raise ValueError(
            "attention contains NaN or infinity; a row whose keys are all masked gives NaN: leave it out with mask="
        )
    if least < 0:
        raise ValueError(
            f"attention weights must not be negative, the smallest is {least:.3g}; "
            "these look like scores: apply .softmax(-1)?"
        )
    off = (total - 1).abs().max().item() if total.numel() else 0.0
    if off > ROW_SUM_TOLERANCE[dtype]:
        raise ValueError(f"attention rows must sum to 1, the worst is off by {off:.3g}; apply .softmax(-1)?")


def crop(attention: Tensor | np.ndarray | HasAttention, start: int = 0, stop: int | None = None) -> Tensor:
    """Keep the attention among the tokens start..stop-1 and renormalise its rows.

        A'_ij = A_ij / sum_{start <= j' < stop} A_ij'     for start <= i, j < stop

    This leaves special tokens or attention sinks out: ``locality(crop(A, 1))`` is the locality among all tokens
    but the first, whatever the first one drew.

    Args:
        attention: (..., n, n), rows sum to 1.
        start: First token kept; may be negative, as in a slice.
        stop: End of the tokens kept, exclusive; may be negative, as in a slice.

    Returns:
        (..., stop - start, stop - start), rows sum to 1; half precision comes back as float32.

    Raises:
        ValueError: Nothing is left, or a kept row has all of its weight on tokens that are left out.

    Examples:
        >>> import torch
        >>> A = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.8, 0.1, 0.1]])
        >>> crop(A, 1)
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])
    """
    matrices = _as_tensor(getattr(attention, "attention", attention))
    first, last, _ = slice(start, stop).indices(matrices.shape[-1])
    if first >= last:
        raise ValueError(f"crop keeps no token of {matrices.shape[-1]}: start={start}, stop={stop}; widen the range")
    flat = matrices.reshape(-1, *matrices.shape[-2:])
    return _crop(flat, first, last).reshape((*matrices.shape[:-2], last - first, last - first))


def token_spans(mask: Tensor | np.ndarray, batch_shape: Sequence[int], n: int) -> Tensor:
    """Read the mask as one run of counting tokens per matrix.

    Args:
        mask: (*leading, n), nonzero where a token counts, as in a Hugging Face ``attention_mask``; the leading
            axes are the first ones of the attention, size 1 repeats. Padding may stand left or right.
        batch_shape: Leading shape of the attention.
        n: Number of positions.

    Returns:
        (batch, 2) integers, start and stop (exclusive) of every matrix.

    Raises:
        ValueError: The shape does not fit, or a row's tokens are none or not one run.
    """
    flags = torch.as_tensor(mask).detach().cpu() != 0
    leading = tuple(flags.shape[:-1])
    fits = flags.ndim >= 1 and flags.shape[-1] == n and len(leading) <= len(batch_shape)
    if not fits or any(a not in (1, b) for a, b in zip(leading, batch_shape, strict=False)):
        raise ValueError(
            f"mask of shape {tuple(flags.shape)} does not fit attention of shape {(*batch_shape, n, n)}; "
            "wanted (*first axes of the attention, n), one flag per token"
        )
    position = torch.arange(n)
    start = torch.where(flags, position, n).amin(-1)
    stop = torch.where(flags, position + 1, 0).amax(-1)
    if bool((flags.sum(-1) != stop - start).any()) or not bool(flags.any(-1).all()):
        raise ValueError(
            "mask must mark one unbroken run of tokens per sequence, at least one token long; "
            "cut the attention with crop() or measure the pieces one by one"
        )
    spans = torch.stack([start, stop], -1)  # (*leading, 2)
    spans = spans.reshape(*leading, *[1] * (len(batch_shape) - len(leading)), 2)
    return spans.expand(*batch_shape, 2).reshape(-1, 2)


def _as_tensor(attention: Any) -> Tensor:
    if isinstance(attention, np.ndarray):
        if attention.dtype.newbyteorder("=") not in (np.float16, np.float32, np.float64):
            raise TypeError(
                f"attention must hold floating-point weights, got a numpy array of {attention.dtype}; "
                "convert it with .astype('float64')"
            )
        native = np.ascontiguousarray(attention, attention.dtype.newbyteorder("="))
        # torch warns about memory it must not write; we never write, a copy only silences it
        attention = torch.from_numpy(native if native.flags.writeable else native.copy())
    if not isinstance(attention, Tensor):
        raise TypeError(
            f"attention must be a tensor, a numpy array or the tuple a model returns, got {type(attention).__name__}"
        )
    if attention.dtype not in ROW_SUM_TOLERANCE:
        raise TypeError(
            f"attention must hold floating-point weights of 16, 32 or 64 bits, got {attention.dtype}; "
            "convert it with .float()"
        )
    if attention.ndim < 2 or attention.shape[-1] != attention.shape[-2]:
        raise ValueError(
            f"attention must be square in its last two axes (..., n, n), got shape {tuple(attention.shape)}"
        )
    if attention.shape[-1] == 0:
        raise ValueError("attention has no positions: its shape is " + str(tuple(attention.shape)))
    return attention


def _least(weights: Tensor) -> float:
    return weights.detach().amin().item() if weights.numel() else 0.0


def _crop(flat: Tensor, start: int, stop: int) -> Tensor:
    """Tokens start..stop-1 of (batch, n, n), rows renormalised."""
    kept_rows = flat[:, start:stop]
    dtype = torch.promote_types(flat.dtype, torch.float32)
    refuse_unless_distributions(kept_rows.sum(-1, dtype=dtype), _least(kept_rows), flat.dtype)
    kept = kept_rows[..., start:stop].to(dtype)
    mass = kept.sum(-1, keepdim=True)
    if bool((mass <= 0).any()):
        raise ValueError(
            "a counted token attends only to tokens that are left out, so its row cannot be renormalised; "
            "widen the mask or the crop"
        )
    return kept / mass


def _kernel_on_spans(flat: Tensor, spans: Tensor, kernel: Kernel, layout: Layout) -> Tensor:
    """Group equal spans, apply the kernel to the cropped matrices, put the answers in place."""
    n = flat.shape[-1]
    groups, member = torch.unique(spans, dim=0, return_inverse=True)
    pieces, order = [], []
    for group, (start, stop) in enumerate(groups.tolist()):
        chosen = torch.nonzero(member == group).squeeze(-1)
        values = kernel(_crop(flat[chosen.to(flat.device)], start, stop))
        room = {"matrix": None, "rows": (start, n - stop), "offsets": (n - (stop - start),) * 2}[layout]
        if room is not None:
            values = torch.nn.functional.pad(values, room, value=float("nan"))
        pieces.append(values)
        order.append(chosen)
    return torch.cat(pieces)[torch.argsort(torch.cat(order)).to(flat.device)]
