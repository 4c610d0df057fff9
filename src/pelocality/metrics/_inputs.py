"""Input validation of the metrics: attention becomes batches of matrices, padding is left out.

Every metric is a function of one batch of matrices, (batch, n, n) -> (batch, ...), or of rectangles (batch, m, n) with
their `Positions`. This file turns every accepted input (a tensor, an array, the tuple a Hugging Face model returns, a
result of this library) into such batches and reshapes the values to the leading axes of the input.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn

from pelocality._checks import check_unmasked, count, flag, on_float64_device
from pelocality._transforms import transformed
from pelocality.metrics._masks import Mask, Visible, expand_visible, token_spans, visible_by_layer
from pelocality.metrics._tolerance import ROW_SUM_TOLERANCE, Tolerance, check_rows, precision_of, row_faults
from pelocality.positions import Positions

Layout = Literal["scalar", "rows", "offsets", "matrix"]

# elements that a kernel is given at a time: it may need several times their memory; more occupy a GPU
_PART, _PART_OF_GPU = 2**24, 2**28

_OF_BANDS = "entry c of query i is key i + c - window // 2: put them there in a matrix of zeros, and measure that"


class HasAttention(Protocol):
    """A result that carries its matrices, such as ``PositionalAttention``."""

    @property
    def attention(self) -> Tensor:
        """Positional weights (..., n, n)."""


Attention = Tensor | np.ndarray | Sequence[Any] | HasAttention
PositionsLike = Positions | Tensor | np.ndarray | Sequence[Any]


class Matrices(NamedTuple):
    """A batch of matrices, as every kernel receives it.

    Attributes:
        weights: (batch, n, n), in the precision of the input; crops of half precision are float32. With positions of
            queries that are not the keys, or for metrics without distances, (batch, m, n).
        visible: Which keys each query sees, boolean (batch, n, n); None where the caller does not say.
        dtype: That by whose rounding a row is judged; None: that of the weights, or half precision where they were
            converted from it, see `precision`.
        positions: Where queries and keys lie; None on a line of tokens.
        causal: Whether a query sees only its past, as the caller says; None: it is inferred.
        inferred: Gets what is inferred, (batch,) of booleans for each call of a kernel.
    """

    weights: Tensor
    visible: Tensor | None
    dtype: torch.dtype | None = None
    positions: Positions | None = None
    causal: bool | None = None
    inferred: list[Tensor] | None = None

    @property
    def precision(self) -> torch.dtype:
        """The dtype by whose rounding the weights are judged."""
        if self.dtype is not None or transformed(self.weights):  # traced numbers cannot be read
            return self.dtype or self.weights.dtype
        return precision_of(self.weights)

    def tolerance(self, rtol: float | None = None) -> Tolerance:
        """Return up to which range a row counts as constant."""
        return Tolerance.for_dtype(self.dtype or self.weights.dtype, rtol, guess=self.dtype is None)

    def part(self, chosen: Tensor | slice) -> Self:
        """Return some of the matrices."""
        visible = None if self.visible is None else self.visible[chosen]
        return self._replace(weights=self.weights[chosen], visible=visible)

    def crop(self, start: int, stop: int) -> Self:
        """Return tokens start..stop-1 of all matrices, with rows renormalised."""
        kept = validated_weights(self.weights[:, start:stop])[..., start:stop]
        mass = kept.sum(-1, keepdim=True)
        if bool((mass <= 0).any()):
            raise ValueError("a row has weight on tokens left out alone; leave out fewer, or is mask True at padding?")
        visible = None if self.visible is None else self.visible[:, start:stop, start:stop]
        positions = None if self.positions is None else self.positions.part(start, stop)
        return self._replace(weights=kept / mass, visible=visible, dtype=self.precision, positions=positions)


Kernel = Callable[[Matrices], Tensor]


def map_matrices(
    attention: Attention,
    kernel: Kernel,
    positions: PositionsLike | None = None,
    mask: Mask | None = None,
    without_first: int = 0,
    *,
    visible: Tensor | None = None,
    rows: bool = False,
    layout: Layout = "scalar",
    may_be_padded: bool = False,
    any_shape: bool = False,
) -> Tensor:
    """Apply a kernel to every matrix of the attention and reshape its values to the leading axes of the input.

    Args:
        attention: (..., n, n), or a sequence of such tensors (one per layer).
        kernel: `Matrices` of (batch, n, n) -> (batch,), or what ``layout`` names. It checks the rows of the weights
            itself (see `validated_weights`).
        positions: Where queries and keys lie. None: those of a result, or else tokens one after the other.
        mask: Which tokens count, see `token_spans`.
        without_first: How many of the first ones do not.
        visible: Which keys each query sees, boolean (n, n), or one for every matrix: as many axes as the attention
            (size 1 repeats); for a sequence of layers one axis more, or shared by all of them.
        rows: Whether the kernel returns a number for each query.
        layout: What else the kernel returns for each matrix: one number, 2n - 1 (offsets) or (n, n) (matrix). Entries
            of padding are NaN; a matrix starts at its first counting token.
        may_be_padded: Whether not to warn of what looks like padding without a mask.
        any_shape: Whether the kernel takes rectangles without positions.

    Returns:
        (...), (..., n), (..., 2n-1) or (..., n, n); a sequence of layers adds a leading axis.

    Raises:
        TypeError: The attention is not a float tensor, array or sequence of them.
        ValueError: It is not square, has no positions, or a mask or positions do not fit.
    """
    known, precision = hasattr(attention, "attention"), getattr(attention, "precision", None)  # of a result
    if positions is None and known:
        positions = getattr(attention, "positions", None)
    places = None if positions is None else Positions.of(positions)
    may_be_padded |= known
    options: dict[str, Any] = {"rows": flag("rows", rows), "may_be_padded": may_be_padded, "any_shape": any_shape}
    options |= {"positions": places, "mask": mask, "without_first": without_first, "layout": layout, "kernel": kernel}
    if torch.compiler.is_compiling():  # the compiler cannot trace numba, and loses the gradient of a `Function`
        eager: Callable[..., Tensor] = torch.compiler.disable(map_matrices)  # type: ignore[no-untyped-call]
        return eager(attention, visible=visible, **options)
    attention = unwrap(attention)
    if attention is None or isinstance(attention, list | tuple):
        if not attention or any(layer is None for layer in attention):
            raise ValueError("attention has no weights; use attn_implementation='eager' and output_attentions=True")
        by_layer = zip(attention, visible_by_layer(visible, attention), strict=True)
        return torch.stack([map_matrices(each, visible=seen, **options) for each, seen in by_layer])
    tensor = float_tensor("attention", attention)
    weights = on_float64_device(tensor)
    _check_shape(weights, places, any_shape)
    *leading, m, n = weights.shape
    if without_first and places is not None and places.sequence is not None and int(places.sequence.max()) > 0:
        raise ValueError("without_first is not for packed sequences; measure one at a time, attention[..., a:b, a:b]")
    if places is not None and places.before:
        without_first = max(count("without_first", without_first, least=0), places.before)
    if (m != n or (places is not None and places.queries is not None)) and (mask is not None or without_first):
        raise ValueError("mask and without_first are for tokens that are queries and keys; cut the attention instead")
    if places is not None and places.is_line:
        places = None  # tokens one after the other are measured faster
    seen = None if visible is None else expand_visible(visible, weights).reshape(-1, m, n)
    flat = weights.reshape(-1, m, n)
    matrices = Matrices(flat, seen, precision, places)
    spans = None if mask is None and without_first == 0 else token_spans(mask, leading, n, without_first)
    values = _map_parts(matrices, spans, kernel, "rows" if rows else layout)
    if m == n and flat.numel() and not known:
        _suspect(weights.detach(), may_be_padded or mask is not None)
    of_sums = torch.promote_types(tensor.dtype, torch.float32)
    return values.reshape((*leading, *values.shape[1:])).to(tensor.device, of_sums)


def _check_shape(weights: Tensor, positions: Positions | None, any_shape: bool) -> None:
    """Raise ValueError unless the matrices (..., m, n) fit the positions, or are square without any."""
    shape = tuple(weights.shape)
    if positions is not None:
        expected = tuple(positions.before + size for size in positions.shape)
        if shape[-2:] != expected:
            advice = "queries= names other queries, before= counts first tokens without a place"
            raise ValueError(f"positions are of (query, key) {expected}, attention has shape {shape}; {advice}")
    elif weights.ndim < 2 or 0 in shape[-2:] or not (any_shape or shape[-1] == shape[-2]):
        advice = "of other queries than keys give positions=Positions(keys, queries)"
        if weights.ndim == 2:
            advice += ", and a table of position embeddings (n, d) to measure_absolute"
        raise ValueError(f"attention must be square, (..., n, n) with n >= 1, got shape {shape}; {advice}")


def unwrap(attention: Attention) -> Any:
    """Return the ``.attention`` of a result or the ``.attentions`` of a model output; anything else as it is."""
    if hasattr(attention, "global_attentions"):  # the output of Longformer, or of LED's encoder
        raise ValueError(f"attention must be n x n, got the bands of a {type(attention).__name__}; {_OF_BANDS}")
    return getattr(attention, "attention", getattr(attention, "attentions", attention))


def leading_shape(attention: Attention) -> tuple[int, ...]:
    """Return the axes of the attention before (query, key); a sequence of layers has one more."""
    weights = unwrap(attention)
    layers = isinstance(weights, list | tuple)
    inner = tuple(getattr(unwrap(weights[0]) if layers and weights else weights, "shape", ()))[:-2]
    return (len(weights), *inner) if layers else inner


def map_with_visible(
    attention: Attention, kernel: Kernel, *tokens: Any, causal: bool | None, visible: Visible | None, **options: Any
) -> Tensor:
    """Apply a kernel that depends on which keys a query sees, as `map_matrices` does.

    Args:
        attention: As for `map_matrices`.
        kernel: As for `map_matrices`; it may call `seen_keys` and `visible_counts`.
        tokens: Positions, mask and without_first of `map_matrices`.
        causal: Whether a query sees only its past; None: each matrix without weight above its diagonal is causal.
        visible: Which keys each query sees; None: the ``.visible`` of a result (all keys, if that is None), otherwise
            causality decides.
        options: Further arguments of `map_matrices`.
    """
    if causal is not None and visible is not None:
        raise ValueError(f"visible and causal={causal} both define which keys a query sees; give one of them")
    check_unmasked("visible", visible)
    inferred: list[Tensor] = []
    if causal is not None:
        flag("causal", causal)
    elif visible is None and hasattr(attention, "visible"):
        visible = _carried_visible(attention)
    if not isinstance(visible, Tensor | None):
        visible = torch.as_tensor(visible, device="cpu")

    def informed(matrices: Matrices) -> Tensor:
        return kernel(matrices._replace(causal=causal, inferred=inferred))

    values = map_matrices(attention, informed, *tokens, visible=visible, **options)
    causal_ones = [one for each in inferred for one in each.tolist()]
    if any(causal_ones) and not all(causal_ones):
        share = f"{sum(causal_ones)} of {len(causal_ones)} matrices have no weight above their diagonal"
        warn_caller(f"{share} and count as causal, the others do not; give causal= or visible=")
    return values


def _carried_visible(attention: Any) -> Visible:
    """Return the keys that each query of a result sees, in the axes of its attention."""
    weights = unwrap(attention)
    if attention.visible is None:  # every query sees every key, though weights may be 0
        return torch.ones(weights.shape[-2:], dtype=torch.bool, device="cpu")
    visible = attention.visible
    shape = *visible.shape[:-2], *[1] * (weights.ndim - visible.ndim), *visible.shape[-2:]
    return visible.reshape(shape)


def validated_weights(flat: Tensor) -> Tensor:
    """Return the matrices (batch, n, n) in at least float32, after checking that their rows are distributions."""
    check_rows(row_faults(flat), flat)
    return flat.to(torch.promote_types(flat.dtype, torch.float32))


def float_tensor(name: str, given: Any) -> Tensor:
    """Return a floating-point tensor or numpy array as a tensor; it may share memory with the input."""
    check_unmasked(name, given, f"pass {name}.data and mask=")
    if isinstance(given, np.ndarray) and given.dtype.newbyteorder("=") in (np.float16, np.float32, np.float64):
        # torch takes native numbers and strides of at least 0, and warns about read-only memory
        native = np.require(given, given.dtype.newbyteorder("="), ["C", "W"])
        return torch.from_numpy(native.copy() if min(native.strides, default=0) < 0 else native)
    if isinstance(given, Tensor) and given.dtype in ROW_SUM_TOLERANCE:
        return given.resolve_neg()
    if isinstance(given, Tensor | np.ndarray):
        advice = f"use {name}.float() or {name}.astype('float64'), and of complex numbers abs({name})"
        raise TypeError(f"{name} must be floating-point of 16 to 64 bits, got {given.dtype}; {advice}")
    advice = f"convert it with np.asarray({name}), or read a file with np.load"
    if hasattr(given, "decoder_attentions"):
        advice = "give output.encoder_attentions or output.decoder_attentions"
    elif isinstance(given, nn.Module):
        advice = "measure a model with positional_attention, an encoding by its weights(length), a layer by its weight"
    raise TypeError(f"{name} must be a tensor or a numpy array, got {type(given).__name__}; {advice}")


def _suspect(weights: Tensor, may_be_padded: bool) -> None:
    """Refuse what looks like bands, and warn of what looks like padding; the corners decide nearly always."""
    n = weights.shape[-1]
    bands = n > 4 and n % 2 == 1
    padded = n > 2 and not may_be_padded and weights.ndim > 2 and weights.shape[-3] > 1
    if not (bands or padded):
        return
    corners = weights[..., :: n - 1, :: n - 1].cpu()  # The corners belong to the first and the last query and key.
    if bands and not bool(corners.diagonal(dim1=-2, dim2=-1).any()):
        _refuse_bands(weights.reshape(-1, n, n))
    if padded and not bool((attended := corners.amax((-3, -2))).all()):  # by any head
        _warn_of_padding(weights, attended == 0)


def _refuse_bands(flat: Tensor) -> None:
    """Raise ValueError for bands (query, window) that are square by chance: entry c of row i is key i + c - n // 2."""
    n = flat.shape[-1]
    key = torch.arange(n, device=flat.device) + torch.arange(-(n // 2), n - n // 2, device=flat.device)[:, None]
    if bool(((flat > 0) == ((key >= 0) & (key < n))).all()):
        raise ValueError(f"attention must be n x n, got what looks like Longformer's bands; {_OF_BANDS}")


def _warn_of_padding(weights: Tensor, left_out: Tensor) -> None:
    """Warn if all heads of a sequence leave out the same keys at one end, and no other keys.

    Args:
        weights: (..., head, n, n).
        left_out: Whether the first and the last query of every head leave out the first and the last key, (..., 2).
    """
    for end, which in ((0, "first"), (-1, "last")):
        suspicious = left_out[..., end]
        if not bool(suspicious.any()):
            continue
        attended = (weights[suspicious] > 0).any(-2)  # (sequence, head, key)
        if end == 0:
            attended = attended.flip(-1)
        one_run = ~attended[..., -1] & attended[..., 1] & (attended.int().diff(dim=-1) <= 0).all(-1)
        # a few sharp heads may leave any key out, but not all heads the same ones at one end
        if bool((one_run & (attended == attended[:, :1]).all(-1)).all(-1).any()):
            message = f"no query of any head attends to the {which} key, as if it were padding"
            warn_caller(f"{message}; leave padding out with mask=attention_mask")


def warn_caller(message: str) -> None:
    """Warn with the location of the first caller outside of this library and torch."""
    libraries = ("pelocality", "torch", "torchmetrics")
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in libraries:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _map_parts(matrices: Matrices, spans: Tensor | None, kernel: Kernel, layout: Layout) -> Tensor:
    """Apply the kernel to some of the matrices at a time; where there are spans, to those cropped to the same one.

    Values of cropped matrices are padded with NaN to the full length.
    """
    batch, m, n = matrices.weights.shape
    device = matrices.weights.device
    size = max(1, (_PART if device.type == "cpu" else _PART_OF_GPU) // (m * n))
    if matrices.weights.requires_grad and torch.is_grad_enabled():
        size = max(1, batch)
    if spans is None and size >= batch:
        return kernel(matrices)  # a part would need another tensor for its gradient
    if spans is None or not batch:
        return torch.cat([kernel(matrices.part(slice(at, at + size))) for at in range(0, max(1, batch), size)])
    groups, member = torch.unique(spans, dim=0, return_inverse=True)
    pieces, order = [], []
    for group, (start, stop) in enumerate(groups.tolist()):
        missing = n - (stop - start)
        paddings = {"scalar": (), "rows": (start, n - stop), "offsets": (missing, missing), "matrix": (0, missing) * 2}
        if matrices.positions is not None:  # distances of a part are those of the whole
            paddings["offsets"] = ()
        for chosen in torch.split(torch.nonzero(member == group).squeeze(-1), size):
            values = kernel(matrices.part(chosen.to(device)).crop(start, stop))
            pieces.append(torch.nn.functional.pad(values, paddings[layout], value=torch.nan))
            order.append(chosen)
    return torch.cat(pieces)[torch.argsort(torch.cat(order)).to(pieces[0].device)]
