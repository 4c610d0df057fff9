"""What is declared and what is measured of each layer, in words, and a sentence where they differ.

`CHECKS` lists the functions that compare them: each takes what was read from a model and one of its layers, and returns
a row.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pelocality._checks import HIDDEN
from pelocality.encodings._rotary_angles import RotaryAngles
from pelocality.models._weights import token_embeddings
from pelocality.models.auditing.measured import BEHIND_PADDING, Layer, Reading
from pelocality.models.families import LAYOUTS, UNDECLARED, Architecture, KnownLogits, Window
from pelocality.models.recorder import Call, Lookup, NoRowError, distances
from pelocality.models.rotations import Rotation

_PAIRS: Any = {False: "dimensions of both halves (as in Llama)", True: "neighbouring dimensions (as in GPT-J)"}
_SEES = {True: "causal", False: "attention to later keys"}

Runs = dict[int, Rotation]
"""How queries are rotated in runs, by the number of positions of these: at consecutive positions first."""


class Row(NamedTuple):
    """What is declared and measured of a layer's positions, in words, and a sentence if they differ."""

    declared: str = ""
    measured: str = ""
    mismatch: str = ""


def _row(name: str, declared: str, measured: str, differences: dict[str, bool]) -> Row:
    """Return a row, with a sentence if something differs; "" is a difference that the words show."""
    details = ", ".join(text for text, differs in differences.items() if differs and text)
    sentence = f"declared {declared or f'no {name}'}, measured {measured or f'no {name}'}"
    return Row(declared, measured, ": ".join(filter(None, (sentence, details))) if any(differences.values()) else "")


def _number(value: float) -> str:
    """Return a number as one would write it in a configuration."""
    return f"{value:.0f}" if value == round(value) or abs(value) >= 1e4 else f"{value:.4g}"


# ---- the table at the input


def table(reading: Reading) -> Row:
    """Compare the vectors of positions that reach the first layer, and the rows that tokens read for them."""
    family, lookup, states = reading.family, reading.table, reading.at_input.input_states
    kind, first = family.declared_table(reading.config) or ("", 0)
    declared, rows = _table_words(kind, first), [first] if lookup is None else lookup.rows.tolist()
    other = _other_sines(family, states, rows[0]) if kind == "sinusoidal" and states is not None else ""
    if lookup is None:
        computed = states is not None and bool((states - states[:, :1]).abs().max() > 1e-3 * states.abs().max())
        quantised = callable(token_embeddings(reading.model.module).weight)  # and looked up unseen
        allowed = {"learned": quantised, "sinusoidal": not other, "": not isinstance(family, KnownLogits)}[kind]
        words = "computed at the input" if computed else ""
        return _row("table", declared, words, {other: not allowed if computed else kind != ""})
    measured = _table_words("learned" if other and not reading.lost else kind or "learned", rows[0])
    if not kind:
        return _row("table", declared, measured, {"": isinstance(family, KnownLogits)})
    vectors = lookup.table[lookup.rows].cpu()
    _, number, copies = torch.unique(vectors, dim=0, return_inverse=True, return_counts=True)
    equal = (number == number[(copies[number] > 1).int().argmax()]).nonzero().flatten().tolist()
    wrong = [f"position {i} reads row {row}, not row {first + i}" for i, row in enumerate(rows) if row != first + i]
    wrong += [f"equal vectors at positions {equal[0]} and {equal[1]}"] if len(equal) > 1 else []
    if kind == "learned" and (unused := int((vectors == 0).all(0).sum())):
        wrong.append(f"{unused} of {vectors.shape[1]} dimensions are zero at all positions")
    wrong += [f"the vector of position {i} does not reach the first layer as a word does" for i in reading.lost]
    difference = next(filter(None, (*wrong, other)), "")
    return _row("table", declared, "" if 1 < len(equal) == len(rows) else measured, {difference: difference != ""})


def _other_sines(family: Architecture, states: Tensor, first: int) -> str:
    """Return where states (1, n, d) of one word differ otherwise than sines and cosines from a row on, in words."""
    eps, states = max(torch.finfo(each).eps for each in (states.dtype, torch.float32)), states[0].cpu().double()
    rows = torch.arange(first, first + len(states), dtype=torch.float64, device="cpu")
    sines = family.declared_sinusoids(rows, states.shape[1])
    off = (states - states[:1] - (sines - sines[:1])).abs().amax(1) > 5e-3 + 4 * eps * (rows + states.abs().max())
    return f"other sines and cosines at position {int(off.int().argmax())}" if bool(off.any()) else ""


def _table_words(kind: str, row: int) -> str:
    return f"{kind} from row {row}" if row else kind


def rows_with_a_mask(reading: Reading) -> Row:
    """Compare the row of the first token with and without a mask, and find positions for which a table has no row."""
    differences = [f"{name}: {run}" for name, run in reading.runs.items() if isinstance(run, NoRowError)]
    for name, (row, plain) in reading.moved_rows.items():
        if name != BEHIND_PADDING or reading.family.counts_tokens:
            differences.append(f"{name}: the first token reads row {row}, not row {plain}")
    return Row(mismatch=", ".join(differences))


# ---- rotations


def rotation(reading: Reading, layer: Layer) -> Row:
    """Compare the angles by which queries are rotated, by each coordinate, and those of keys with them."""
    declared, queries, keys, family = layer.rotation, layer.queries, layer.keys, reading.family
    angles = declared if isinstance(declared, RotaryAngles) else None
    head = None if layer.constant.query is None else layer.constant.query.shape[-1]
    words, sections = str(declared or ""), ""
    if angles is not None:
        sections = str([*angles.options.get("mrope_section", ())]).replace("[]", "")
        words = _rotary_words(angles, angles.attention_factor, angles.dims, head, sections)
    if not isinstance(queries, Rotation):
        change, _, reason = (queries or "").partition(": ")
        measured = {"": "", "unseen": "queries not seen"}.get(change, f"queries {change} by position")
        missing = angles is not None and queries != "unseen"
        keys_alone = missing and isinstance(keys, Rotation)
        return _row("rotation", words, measured, {reason: missing, "keys are rotated": keys_alone})
    same = isinstance(keys, Rotation) and torch.equal(keys.pairs, queries.pairs) and not keys.off_from(queries.angles)
    keys_differ = keys != "unseen" and not same
    dims, direction = 2 * len(queries.pairs), 1 if float(queries.frequencies[0, 0]) >= 0 else -1
    like = angles if angles is not None and angles.dims == dims else RotaryAngles(dims)
    runs, far, axes = {reading.constant.tokens: queries}, layer.far, family.declared_axes(like)
    if isinstance(far, Rotation) and torch.equal(far.pairs, queries.pairs):
        runs[int(far.places.max()) + 1] = far
    *_, last = runs.values()
    run_axes = last.axis.where(last.frequencies[0].any(1), 0 if axes is None else axes)  # some bands hardly turn
    run_sections = _sections(run_axes, family.sections) if last.places.shape[1] == 3 else ""
    measured = _rotary_words(_recognised(runs, like, run_axes, direction), queries.scaling, dims, head, run_sections)
    apart = str(far).partition("change: ")[2] if sections and not keys_differ else ""
    measured += f"; at positions far apart, {apart}" if apart else ""
    # The sections of HunYuan-VL have no known layout.
    differs = axes is not None and (bool(apart) or run_sections not in ("", sections))
    differs = differs if like is angles else declared != UNDECLARED
    differences = {"": differs, "keys are rotated otherwise": keys_differ}
    if like is angles:
        off, factor = _off(runs, like, run_axes if axes is None else axes, direction), queries.scaling
        pairs_differ = dims > 2 and family.interleaved not in (None, queries.interleaved)
        factor_differs = factor is not None and abs(factor / like.attention_factor - 1) > 1e-3
        differences |= {
            "angles differ from position {} on, by up to {:.1g} rad".format(*off or (0, 0)): off is not None,
            f"pairs are {_PAIRS.get(queries.interleaved, 'others')}": pairs_differ,
            "angles have the other sign": family.direction not in (None, direction),
            f"attention factor {factor or 0:.4g}, not {like.attention_factor:.4g}": factor_differs,
        }
    return _row("rotation", words, measured, differences)


def _off(runs: Runs, angles: RotaryAngles, axes: Tensor, direction: int) -> tuple[int, float] | None:
    """Return the first position with other angles than these, of which each pair has an axis, and by how much."""
    for length, run in runs.items():
        places = run.places if run.places.shape[1] == 1 else run.places[:, axes]
        if (off := run.off_from(direction * places * angles.frequencies(length))) is not None:
            return off
    return None


def _recognised(runs: Runs, like: RotaryAngles, axes: Tensor, direction: int) -> RotaryAngles | None:
    """Return the rotary embeddings that have the measured angles, or at least those of consecutive positions."""
    near = next(iter(runs.values()))
    frequencies = direction * near.frequencies[0, :, 0]
    scalings = [(like.scaling, like.options), ("default", like.options)]
    bases = [like.base, RotaryAngles(like.dims).base]
    if len(frequencies) > 1 and frequencies[1] > 0:
        base = float((frequencies[0] / frequencies[1]) ** len(frequencies))
        bases += [float(f"{base:.3g}"), base]
    if 0 < frequencies[0] < 1:
        scalings.append(("linear", {"factor": float(1 / frequencies[0])}))
    candidates = [replace(like, base=base, scaling=name, options=given) for base in bases for name, given in scalings]
    agreeing = [(_off(runs, each, axes, direction) or (math.inf,))[0] for each in candidates]  # up to which position
    enough = math.inf if math.inf in agreeing else len(near.angles)
    return next((each for each, position in zip(candidates, agreeing, strict=True) if position >= enough), None)


def _rotary_words(rotary: RotaryAngles | None, factor: float | None, dims: int, head: int | None, sections: str) -> str:
    """Return rotary embeddings in words; ``rotary`` is None if their angles have no known form."""
    words = ["rotary"] if rotary is None else [f"rotary, base {_number(rotary.base)}"]
    if rotary is not None and rotary.scaling != "default":
        by = rotary.options.get("factor")
        words.append(rotary.scaling if by is None else f"{rotary.scaling} (factor {_number(by)})")
    if head not in (None, dims):
        words.append(f"{dims} of {head} dimensions")
    if sections:
        words.append(f"sections {sections}")
    if factor is not None and abs(factor - 1) > 1e-2:
        words.append(f"attention factor {_number(factor)}")
    return ", ".join(words)


def _sections(axes: Tensor, layout: str | None) -> str:
    """Return the sections of M-RoPE by which pairs have these axes, and their layout if it is another one."""
    if several := int((axes < 0).sum()):
        return f"of several axes in {several} of {len(axes)} pairs"
    sizes, pair = torch.bincount(axes, minlength=3), torch.arange(len(axes), device="cpu")
    layouts = [name for name, axes_of in LAYOUTS.items() if torch.equal(axes_of(pair, sizes), axes)]
    words = str((sizes.roll(-1) if layout == "time last" else sizes).tolist())
    return words if layout in (None, *layouts) else f"{words} laid out as {(*layouts, 'no known layout')[0]}"


# ---- biases


def bias(reading: Reading, layer: Layer) -> Row:
    """Compare what is added to the logits by distance: slopes, buckets or embeddings of distances."""
    if isinstance(layer.queries, Rotation) or str(layer.queries).startswith("change"):
        return Row()
    measured, precision = bias_of(layer.constant)
    family, config, n = reading.family, reading.config, measured.shape[-1]
    slopes, buckets = family.declared_slopes(config), family.declared_buckets(config, n)
    terms = family.relative_terms and getattr(config, "relative_attention", True)  # DeBERTa
    declared = "relative terms" if terms else ""
    declared = declared if buckets is None else f"{config.relative_attention_num_buckets} buckets"
    declared = declared if slopes is None else _slope_words(slopes)
    largest, fitted = measured.nan_to_num().abs().amax((1, 2)), -measured[:, -1, 0] / (n - 1)
    rounding = (precision + torch.finfo(torch.bfloat16).eps * largest)[:, None, None]  # Falcon's table is in bfloat16
    steep = bool((fitted.abs() * n > 2 * rounding.flatten()).all())
    lookup = next((each for each in reading.constant.lookups if _is_read(each, measured)), None)
    words = "relative terms"
    if float(largest.max()) < 1e-3:
        words = ""
    elif lookup is not None:
        words = f"{len(lookup.table)} buckets"
    elif steep and not terms and not bool(_off_slopes(measured, fitted, rounding).any()):
        words = _slope_words(fitted)
    if slopes is not None and len(slopes) == len(measured):
        off = _off_slopes(measured, slopes, rounding)
        difference = f"off by up to {float(off.max()):.1g}"
    elif buckets is not None and lookup is not None:
        off = (lookup.rows[:n, :n].cpu() != buckets) & ~measured.isnan().all(0)
        difference = "other buckets"
    else:
        return _row("bias", declared, words, {"": slopes is not None or (words != declared and terms is not None)})
    nearest = int(distances(n).abs()[off > 0].min()) if bool(off.any()) else 0
    return _row("bias", declared, words, {f"{difference} from distance {nearest} on": nearest > 0})


def _off_slopes(measured: Tensor, slopes: Tensor, rounding: Tensor) -> Tensor:
    """Return by how much a bias (head, n, n) is not that of slopes (head,), in any head: (n, n), 0 for rounding."""
    bias = -slopes[:, None, None] * distances(measured.shape[-1]).abs()
    off = (measured - bias).nan_to_num().abs()
    return off.where(off > 0.02 * bias.abs() + rounding, 0).amax(0)


def _is_read(lookup: Lookup, measured: Tensor) -> bool:
    """Return whether a bias (head, n, n) was read from a table by pairs of positions."""
    if lookup.rows.ndim != 2 or lookup.table.shape[1] != len(measured):
        return False
    n = measured.shape[-1]
    bias = _from_diagonal(lookup.table[lookup.rows[:n, :n]].permute(2, 0, 1).cpu().double())
    return float((measured - bias).nan_to_num().abs().max()) < 1e-2 * float(bias.abs().max())


def _from_diagonal(logits: Tensor) -> Tensor:
    """Return how logits (head, n, n) differ from that of the query's own key."""
    return logits - logits.diagonal(dim1=1, dim2=2)[..., None]


def bias_of(call: Call) -> tuple[Tensor, Tensor]:
    """Return the bias of constant content, NaN where a key is hidden, (head, n, n), and its precision (head,)."""
    bias = _from_diagonal(call.logits)
    bias = bias.masked_fill(bias <= HIDDEN, torch.nan)
    eps = torch.finfo(torch.float32 if call.query is None else call.query.dtype).eps
    return bias, eps * call.logits.masked_fill(bias.isnan(), 0).abs().amax((1, 2))


def _slope_words(slopes: Tensor) -> str:
    return f"ALiBi, slopes {_number(float(slopes.max()))} to {_number(float(slopes.min()))}"


# ---- visible keys


def visible_keys(reading: Reading, layer: Layer) -> Row:
    """Compare causality, and the window of a layer."""
    declared, causal, reach = layer.window, reading.causal, layer.constant.reach
    if causal not in (None, reach.causal):
        return Row(mismatch=f"declared {_SEES[not reach.causal]}, measured {_SEES[reach.causal]}")
    words = window_words(declared, causal), window_words(reach.window, reach.causal)
    unreached = isinstance(declared, tuple) and declared[1] >= len(reach.visible)
    if declared == UNDECLARED or unreached or words[1] in ("irregular", window_words(declared, reach.causal)):
        return Row()
    return Row(mismatch="declared window {}, measured {}".format(*words))


def window_words(window: Window, causal: bool | None) -> str:
    """Return a window in words."""
    if not isinstance(window, tuple):
        return window or "none"
    around = f"{window[1]} to either side" if causal is False else str(window[1])
    return f"chunks of {window[1]}" if window[0] == "chunks" else around


def attention_with_a_mask(reading: Reading, layer: Layer) -> Row:
    """Compare attention with a mask, with and without padding, with attention without one."""
    plain, differing = layer.constant, {}
    for name, masked in layer.masked.items():
        padded = len(plain.logits[0]) - len(masked.logits[0])  # SqueezeBert hides keys by position, not by distance
        off = first_difference(plain, masked)
        if off and not (padded and first_difference(plain, masked, padded) is None):
            differing[name] = off[0]
    if not differing:
        return Row()
    without = f"other attention than without a mask from distance {min(differing.values())} on"
    return Row(mismatch=f"{', '.join(differing)}: {without}")


def padding(reading: Reading, layer: Layer) -> Row:
    """Find runs in which tokens attend to padding."""
    seen = [name for name, masked in layer.masked.items() if masked.reach.padding]
    return Row(mismatch=f"{', '.join(seen)}: tokens attend to padding" if seen else "")


def first_difference(one: Call, two: Call, start: int = 0) -> tuple[int, int] | None:
    """Return the smallest distance at which two attentions of the same content differ, from a position of the first on.

    Returns:
        The distance, and the number of positions that show it: logits are compared over fewer than visible keys. None
        if both are the same.
    """
    (a, precision), (b, _) = bias_of(one), bias_of(two)
    n = min(a.shape[-1] - start, b.shape[-1])
    a, b = a[:, start : start + n, start : start + n], b[:, :n, :n]
    allowed = torch.maximum(4 * precision, 1e-3 * a.nan_to_num().abs().max().clamp(min=1))[:, None, None]
    logits = ((a - b).abs() > allowed) | (a.isnan() != b.isnan())
    n = min(len(one.reach.visible) - start, len(two.reach.visible))
    visible = one.reach.visible[start : start + n, start : start + n] != two.reach.visible[:n, :n]
    for off in (logits.any(0), visible):
        if bool(off.any()):
            return int(distances(len(off), off.device).abs()[off].min()), len(off)
    return None


CHECKS: tuple[Callable[[Reading, Layer], Row], ...] = (rotation, bias, visible_keys, attention_with_a_mask, padding)
"""What an audit compares in each layer, in the order of the words of its positions."""
