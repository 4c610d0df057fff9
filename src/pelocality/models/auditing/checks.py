"""What is declared and what is measured of each layer, in words, and a sentence where they differ.

`CHECKS` lists the functions that compare them: each takes what was read from a model and one of its layers, and returns
a row.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from pelocality._checks import HIDDEN
from pelocality.encodings._rotary_angles import RotaryAngles
from pelocality.models._weights import token_embeddings
from pelocality.models.auditing.measured import BEHIND_PADDING, Layer, Reading
from pelocality.models.auditing.rotations import Rotation
from pelocality.models.families import UNDECLARED, Architecture, KnownLogits, Window
from pelocality.models.recorder import Call, Lookup, NoRowError, distances

_PAIRS = {False: "dimensions of both halves (as in Llama)", True: "neighbouring dimensions (as in GPT-J)"}
_SEES = {True: "causal", False: "attention to later keys"}


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
    """Compare the angles by which queries are rotated, and those of keys with them."""
    declared, queries, keys = layer.rotation, layer.queries, layer.keys
    angles = declared if isinstance(declared, RotaryAngles) else None
    head = queries.head if isinstance(queries, Rotation) else None
    words = str(declared or "") if angles is None else _rotary_words(angles, angles.attention_factor, angles.dims, head)
    if not isinstance(queries, Rotation):
        measured = {None: "", "unseen": "queries not seen"}.get(queries, f"queries {queries} by position")
        missing = angles is not None and queries != "unseen"
        keys_alone = missing and isinstance(keys, Rotation)
        return _row("rotation", words, measured, {"": missing, "keys are rotated": keys_alone})
    runs = [each for each in (queries, layer.far) if isinstance(each, Rotation) and each.dims == queries.dims]
    like = angles if angles is not None and angles.dims == queries.dims else RotaryAngles(queries.dims)
    measured = _rotary_words(_recognised(runs, like), queries.factor, queries.dims, queries.head)
    keys_differ = keys != "unseen" and not (isinstance(keys, Rotation) and keys.same_as(queries))
    differences = {"keys are rotated otherwise": keys_differ, "": like is not angles and declared != UNDECLARED}
    if like is angles:
        off, family, factor = _off(runs, like), reading.family, queries.factor or 0.0
        allowed = max(1e-3, 10 * queries.tolerance - 1e-2) * like.attention_factor
        differences |= {
            "angles differ from position {} on, by up to {:.1g} rad".format(*off or (0, 0)): off is not None,
            f"pairs are {_PAIRS[queries.interleaved]}": not queries.pairs_as(family.interleaved),
            "angles have the other sign": family.direction not in (None, queries.direction),
            f"attention factor {factor:.4g}, not {like.attention_factor:.4g}": factor > 0
            and abs(factor - like.attention_factor) > allowed,
        }
    return _row("rotation", words, measured, differences)


def _off(runs: Sequence[Rotation], angles: RotaryAngles) -> tuple[int, float] | None:
    """Return the first position with other angles than these, and by how much; in the direction of the first run."""
    offs = (run.off_from(angles, runs[0].direction) for run in runs)
    return next((each for each in offs if each is not None), None)


def _recognised(runs: Sequence[Rotation], like: RotaryAngles) -> RotaryAngles | None:
    """Return the rotary embeddings that have the measured angles, or at least those of consecutive positions."""
    frequencies, scalings = runs[0].frequencies(), [(like.scaling, like.options), ("default", like.options)]
    bases = [like.base, RotaryAngles(like.dims).base]
    if len(frequencies) > 1 and frequencies[1] > 0:
        base = float((frequencies[0] / frequencies[1]) ** len(frequencies))
        bases += [float(f"{base:.3g}"), base]
    if 0 < frequencies[0] < 1:
        scalings.append(("linear", {"factor": float(1 / frequencies[0])}))
    candidates = [replace(like, base=base, scaling=name, options=given) for base in bases for name, given in scalings]
    agreeing = [(_off(runs, each) or (math.inf,))[0] for each in candidates]  # up to which position
    enough = math.inf if math.inf in agreeing else len(runs[0].angles)
    return next((each for each, position in zip(candidates, agreeing, strict=True) if position >= enough), None)


def _rotary_words(rotary: RotaryAngles | None, factor: float | None, dims: int, head: int | None) -> str:
    """Return rotary embeddings in words; ``rotary`` is None if their angles have no known form."""
    words = ["rotary"] if rotary is None else [f"rotary, base {_number(rotary.base)}"]
    if rotary is not None and rotary.scaling != "default":
        by = rotary.options.get("factor")
        words.append(rotary.scaling if by is None else f"{rotary.scaling} (factor {_number(by)})")
    if head not in (None, dims):
        words.append(f"{dims} of {head} dimensions")
    if rotary is not None and "mrope_section" in rotary.options:
        words.append(f"sections {rotary.options['mrope_section']}")
    if factor is not None and abs(factor - 1) > 1e-2:
        words.append(f"attention factor {_number(factor)}")
    return ", ".join(words)


# ---- biases


def bias(reading: Reading, layer: Layer) -> Row:
    """Compare what is added to the logits by distance: slopes, buckets or embeddings of distances."""
    if isinstance(layer.queries, Rotation) or layer.queries == "change":
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
