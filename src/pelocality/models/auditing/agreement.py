"""Declared against measured: the words for both, and the sentences where they differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pelocality.encodings.alibi import published_slopes
from pelocality.models.auditing.declared import Rotary
from pelocality.models.auditing.measured import PADDING, Call, Lookup, Reach, Reading, Window
from pelocality.models.auditing.rotations import Rotation, wrapped

UNDECLARED = "undeclared"
_DEFAULT_BASE = 1e4


def number(value: float) -> str:
    """Return a number as one would write it in a configuration."""
    return f"{value:.0f}" if value == round(value) or abs(value) >= 1e4 else f"{value:.4g}"


def _rounded(value: float) -> float:
    """Return a number with three digits."""
    return float(f"{value:.3g}")


# ---- rotary


class Angles:
    """The measured angles of one layer, to hold frequencies against."""

    def __init__(self, turn: Rotation, far: Rotation | str | None, positions: Tensor | None, length: int) -> None:
        self.turn, self.length = turn, length
        near = torch.arange(len(turn.angles), dtype=torch.float64)
        self.runs = [(near, turn.angles, length)]
        if isinstance(far, Rotation) and positions is not None and far.dims == turn.dims:
            self.runs.append((positions.double(), far.angles, int(positions.max()) + 1))
        self.tolerance = turn.tolerance

    def departure(self, rotary: Rotary, **changed: Any) -> int | None:
        """Return the first position with other angles than those of declared embeddings, or None."""
        if rotary.dims != self.turn.dims:
            return 0
        for positions, angles, length in self.runs:
            wanted = positions[:, None] * rotary.frequencies(length, **changed)
            apart = (wrapped(angles - wanted).abs() > self.tolerance + 1e-6 * wanted).any(1)
            if bool(apart.any()):
                return int(positions[apart][0])
        return None

    def base(self) -> float | None:
        """Return the base that the first two frequencies have, None for a single frequency."""
        frequencies = self.turn.frequencies()
        if len(frequencies) < 2 or frequencies[1] <= 0:
            return None
        return float((frequencies[0] / frequencies[1]) ** len(frequencies))

    def text(self, base: float | None, scaling: str) -> str:
        """Return the measured rotation in words, of this base and scaling."""
        return rotary_text(base, scaling, self.turn.factor, self.turn.dims, self.turn.head)


def rotary_text(base: float | None, scaling: str, factor: float | None, dims: int, head: int) -> str:
    """Return rotary embeddings in words."""
    words = ["rotary"] if base is None else [f"rotary, base {number(base)}"]
    if scaling != "default":
        words.append(scaling)
    if dims != head:
        words.append(f"{dims} of {head} dimensions")
    if factor is not None and abs(factor - 1) > 1e-2:
        words.append(f"attention factor {number(factor)}")
    return ", ".join(words)


def scaling_text(rotary: Rotary) -> str:
    """Return the scaling and its factor in words."""
    factor = rotary.options.get("factor")
    return rotary.scaling + ("" if factor is None or rotary.scaling == "default" else f" (factor {number(factor)})")


def compare_rotations(wanted: Rotary | str | None, angles: Angles | None) -> tuple[str, list[str]]:
    """Return the measured rotation in words, and what differs from the declared one."""
    if angles is None:
        bases = [number(wanted.base)] if isinstance(wanted, Rotary) else []
        return "", [f"declared rotary base {base}, measured no rotation" for base in bases]
    turn = angles.turn
    own = Rotary(angles.base() or _DEFAULT_BASE, turn.dims, "default", {}, 0)
    if not isinstance(wanted, Rotary):
        text = angles.text(*_found(angles, own))
        return text, [f"declared no rotation, measured {text}"] if wanted is None else []
    differences = []
    factor = wanted.attention_factor
    if turn.factor is not None and abs(turn.factor - factor) > max(1e-3, 10 * angles.tolerance - 1e-2) * factor:
        differences.append(f"declared attention factor {number(factor)}, measured {number(turn.factor)}")
    if not wanted.known:
        return angles.text(_found(angles, own)[0], wanted.scaling), differences
    text, departure = angles.text(wanted.base, scaling_text(wanted)), angles.departure(wanted)
    if departure is None:
        return text, differences
    same_dims = turn.dims == wanted.dims
    if not same_dims:
        differences.append(f"declared {wanted.dims} rotated dimensions of {turn.head}, measured {turn.dims}")
    base, scaling = _found(angles, wanted if same_dims else own)
    name = scaling.split(" ")[0]
    as_declared = base is None or (number(base), name) == (number(wanted.base), wanted.scaling)  # but not far off
    if same_dims and as_declared:
        return text, [*differences, f"declared {text}, measured other angles from position {departure} on"]
    if base is None or number(base) != number(wanted.base):
        measured = "angles of no known form" if base is None else number(base)
        differences.append(f"declared rotary base {number(wanted.base)}, measured {measured}")
    if base is not None and name != wanted.scaling:
        measured = "none" if scaling == "default" else scaling
        differences.append(f"declared rotary scaling {scaling_text(wanted)}, measured {measured}")
    return angles.text(base, scaling), differences


def _found(angles: Angles, like: Rotary) -> tuple[float | None, str]:
    """Return base and scaling of measured angles; None where they are of no known form."""
    base = angles.base()
    candidates = [like.base, _DEFAULT_BASE, *(() if base is None else (_rounded(base), base))]
    for nearby in (False, True):  # everywhere, or at consecutive positions from the first
        for candidate in candidates[nearby:]:
            for scaling in dict.fromkeys(["default", like.scaling]):
                departure = angles.departure(like, base=candidate, scaling=scaling)
                if departure is None or (nearby and departure > len(angles.turn.angles)):
                    return candidate, "default" if scaling == "default" else scaling_text(like)
    frequencies = angles.turn.frequencies()
    if base is not None and 0 < frequencies[0] < 1:
        factor = float(1 / frequencies[0])
        if angles.departure(Rotary(base, angles.turn.dims, "linear", {"factor": factor}, 0)) is None:
            return base, f"linear (factor {number(factor)})"
    return None, "default"


# ---- biases


def bias_of(call: Call) -> Tensor | None:
    """Return how logits of constant content differ from that of the query's own key: (head, n, n); None for not."""
    logits = call.logits.double().cpu()
    bias = logits - logits.diagonal(dim1=1, dim2=2)[..., None]
    visible = bias > -1e3
    bias = bias.masked_fill(~visible, torch.nan)
    return None if float(bias.nan_to_num().abs().max()) < 1e-3 else bias


def rounding_of(call: Call, bias: Tensor) -> Tensor:
    """Return how far each head's bias (head, n, n) may be off, (head,), by the precision of logits and of a table."""
    eps = torch.finfo(torch.float32 if call.query is None else call.query.dtype).eps
    logits = call.logits.double().cpu().masked_fill(bias.isnan(), 0).abs().amax((1, 2))
    table = torch.finfo(torch.bfloat16).eps * bias.nan_to_num().abs().amax((1, 2))  # Falcon's, in any model
    return eps * logits + table


def slopes_of(bias: Tensor, rounding: Tensor) -> Tensor | None:
    """Return the slopes (head,) of a bias that falls in proportion to distance but for rounding (head,), else None."""
    n = bias.shape[-1]
    position = torch.arange(n, dtype=bias.dtype)
    distance = (position[:, None] - position).abs()
    past = ~bias.isnan() & (distance > 0)
    rates = torch.where(past, -bias / distance.clamp(min=1), torch.nan)
    slopes = rates[:, -1, 0] if not bool(rates[:, -1, 0].isnan().any()) else rates.nanmean((1, 2))
    off = (bias + slopes[:, None, None] * distance).nan_to_num().abs()
    allowed = 0.02 * slopes.abs()[:, None, None] * distance + rounding[:, None, None]
    return slopes if bool((off <= allowed).all()) and bool((slopes.abs() * n > 2 * rounding).all()) else None


def compare_slopes(wanted: Tensor | None, slopes: Tensor | None, error: Tensor) -> list[str]:
    """Return what differs from declared slopes.

    Args:
        wanted: declared slopes (head,), or None.
        slopes: measured slopes (head,), or None.
        error: how far the measured ones may be off, (head,).
    """
    if wanted is None:
        return [] if slopes is None else ["declared no ALiBi slopes, measured some"]
    if slopes is None:
        return ["declared ALiBi slopes, measured none"]
    if len(wanted) == len(slopes) and bool(((wanted - slopes).abs() <= 0.02 * slopes.abs() + error).all()):
        return []
    heads = len(slopes)
    like = [h for h in range(1, 4 * heads) if h != heads and _same_slopes(published_slopes(h), slopes)]
    measured = f"those of {like[0]} heads" if like else slope_text(slopes)
    return [f"declared ALiBi slopes of {len(wanted)} heads ({slope_text(wanted)}), measured {measured}"]


def _same_slopes(those: Tensor, slopes: Tensor) -> bool:
    return len(those) >= len(slopes) and torch.allclose(those[: len(slopes)], slopes, rtol=0.02)


def slope_text(slopes: Tensor) -> str:
    """Return the range of the slopes in words."""
    return f"{number(float(slopes.max()))} to {number(float(slopes.min()))}"


def bucket_lookup(bias: Tensor, lookups: Sequence[Lookup]) -> Lookup | None:
    """Return the table of buckets that a bias was read from, or None."""
    for lookup in lookups:
        if lookup.rows.ndim == 2 and lookup.table.shape[1] == len(bias):
            n = bias.shape[-1]
            values = lookup.table[lookup.rows[:n, :n]].permute(2, 0, 1).double().cpu()
            values = values - values.diagonal(dim1=1, dim2=2)[..., None]
            off = (bias - values).nan_to_num().abs().max()
            if float(off) < 1e-2 * float(values.abs().max()):
                return lookup
    return None


# ---- windows and causality


def window_text(window: Window, causal: bool | None) -> str:
    """Return a window in words."""
    if not isinstance(window, tuple):
        return window or "none"
    kind, size = window
    if kind == "chunks":
        return f"chunks of {size}"
    return f"{size} to either side" if causal is False else str(size)


def compare_reach(wanted: Window, causal: bool | None, reach: Reach) -> list[str]:
    """Return what differs from the declared window and causality."""
    if causal is True and not reach.causal:
        return ["declared causal, measured attention to later keys"]
    if causal is False and reach.causal:
        return ["declared to see both directions, measured causal"]
    unreached = isinstance(wanted, tuple) and wanted[1] >= reach.length
    measured = window_text(reach.window, reach.causal)
    if wanted == UNDECLARED or unreached or measured in ("irregular", window_text(wanted, reach.causal)):
        return []
    return [f"declared window {window_text(wanted, causal)}, measured {measured}"]


# ---- tables at the input


def position_lookup(reading: Reading) -> Lookup | None:
    """Return the table at the input of which each token reads another row, or None."""
    tables = [lookup for lookup in reading.lookups if lookup.block is None and lookup.rows.ndim == 1]
    moving = [
        lookup
        for lookup in tables
        if bool((lookup.rows.diff() != 0).all()) and lookup.table.shape[1] in reading.widths  # not angles of a head
    ]
    return moving[0] if moving else None


def is_sinusoidal(table: Tensor) -> bool:
    """Return whether rows of a table are sines and cosines of distances, in any order of dimensions."""
    some = table[2 : 2 + 32].double().cpu()  # the first rows may be padding
    middle, around = some[1:-1], some[:-2] + some[2:]
    moving = middle.square().sum(0) > 1e-12
    cosine = (middle * around).sum(0) / (2 * middle.square().sum(0)).clamp(min=1e-12)
    off = (around - 2 * cosine * middle).abs().amax(0)[moving]
    return bool(moving.any()) and bool((off < 1e-2).all()) and float(some.abs().max()) <= 1.01


def compare_rows(kind: str | None, first: int, reading: Reading) -> tuple[str, list[str]]:
    """Return the measured positions at the input in words, and what differs from the declared ones."""
    lookup = position_lookup(reading)
    if lookup is None:
        if reading.input_moves:
            return "computed at the input", []
        return "", ([f"declared {kind} positions, measured none"] if kind is not None else [])
    row = int(lookup.rows[0])
    measured = "sinusoidal" if is_sinusoidal(lookup.table) else "learned"
    text = measured if row == 0 else f"{measured} from row {row}"
    if kind is None:
        return text, []
    read = lookup.table[lookup.rows]
    if torch.equal(read, read[:1].expand_as(read)):
        return "", [f"declared {kind} positions, measured the same row at every position"]
    differences = [] if row == first else [f"declared positions from row {first} of the table, measured from row {row}"]
    if not bool((lookup.rows.diff() == 1).all()):
        differences.append("declared one row a position, measured other steps")
    return text, differences


def counted_through_padding(reading: Reading) -> bool | None:
    """Return whether tokens behind padding read later rows than without it; None where no table is read."""
    plain = position_lookup(reading)
    if plain is None or reading.padded is None or isinstance(reading.padded, str):
        return None
    same = [lookup for lookup in reading.padded if lookup.table.data_ptr() == plain.table.data_ptr()]
    if not same:
        return None
    return int(same[0].rows[PADDING]) != int(plain.rows[0])
