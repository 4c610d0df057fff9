"""Declared against measured: the words for both, and the sentences where they differ."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pelocality._checks import HIDDEN
from pelocality.encodings.alibi import published_slopes
from pelocality.models.auditing import declared
from pelocality.models.auditing.declared import DEFAULT_BASE, Rotary
from pelocality.models.auditing.families import declarations
from pelocality.models.auditing.measured import (
    PADDING,
    SHORT,
    WITH_MASK,
    Call,
    Layer,
    Lookup,
    NoRowError,
    Reach,
    Reading,
    Recorder,
    Window,
    distances,
)
from pelocality.models.auditing.rotations import Rotation, wrapped

Finding = tuple[str, str, list[str]]
"""Declared and measured, in words, and what differs."""

UNDECLARED = "undeclared"
_LAYOUTS = {
    "half": "pairs of dimensions from both halves (as in Llama)",
    "interleaved": "pairs of neighbouring dimensions (as in GPT-J)",
}


def as_written(value: float) -> str:
    """Return a number as one would write it in a configuration."""
    return f"{value:.0f}" if value == round(value) or abs(value) >= 1e4 else f"{value:.4g}"


# ---- rotary


def compare_rotations(wanted: Rotary | str | None, layer: Layer) -> Finding:
    """Return the rotation of a layer's queries and keys."""
    rotation, rotary, declared_text = layer.queries, wanted if isinstance(wanted, Rotary) else None, ""
    if rotary is not None:
        head = rotation.head if isinstance(rotation, Rotation) else rotary.dims
        declared_text = _rotary_text(rotary, rotary.attention_factor, rotary.dims, head)
    if rotation == "unseen":
        return declared_text, "queries not seen", []
    if not isinstance(rotation, Rotation):
        instead = "no rotation" if rotation is None else "one that differs between heads, or no rotation"
        missing = [] if rotary is None else [f"declared rotary base {as_written(rotary.base)}, measured {instead}"]
        missing += _key_differences(rotation, layer.keys) if rotary is not None else []
        return declared_text, "" if rotation is None else f"queries {rotation} by position", missing
    rotations = [each for each in (rotation, layer.far) if isinstance(each, Rotation) and each.dims == rotation.dims]
    departure = math.inf
    if rotary is not None and rotary.dims == rotation.dims:
        departure = _departure(rotations, rotary)
        found = rotary if departure == math.inf else _recognised(rotations, rotary)
    else:
        found = _recognised(rotations, Rotary(DEFAULT_BASE, rotation.dims, "default", {}, 0))
    measured_text = _rotary_text(found, rotation.factor, rotation.dims, rotation.head)
    mismatches = [f"declared no rotation, measured {measured_text}"] if wanted is None else []
    if rotary is not None:
        mismatches += _angle_differences(rotary, rotation, found)
        if not mismatches and departure < math.inf:
            mismatches.append(f"declared {declared_text}, measured other angles from position {departure:.0f} on")
        mismatches += _pair_differences(rotary, rotation)
        mismatches += _factor_difference(rotary.attention_factor, rotation)
    return declared_text, measured_text, mismatches + _key_differences(rotation, layer.keys)


def _key_differences(queries: Rotation | str | None, keys: Rotation | str | None) -> list[str]:
    """Return whether keys are rotated otherwise than queries."""
    if isinstance(queries, Rotation) and isinstance(keys, Rotation):
        return [] if queries.same_as(keys) else ["queries and keys are rotated by different angles"]
    if "unseen" in (queries, keys):
        return []
    if isinstance(queries, Rotation):
        return ["queries are rotated by position, keys are not"]
    return ["keys are rotated by position, queries are not"] if isinstance(keys, Rotation) else []


def _rotary_text(rotary: Rotary | None, factor: float | None, dims: int, head: int) -> str:
    """Return rotary embeddings in words; ``rotary`` is None if their angles have no known form."""
    words = ["rotary"] if rotary is None else [f"rotary, base {as_written(rotary.base)}"]
    if rotary is not None and rotary.scaling != "default":
        words.append(_scaling_text(rotary))
    if dims != head:
        words.append(f"{dims} of {head} dimensions")
    if factor is not None and abs(factor - 1) > 1e-2:
        words.append(f"attention factor {as_written(factor)}")
    return ", ".join(words)


def _scaling_text(rotary: Rotary) -> str:
    """Return the scaling and its factor in words."""
    factor = rotary.options.get("factor")
    if rotary.scaling == "default":
        return "none"
    return rotary.scaling if factor is None else f"{rotary.scaling} (factor {as_written(factor)})"


def _departure(rotations: Sequence[Rotation], rotary: Rotary) -> float:
    """Return the first position at which measured angles are not those of the rotary embeddings, infinity for none.

    The direction is that of the first rotation, because its positions are consecutive.
    """
    for rotation in rotations:
        wanted = rotations[0].direction * rotation.positions[:, None] * rotary.frequencies(rotation.length)
        off = (wrapped(rotation.angles - wanted).abs() > rotation.tolerance + 1e-6 * wanted.abs()).any(1)
        if bool(off.any()):
            return float(rotation.positions[off][0])
    return math.inf


def _recognised(rotations: Sequence[Rotation], like: Rotary) -> Rotary | None:
    """Return the rotary embeddings that have the measured angles, or at least those of consecutive positions."""
    near = rotations[0]
    bases = [like.base, DEFAULT_BASE, *([] if near.base is None else [float(f"{near.base:.3g}"), near.base])]
    scalings = [(like.scaling, like.options), ("default", like.options)]
    if 0 < near.frequencies[0] < 1:
        scalings.append(("linear", {"factor": float(1 / near.frequencies[0])}))
    candidates = [replace(like, base=base, scaling=name, options=given) for base in bases for name, given in scalings]
    departures = [(_departure(rotations, each), each) for each in candidates]
    fitting = (each for least in (math.inf, len(near.angles)) for departure, each in departures if departure >= least)
    return next(fitting, None)


def _factor_difference(wanted: float, rotation: Rotation) -> list[str]:
    """Return whether the factor on the rotated dimensions differs."""
    allowed = max(1e-3, 10 * rotation.tolerance - 1e-2) * wanted
    if rotation.factor is None or abs(rotation.factor - wanted) <= allowed:
        return []
    return [f"declared attention factor {as_written(wanted)}, measured {as_written(rotation.factor)}"]


def _angle_differences(wanted: Rotary, rotation: Rotation, found: Rotary | None) -> list[str]:
    """Return in what the declared rotary embeddings differ from those that were recognised."""
    mismatches = []
    if wanted.dims != rotation.dims:
        mismatches.append(f"declared {wanted.dims} rotated dimensions of {rotation.head}, measured {rotation.dims}")
    for name, text in (("base", lambda rotary: as_written(rotary.base)), ("scaling", _scaling_text)):
        if found is not None and text(found) != text(wanted):
            mismatches.append(f"declared rotary {name} {text(wanted)}, measured {text(found)}")
    return mismatches


def _pair_differences(wanted: Rotary, rotation: Rotation) -> list[str]:
    """Return whether other dimensions are rotated as a pair, or in the other direction."""
    mismatches = []
    if wanted.layout and wanted.dims == rotation.dims and not rotation.pairs_as(wanted.layout):
        mismatches.append(f"declared {_LAYOUTS[wanted.layout]}, measured {_LAYOUTS[rotation.layout]}")
    if wanted.direction and wanted.direction != rotation.direction:
        signs = ("positive", "negative")[:: wanted.direction]
        mismatches.append("declared rotation by {} angles, measured {} angles".format(*signs))
    return mismatches


# ---- biases


def compare_biases(config: Any, call: Call, lookups: Sequence[Lookup]) -> Finding:
    """Return the bias of a layer."""
    terms, slopes = declarations(config).relative_terms(config), declarations(config).slopes(config)
    buckets = declared.buckets(config, SHORT)
    declared_text = "relative terms" if terms else ""
    if slopes is not None:
        declared_text = f"ALiBi, slopes {_slope_text(slopes)}"
    elif buckets is not None:
        declared_text = f"{config.relative_attention_num_buckets} buckets"
    bias = bias_of(call)
    if float(bias.nan_to_num().abs().max()) < 1e-3:
        return declared_text, "", [f"declared {declared_text}, measured none"] if declared_text else []
    rounding = _rounding_of(call, bias)
    found = _slopes_of(bias, rounding)
    if slopes is not None or (found is not None and not declared_text):
        measured_text = "a bias" if found is None else f"ALiBi, slopes {_slope_text(found)}"
        return declared_text, measured_text, _slope_differences(slopes, found, rounding / (bias.shape[-1] - 1))
    lookup = _bucket_lookup(bias, lookups)
    if lookup is None:
        unknown = declared_text or terms is None
        return declared_text, "relative terms", [] if unknown else ["declared no relative terms, measured some"]
    measured_text, n = f"{len(lookup.table)} buckets", len(bias[0])
    if buckets is None:
        return declared_text, measured_text, ["declared no buckets, measured some"]
    off = (lookup.rows[:n, :n].cpu() != buckets[:n, :n]) & ~bias.isnan().all(0)
    nearest = int(distances(n).abs()[off].min()) if bool(off.any()) else None
    return (
        declared_text,
        measured_text,
        [] if nearest is None else [f"declared {declared_text}, measured others from distance {nearest} on"],
    )


def bias_of(call: Call) -> Tensor:
    """Return how logits of constant content differ from that of the query's own key, NaN where hidden: (head, n, n)."""
    logits = call.logits.cpu().double()
    bias = logits - logits.diagonal(dim1=1, dim2=2)[..., None]
    return bias.masked_fill(bias <= HIDDEN, torch.nan)


def _rounding_of(call: Call, bias: Tensor) -> Tensor:
    """Return how far each head's bias (head, n, n) may be off, (head,), by the precision of logits and of a table."""
    table = torch.finfo(torch.bfloat16).eps * bias.nan_to_num().abs().amax((1, 2))  # Falcon keeps its table in bfloat16
    return _precision_of(call, bias) + table


def _precision_of(call: Call, bias: Tensor) -> Tensor:
    """Return how far each head's bias (head, n, n) may be off, (head,), by the precision of logits alone."""
    eps = torch.finfo(torch.float32 if call.query is None else call.query.dtype).eps
    logits: Tensor = call.logits.cpu().double().masked_fill(bias.isnan(), 0).abs().amax((1, 2))
    return eps * logits


def _slopes_of(bias: Tensor, rounding: Tensor) -> Tensor | None:
    """Return the slopes (head,) of a bias that falls in proportion to distance but for rounding (head,), else None."""
    n = bias.shape[-1]
    distance = distances(n).abs().to(bias.dtype)
    past = ~bias.isnan() & (distance > 0)
    rates = torch.where(past, -bias / distance.clamp(min=1), torch.nan)
    slopes = rates[:, -1, 0] if not bool(rates[:, -1, 0].isnan().any()) else rates.nanmean((1, 2))
    off = (bias + slopes[:, None, None] * distance).nan_to_num().abs()
    allowed = 0.02 * slopes.abs()[:, None, None] * distance + rounding[:, None, None]
    return slopes if bool((off <= allowed).all()) and bool((slopes.abs() * n > 2 * rounding).all()) else None


def _slope_differences(wanted: Tensor | None, slopes: Tensor | None, error: Tensor) -> list[str]:
    """Return what differs from declared slopes (head,), where measured ones may be off by ``error`` (head,)."""
    if wanted is None:
        return [f"declared no ALiBi, measured slopes {_slope_text(slopes)}"] if slopes is not None else []
    if slopes is None:
        return ["declared ALiBi, measured a bias that does not fall in proportion to distance"]
    heads = len(slopes)
    if len(wanted) == heads and bool(((wanted - slopes).abs() <= 0.02 * slopes.abs() + error).all()):
        return []
    published = {count: published_slopes(count)[:heads] for count in range(heads + 1, 4 * heads)}
    like = [count for count, others in published.items() if torch.allclose(others, slopes, rtol=0.02)]
    if len(wanted) != heads or like:
        measured = f"those of {like[0]} heads" if like else f"{_slope_text(slopes)} in {heads} heads"
        return [f"declared ALiBi slopes of {len(wanted)} heads ({_slope_text(wanted)}), measured {measured}"]
    ordered = (wanted.sort().values - slopes.sort().values).abs() <= 0.02 * slopes.sort().values.abs()
    order = ", the same slopes in another order" if bool(ordered.all()) else ""
    head = int(((wanted - slopes).abs() > 0.02 * slopes.abs() + error).nonzero()[0])
    one, other = (as_written(float(each[head])) for each in (wanted, slopes))
    return [f"declared ALiBi slope {one} in head {head}, measured {other}{order}"]


def _slope_text(slopes: Tensor) -> str:
    """Return the range of the slopes in words."""
    return f"{as_written(float(slopes.max()))} to {as_written(float(slopes.min()))}"


def _bucket_lookup(bias: Tensor, lookups: Sequence[Lookup]) -> Lookup | None:
    """Return the table of buckets that a bias was read from, or None."""
    for lookup in lookups:
        if lookup.rows.ndim == 2 and lookup.table.shape[1] == len(bias):
            n = bias.shape[-1]
            values = lookup.table[lookup.rows[:n, :n]].permute(2, 0, 1).cpu().double()
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


# ---- with a mask


def compare_masked(plain: Call, runs: Mapping[str, Recorder], place: int) -> list[str]:
    """Return how the attention at this place differs between the runs with a mask and the run without a mask."""
    calls = {name: run.calls[place] for name, run in runs.items() if place < len(run.calls)}
    return [f"{name}: {each}" for name, masked in calls.items() for each in _mask_differences(plain, masked)]


def _mask_differences(plain: Call, masked: Call) -> list[str]:
    """Return how an attention with a mask differs from the same attention without a mask, over their common tokens."""
    if masked.reach.causal != plain.reach.causal:
        return ["measured causal, not without a mask" if masked.reach.causal else "measured attention to later keys"]
    unreached = isinstance(plain.reach.window, tuple) and plain.reach.window[1] >= masked.reach.length
    windows = [window_text(each.reach.window, each.reach.causal) for each in (masked, plain)]
    if windows[0] != windows[1] and not unreached and "irregular" not in windows:
        return ["measured window {}, without a mask {}".format(*windows)]
    moved = len(plain.logits[0]) - len(masked.logits[0])  # SqueezeBert hides keys by position, not by distance
    nearest = first_difference(plain, masked)
    if nearest is None or (moved and first_difference(plain, masked, moved) is None):
        return []
    return [f"measured other logits than without a mask from distance {nearest} on"]


def first_difference(one: Call, two: Call, start: int = 0) -> int | None:
    """Return the smallest distance at which logits of the same content differ, None if they do not.

    From this position of the first call on.
    """
    n = min(len(one.logits[0]) - start, len(two.logits[0]))
    part = slice(start, start + n)
    a, b = bias_of(one)[:, part, part], bias_of(two)[:, :n, :n]
    largest = a.nan_to_num().abs().max().clamp(min=1)
    allowed = torch.maximum(4 * _precision_of(one, bias_of(one)), 1e-3 * largest)[:, None, None]
    off = ((a - b).abs() > allowed) | (a.isnan() != b.isnan())
    return int(distances(n).abs()[off.any(0)].min()) if bool(off.any()) else None


def first_hidden(one: Reach, two: Reach) -> int | None:
    """Return the smallest distance at which one of two windows hides a key and the other does not, None for none."""
    windows = [reach.window for reach in (one, two)]
    if windows[0] == windows[1] or "irregular" in windows:
        return None
    sizes = [window for window in windows if isinstance(window, tuple)]
    return 1 if "chunks" in dict(sizes) else min(size for _, size in sizes) + (not one.causal)


# ---- tables at the input


def compare_inputs(config: Any, reading: Reading) -> Finding:
    """Return the positions at the input."""
    kind, first = declarations(config).table(config) or (None, 0)
    declared_text, lookup = _table_text(kind, first), reading.table
    if lookup is None:
        states = reading.constant.input_states
        if states is not None and bool((states - states[:, :1]).abs().max() > 1e-3 * states.abs().max()):
            return declared_text, "computed at the input", []
        return declared_text, "", [f"declared {kind} positions, measured none"] if kind else []
    row, read = int(lookup.rows[0]), lookup.table[lookup.rows]
    measured_text = _table_text("sinusoidal" if _is_sinusoidal(lookup.table) else "learned", row)
    if kind is None:
        return declared_text, measured_text, []
    if torch.equal(read, read[:1].expand_as(read)):
        return declared_text, "", [f"declared {kind} positions, measured the same row at every position"]
    mismatches = [] if row == first else [f"declared positions from row {first} of the table, measured from row {row}"]
    steps = lookup.rows.cpu() - row - torch.arange(len(lookup.rows), device="cpu")
    if bool(steps.any()):
        place = int(steps.nonzero()[0])
        other = f"measured row {int(lookup.rows[place])}"
        mismatches.append(f"declared row {row + place} of the table at position {place}, {other}")
    elif (equal := _equal_rows(read)) is not None:
        mismatches.append("declared {} positions, measured the same vector at positions {} and {}".format(kind, *equal))
    return declared_text, measured_text, mismatches + ([reading.no_row] if reading.no_row else [])


def _equal_rows(read: Tensor) -> tuple[int, int] | None:
    """Return two positions with equal vectors, the earlier position first; None if all vectors differ."""
    _, number = torch.unique(read.cpu(), dim=0, return_inverse=True)
    first = torch.full((len(read),), len(read), device="cpu")
    first.scatter_reduce_(0, number, torch.arange(len(read), device="cpu"), "amin")
    again = (first[number] < torch.arange(len(read), device="cpu")).nonzero()
    return (int(first[number[again[0]]]), int(again[0])) if len(again) else None


def _table_text(kind: str | None, row: int) -> str:
    """Return a table of positions in words."""
    return f"{kind} from row {row}" if row else kind or ""


def _is_sinusoidal(table: Tensor) -> bool:
    """Return whether rows of a table are sines and cosines of distances, in any order of dimensions."""
    some = table[2 : 2 + 32].cpu().double()  # the first rows may be padding
    middle, around = some[1:-1], some[:-2] + some[2:]
    nonzero = middle.square().sum(0) > 1e-12
    cosine = (middle * around).sum(0) / (2 * middle.square().sum(0)).clamp(min=1e-12)
    off = (around - 2 * cosine * middle).abs().amax(0)[nonzero]
    return bool(nonzero.any()) and bool((off < 1e-2).all()) and float(some.abs().max()) <= 1.01


def counted_through_padding(reading: Reading) -> bool | None:
    """Return whether tokens behind padding read later rows than without it; None where no table is read."""
    rows = _first_rows(reading.table, reading.padded, PADDING)
    return None if rows is None else rows[0] != rows[1]


def _first_rows(plain: Lookup | None, others: Sequence[Lookup], first: int) -> tuple[int, int] | None:
    """Return the row of the first token, at this place in another run, and without a mask; None without a table."""
    same = (each for each in others if plain is not None and each.table.data_ptr() == plain.table.data_ptr())
    other = next(same, None)
    return None if plain is None or other is None else (int(other.rows[first]), int(plain.rows[0]))


def compare_padding(reading: Reading, miscounted: bool | None) -> list[str]:
    """Return what is wrong with a mask: a position has no row or another row, or padding on the left is counted."""
    missing = [f"{name}: {error}" for name, error in reading.failed.items() if isinstance(error, NoRowError)]
    run = reading.masked.get(WITH_MASK)
    rows = _first_rows(reading.table, () if run is None else run.lookups, 0)
    if rows is not None and rows[0] != rows[1]:
        missing.append(f"{WITH_MASK}: measured from row {rows[0]}, without one from row {rows[1]}")
    if miscounted and not missing:
        return ["declared positions counted from the first token, measured through left padding"]
    return missing
