"""What each attention layer of a model does with positions, read from runs of constant content."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from pelocality.encodings._rotary_angles import RotaryAngles
from pelocality.models._restore import changed
from pelocality.models._weights import embedding_weight
from pelocality.models.families import Architecture, Window, family_named
from pelocality.models.layers import layer_numbers
from pelocality.models.recorder import SHORT, Call, Lookup, NoRowError, Recorder, unrotated
from pelocality.models.rotations import Rotation, closest_rotation, places_apart, text_at
from pelocality.models.sequence_model import SequenceModel

PADDING = 5  # tokens of padding
BEHIND_PADDING = "behind padding on the left"
_IN_GENERATION = f"{BEHIND_PADDING}, in generation"
_LONGEST_TABLE = 8500  # the most rows of a table at the input that are read


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer with attention.

    Attributes:
        number: Its number in the model, counted from 0.
        rotation: How its queries and keys are declared to be rotated.
        window: The window that is declared.
        constant: Its attention with constant content.
        text: Its attention with the model's own content.
        masked: Its attention with constant content and a mask, by the padding in it.
        queries: How its queries are rotated: a `Rotation`, None for not at all, "scaled", or "change" and a reason, for
            another change by position, "unseen" where no product of queries and keys was found.
        keys: Likewise.
        far: How both are rotated at positions far apart, on each axis alone; None where the model takes none.
    """

    number: int
    rotation: RotaryAngles | str | None
    window: Window
    constant: Call
    text: Call
    masked: dict[str, Call]
    queries: Rotation | str | None
    keys: Rotation | str | None
    far: Rotation | str | None


@dataclass(frozen=True, eq=False)
class Reading:
    """What was measured of a running model.

    Attributes:
        model: The model.
        config: The configuration of the text model.
        family: What is known of its family.
        causal: Whether queries are declared to see no later key, None where it is not known.
        generates: Whether it continues the texts that it reads.
        layers: Its layers with attention.
        others: What its layers without attention are, by number.
        constant: The run with constant content.
        table: The table at the input and its rows, over all positions that the model has; None without one.
        at_input: The run up to the first block, over the same positions.
        lost: The positions that have other states before the first block if the vector of each is taken from the word.
        runs: The same run with an attention mask, by the padding in it; in the place of a run that failed its error.
    """

    model: SequenceModel
    config: Any
    family: Architecture
    causal: bool | None
    generates: bool
    layers: list[Layer]
    others: dict[int, str]
    constant: Recorder
    table: Lookup | None
    at_input: Recorder
    lost: list[int]
    runs: dict[str, Recorder | Exception]

    @property
    def moved_rows(self) -> dict[str, tuple[int, int]]:
        """The row of the table that the first token reads, by the runs with a mask where it differs from the other."""
        moved: dict[str, tuple[int, int]] = {}
        for name, run in self.runs.items():
            if self.table is not None and isinstance(run, Recorder):
                table, plain = self.table.table.data_ptr(), int(self.table.rows[0])
                rows = (int(each.rows[run.part.start]) for each in run.lookups if each.table.data_ptr() == table)
                if (row := next(rows, plain)) != plain:
                    moved[name] = row, plain
        return moved


def read(model: SequenceModel, word: int, text: Tensor, length: int, farthest: int) -> Reading:
    """Run a model for what its layers do with positions.

    Args:
        model: The model, whose head says how positions are counted in generation.
        word: The id of the token to repeat.
        text: (1, n) token ids, at most ``SHORT``.
        length: The number of positions of the run with constant content.
        farthest: The last position of the run with positions far apart; 0 for no such run.
    """
    config: Any = model.config.get_text_config()
    family = family_named(config.model_type)
    widths = {embedding_weight(model.module).shape[1], config.hidden_size}
    # An encoder-decoder model reads with its encoder, which continues no text.
    generates = bool(model.with_head.can_generate()) and not model.with_head.config.is_encoder_decoder
    ids = torch.full((1, length), word, device=text.device)
    on_text = _run(model, {"input_ids": text}, constant=False).calls
    constant = _run(model, {"input_ids": ids})
    with unrotated(model.module):
        still = _run(model, {"input_ids": ids}).calls
    numbers, _, others = layer_numbers(model.config, [call.block for call in constant.calls])
    several = len({call.block[0] for call in constant.calls if call.block is not None}) > 1  # lists of blocks
    has_table = _table_at_input(constant.lookups, widths) is not None
    runs = _masked_runs(model, ids, generates and has_table)
    most = max(length, min(model.longest or 0, _LONGEST_TABLE)) if has_table else length
    inputs = {"input_ids": torch.full((1, most), word, device=ids.device)}
    try:
        at_input = _run(model, inputs, change=lambda *call: None)
    except NoRowError as error:
        runs |= {f"at {most} positions": error} if family.table is not None else {}
        inputs, at_input = {"input_ids": ids}, constant
    table = _table_at_input(at_input.lookups, widths)
    lost = [] if table is None else _lost_positions(model, family, inputs, table)
    with_mask = {name: run.calls for name, run in runs.items() if isinstance(run, Recorder) and name != _IN_GENERATION}
    near = torch.arange(min(length, SHORT), device="cpu")[:, None]
    far, distant = near, list[Tensor | None]([None] * len(constant.calls))
    if farthest and model.reads("position_ids"):
        far = places_apart(model, farthest + 1)
        distant = [call.states for call in _run(model, text_at(model, far)[0], most=len(far)).calls]
    layers, tolerance = [], max(1e-3, 4 * torch.finfo(model.dtype).eps)
    for place, (call, other, states) in enumerate(zip(constant.calls, still, distant, strict=True)):
        block = numbers[place] if call.block is None or several else call.block[1]
        rotation = family.declared_rotation(config, block)
        dims = rotation.dims if isinstance(rotation, RotaryAngles) else 0
        layer = Layer(
            number=numbers[place],
            rotation=rotation,
            window=family.declared_window(config, block),
            constant=call,
            text=on_text[place] if place < len(on_text) else call,
            masked={name: calls[place] for name, calls in with_mask.items() if place < len(calls)},
            queries=_rotation(call.query, other.query, near, dims, tolerance),
            keys=_rotation(call.key, other.key, near, dims, tolerance),
            far=_rotation(states, None, far, dims, tolerance),
        )
        layers.append(layer)
    causal = family.declared_causal(config, model.module)
    return Reading(model, config, family, causal, generates, layers, others, constant, table, at_input, lost, runs)


def _rotation(states: Tensor | None, still: Any, places: Tensor, dims: int, tolerance: float) -> Rotation | str | None:
    """Return how queries or keys are rotated at places, or the other change by position, as of `Layer.queries`."""
    if states is None or not bool(states.any()):  # some states of untrained models are zero, such as ZAYA's keys
        return "unseen"
    try:
        rotation = closest_rotation(states, places, still, dims, tolerance)
    except ValueError as error:
        return f"change: {error}"
    before = states[:, :1] if still is None or torch.equal(states, still) else still
    change = bool((states - before).abs().max() > 1e-5 * before.abs().max())
    return "scaled" if rotation is None and change else rotation


def _lost_positions(model: SequenceModel, family: Architecture, inputs: dict[str, Any], table: Lookup) -> list[int]:
    """Return the positions whose vector is not what the model adds: taken from the word there, it leaves another."""
    rows, maps = table.table[table.rows], (nn.functional.embedding, nn.functional.linear)[family.maps_words :]
    word, words = rows.abs().amax(0), list[Tensor]()
    word[::2].neg_()
    taken = rows / family.word_factor(model.config.get_text_config(), len(word))

    def change(func: Any, result: Any) -> None:
        if func in maps and result.shape[-2:] == rows.shape and not (words or torch.equal(result.squeeze(0), rows)):
            words.append(result.copy_(word - taken))

    run = _run(model, inputs, change=change)
    # Blocks whose method is called directly, such as SqueezeBERT's, are not seen to begin.
    states = (run.output if run.input_states is None else run.input_states)[0].flatten(1)
    allowed = max(1e-3, 16 * torch.finfo(states.dtype).eps) * states.abs().max()
    off = (states - states.median(0).values).abs().amax(1) > allowed
    # An adapter (LoRA) adds to the vectors what it looks up by the same rows in a table of another width.
    adapted = any(each.table.shape != table.table.shape and torch.equal(each.rows, table.rows) for each in run.lookups)
    return off.nonzero().flatten().tolist() if words and not adapted else []


def _table_at_input(lookups: list[Lookup], widths: set[int]) -> Lookup | None:
    """Return the table outside the blocks of which tokens read rows by position, of one of these widths, or None."""
    # Tables of angles are as wide as a head.
    added = [each for each in lookups if each.block is None and each.rows.ndim == 1 and each.table.shape[1] in widths]
    every = (each for each in added if bool((each.rows.diff() != 0).all()))
    return next(every, added[0] if added else None)


def _masked_runs(model: SequenceModel, ids: Tensor, in_generation: bool) -> dict[str, Recorder | Exception]:
    """Return the runs of tokens (1, n) with an attention mask, which tokenizers pass, by the padding in it."""
    if not model.reads("attention_mask"):
        return {}
    left = ids[:, :SHORT], slice(PADDING, None)
    with_padding = {
        "with an attention mask": (ids[:, :SHORT], slice(None)),
        "before padding on the right": (ids, slice(0, -PADDING)),
        BEHIND_PADDING: left,
        **({_IN_GENERATION: left} if in_generation else {}),
    }
    padding = model.padding if 0 <= (model.padding or 0) < model.vocabulary else None
    runs: dict[str, Recorder | Exception] = {}
    for name, (tokens, real) in with_padding.items():
        mask = torch.zeros_like(tokens)
        mask[:, real] = 1
        inputs = {"input_ids": tokens.masked_fill(mask == 0, padding or 0), "attention_mask": mask}
        try:
            runs[name] = _run(model, inputs, generating=name == _IN_GENERATION, real=real)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            runs[name] = error
    return runs


def _run(model: SequenceModel, inputs: dict[str, Any], *, generating: bool = False, **options: Any) -> Recorder:
    """Run a model, recorded with the options of `Recorder`."""
    recorder, head = Recorder(inputs["input_ids"].shape[1], **options), model.with_head
    with recorder.observing(model.module):
        if not generating:
            recorder.output = model.run(inputs)[0]
        else:
            plain = GenerationConfig()  # type: ignore[no-untyped-call]
            with changed(head, "generation_config", plain):  # the user's configuration may ask for beams
                head.generate(**inputs, max_new_tokens=1)
    return recorder
