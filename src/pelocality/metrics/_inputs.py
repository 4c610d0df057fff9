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

from pelocality.metrics._masks import Mask, Visible, expanded, of_layer, token_spans

Layout = Literal["matrix", "rows", "offsets"]
Kernel = Callable[..., Tensor]

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
    mask: Mask | None = None,
    visible: Visible | None = None,
    layout: Layout = "matrix",
) -> Tensor:
    """Apply a kernel to every matrix of the user's attention and give the answers the user's leading shape.

    Args:
        attention: (..., n, n), or a sequence of such tensors (one a layer).
        kernel: (batch, n, n) -> (batch,), (batch, n) for ``layout="rows"`` or (batch, 2n-1) for ``layout="offsets"``.
            It receives float32 or float64 or half precision as given; it checks the rows itself or calls
            `checked`. Where visible is given it receives that too, (batch, n, n).
        mask: Which tokens count, see `token_spans`.
        visible: Which keys each query sees, boolean (n, n), or one for every matrix: as many axes as the attention
            (size 1 repeats), a sequence of layers counting as one axis more or not at all.
        layout: How an answer for fewer tokens lies in one for all n; the rest is NaN.

    Returns:
        (...) for matrices, (..., n) for rows, (..., 2n-1) for offsets; a sequence of layers adds a leading axis.

    Raises:
        TypeError: The attention is no float tensor, array or sequence of them, or a mask is none.
        ValueError: It is not square, has no positions, its layers differ in shape, or a mask does not fit.
    """
    attention = unwrapped(attention)
    if attention is None or isinstance(attention, list | tuple):
        if not attention or any(layer is None for layer in attention):
            raise ValueError(
                "attention holds no weights, as a model returns them under sdpa or flash attention; "
                "load the model with attn_implementation='eager' and call it with output_attentions=True"
            )
        by_layer = [
            each_matrix(layer, kernel, mask=mask, visible=of_layer(visible, index, attention), layout=layout)
            for index, layer in enumerate(attention)
        ]
        shapes = [
            tuple(getattr(unwrapped(layer), "shape", values.shape))
            for layer, values in zip(attention, by_layer, strict=True)
        ]
        if len(set(shapes)) > 1:
            raise ValueError(
                "the layers of attention differ in heads, sequences or positions, with the shapes "
                f"{', '.join(map(str, shapes))}; measure them layer by layer"
            )
        return torch.stack(by_layer)
    matrices = _as_tensor(attention)
    given = [matrices] if visible is None else [matrices, expanded(visible, matrices)]
    flat = [each.reshape(-1, *each.shape[-2:]) for each in given]  # (batch, n, n)
    spans = None if mask is None else token_spans(mask, matrices.shape[:-2], matrices.shape[-1])
    values = kernel(*flat) if spans is None or not len(spans) else _kernel_on_spans(flat, spans, kernel, layout)
    return values.reshape((*matrices.shape[:-2], *values.shape[1:]))


def unwrapped(attention: Attention) -> Any:
    """Return the weights that a result or the output of a model carries.

    Args:
        attention: What a user holds.

    Returns:
        Its ``.attention`` or ``.attentions``, or the same where it has neither.
    """
    return getattr(attention, "attention", getattr(attention, "attentions", attention))


def visible_keys(attention: Attention, visible: Visible | None, causal: bool | None) -> Any:
    """Return which keys each query sees, as given or as a result carries it.

    Args:
        attention: What a user holds. A result may say so in ``.visible``, (*first axes of the attention, n, n).
        visible: What the user says.
        causal: The other way to say it.

    Returns:
        As `each_matrix` takes it; None where nobody says.

    Raises:
        ValueError: The user says both.
    """
    if visible is not None and causal is not None:
        raise ValueError(f"visible and causal={causal} both say which keys a query sees; give one of them")
    carried = getattr(attention, "visible", None)
    if visible is not None or causal is not None or carried is None:
        return None if visible is None else torch.as_tensor(visible)
    axes = unwrapped(attention).ndim - carried.ndim
    return carried.reshape(*carried.shape[:-2], *[1] * axes, *carried.shape[-2:])


def refuse_hidden_weight(weights: Tensor, seen: Tensor, dtype: torch.dtype) -> None:
    """Raise where a query has weight on a key that it is said not to see.

    Args:
        weights: (batch, n, n).
        seen: Boolean, of the same shape.
        dtype: Precision of the weights, which sets how much counts as weight.

    Raises:
        ValueError: There is such a query.
    """
    hidden = weights.detach().masked_fill(seen, 0).sum(-1)
    if hidden.numel() and hidden.max().item() > ROW_SUM_TOLERANCE[dtype]:
        raise ValueError(
            f"visible hides keys that the attention rests on: some query has {hidden.max().item():.3g} of its weight "
            "there; visible is True where query i (row) may see key j (column)"
        )


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


def crop(attention: Attention, start: int = 0, stop: int | None = None) -> Tensor:
    """Keep the attention among the tokens start..stop-1 and renormalise its rows.

        A'_ij = A_ij / sum_{start <= j' < stop} A_ij'     for start <= i, j < stop

    This leaves special tokens or attention sinks out: ``locality(crop(A, 1))`` is the locality among all tokens
    but the first, whatever the first one drew.

    Args:
        attention: (..., n, n), rows sum to 1, as for `locality`.
        start: First token kept; may be negative, as in a slice.
        stop: End of the tokens kept, exclusive; may be negative, as in a slice.

    Returns:
        (..., stop - start, stop - start), rows sum to 1; half precision comes back as float32.

    Raises:
        TypeError: As for `locality`.
        ValueError: As for `locality`, or nothing is left, or a kept row has all of its weight on tokens that are left
            out.

    Examples:
        >>> import torch
        >>> A = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.8, 0.1, 0.1]])
        >>> crop(A, 1)
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])
    """

    def kernel(flat: Tensor) -> Tensor:
        n = flat.shape[-1]
        first, last, _ = slice(start, stop).indices(n)
        if first >= last:
            raise ValueError(f"crop keeps no token of {n}: start={start}, stop={stop}; widen the range")
        return _crop(flat, first, last)

    return each_matrix(attention, kernel)


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


def _kernel_on_spans(matrices: Sequence[Tensor], spans: Tensor, kernel: Kernel, layout: Layout) -> Tensor:
    """Group equal spans, apply the kernel to the cropped matrices, put the answers in place."""
    flat, *seen = matrices
    n = flat.shape[-1]
    groups, member = torch.unique(spans, dim=0, return_inverse=True)
    pieces, order = [], []
    for group, (start, stop) in enumerate(groups.tolist()):
        chosen = torch.nonzero(member == group).squeeze(-1)
        here = chosen.to(flat.device)
        values = kernel(_crop(flat[here], start, stop), *(each[here, start:stop, start:stop] for each in seen))
        room = {"matrix": None, "rows": (start, n - stop), "offsets": (n - (stop - start),) * 2}[layout]
        if room is not None:
            values = torch.nn.functional.pad(values, room, value=float("nan"))
        pieces.append(values)
        order.append(chosen)
    return torch.cat(pieces)[torch.argsort(torch.cat(order)).to(flat.device)]
