"""A model's attention together with the layer numbers and visible keys, which the attention maps do not hold."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pelocality.metrics._tolerance import ROW_SUM_TOLERANCE
from pelocality.models._names import described
from pelocality.models._restore import inference
from pelocality.models._run import device_of, largest_difference, requested_layers, run
from pelocality.models._softmaxes import MASKED, Block, Softmaxes
from pelocality.models._weights import check_ids, hooks_of, some_ids
from pelocality.models.eager import configurations, eager_attention
from pelocality.models.families import longest_input, record_of
from pelocality.models.function import AttentionFunction

_TOKENS = 7
# tokens on which the layers of a longer input are found, with the attention of all in memory; no number of experts, as
# a softmax over these would look like one over tokens
_BEGINNING = 500
_TOLERANCE = 5e-3  # a difference of outputs, relative to the largest, that rounding to 8 bits can make


@dataclass(frozen=True)
class AttentionLayers:
    """The layers of a model that attend.

    Attributes:
        layers: Their numbers in the model, counted from 0.
        sinks: Whether each of them has a learned sink.
        depth: The number of layers of the model, those without attention included.
        others: What the layers without attention are, by number.
        heads: The number of heads of each layer.
        dtype: That of the attention which the model returns.
        order: Which of the softmaxes gave the attention of each layer, None where none did.
        softmaxes: How many there were.
        tokens: On how many tokens: other softmaxes may run on another number.
    """

    layers: tuple[int, ...]
    sinks: tuple[bool, ...]
    depth: int
    others: dict[int, str]
    heads: int
    dtype: torch.dtype
    order: tuple[int | None, ...]
    softmaxes: int
    tokens: int

    def requested(self, layers: Sequence[int] | None) -> tuple[int, ...]:
        """Return the requested layers, by their numbers in the model; all that have attention for None."""
        missing = f"which have no attention in this model; those that have are {list(self.layers)}"
        return requested_layers(layers, self.layers, self.depth, missing)


@dataclass(frozen=True)
class Observed:
    """Attention of one forward pass.

    Attributes:
        known: The layers it belongs to.
        maps: Attention (batch, head, n, n) of each of ``known.layers``. Rows sum to 1, or to less in layers where a
            learned sink takes the rest.
        visible: The keys that each query may attend to, (batch, n, n) for each of ``maps``, on its device.
    """

    known: AttentionLayers
    maps: tuple[Tensor, ...]
    visible: tuple[Tensor, ...]


@contextmanager
def checked_eager_attention(model: nn.Module, base: Any) -> Iterator[None]:
    """Run a model with eager attention, which returns weights, once it was seen to compute what the model does.

    Raises:
        ValueError: It gives other outputs than the implementation that the model runs.
    """
    _check_eager(model, base)
    with eager_attention(model):
        yield


def _check_eager(model: nn.Module, base: Any) -> None:
    """Compare the outputs on a few tokens, as in transformers 5.23 Falcon's eager attention adds its bias twice."""
    used = {config._attn_implementation for config in configurations(base)} - {None, "eager"}
    if not used:
        return
    ids = torch.tensor([some_ids(base, min(_TOKENS, longest_input(base) or _TOKENS))], device=device_of(base))
    try:
        with inference(model):
            expected = run(base, output_attentions=False, input_ids=ids)[0]
        with eager_attention(model):
            eager = run(base, output_attentions=False, input_ids=ids)[0]
    except Exception:  # the one in use may need other hardware; `observe` raises what eager attention fails with
        return
    if not isinstance(expected, Tensor):
        return
    off = largest_difference(eager, expected)
    if off > max(_TOLERANCE, 16 * torch.finfo(expected.dtype).eps):
        advice = "load it with attn_implementation='eager' to measure what it does then"
        given = f"with eager attention, which returns weights, it gives other outputs than with {', '.join(used)}"
        raise _unprobed(base, f"{given} (by {off:.1g} of the largest); {advice}")


def observe(base: Any, **inputs: Tensor) -> Observed:
    """Run a base model and return its attention, the layers it belongs to, and which keys were visible.

    The softmax of every layer is captured as it runs: its logits hold the mask that the model built (a window, chunks,
    a prefix, an attached encoding that is causal), one more logit than keys is a learned sink, and the block in which
    it runs gives the layer. The weights do not show the mask, as they may underflow to 0 on visible keys.

    Raises:
        ValueError: No weights or weights of another shape, rows that do not sum to 1, or layers that differ in
            their number of heads.
    """
    recorded: list[_Softmax] = []
    with _recording(base, recorded.append):
        maps = _attention_maps(base, **inputs)
    order = _match(maps, [softmax.weights for softmax in recorded])
    found = [
        _Softmax(None, weights > 0, weights, False) if index is None else recorded[index]
        for index, weights in zip(order, maps, strict=True)
    ]
    heads = sorted({weights.shape[1] for weights in maps})
    if len(heads) > 1:
        raise _unprobed(base, f"its layers have different numbers of heads ({', '.join(map(str, heads))})")
    sinks = tuple(softmax.sink for softmax in found)
    layers, depth, others = layer_numbers(base, [softmax.block for softmax in found])
    for layer, weights, sink in zip(layers, maps, sinks, strict=True):
        _check_rows(base, layer, weights, sink, inputs.get("attention_mask"))
    visible = tuple(each.visible.reshape(weights.shape).any(1) for each, weights in zip(found, maps, strict=True))
    known = AttentionLayers(
        layers=layers,
        sinks=sinks,
        depth=depth,
        others=others,
        heads=heads[0],
        dtype=maps[0].dtype,
        order=tuple(order),
        softmaxes=len(recorded),
        tokens=maps[0].shape[-1],
    )
    return Observed(known, maps, visible)


def attention_layers(base: Any, **inputs: Tensor) -> AttentionLayers:
    """Return the layers of a base model that attend, found on the first tokens of the longest text of a batch.

    Raises:
        ValueError: As `observe`, or a function that is random.
    """
    longest = int(inputs["attention_mask"].sum(1).argmax()) if "attention_mask" in inputs else 0
    beginning = {name: tensor[longest : longest + 1, :_BEGINNING] for name, tensor in inputs.items()}
    known = observe(base, **beginning).known
    if isinstance(base, AttentionFunction):
        base.check_repeats(beginning["input_ids"])
    return known


def observe_by_layer(
    base: Any,
    known: AttentionLayers,
    layers: Sequence[int],
    use: Callable[[int, Tensor, Tensor], None],
    **inputs: Tensor,
) -> None:
    """Run a base model and pass the attention of each layer to a callback as it is computed, so that one is in memory.

    The attention of all layers is in memory where it matches no softmax, and for a single short text.

    Args:
        base: A model.
        known: Its `attention_layers`, of these or other inputs.
        layers: The numbers of the layers to pass to the callback.
        use: The callback, which takes the index of a layer in ``layers``, its attention (batch, head, n, n) and its
            visible keys (batch, n, n).
        inputs: As for `observe`.

    Raises:
        ValueError: As `observe`; or another number of softmaxes than before.
    """
    batch, n = inputs["input_ids"].shape
    elsewhere = min(n, _BEGINNING) != known.tokens
    alone = batch == 1 and n <= _BEGINNING
    if elsewhere and not alone:
        known = attention_layers(base, **inputs)
    if None in known.order or (elsewhere and alone):
        observed = observe(base, **inputs)
        for layer, weights, visible in zip(observed.known.layers, observed.maps, observed.visible, strict=True):
            if layer in layers:
                use(layers.index(layer), weights, visible)
        return
    check_ids(base, inputs["input_ids"])
    wanted = {known.order[known.layers.index(layer)]: layer for layer in layers}
    indices, ours = itertools.count(), []

    def use_softmax(softmax: _Softmax) -> None:
        layer = wanted.get(next(indices))
        if layer is None:
            return
        try:
            shape = (-1, known.heads, n, n)  # of one text for the whole batch where content plays no part
            if softmax.weights.numel() not in {texts * math.prod(shape[1:]) for texts in (1, batch)}:
                raise _unprobed(base, f"the softmax of layer {layer} is not one of {known.heads} heads for each text")
            weights = softmax.weights.reshape(shape).to(known.dtype).expand(batch, -1, -1, -1)
            visible = softmax.visible.reshape(shape).any(1).expand(batch, -1, -1)
            _check_rows(base, layer, weights, softmax.sink, inputs.get("attention_mask"))
            use(layers.index(layer), weights, visible)
        except Exception as error:
            ours.append(error)
            raise

    with _recording(base, use_softmax), _failing_with_reason(base, inputs["input_ids"], ours):
        run(base, output_attentions=False, **inputs)
    if next(indices) != known.softmaxes:
        raise _unprobed(base, "its attention differs between inputs, or without output_attentions=True")


def _attention_maps(base: Any, **inputs: Tensor) -> tuple[Tensor, ...]:
    """Run a base model and return its attention (batch, head, n, n) of each layer, checked.

    Raises:
        ValueError: The model returns no weights, or weights of another shape.
    """
    if reason := record_of(base).why_not_measured(base):
        raise _unprobed(base, reason)
    batch, n = inputs["input_ids"].shape
    check_ids(base, inputs["input_ids"])
    with _failing_with_reason(base, inputs["input_ids"]):
        outputs = run(base, **inputs)
    maps = getattr(outputs, "attentions", None)
    if not maps or not all(isinstance(weights, Tensor) for weights in maps):
        advice = "if its implementation was chosen when it was built, load it again with attn_implementation='eager'"
        raise _unprobed(base, f"it returned no attention weights with output_attentions=True; {advice}")
    for layer, weights in enumerate(maps):
        if weights.ndim != 4 or weights.shape[0] != batch or weights.shape[-2:] != (n, n):
            shapes = f"{tuple(weights.shape)} for {batch} x {n} tokens, wanted ({batch}, heads, {n}, {n})"
            raise _unprobed(base, f"layer {layer} returned weights of shape {shapes}")
    return tuple(maps)


@contextmanager
def _failing_with_reason(base: Any, ids: Tensor, ours: Sequence[Exception] = ()) -> Iterator[None]:
    """Name a model that cannot run on ids (batch, n) and the reason; errors of our own are raised as they are."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if error in ours:
            raise
        reason = f"it fails with {type(error).__name__}: {error}"
        if "index out of range in self" in str(error):  # torch's message for a lookup beyond a table
            reason = "it has no row for every position; ask for fewer tokens"
        raise _unprobed(base, f"on {ids.shape[0]} x {ids.shape[1]} tokens {reason}") from error


def _check_rows(base: Any, layer: int, weights: Tensor, sink: bool, mask: Tensor | None) -> None:
    """Refuse attention (batch, head, n, n) with rows that do not sum to 1, or with a sink to more than 1."""
    totals = weights.sum(-1, dtype=torch.promote_types(weights.dtype, torch.float32))
    if mask is not None:  # rows of padding are undefined
        totals = totals.transpose(1, 2)[mask.bool().to(totals.device)]
    off = float((totals - (totals.clamp(max=1) if sink else 1)).abs().max())
    if not off <= ROW_SUM_TOLERANCE[weights.dtype]:  # not <=, so that NaN is refused too
        if math.isnan(off):
            raise _unprobed(base, f"attention in layer {layer} is NaN; try texts of one length, or float32")
        reason = f"rows of attention in layer {layer} do not sum to 1 (off by {off:.3g})"
        raise _unprobed(base, f"{reason}, as with dropout, heads mixed after the softmax, or logits")


def _unprobed(base: Any, reason: str) -> ValueError:
    """Return the error for a model whose attention cannot be measured."""
    if "forward" in vars(base) and not hooks_of(base):
        reason = f"{reason}; accelerate replaced its forward for mixed precision, which `del model.forward` undoes"
    return ValueError(f"{described(base)} cannot be probed: {reason}")


@dataclass(frozen=True)
class _Softmax:
    """One softmax.

    Attributes:
        block: The block in which it ran.
        visible: The keys visible by its logits, (..., n, n).
        weights: Its result, (..., n, n).
        sink: Whether its rows had one more logit, for a sink.
    """

    block: Block | None
    visible: Tensor
    weights: Tensor
    sink: bool


def _recording(base: nn.Module, use: Callable[[_Softmax], None]) -> AbstractContextManager[None]:
    """Hand on each softmax over n keys, or n keys and a sink, that runs inside the context."""

    def softmax(logits: Tensor, weights: Tensor) -> None:
        n, keys = weights.shape[-2:]
        if keys - n in (0, 1):
            weights = weights[..., :n]
            # a key is masked where its weight is 0 and its logit as low as a mask
            use(_Softmax(softmaxes.block, (logits[..., :n] > MASKED) | (weights > 0), weights, keys > n))

    softmaxes = Softmaxes(softmax)
    return softmaxes.recording(base)


def _match(maps: tuple[Tensor, ...], softmaxes: list[Tensor]) -> list[int | None]:
    """Return the index of the softmax behind each map, or None; both are in the order in which they ran."""
    found: list[int | None] = []
    start = 0
    for weights in maps:
        index = next((i for i in range(start, len(softmaxes)) if _same(softmaxes[i], weights)), None)
        found.append(index)
        start = start if index is None else index + 1
    return found


def _same(given: Tensor, weights: Tensor) -> bool:
    """Return whether weights (batch, head, n, n) equal a softmax, whose batch and heads may be one axis."""
    if given.numel() != weights.numel() or given.shape[-1] != weights.shape[-1]:
        return False
    reshaped = given.reshape(weights.shape).to(weights.dtype)
    return given.data_ptr() == weights.data_ptr() or torch.equal(reshaped, weights)


def layer_numbers(base: Any, blocks: list[Block | None]) -> tuple[tuple[int, ...], int, dict[int, str]]:
    """Return the layer numbers, the depth, and what the other layers are.

    Layers are counted in order where a block runs several times, as in ALBERT.
    """
    known = [block for block in blocks if block is not None]
    numbers = tuple(index for _, index in known)
    one_list = len(known) == len(blocks) and len({layers for layers, _ in known}) == 1
    if not one_list or list(numbers) != sorted(set(numbers)):
        return tuple(range(len(blocks))), len(blocks), {}
    members = known[0][0]
    kinds = getattr(base.config, "layer_types", None) or getattr(base.config, "layers_block_type", None)
    if kinds is None or len(kinds) != len(members):
        kinds = [type(member).__name__ for member in members]
    others = {index: kind for index, kind in enumerate(kinds) if index not in numbers}
    return numbers, len(members), others
