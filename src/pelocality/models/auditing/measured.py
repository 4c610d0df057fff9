"""What each attention layer of a running model does with positions, read from the calls that it makes.

The model runs unchanged but for one thing: every linear map of the tokens returns the same vector at each of them.
Queries and keys then differ between tokens by position alone, whatever the weights are and whatever the layers below
have done, and the long runs that a window of some thousand tokens needs cost no products.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from pelocality.encodings._rotary_angles import RotaryAngles
from pelocality.models._restore import changed, hooked
from pelocality.models._weights import embedding_weight
from pelocality.models.auditing.rotations import Rotation, rotation_of
from pelocality.models.families import Architecture, Window, attached_biases, family_named
from pelocality.models.layers import layer_numbers
from pelocality.models.observer import BATCHED, MASKED, MATMULS, Block, Observer, kernel_call, kernel_logits
from pelocality.models.sequence_model import SequenceModel

SHORT = 61  # positions that are compared one by one; a prime, so that hardly another axis has its size
PADDING = 5  # tokens of padding
BEHIND_PADDING = "behind padding on the left"
_IN_GENERATION = f"{BEHIND_PADDING}, in generation"
_LONGEST_TABLE = 8500  # the most rows of a table at the input that are read
_ROTARY = re.compile("rotary|rope", re.IGNORECASE)  # names of classes
_LOOKUPS = (nn.functional.embedding, torch.index_select, Tensor.index_select, Tensor.__getitem__)


class Reach(NamedTuple):
    """Which keys (n, n) the queries see, whether none lies after its query, the window, and whether padding is seen."""

    visible: Tensor
    causal: bool
    window: Window
    padding: bool


class Lookup(NamedTuple):
    """A table of which rows were read by position: the table (row, d), the rows (n,) or (n, n), and the block."""

    block: Block | None
    table: Tensor
    rows: Tensor


class Call(NamedTuple):
    """One attention, of the first ``SHORT`` positions.

    Attributes:
        block: The block in which it ran.
        query: (head, n, d_head) as they enter the product, or None where they were not seen.
        key: (head of keys, n, d_head), likewise.
        logits: (head, n, n) before the softmax, masked ones far below the others, in float64 on the CPU.
        weights: (head, n, n), likewise.
        reach: Which keys are visible, over the full length of the run.
        sinks: The weight of learned sinks (head, n), likewise, or None where rows sum to 1 over the sequence.
        owner: The module that computed it.
    """

    block: Block | None
    query: Tensor | None
    key: Tensor | None
    logits: Tensor
    weights: Tensor
    reach: Reach
    sinks: Tensor | None = None
    owner: nn.Module | None = None


class NoRowError(Exception):
    """A position for which a table has no row."""


class _LayersBeginError(Exception):
    """The first block is called."""


class Recorder(Observer):
    """Records the attentions and the lookups by position of one sequence of n tokens (batch of 1).

    Every softmax over the tokens counts as attention: with constant content the product with the values shows nothing.

    Args:
        tokens: The number of tokens, padding included.
        constant: Whether every linear map of the tokens returns the same vector at each of them.
        real: The tokens that are not padding.
        change: Called with each function of torch that runs, and its result. The model runs as it is, and stops before
            its first block.
    """

    def __init__(self, tokens: int, constant: bool = True, real: slice = slice(None), change: Any = None) -> None:
        super().__init__(lambda attention: None, tokens)
        self.tokens, self.constant, self.real, self.change = tokens, constant and change is None, real, change
        start, stop, _ = real.indices(tokens)
        self.part = slice(start, min(stop, start + SHORT))  # the tokens that are compared one by one
        self.input_states: Tensor | None = None  # the states (1, n, ...) before the first block
        self.output: Any = None  # the output (1, n, d) of a model that ran to its end
        self.calls: list[Call] = []
        self.lookups: list[Lookup] = []
        self._factors: tuple[Tensor, Tensor] | None = None
        self._maps = 0  # linear maps so far: the seed of the next vector
        self._reaches: dict[tuple[Tensor | None, bool], Reach] = {}  # layers share masks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if self.constant and func is nn.functional.scaled_dot_product_attention:
            call = kernel_call(args, kwargs)
            output = call["query"].new_zeros(*call["query"].shape[:-1], call["value"].shape[-1])
            self.see_kernel(call, output)
            return output
        if self.constant and (constant := self._constant_map(func, args, kwargs)) is not None:
            return constant
        if func in _LOOKUPS:
            self._see_lookup(func, [*args, *kwargs.values()])
        result = super().__torch_function__(func, types, args, kwargs)
        if self.change is not None:
            self.change(func, result)
        if func in BATCHED and result.ndim > 2 and result.shape[-2:] == (self.tokens, self.tokens):
            *_, first, second = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
            self._factors = (first, second.transpose(-1, -2))
        return result

    def _constant_map(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """Return one vector at every token in place of a linear map of the tokens; None for anything else."""
        if func is nn.functional.linear:
            states, size = args[0], (args[1] if len(args) > 1 else kwargs["weight"]).shape[0]
        elif func in (torch.addmm, Tensor.addmm):
            states, size = args[1], args[2].shape[-1]
        elif func in MATMULS and args[0].ndim == 3 and args[1].ndim == 2:
            states, size = args[0], args[1].shape[-1]
        else:
            return None
        if self.tokens not in states.shape[:-1] or size == self.tokens:
            return None
        self._maps += 1
        seeded = torch.Generator("cpu").manual_seed(self._maps)
        vector = torch.randn(size, generator=seeded, device="cpu")
        return vector.to(states.device, states.dtype).expand(*states.shape[:-1], size).clone()

    def mapped(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor | None:
        """Return one vector at every token in place of the output of a module that is a linear map."""
        replaced = self.constant and isinstance(output, Tensor)
        return self._constant_map(nn.functional.linear, (output, output.flatten(0, -2).mT), {}) if replaced else None

    def enter(self, block: Block, args: Any, kwargs: Any) -> None:
        """Note the block that begins to run, and the states before the first one."""
        super().enter(block, args, kwargs)
        for each in (*args, *kwargs.values()):
            if self.input_states is None and isinstance(each, Tensor) and each.is_floating_point() and each.ndim > 2:
                self.input_states = each
        if self.change is not None and self.input_states is not None:
            raise _LayersBeginError

    def see_kernel(self, call: dict[str, Any], output: Tensor) -> None:
        """Record a call of torch's kernel, with the logits that it does not hand out."""
        n, part, mask, causal = self.tokens, self.part, call.get("attn_mask"), bool(call.get("is_causal"))
        if call["query"].shape[-2] != n or call["key"].shape[-2] != n:
            return
        if (mask, causal) not in self._reaches:
            seen = torch.ones(n, n, dtype=torch.bool, device=call["query"].device) if mask is None else mask
            seen = seen if seen.dtype == torch.bool else seen > MASKED
            self._reaches[mask, causal] = self._reach(seen.tril() if causal else seen)
        query, key = (call[name][..., part, :] for name in ("query", "key"))
        corner = None if mask is None else mask.broadcast_to(*mask.shape[:-2], n, n)[..., part, part]
        logits = _flat(kernel_logits(call | {"query": query, "key": key, "attn_mask": corner}))
        weights, reach = logits.softmax(-1).cpu().double(), self._reaches[mask, causal]
        query, key, logits = _flat(query), _flat(key), logits.cpu().double()
        self.calls.append(Call(self.block, query, key, logits, weights, reach, owner=self._owner))

    def see_softmax(self, logits: Tensor, weights: Tensor, without_sum: bool = False) -> None:
        """Record an attention that is computed step by step."""
        n, part, factors, self._factors = self.tokens, self.part, self._factors, None
        if without_sum or weights.shape[-2] != n or (weights.shape[-1] > n and factors is None):  # with a learned sink
            return
        logits, weights = _flat(logits), _flat(weights)
        reach = self._reach(((logits > MASKED) | (weights > 0))[..., :n])
        query, key = (None, None) if factors is None else (_flat(each)[:, part] for each in factors)
        logits, weights = (each[:, part].cpu().double() for each in (logits, weights))
        sinks = weights[..., n:].sum(-1) if weights.shape[-1] > n else None
        self.calls.append(
            Call(self.block, query, key, logits[..., part], weights[..., part], reach, sinks, self._owner)
        )

    def _reach(self, visible: Tensor) -> Reach:
        """Return the reach of the tokens from visible keys (..., n, n); a window without a name is "irregular"."""
        every = _flat(visible.broadcast_to(*visible.shape[:-2], self.tokens, self.tokens)).any(0)
        visible, seen_by_tokens = every[self.real, self.real], every[self.real].any(0)
        seen_by_tokens[self.real] = False
        padding = bool(seen_by_tokens.any())
        n, distance = len(visible), distances(len(visible), visible.device)
        seen = distance[visible]
        behind, ahead = (int(seen.amax()), int(-seen.amin())) if len(seen) else (0, 0)
        causal = ahead <= 0 and n > 1
        if torch.equal(visible, (distance <= behind) & (distance >= -ahead)):
            limit = None if max(behind, ahead) == n - 1 else ("window", behind + 1 if causal else behind)
            return Reach(visible, causal, limit if causal or behind == ahead else "irregular", padding)
        chunk = max(int((~visible[:, 0]).int().argmax()), 1)  # the first query that does not see the first key
        number = torch.arange(n, device=visible.device) // chunk
        same = (number[:, None] == number) & ((distance >= 0) | (not causal))
        return Reach(visible, causal, ("chunks", chunk) if torch.equal(visible, same) else "irregular", padding)

    def _see_lookup(self, func: Any, named: list[Any]) -> None:
        """Record the rows of a table that were read, one for each token or for each pair of tokens."""
        rows, table = named[:2] if func is nn.functional.embedding else (named[-1], named[0])
        rows = rows[0] if isinstance(rows, tuple) else rows
        shape = {self.tokens: (self.tokens,), self.tokens**2: (self.tokens, self.tokens)}
        if not (isinstance(rows, Tensor) and rows.dtype in (torch.int32, torch.int64) and rows.numel() in shape):
            return
        if table.is_floating_point() and table.ndim == 2 and bool((rows != rows.flatten()[0]).any()):
            first = 0 if func is nn.functional.embedding else -len(table)
            if (missing := rows[(rows < first) | (rows >= len(table))]).numel():
                raise NoRowError(f"a table of {len(table)} rows has no row {int(missing[0])}")
            self.lookups.append(Lookup(self.block, table.detach(), rows.reshape(shape[rows.numel()])))


def _flat(states: Tensor) -> Tensor:
    """Return (n, d), (1, head, n, d) or (head, n, d) as (head, n, d)."""
    return states.reshape(-1, *states.shape[-2:])


def distances(n: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the distance i - j from each query back to each key: (n, n)."""
    position = torch.arange(n, device=device)
    return position[:, None] - position


@contextmanager
def unrotated(model: nn.Module) -> Iterator[None]:
    """Run a model with angles of 0 in a with-statement, as far as these are made by rotary modules."""
    rotary = [each for each in model.modules() if _ROTARY.search(type(each).__name__)]
    with ExitStack() as still, hooked(rotary, after=_without_angles, last=True):
        for each in attached_biases(model):
            if each.is_rotation:  # an attached rotation takes the place of what these modules return
                still.enter_context(changed(each, "encoding", each.encoding.scaled(0.0)))
        yield


def _without_angles(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Replace cosines and sines in the output of a module by 1 and 0."""
    if isinstance(output, Tensor) and output.is_complex():
        return torch.ones_like(output)
    pair = output if isinstance(output, tuple) and all(isinstance(each, Tensor) for each in output) else ()
    if len(pair) != 2 or pair[0].shape != pair[1].shape:
        return None
    cos, sin = pair
    squares = cos.float() ** 2 + sin.float() ** 2
    if not bool((squares - squares.mean()).abs().max() < 0.02 * squares.mean()):
        return None  # queries and keys come in such pairs too
    if not bool(cos[..., 0, :].any()):  # sines come first, and those of position 0 are 0
        return torch.zeros_like(cos), torch.ones_like(sin)
    return torch.ones_like(cos), torch.zeros_like(sin)


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
        queries: How its queries are rotated: a `Rotation`, None for not at all, "scaled" or "change" for another change
            by position, "unseen" where no product of queries and keys was found.
        keys: Likewise.
        far: How its queries are rotated at positions far apart; None where the model takes none.
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
    every = range(config.num_hidden_layers)
    in_sections = any(family.declared_axes(family.declared_rotation(config, layer)) is not None for layer in every)
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
    near = far = torch.arange(min(length, SHORT), device="cpu")[None]
    distant: list[Tensor | None] = [None] * len(constant.calls)
    if farthest and model.reads("position_ids"):
        n, farthest = near.shape[1], min(farthest, (model.longest or sys.maxsize) - 1)
        far = near + ((farthest - n + 1) * (near / (n - 1)) ** 3).long()
        few = {"input_ids": ids[:, :n], "attention_mask": torch.ones_like(ids[:, :n])}
        far = torch.cat([far, farthest - far, far // 2]) if in_sections else far  # of time, height and width
        few["position_ids"] = (far[:, None] if in_sections else far).to(ids.device)
        distant = [call.query for call in _run(model, few).calls]
    layers = []
    for place, (call, other, query) in enumerate(zip(constant.calls, still, distant, strict=True)):
        block = numbers[place] if call.block is None or several else call.block[1]
        rotation = family.declared_rotation(config, block)
        axes, hints = family.declared_axes(rotation), [rotation.dims] if isinstance(rotation, RotaryAngles) else []
        layer = Layer(
            number=numbers[place],
            rotation=rotation,
            window=family.declared_window(config, block),
            constant=call,
            text=on_text[place] if place < len(on_text) else call,
            masked={name: calls[place] for name, calls in with_mask.items() if place < len(calls)},
            queries=rotation_of(call.query, other.query, near, length, hints),
            keys=rotation_of(call.key, other.key, near, length, hints),
            far=rotation_of(query, None, far if axes is None else far[axes], farthest + 1, hints),
        )
        layers.append(layer)
    causal = family.declared_causal(config, model.module)
    return Reading(model, config, family, causal, generates, layers, others, constant, table, at_input, lost, runs)


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
    maps = [each for each in model.module.modules() if hasattr(each, "out_features") and type(each) is not nn.Linear]
    with suppress(_LayersBeginError), recorder.observing(model.module), hooked(maps, after=recorder.mapped):
        if not generating:
            recorder.output = model.run(inputs)[0]
        else:
            plain = GenerationConfig()  # type: ignore[no-untyped-call]
            with changed(head, "generation_config", plain):  # the user's configuration may ask for beams
                head.generate(**inputs, max_new_tokens=1)
    return recorder
