"""Which positions a model really runs, layer by layer: declared by its configuration against measured."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pelocality._distributed import refuse_sharded
from pelocality.encodings._rotary_angles import RotaryAngles
from pelocality.models._inference import inference
from pelocality.models.auditing.checks import CHECKS, Row, first_difference, rows_with_a_mask, table, window_words
from pelocality.models.auditing.measured import BEHIND_PADDING, PADDING, Layer, Reading, read
from pelocality.models.auditing.result import Audit, AuditComparison, LayerAudit
from pelocality.models.families import UNDECLARED, family_named
from pelocality.models.inputs.tokens import token_batch
from pelocality.models.inputs.words import drawn_words
from pelocality.models.recorder import SHORT, Lookup, NoRowError
from pelocality.models.rotations import Rotation
from pelocality.models.sequence_model import SequenceModel
from pelocality.models.token_proof import cautions_of, prove_tokens

_LONGEST = {"sdpa": 8500, "eager": 1200}  # positions of the run for windows: eager holds a matrix for every head
_WORDS = 64  # other tokens in the run with the model's own content


def audit(
    model: nn.Module | SequenceModel, other: nn.Module | SequenceModel | None = None, *, input_ids: Any = None
) -> Audit | AuditComparison:
    r"""Return which positions a model really runs: declared by its configuration against measured, one row per layer.

    A model whose RoPE scaling was dropped, or whose window is off by one, runs without an error. The declared side
    comes from ``model.config`` by the published formulas (RoPE, its linear, dynamic, YaRN, Llama 3 and LongRoPE
    scalings, ALiBi, T5's buckets), not from transformers' functions. The measured side is read from the running model:

    - the model runs with the same vector at every token in place of each linear map, so that queries and keys differ
      by position alone. Their angles $\theta_{ik}$ at position $i$ in plane $k$ give base, scaling, attention factor
      and share of dimensions; a second run has positions as far apart as the configuration allows, on each axis alone
      where tokens have time, height and width, for the sections of M-RoPE and their layout;
    - slopes and buckets are read from the logits, windows and causality from the keys that are masked, rows of tables
      from the lookups, also behind padding on the left;
    - the vectors of a table must reach the first layer: taken from the words before they are added, they must leave the
      same word at every position;
    - each layer runs also with a mask, with and without padding, and must do the same as without one and hide padding;
    - sinks are read from a run of the model as it is.

    Weights are not changed, and mode and hooks are restored. The model's own attention implementation runs where that
    is "sdpa" or "eager", otherwise "eager". It takes about as long as one pass over 61 tokens, and more for a window of
    some thousand tokens.

    Args:
        model: A transformers model, or a wrapper around one. Of an encoder-decoder model the encoder is audited; pass
            ``model.get_decoder()`` for the other half. A model that can generate is also asked how it counts positions
            behind padding on the left.
        other: A second model with the same layers and heads, for a comparison.
        input_ids: Token ids (n,) or (1, n) on which sinks and changes of attention are measured, at most 61 are read;
            by default random ones.

    Returns:
        An `Audit`, whose ``mismatches`` are empty if all that is declared was measured. Where blocks run several times
        it has a row for each time, counted as they run, and compares it to what is declared of the block. With a second
        model, an `AuditComparison`.

    Raises:
        TypeError: Something that is not a transformers model, or ids that are not integers.
        ValueError: A model without softmax attention or of fewer than 7 positions, or two models that differ in
            layers, heads or, below 61, positions.

    Examples:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> tiny = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        >>> model = LlamaModel(LlamaConfig(**tiny, vocab_size=99, rope_parameters={"rope_theta": 5e5}))
        >>> result = audit(model)
        >>> result.layers[0].positions, result.mismatches
        (('rotary, base 500000', 'rotary, base 500000'), ())
        >>> fallen_back = LlamaModel(LlamaConfig(**tiny, vocab_size=99, rope_parameters={"rope_theta": 1e4}))
        >>> model.rotary_emb = fallen_back.rotary_emb
        >>> audit(model).mismatches[0]  # doctest: +ELLIPSIS
        'layers 0-1: declared rotary, base 500000, measured rotary, base 10000: angles differ from position 1 on...'
    """
    models = [SequenceModel.of(each) for each in (model, other) if each is not None]
    for each in models:
        refuse_sharded(each.module)
    length, farthest = map(max, zip(*map(_declared_sizes, models), strict=True))
    readings = [_read(each, input_ids, length, farthest) for each in models]
    audits = list(map(_audit, readings))
    return audits[0] if other is None else _differences(audits, readings)


def _declared_sizes(model: SequenceModel) -> tuple[int, int]:
    """Return the number of positions that show the windows of a model, and the last one for its angles."""
    config: Any = model.config.get_text_config() if model.config is not None else None
    if not hasattr(config, "num_hidden_layers"):
        raise ValueError(f"{model} cannot be audited: its configuration has no num_hidden_layers")
    family, layers = family_named(config.model_type), range(config.num_hidden_layers)
    windows = [family.declared_window(config, layer) for layer in layers]
    rotary = [each for each in (family.declared_rotation(config, i) for i in layers) if isinstance(each, RotaryAngles)]
    sizes = [each[1] + 8 for each in windows if isinstance(each, tuple)]
    most = _LONGEST["sdpa" if config._attn_implementation == "sdpa" else "eager"]
    longest = getattr(config, "max_position_embeddings", None) or 0
    farthest = longest - 1 if rotary and longest > 2 * SHORT else 0
    if any(each.scaling in ("dynamic", "longrope") for each in rotary):  # depends on the length of the text
        farthest = 2 * max(longest, SHORT, *(each.trained for each in rotary))
    if any(family.declared_axes(each) is not None for each in rotary):  # far enough to tell the axes of slow pairs
        farthest = max(farthest, 2**15)
    return max([SHORT, *(size for size in sizes if size <= most)]), farthest


def _read(model: SequenceModel, input_ids: Any, length: int, farthest: int) -> Reading:
    """Run a model for an audit, on at most so many positions."""
    length = min(length, model.longest or length)
    length -= 1 - length % 2  # so that hardly another axis has its size
    if length <= PADDING:
        raise ValueError(f"{model} cannot be audited: an audit needs at least {PADDING + 2} positions")
    word, ids = _tokens(model, input_ids, min(length, SHORT))
    with inference(model.module), model.observable():
        reading = read(model, word, ids, length, farthest)
    if not reading.layers:
        raise ValueError(f"{model} cannot be audited: it computed no softmax over its tokens")
    return reading


def _tokens(model: SequenceModel, input_ids: Any, length: int) -> tuple[int, Tensor]:
    """Return the token to repeat, and (1, n) tokens for the run with the model's own content."""
    words = drawn_words(model, None, min(_WORDS, max(model.vocabulary // 2, 1)), 0)
    if input_ids is None:
        seeded = torch.Generator("cpu").manual_seed(0)
        drawn = torch.randint(len(words), (length,), generator=seeded, device="cpu")
        return words[0], torch.tensor(words, device="cpu")[drawn][None].to(model.device)
    ids = token_batch(model, input_ids)[0]["input_ids"]
    if len(ids) != 1 or ids.shape[1] < 2:
        raise ValueError(f"input_ids must be one sequence of at least 2 tokens, got shape {tuple(ids.shape)}")
    return words[0], ids[:, :length]


def _audit(reading: Reading) -> Audit:
    """Return the audit of one model."""
    model, family, length, cautions = reading.model, reading.family, reading.constant.tokens, []
    at_input = table(reading), rows_with_a_mask(reading)
    layers = [_layer_audit(reading, layer, *at_input) for layer in reading.layers]
    layers += [LayerAudit(number, (name, name)) for number, name in reading.others.items()]
    if BEHIND_PADDING in reading.moved_rows and reading.causal and not (family.counts_tokens or reading.generates):
        cautions.append("behind padding on the left, positions are right only if position_ids are passed")
    for name, run in reading.runs.items():
        if isinstance(run, Exception) and not isinstance(run, NoRowError):
            cautions.append(f"{name} nothing was measured: the model raises {type(run).__name__}: {run}")
    try:
        cautions += cautions_of(prove_tokens(model))
    except ValueError as error:
        cautions.append(str(error))
    windows = [layer.window for layer in reading.layers if isinstance(layer.window, tuple)]
    if beyond := sorted({size for _, size in windows if size >= length}):
        cautions.append(f"windows of {', '.join(map(str, beyond))} were not reached with {length} positions")
    rows = tuple(sorted(layers, key=lambda row: row.layer))
    return Audit(rows, model.name, length, model.encoding, tuple(cautions))


def _layer_audit(reading: Reading, layer: Layer, *at_input: Row) -> LayerAudit:
    """Return what is declared and measured of one layer, that at the input first."""
    reach, text = layer.constant.reach, layer.text
    rows = [*at_input, *(check(reading, layer) for check in CHECKS)]
    return LayerAudit(
        layer=layer.number,
        positions=(_joined(row.declared for row in rows), _joined(row.measured for row in rows)),
        window=(window_words(layer.window, reading.causal), window_words(reach.window, reach.causal)),
        causal=(reading.causal, reach.causal),
        first_key=float(text.weights[:, 1:, 0].mean()),
        sinks=None if text.sinks is None else float(text.sinks.mean()),
        mismatches=tuple(row.mismatch for row in rows if row.mismatch),
    )


def _joined(words: Iterable[str]) -> str:
    """Return the words of all positions that a layer has, such as "learned from row 2 + 32 buckets"."""
    words = [each for each in words if each]
    return " + ".join(each for each in words if each != UNDECLARED) or next(iter(words), "none")


def _differences(audits: list[Audit], readings: list[Reading]) -> AuditComparison:
    """Return where the positions of two models differ."""
    shapes = [[(layer.number, layer.constant.logits.shape) for layer in reading.layers] for reading in readings]
    if shapes[0] != shapes[1]:
        one, two = (" x ".join(map(str, [len(each), *each[0][1][:2]])) for each in shapes)
        raise ValueError(f"model and other must have the same layers, heads and positions, got {one} and {two}")
    pairs = list(zip(*(reading.layers for reading in readings), strict=True))
    distance, length = zip(*(_difference(*pair) for pair in pairs), strict=True)
    return AuditComparison(
        audits=(audits[0], audits[1]),
        distance=distance,
        length=length,
        # This is the total variation, the mean over heads and queries.
        change=tuple(float((a.text.weights - b.text.weights).abs().sum(-1).mean() / 2) for a, b in pairs),
        layers=tuple(layer.number for layer in readings[0].layers),
        input_position=_first_other_row(*(reading.table for reading in readings)),
    )


def _first_other_row(one: Lookup | None, two: Lookup | None) -> int | None:
    """Return the first position at which two tables have other vectors, or only one has any; None if they are equal."""
    if one is None or two is None:
        return None if one is two else 0
    a, b = (each.table[each.rows].cpu().double() for each in (one, two))
    equal = [len(x) == len(y) and torch.allclose(x, y, atol=1e-6) for x, y in zip(a, b, strict=False)]
    return None if all(equal) and len(a) == len(b) else [*equal, False].index(False)


def _difference(one: Layer, two: Layer) -> tuple[int | None, int | None]:
    """Return the smallest distance at which two layers' positions differ, and the number of positions of that run."""
    if (near := first_difference(one.constant, two.constant)) is not None:
        return near
    a, b = one.far, two.far
    if not (isinstance(a, Rotation) and isinstance(b, Rotation)) or len(a.pairs) != len(b.pairs):
        return None, None
    off = a.off_from(b.angles) if torch.equal(a.places, b.places) else None
    return (off[0], int(a.places.max()) + 1) if off else (None, None)
