"""Which positions a model really runs, layer by layer: declared by its configuration against measured."""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pelocality.models._inference import inference
from pelocality.models.auditing import comparison, declared
from pelocality.models.auditing.families import declarations
from pelocality.models.auditing.measured import PADDING, SHORT, Layer, Lookup, NoRowError, Reading, generates, read
from pelocality.models.auditing.result import Audit, AuditComparison, LayerAudit
from pelocality.models.auditing.rotations import Rotation
from pelocality.models.inputs.tokens import token_batch
from pelocality.models.inputs.words import drawn_words
from pelocality.models.sequence_model import SequenceModel

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
      and share of dimensions; a second run has positions as far apart as the configuration allows;
    - slopes and buckets are read from the logits, windows and causality from the keys that are masked, rows of tables
      from the lookups, also behind padding on the left;
    - each layer runs also with a mask, with and without padding, and must do the same as without one;
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
        >>> audit(model).mismatches
        ('layers 0-1: declared rotary base 500000, measured 10000',)
    """
    models = [SequenceModel.of(each) for each in (model, other) if each is not None]
    plans = [_plan(each) for each in models]
    length = max(plan.length for plan in plans)
    farthest = min(max(plan.farthest for plan in plans), *(plan.limit for plan in plans), sys.maxsize)
    found = [
        _audit(each, plan, input_ids, length, max(farthest, plan.farthest) if plan.rotary else 0)
        for each, plan in zip(models, plans, strict=True)
    ]
    return found[0][0] if other is None else _compare(*found)


@dataclass(frozen=True)
class _Plan:
    """What one audit runs: its model's text configuration, declared rotations and windows, and the positions to reach.

    Attributes:
        length: The number of positions of the run with constant content.
        farthest: The last position of the run with positions far apart, 0 for no such run.
        limit: The last position for which the model can have angles.
    """

    config: Any
    rotary: list[declared.Rotary]
    windows: set[int]
    length: int
    farthest: int
    limit: int


def _plan(model: SequenceModel) -> _Plan:
    """Return what an audit of a model runs."""
    config: Any = model.config.get_text_config() if model.config is not None else None
    if not hasattr(config, "num_hidden_layers"):
        raise ValueError(f"{model} cannot be audited: its configuration has no num_hidden_layers")
    wanted = [declared.rotary(config, layer) for layer in range(config.num_hidden_layers)]
    rotary = [each for each in wanted if isinstance(each, declared.Rotary)]
    windows = [declared.window(config, layer) for layer in range(config.num_hidden_layers)]
    sizes = {window[1] for window in windows if isinstance(window, tuple)}
    most = _LONGEST["sdpa" if config._attn_implementation == "sdpa" else "eager"]
    length = _runnable(model, max([SHORT, *(size + 8 for size in sizes if size + 8 <= most)]))
    if length <= PADDING:
        raise ValueError(f"{model} cannot be audited: an audit needs at least {PADDING + 2} positions")
    farthest = _farthest(config, rotary)
    computed = all(each.options for each in rotary)  # GPT-J has no options, and reads its angles from a table
    return _Plan(config, rotary, sizes, length, farthest, sys.maxsize if computed else farthest)


def _audit(model: SequenceModel, plan: _Plan, input_ids: Any, length: int, farthest: int) -> tuple[Audit, Reading]:
    """Return the audit of one model, and what was read from it."""
    base, config = model.module, plan.config
    length = _runnable(model, length)
    word, ids = _tokens(model, input_ids, min(length, SHORT))
    dims = sorted({each.dims for each in plan.rotary})
    with inference(base), model.observable():
        reading = read(model, word, ids, length=length, farthest=farthest, dims=dims)
    if not reading.layers:
        raise ValueError(f"{model} cannot be audited: it computed no softmax over its tokens")
    counts_tokens = declarations(config).counts_tokens or generates(model)
    causal = declared.causal(base, config)
    through_padding = comparison.counted_through_padding(reading)
    at_input = comparison.compare_inputs(config, reading)
    at_input[2].extend(comparison.compare_padding(reading, counts_tokens and through_padding))
    rows = [_row(config, layer, reading, place, causal, at_input) for place, layer in enumerate(reading.layers)]
    rows += [LayerAudit(number, (name, name)) for number, name in reading.others.items()]
    cautions = []
    if through_padding and not counts_tokens and causal:
        cautions.append("behind padding on the left, positions are right only if position_ids are passed")
    for name, error in reading.failed.items():
        if not isinstance(error, NoRowError):
            cautions.append(f"{name} nothing was measured: the model raises {type(error).__name__}: {error}")
    if beyond := sorted(size for size in plan.windows if size >= length):
        cautions.append(f"windows of {', '.join(map(str, beyond))} were not reached with {length} positions")
    result = Audit(
        layers=tuple(sorted(rows, key=lambda row: row.layer)),
        model=model.name,
        length=length,
        encoding=model.encoding,
        cautions=tuple(cautions),
    )
    return result, reading


def _row(
    config: Any, layer: Layer, reading: Reading, place: int, causal: bool | None, at_input: comparison.Finding
) -> LayerAudit:
    """Return what is declared and measured of one layer, the attention that was computed at this place."""
    rotary, window = declared.rotary(config, layer.block), declared.window(config, layer.block)
    reach, text = layer.constant.reach, layer.text
    found = [at_input, comparison.compare_rotations(rotary, layer)]
    if layer.queries != "change" and not isinstance(layer.queries, Rotation):
        found.append(comparison.compare_biases(config, layer.constant, reading.constant.lookups))
    words, measured, differences = zip(*found, strict=True)
    nothing = comparison.UNDECLARED if rotary == comparison.UNDECLARED else "none"
    mismatches = [*itertools.chain(*differences[1:]), *comparison.compare_reach(window, causal, reach)]
    if not mismatches:
        mismatches = comparison.compare_masked(layer.constant, reading.masked, place)
    return LayerAudit(
        layer=layer.number,
        positions=(" + ".join(filter(None, words)) or nothing, " + ".join(filter(None, measured)) or "none"),
        window=(comparison.window_text(window, causal), comparison.window_text(reach.window, reach.causal)),
        causal=(causal, reach.causal),
        first_key=float(text.weights[:, 1:, 0].cpu().double().mean()),
        sinks=None if text.sinks is None else float(text.sinks.cpu().double().mean()),
        mismatches=(*at_input[2], *mismatches),
    )


def _runnable(model: SequenceModel, length: int) -> int:
    """Return the number of positions to run, at most so many; it is odd, so that hardly another axis has its size."""
    most = min(length, model.longest or length)
    return most - 1 + most % 2


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


def _farthest(config: Any, rotary: Sequence[declared.Rotary]) -> int:
    """Return the last position to look at: the longest that was declared, beyond it where the scaling depends on it."""
    most = getattr(config, "max_position_embeddings", None) or 0
    if any(each.scaling in ("dynamic", "longrope") for each in rotary):
        return 2 * max(most, SHORT, *(each.trained for each in rotary))
    return most - 1 if rotary and most > 2 * SHORT else 0


def _compare(a: tuple[Audit, Reading], b: tuple[Audit, Reading]) -> AuditComparison:
    """Return where the positions of two models differ."""
    shapes = [[(layer.number, layer.constant.logits.shape) for layer in each[1].layers] for each in (a, b)]
    if shapes[0] != shapes[1]:
        one, two = (" x ".join(map(str, [len(each), *each[0][1][:2]])) for each in shapes)
        raise ValueError(f"model and other must have the same layers, heads and positions, got {one} and {two}")
    pairs = list(zip(a[1].layers, b[1].layers, strict=True))
    found = [_difference(one, two) for one, two in pairs]
    return AuditComparison(
        audits=(a[0], b[0]),
        distance=tuple(distance for distance, _ in found),
        length=tuple(length for _, length in found),
        change=tuple(_change(one.text.weights, two.text.weights) for one, two in pairs),
        layers=tuple(layer.number for layer in a[1].layers),
        input_position=_first_other_row(a[1].table, b[1].table),
    )


def _first_other_row(one: Lookup | None, two: Lookup | None) -> int | None:
    """Return the first position at which two tables have other vectors, or only one has any; None if they are equal."""
    if one is None or two is None:
        return None if one is two else 0
    a, b = (each.table[each.rows].cpu().double() for each in (one, two))
    if a.shape[1] != b.shape[1]:
        return 0
    n = min(len(a), len(b))
    other = ~torch.isclose(a[:n], b[:n], atol=1e-6).all(1)
    return int(other.nonzero()[0]) if bool(other.any()) else None if len(a) == len(b) else n


def _change(a: Tensor, b: Tensor) -> float:
    """Return the total variation between two attentions (head, n, n), mean over heads and queries."""
    return float((a.cpu().double() - b.cpu().double()).abs().sum(-1).mean() / 2)


def _difference(one: Layer, two: Layer) -> tuple[int | None, int | None]:
    """Return the smallest distance at which two layers' positions differ, and the number of positions of that run."""
    n = len(one.constant.logits[0])
    if (near := comparison.first_difference(one.constant, two.constant)) is not None:
        return near, n
    if (hidden := comparison.first_hidden(one.constant.reach, two.constant.reach)) is not None:
        return hidden, one.constant.reach.length
    if isinstance(one.far, Rotation) and isinstance(two.far, Rotation) and one.far.length == two.far.length:
        far = one.far.first_difference(two.far)
        return far, None if far is None else one.far.length
    return None, None
