"""Which positions a model really runs, layer by layer: declared by its configuration against measured."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pelocality.models._inputs import token_tensor
from pelocality.models._restore import inference
from pelocality.models._run import (
    attached_encoding,
    device_of,
    eager_attention,
    find_base,
    model_name,
)
from pelocality.models._weights import check_ids
from pelocality.models._words import choose_words
from pelocality.models.auditing import agreement, declared
from pelocality.models.auditing.measured import SHORT, Reading, read
from pelocality.models.auditing.result import Audit, AuditComparison, LayerAudit
from pelocality.models.auditing.rotations import Rotation, wrapped
from pelocality.models.families import longest_input
from pelocality.models.families._declared import declarations
from pelocality.models.families._wrapper import pretrained

_LONGEST = {"sdpa": 8500, "eager": 1200}  # positions of the run for windows: eager holds a matrix for every head
Finding = tuple[str, str, list[str]]  # declared and measured, in words, and what differs
_WORDS = 64  # other tokens in the run with the model's own content


def audit(model: nn.Module, other: nn.Module | None = None, *, input_ids: Any = None) -> Audit | AuditComparison:
    r"""Return which positions a model really runs: declared by its configuration against measured, a layer a row.

    A model whose RoPE scaling was dropped, or whose window is off by one, runs without an error. The declared side
    comes from ``model.config`` by the published formulas (RoPE, its linear, dynamic, YaRN, Llama 3 and LongRoPE
    scalings, ALiBi, T5's buckets), not from transformers' functions. The measured side is read from the running model:

    - the model runs with the same vector at every token in place of each linear map, so that queries and keys differ
      by position alone. Their angles $\theta_{ik}$ at position $i$ in plane $k$ give base, scaling, attention factor
      and share of dimensions; a second run has positions as far apart as the configuration allows;
    - slopes and buckets are read from the logits, windows and causality from the keys that are masked, rows of tables
      from the lookups, also behind padding on the left;
    - sinks are read from a run of the model as it is.

    Weights are not changed, and mode and hooks are restored. The model's own attention implementation runs where that
    is "sdpa" or "eager", otherwise "eager". It takes about as long as one pass over 61 tokens, and more for a window of
    some thousand tokens.

    Args:
        model: a transformers model, or a wrapper around one. Of an encoder-decoder model the encoder is audited; pass
            ``model.get_decoder()`` for the other half. A model that can generate is also asked how it counts positions
            behind padding on the left.
        other: a second model with the same layers and heads, for a comparison.
        input_ids: token ids (n,) or (1, n) on which sinks and changes of attention are measured, at most 61 are read;
            by default random ones.

    Returns:
        An `Audit`, whose ``mismatches`` are empty if all that is declared was measured. With a second model, an
        `AuditComparison`.

    Raises:
        TypeError: for something that is not a transformers model, or ids that are not integers.
        ValueError: for a model without softmax attention, or two models that differ in layers or heads.

    Examples:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> tiny = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        >>> model = LlamaModel(LlamaConfig(**tiny, vocab_size=99, rope_parameters={"rope_theta": 5e5}))
        >>> result = audit(model)
        >>> result.layers[0].positions, result.mismatches
        (('rotary, base 500000', 'rotary, base 500000'), ())
        >>> fallen_back = LlamaModel(LlamaConfig(**tiny, vocab_size=99, rope_parameters={"rope_theta": 1e4}))
        >>> model.rotary_emb = fallen_back.rotary_emb
        >>> audit(model).mismatches
        ('layers 0-1: declared rotary base 500000, measured 10000',)
    """
    text = None if input_ids is None else token_tensor("input_ids", input_ids)
    if text is not None and (text.ndim > 2 or text.numel() != text.shape[-1] or text.shape[-1] < 2):
        raise ValueError(f"input_ids must be one sequence of at least 2 tokens, got shape {tuple(text.shape)}")
    if other is None:
        return _audit(model, text)[0]
    return _compare(_audit(model, text), _audit(other, text))


def _audit(model: nn.Module, text: Tensor | None) -> tuple[Audit, Reading]:
    """Return the audit of one model, and what was read from it."""
    base = find_base(model)
    inner, config = pretrained(model), base.config.get_text_config()
    own = getattr(config, "_attn_implementation", None) in ("sdpa", "eager", None)
    implementation = "sdpa" if own and config._attn_implementation == "sdpa" else "eager"
    depth = config.num_hidden_layers
    wanted = [declared.rotary(config, layer) for layer in range(depth)]
    rotary = [each for each in wanted if isinstance(each, declared.Rotary)]
    causal = declared.causal(base, config)
    windows = [declared.window(config, layer, bool(causal)) for layer in range(depth)]
    length = _length(base, windows, _LONGEST[implementation])
    word, ids = _tokens(base, text, min(length, SHORT))
    with inference(model) if own else eager_attention(model):
        reading = read(
            inner, base, config, word, ids, length, _farthest(config, rotary), sorted({each.dims for each in rotary})
        )
    if not reading.calls:
        raise ValueError(
            f"{type(base).__name__} (model type '{config.model_type}') cannot be audited: it took no softmax over its "
            "tokens"
        )
    through_padding = agreement.counted_through_padding(reading)
    by_itself = declarations(config).counts_tokens or (hasattr(inner, "can_generate") and inner.can_generate())
    at_input = _input(config, reading, bool(through_padding and by_itself))
    rows = [_row(config, reading, place, causal, at_input) for place in range(len(reading.calls))]
    rows += [
        LayerAudit(layer, (name, name), ("", ""), (None, None), None, None, ())
        for layer, name in reading.others.items()
    ]
    cautions = []
    if through_padding and not by_itself and causal:
        cautions.append("behind padding on the left, positions are right only if position_ids are passed")
    beyond = sorted({w[1] for w in windows if isinstance(w, tuple) and w[1] >= length})
    if beyond:
        cautions.append(f"windows of {', '.join(map(str, beyond))} were not reached with {length} positions")
    result = Audit(
        layers=tuple(sorted(rows, key=lambda row: row.layer)),
        model=model_name(model),
        length=length,
        encoding=attached_encoding(base),
        cautions=tuple(cautions),
    )
    return result, reading


def _input(config: Any, reading: Reading, through_padding: bool) -> Finding:
    """Return the positions at the input."""
    kind, first = declared.absolute(config), declared.first_row(config)
    text, differences = agreement.compare_rows(kind, first, reading)
    if isinstance(reading.padded, str):
        differences.append(f"behind padding on the left: {reading.padded}")
    if through_padding:
        differences.append("declared positions counted from the first token, measured through left padding")
    return f"{kind} from row {first}" if kind and first else kind or "", text, differences


def _row(config: Any, reading: Reading, place: int, causal: bool | None, at_input: Finding) -> LayerAudit:
    """Return what is declared and measured of one layer with attention."""
    layer, call, turn = reading.layers[place], reading.calls[place], reading.queries[place]
    rotary, window = declared.rotary(config, layer), declared.window(config, layer, bool(causal))
    found = [at_input, _rotation(rotary, reading, place)]
    if turn != "change" and not isinstance(turn, Rotation):
        found.append(_biases(config, reading, place))
    wanted, measured, differences = zip(*found, strict=True)
    text_call = reading.text[place] if place < len(reading.text) else call
    nothing = "undeclared" if rotary == "undeclared" else "none"
    return LayerAudit(
        layer=layer,
        positions=(_joined(wanted, nothing), _joined(measured, "none")),
        window=(agreement.window_text(window, causal), agreement.window_text(call.reach.window, call.reach.causal)),
        causal=(causal, call.reach.causal),
        first_key=float(text_call.weights[:, 1:, 0].double().mean()),
        sinks=None if text_call.sinks is None else float(text_call.sinks.double().mean()),
        mismatches=(*itertools.chain(*differences), *agreement.compare_reach(window, causal, call.reach)),
    )


def _rotation(wanted: declared.Rotary | str | None, reading: Reading, place: int) -> Finding:
    """Return the rotation of queries and keys."""
    turn, keys, words = reading.queries[place], reading.keys[place], ""
    if isinstance(wanted, declared.Rotary):
        head = turn.head if isinstance(turn, Rotation) else wanted.dims
        factor, scaling = wanted.attention_factor, agreement.scaling_text(wanted)
        words = agreement.rotary_text(wanted.base, scaling, factor, wanted.dims, head)
    if turn == "unseen":
        return words, "queries not seen", []
    text, differences = agreement.compare_rotations(wanted, _angles(reading, place))
    if isinstance(turn, Rotation) and isinstance(keys, Rotation) and not _same_turn(turn, keys):
        differences.append("queries and keys are turned by different angles")
    return words, f"queries {turn} by position" if isinstance(turn, str) else text, differences


def _biases(config: Any, reading: Reading, place: int) -> Finding:
    """Return declared and measured biases in words, and what differs."""
    call = reading.calls[place]
    bias = agreement.bias_of(call)
    slopes = declared.slopes(config)
    buckets = declared.buckets(config, bool(getattr(config, "is_decoder", False)), SHORT)
    names = (
        None if slopes is None else f"ALiBi, slopes {agreement.slope_text(slopes)}",
        None if buckets is None else f"{config.relative_attention_num_buckets} buckets",
        "relative terms" if declarations(config).relative_terms(config) else None,
    )
    wanted = [name for name in names if name is not None]
    words = _joined(wanted, "")
    if bias is None:
        return words, "", [f"declared {word}, measured none" for word in wanted]
    rounding = agreement.rounding_of(call, bias)
    found = agreement.slopes_of(bias, rounding)
    if slopes is not None or (found is not None and not wanted):
        differences = agreement.compare_slopes(slopes, found, rounding / (bias.shape[-1] - 1))
        return words, "a bias" if found is None else f"ALiBi, slopes {agreement.slope_text(found)}", differences
    lookup = agreement.bucket_lookup(bias, reading.lookups)
    if lookup is None:
        known = wanted or declarations(config).relative_terms(config) is None
        return words, "relative terms", [] if known else ["declared no relative terms, measured some"]
    n = min(len(lookup.rows), SHORT)
    rows, text = lookup.rows[:n, :n].cpu(), f"{len(lookup.table)} buckets"
    if buckets is None:
        return words, text, ["declared no buckets, measured some"]
    off = (rows != buckets[:n, :n]) & ~bias.isnan().all(0)
    if not bool(off.any()):
        return words, text, []
    position = torch.arange(n)
    nearest = int((position[:, None] - position).abs()[off].min())
    return words, text, [f"declared {wanted[0]}, measured others from distance {nearest} on"]


def _angles(reading: Reading, place: int) -> agreement.Angles | None:
    """Return the angles of a layer's queries, None where they are not turned."""
    turn = reading.queries[place]
    if not isinstance(turn, Rotation):
        return None
    positions, far = (None, None) if reading.far is None else (reading.far[0], reading.far[1][place])
    return agreement.Angles(turn, far, positions, reading.length)


def _same_turn(queries: Rotation, keys: Rotation) -> bool:
    """Return whether queries and keys are turned alike."""
    if queries.angles.shape != keys.angles.shape or queries.sign != keys.sign:
        return False
    return bool(wrapped(queries.angles - keys.angles).abs().max() < queries.tolerance)


def _length(base: Any, windows: Iterable[Any], most: int) -> int:
    """Return the number of positions to run: a prime beyond the widest declared window, where that can be run."""
    wide = [window[1] + 8 for window in windows if isinstance(window, tuple) and window[1] + 8 <= most]
    longest = longest_input(base) or 0
    wanted = max([SHORT, *wide])
    if 0 < longest <= 2 * wanted:  # there is a prime between a number and its double
        return _prime(range(min(wanted, longest), 1, -1))
    return _prime(range(wanted, 2 * wanted))


def _prime(numbers: Iterable[int]) -> int:
    """Return the first prime of some numbers."""
    return next(n for n in numbers if all(n % d for d in range(2, int(n**0.5) + 1)))


def _tokens(base: Any, text: Tensor | None, length: int) -> tuple[int, Tensor]:
    """Return the token to repeat, and (1, n) tokens for the run with the model's own content."""
    vocabulary = base.get_input_embeddings().weight.shape[0]
    words = choose_words(base, None, min(_WORDS, max(vocabulary // 2, 1)), 0)[0]
    if text is None:
        drawn = torch.randint(len(words), (length,), generator=torch.Generator().manual_seed(0))
        text = torch.tensor(words)[drawn]
    ids = text.flatten()[:length][None].to(device_of(base))
    check_ids(base, ids)
    return words[0], ids


def _farthest(config: Any, rotary: Sequence[declared.Rotary]) -> int:
    """Return the last position to look at: the longest that was declared, beyond it where the scaling depends on it."""
    most = getattr(config, "max_position_embeddings", None) or 0
    if any(each.scaling in ("dynamic", "longrope") for each in rotary):
        return 2 * max(most, *(each.trained for each in rotary))
    return most - 1 if rotary and most > 2 * SHORT else 0


def _compare(a: tuple[Audit, Reading], b: tuple[Audit, Reading]) -> AuditComparison:
    """Return where the positions of two models part."""
    one, two = a[1], b[1]
    shapes = [[(layer, call.logits.shape) for layer, call in zip(r.layers, r.calls, strict=True)] for r in (one, two)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"model and other must have the same layers and heads, got {len(shapes[0])} x {shapes[0][0][1][0]} and "
            f"{len(shapes[1])} x {shapes[1][0][1][0]}"
        )
    tables = [agreement.position_lookup(reading) for reading in (one, two)]
    same_input = (tables[0] is None) == (tables[1] is None)
    if tables[0] is not None and tables[1] is not None:
        rows = [each.table[each.rows].cpu() for each in tables if each is not None]
        same_input = rows[0].shape == rows[1].shape and torch.allclose(rows[0], rows[1], atol=1e-6)
    change = [
        float((x.weights.double() - y.weights.double().to(x.weights.device)).abs().sum(-1).mean() / 2)
        for x, y in zip(one.text, two.text, strict=True)
    ]
    return AuditComparison(
        audits=(a[0], b[0]),
        distance=tuple(_parting(x.logits, y.logits) for x, y in zip(one.calls, two.calls, strict=True)),
        change=tuple(change),
        layers=one.layers,
        input_differs=not same_input,
    )


def _parting(a: Tensor, b: Tensor) -> int | None:
    """Return the smallest distance at which logits of the same content differ, None if they do not."""
    relative = [each.double().cpu() - each.double().cpu().diagonal(dim1=1, dim2=2)[..., None] for each in (a, b)]
    masked = [each < -1e3 for each in relative]
    one, two = (each.masked_fill(hidden, 0) for each, hidden in zip(relative, masked, strict=True))
    off = ((one - two).abs() > 1e-3 * one.abs().max().clamp(min=1)) | (masked[0] != masked[1])
    position = torch.arange(a.shape[-1])
    distance = (position[:, None] - position).abs()
    return int(distance[off.any(0)].min()) if bool(off.any()) else None


def _joined(words: Iterable[str], nothing: str) -> str:
    return " + ".join(word for word in words if word) or nothing
