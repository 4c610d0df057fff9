"""What each attention layer of a running model does with positions, read from the calls that it makes.

The model runs unchanged but for one thing: every linear map of the tokens returns the same vector at each of them.
Queries and keys then differ between tokens by position alone, whatever the weights are and whatever the layers below
have done, and the long runs that a window of some thousand tokens needs cost no products.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from pelocality.models._restore import changed, hooked
from pelocality.models._weights import embedding_weight
from pelocality.models.auditing.rotations import Rotation, rotation_of
from pelocality.models.families import attached_biases
from pelocality.models.layers import layer_numbers
from pelocality.models.observer import BATCHED, MASKED, MATMULS, Block, Observer, kernel_call, kernel_logits
from pelocality.models.sequence_model import SequenceModel

SHORT = 61  # positions that are compared one by one; a prime, so that hardly another axis has its size
PADDING = 5  # tokens of padding
WITH_MASK, BEHIND_PADDING = "with an attention mask", "behind padding on the left"
_LONGEST_TABLE = 8500  # the most rows of a table at the input that are read
_LOOKUPS = (nn.functional.embedding, torch.index_select, Tensor.index_select, Tensor.__getitem__)

Window = tuple[str, int] | str | None
"""("window", keys up to the query, or the distance to either side), ("chunks", size), None for all keys, or a word."""


@dataclass(frozen=True)
class Reach:
    """Which keys the queries of a layer see: whether none lies after its query, the window, and of how many keys."""

    causal: bool
    window: Window
    length: int


@dataclass(frozen=True)
class Lookup:
    """A table of which rows were read by position: the table (row, d), the rows (n,) or (n, n), and the block."""

    block: Block | None
    table: Tensor
    rows: Tensor


@dataclass(frozen=True, eq=False)
class Call:
    """One attention, of the first ``SHORT`` positions.

    Attributes:
        block: The block in which it ran.
        query: (head, n, d_head) as they enter the product, or None where they were not seen.
        key: (head of keys, n, d_head), likewise.
        logits: (head, n, n) before the softmax, masked ones far below the others.
        reach: Which keys are visible, over the full length of the run.
        weights: (head, n, n).
        sinks: The weight of learned sinks (head, n), or None where rows sum to 1 over the sequence.
    """

    block: Block | None
    query: Tensor | None
    key: Tensor | None
    logits: Tensor
    reach: Reach
    weights: Tensor
    sinks: Tensor | None = None


class NoRowError(Exception):
    """A position for which a table has no row."""


class Recorder(Observer):
    """Records the attentions and the lookups by position of one sequence of n tokens (batch of 1).

    Every softmax over the tokens counts as attention: with constant content the product with the values shows nothing.

    Args:
        length: The number of tokens, padding included.
        constant: Whether every linear map of the tokens returns the same vector at each of them.
        real: The tokens that are not padding.
    """

    def __init__(self, length: int, constant: bool, real: slice = slice(None)) -> None:
        super().__init__(lambda attention: None, length)
        self.tokens, self.constant, self.real = length, constant, real
        start, stop, _ = real.indices(length)
        self.part = slice(start, min(stop, start + SHORT))  # the tokens that are compared one by one
        self.input_states: Tensor | None = None  # the states (1, n, d) before the first block
        self.calls: list[Call] = []
        self.lookups: list[Lookup] = []
        self._factors: tuple[Tensor, Tensor] | None = None
        self._maps = 0  # linear maps so far: the seed of the next vector
        self._reaches: list[tuple[Tensor, Reach]] = []  # the reach of each mask, because layers share masks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if self.constant and func is nn.functional.scaled_dot_product_attention:
            call = kernel_call(args, kwargs)
            output = call["query"].new_zeros(*call["query"].shape[:-1], call["value"].shape[-1])
            self.see_kernel(call, output)
            return output
        if self.constant and (constant := self._linear(func, args, kwargs)) is not None:
            return constant
        if func in _LOOKUPS:
            self._lookup(func, args, kwargs)
        result = super().__torch_function__(func, types, args, kwargs)
        if func in BATCHED and result.ndim > 2 and result.shape[-2:] == (self.tokens, self.tokens):
            *_, first, second = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
            self._factors = (first, second.transpose(-1, -2))
        return result

    def _linear(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
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

    def see_kernel(self, call: dict[str, Any], output: Tensor) -> None:
        """Record a call of torch's kernel, with the logits that it does not hand out."""
        query, given, n, part = call["query"], call.get("attn_mask"), self.tokens, self.part
        if query.shape[-2] != n or call["key"].shape[-2] != n:
            return
        mask = torch.ones(n, n, dtype=torch.bool, device=query.device) if given is None else given
        mask = mask.tril() if call.get("is_causal") else mask
        query, key = (states[..., part, :] for states in (query, call["key"]))
        corner = mask.broadcast_to(*mask.shape[:-2], n, n)[..., part, part]
        logits = kernel_logits(call | {"query": query, "key": key, "attn_mask": corner, "is_causal": False})
        logits = _flat(logits.float())
        reach = self._reach(mask if mask.dtype == torch.bool else mask > MASKED, given)
        self.calls.append(Call(self.block, _flat(query), _flat(key), logits, reach, logits.softmax(-1)))

    def enter(self, block: Block, args: Any, kwargs: Any) -> None:
        """Note the block that begins to run, and the states before the first one."""
        super().enter(block, args, kwargs)
        if self.input_states is None:
            states = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.ndim == 3)
            self.input_states = next(states, None)

    def see_softmax(self, logits: Tensor, weights: Tensor) -> None:
        """Record an attention that is computed step by step."""
        n, part = self.tokens, self.part
        if weights.shape[-1] > weights.shape[-2] and self._factors is None:  # with a learned sink
            return
        logits, weights = _flat(logits), _flat(weights)
        sinks = weights[:, part, n:].sum(-1) if weights.shape[-1] > n else None
        visible = ((logits > MASKED) | (weights > 0))[..., :n].any(0)
        query, key = (None, None) if self._factors is None else (_flat(f)[:, part] for f in self._factors)
        self._factors = None
        call = Call(
            self.block, query, key, logits[:, part, part].float(), self._reach(visible), weights[:, part, part], sinks
        )
        self.calls.append(call)

    def _reach(self, visible: Tensor, mask: Tensor | None = None) -> Reach:
        """Return the reach of visible keys (..., n, n); once for a mask that several layers share."""
        for seen, reach in self._reaches:
            if seen is mask:
                return reach
        n = self.tokens
        seen = visible.broadcast_to(*visible.shape[:-2], n, n).reshape(-1, n, n).any(0)
        reach = _reach_of(seen[self.real, self.real])
        if mask is not None:
            self._reaches.append((mask, reach))
        return reach

    def _lookup(self, func: Any, args: Any, kwargs: Any) -> None:
        """Record the rows of a table that were read, one for each token or for each pair of tokens."""
        named = [*args, *kwargs.values()]
        if func is nn.functional.embedding:
            rows, table = named[:2]
        else:
            table, rows = named[0], named[-1]
            rows = rows[0] if isinstance(rows, tuple) else rows
        if not (isinstance(rows, Tensor) and rows.dtype in (torch.int32, torch.int64) and table.ndim == 2):
            return
        n = self.tokens
        shape = (n,) if rows.numel() == n else (n, n)
        if table.is_floating_point() and rows.numel() in (n, n * n) and bool((rows != rows.flatten()[0]).any()):
            first = 0 if func is nn.functional.embedding else -len(table)
            missing = rows[(rows < first) | (rows >= len(table))]
            if missing.numel():
                raise NoRowError(f"a table of {len(table)} rows has no row {int(missing[0])}")
            self.lookups.append(Lookup(self.block, table.detach(), rows.reshape(shape)))


class _LayersBeginError(Exception):
    """The first block is called."""


class _InputRecorder(Recorder):
    """Records the lookups before the first block, which does not run."""

    def enter(self, block: Block, args: Any, kwargs: Any) -> None:
        raise _LayersBeginError


def _flat(states: Tensor) -> Tensor:
    """Return (1, head, n, d) or (head, n, d) as (head, n, d)."""
    return states.reshape(-1, *states.shape[-2:])


def distances(n: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the distance i - j from each query back to each key: (n, n)."""
    position = torch.arange(n, device=device)
    return position[:, None] - position


def _reach_of(visible: Tensor) -> Reach:
    """Return which keys are seen, from (n, n) of bool; a window without a name is "irregular"."""
    n, distance = len(visible), distances(len(visible), visible.device)
    seen = distance[visible]
    behind, ahead = (int(seen.amax()), int(-seen.amin())) if len(seen) else (0, 0)
    causal = ahead <= 0 and n > 1
    if torch.equal(visible, (distance <= behind) & (distance >= -ahead)):
        limit = None if max(behind, ahead) == n - 1 else ("window", behind + 1 if causal else behind)
        return Reach(causal, limit if causal or behind == ahead else "irregular", n)
    chunk = max(int((~visible[:, 0]).int().argmax()), 1)  # the first query that does not see the first key
    number = torch.arange(n, device=visible.device) // chunk
    same = number[:, None] == number
    regular = torch.equal(visible, same & (distance >= 0) if causal else same)
    return Reach(causal, ("chunks", chunk) if regular else "irregular", n)


def _identity(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Replace cosines and sines in the output of a module by 1 and 0."""
    if isinstance(output, Tensor) and output.is_complex():
        return torch.ones_like(output)
    if not (isinstance(output, tuple) and len(output) == 2 and all(isinstance(each, Tensor) for each in output)):
        return None
    cos, sin = output
    squares = cos.float() ** 2 + sin.float() ** 2 if cos.shape == sin.shape else torch.arange(2.0)
    if not bool((squares - squares.mean()).abs().max() < 0.02 * squares.mean()):
        return None  # queries and keys come in such pairs too
    return torch.ones_like(cos), torch.zeros_like(sin)


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer with attention.

    Attributes:
        number: Its number in the model, counted from 0.
        block: The number of its block, which declares it: another one where blocks run several times.
        constant: Its attention with constant content.
        text: Its attention with the model's own content.
        queries: How its queries are rotated: a `Rotation`, None for not at all, "scaled" or "change" for another change
            by position, "unseen" where no product of queries and keys was found.
        keys: Likewise.
        far: How its queries are rotated at positions far apart; None where the model takes none.
    """

    number: int
    block: int
    constant: Call
    text: Call
    queries: Rotation | str | None
    keys: Rotation | str | None
    far: Rotation | str | None


@dataclass(frozen=True, eq=False)
class Reading:
    """What was measured of a running model.

    Attributes:
        layers: Its layers with attention.
        others: What its layers without attention are, by number.
        constant: The run with constant content.
        table: The table at the input and its rows, over all positions that the model has; None without one.
        no_row: Why the last of these positions cannot be read, or None.
        masked: The same run with an attention mask, by the padding in it.
        padded: The lookups with ``PADDING`` tokens of padding on the left, in generation where the model can generate.
        failed: The errors of runs with a mask, likewise.
    """

    layers: list[Layer]
    others: dict[int, str]
    constant: Recorder
    table: Lookup | None
    no_row: str | None
    masked: dict[str, Recorder]
    padded: list[Lookup]
    failed: dict[str, Exception]


def read(model: SequenceModel, word: int, text: Tensor, *, length: int, farthest: int, dims: Sequence[int]) -> Reading:
    """Run a model for what its layers do with positions.

    Args:
        model: The model, whose head says how positions are counted in generation.
        word: The id of the token to repeat.
        text: (1, n) token ids, at most ``SHORT``.
        length: The number of positions of the run with constant content.
        farthest: The last position of the run with positions far apart; 0 for no such run.
        dims: Numbers of rotated dimensions to try first.
    """
    base = model.module
    rotary = [m for m in base.modules() if any(part in type(m).__name__.lower() for part in ("rotary", "rope"))]
    ids = torch.full((1, length), word, device=text.device)
    on_text = _run(model, {"input_ids": text}, constant=False).calls
    constant = _run(model, {"input_ids": ids})
    # these take the place of what the modules give, and count tokens whatever their position ids
    replacing = [each for each in attached_biases(model.module) if each.is_rotation]
    with ExitStack() as still, hooked(rotary, after=_identity, last=True):
        for each in replacing:
            still.enter_context(changed(each, "encoding", each.encoding.scaled(0.0)))
        unrotated = _run(model, {"input_ids": ids}).calls
    n = min(length, SHORT)
    failed: dict[str, Exception] = {}
    masked = _masked(model, ids, failed)
    near = torch.arange(n, device="cpu")
    distant = None
    if farthest and not replacing and model.reads("position_ids"):
        far = near + ((farthest - n + 1) * (near / (n - 1)) ** 3).long()
        few = {"input_ids": ids[:, :n], "attention_mask": torch.ones_like(ids[:, :n])}
        distant = _run(model, few | {"position_ids": far[None].to(ids.device)}).calls
    padded = masked[BEHIND_PADDING].lookups if BEHIND_PADDING in masked else []
    if constant.lookups and generates(model) and model.reads("attention_mask"):
        padded = _lookups_of_generation(model, ids[:, :n], failed)
    numbers, _, others = layer_numbers(model.config, [call.block for call in constant.calls])
    several = len({call.block[0] for call in constant.calls if call.block is not None}) > 1  # lists of blocks
    layers = []
    for place, (call, other) in enumerate(zip(constant.calls, unrotated, strict=True)):
        query, key = _without_rotation(call.query, other.query), _without_rotation(call.key, other.key)
        layer = Layer(
            number=numbers[place],
            block=numbers[place] if call.block is None or several else call.block[1],
            constant=call,
            text=on_text[place] if place < len(on_text) else call,
            queries=rotation_of(call.query, query, near, length, dims),
            keys=rotation_of(call.key, key, near, length, dims),
            far=None if distant is None else rotation_of(distant[place].query, query, far, farthest + 1, dims),
        )
        layers.append(layer)
    widths = {embedding_weight(base).shape[1], model.config.get_text_config().hidden_size}
    table, no_row = input_table(constant.lookups, widths), None
    if table is not None and (most := min(model.longest or 0, _LONGEST_TABLE)) > length:
        try:
            table = input_table(_input_lookups(model, word, most), widths) or table
        except NoRowError as error:
            no_row = f"declared {most} positions, but {error}"
    return Reading(
        layers=layers,
        others=others,
        constant=constant,
        table=table,
        no_row=no_row,
        masked=masked,
        padded=padded,
        failed=failed,
    )


def input_table(lookups: Sequence[Lookup], widths: set[int]) -> Lookup | None:
    """Return the table outside the blocks of which tokens read rows by position, of one of these widths, or None."""
    vectors = [each for each in lookups if each.block is None and each.rows.ndim == 1]
    added = [each for each in vectors if each.table.shape[1] in widths]  # tables of angles are as wide as a head
    every = (each for each in added if bool((each.rows.diff() != 0).all()))
    return next(every, added[0] if added else None)


def _input_lookups(model: SequenceModel, word: int, length: int) -> list[Lookup]:
    """Return the lookups before the first block of a model that reads so many tokens."""
    recorder = _InputRecorder(length, True)
    with suppress(_LayersBeginError), recorder.observing(model.module):
        model.run({"input_ids": torch.full((1, length), word, device=model.device)})
    return recorder.lookups


def _masked(model: SequenceModel, ids: Tensor, failed: dict[str, Exception]) -> dict[str, Recorder]:
    """Return the runs of tokens (1, n) with an attention mask, which tokenizers pass, by the padding in it."""
    if not model.reads("attention_mask"):
        return {}
    runs = {
        WITH_MASK: (ids[:, :SHORT], slice(None)),
        "before padding on the right": (ids, slice(0, -PADDING)),
        BEHIND_PADDING: (ids[:, :SHORT], slice(PADDING, None)),
    }
    recorders = {}
    for name, (tokens, real) in runs.items():
        with _noting(failed, name):
            recorders[name] = _run(model, _padded(model, tokens, real), real=real)
    return recorders


def _lookups_of_generation(model: SequenceModel, ids: Tensor, failed: dict[str, Exception]) -> list[Lookup]:
    """Return what is looked up by position behind padding in generation from tokens (1, n)."""
    recorder, found = Recorder(ids.shape[1], True), []
    inputs = _padded(model, ids, slice(PADDING, None))
    plain = GenerationConfig()  # type: ignore[no-untyped-call]
    with (
        _noting(failed, BEHIND_PADDING),
        recorder.observing(model.module),
        changed(model.with_head, "generation_config", plain),  # the user's configuration may ask for beams
    ):
        model.with_head.generate(**inputs, max_new_tokens=1)
        found = recorder.lookups
    return found


def _padded(model: SequenceModel, ids: Tensor, real: slice) -> dict[str, Tensor]:
    """Return inputs of tokens (1, n) with padding in the place of those that are not real."""
    mask = torch.zeros_like(ids)
    mask[:, real] = 1
    padding = model.padding or 0
    padded = ids.masked_fill(mask == 0, padding if 0 <= padding < model.vocabulary else 0)
    return {"input_ids": padded, "attention_mask": mask}


@contextmanager
def _noting(failed: dict[str, Exception], name: str) -> Iterator[None]:
    """Note the error of a run in a with-statement under this name, and go on after it."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        failed[name] = error


def _run(model: SequenceModel, inputs: dict[str, Tensor], constant: bool = True, real: slice = slice(None)) -> Recorder:
    """Run a model, recorded."""
    recorder = Recorder(inputs["input_ids"].shape[1], constant, real)
    with recorder.observing(model.module):
        model.run(inputs)
    return recorder


def _without_rotation(states: Tensor | None, unrotated: Tensor | None) -> Tensor | None:
    """Return states without rotation; None where nothing was taken away, as from a module not known to rotate."""
    return None if states is None or unrotated is None or torch.equal(states, unrotated) else unrotated


def generates(model: SequenceModel) -> bool:
    """Return whether a model continues the texts that it reads: an encoder-decoder model reads with its encoder."""
    head = model.with_head
    return bool(head.can_generate()) and not head.config.is_encoder_decoder
