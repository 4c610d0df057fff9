"""The layers of a model that attend, and the attention of each of them on a batch."""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pelocality._distributed import refuse_sharded
from pelocality.metrics._tolerance import ROW_SUM_TOLERANCE
from pelocality.models.observer import Attention, Block, KernelAttention
from pelocality.models.sequence_model import SequenceModel
from pelocality.models.token_proof import TOKENS, Axes, cautions_of, first_text, prove_tokens, with_another

_BEGINNING = 64  # tokens on which the layers of a longer text are found
_APART = 0.5  # share of the change by another token: scaling a whole input changes other logits less

Use = Callable[..., None]
"""Takes the index of a layer among the requested ones, its attention (batch, head, n, n) and its visible keys."""

Rows = Callable[[slice], tuple[Tensor, Tensor]]
"""Returns the attention of some queries in a layer, (batch, head, rows, n), and the keys they see, (batch, rows, n)."""


class AttentionLayers:
    """The layers of a model that attend, found on the beginning of the longest text of a batch.

    Args:
        model: The model.
        inputs: A batch: a dict with ``input_ids`` (batch, n), or what a model without token ids reads.
        length: The number of positions in a batch without token ids; None if that is not known, or images tell it.
        layers: The layers that are measured, which must have as many heads and tokens as each other; None for all.

    Attributes:
        layers: The numbers of these layers in the model, counted from 0, in the order in which they run.
        requested: Those of them that are measured.
        sinks: For each layer whether its heads have a learned sink.
        depth: The number of layers of the model, layers without attention included.
        others: What the layers without attention are, by number.
        heads: The number of heads of each requested layer.
        added: The number of tokens that the model puts around its input, such as the [CLS] of a ViT.
        before: How many of them it puts before its input.
        dtype: The precision of the weights.
        heads_first: Whether weights are (head, batch, n, n) or (head * batch, n, n).
        places: For each attention that runs the place of its layer in `layers`; a layer may run one for each head.
        column: The column of the first token, of n + 1 columns: 1 behind a key that is no token's.
        owners: The modules that compute attention over the tokens; None where every attention is.
        causal: For each layer whether no later key has any weight, though maybe no mask hides it.
        cautions: What could not be proved of this attention, and which attention is left out.

    Raises:
        ValueError: No attention over all positions was seen, the layers differ in their number of heads or tokens, or
            the model is refused by name; or a function that is random.
    """

    def __init__(
        self, model: SequenceModel, inputs: Any, length: int | None = None, layers: Sequence[int] | None = None
    ) -> None:
        refuse_sharded(model.module)
        if reason := model.why_not_measured():
            raise model.unprobed(reason)
        ids = _ids_of(inputs)
        if ids is not None:
            longest = int(inputs["attention_mask"].sum(1).argmax()) if "attention_mask" in inputs else 0
            text = {name: each for name, each in inputs.items() if not model.holds_images(inputs) or model.reads(name)}
            beginning = slice(longest, longest + 1), slice(_BEGINNING)
            inputs = {
                name: each[(..., *beginning) if name == "position_ids" else beginning] for name, each in text.items()
            }
            length = inputs["input_ids"].shape[1]
        patches = math.prod(model.grid_of(inputs) or [0])
        axes = prove_tokens(model, first_text(inputs) if ids is None and length is None else inputs)
        self.owners = None if axes is None else frozenset(each.owner for each in axes)
        seen: list[Attention] = []
        left_out: set[str] = set()

        def note(attention: Attention) -> None:
            if not self.includes(attention):
                left_out.add(type(attention.owner).__name__)
                return
            if seen:  # only the first one is kept with its numbers
                weights, visible = attention.weights.to("meta"), attention.visible.to("meta")
                attention = attention._replace(weights=weights, visible=visible, values=None, shifted=None)
            seen.append(attention)

        model.watch(inputs, note, None if model.adds_tokens else length)
        if not seen and ids is not None and length == 1:
            model.watch(inputs, note, 1)
        self.places = _places(seen, 1 if ids is not None else texts_of(inputs))
        placed = list(zip(seen, self.places, strict=True))
        by_layer = [[each for each, place in placed if place == at] for at in sorted({*self.places})]
        blocks = [{each.block for each in parts} for parts in by_layer]
        in_lists = [each.pop() if len(each) == 1 else None for each in blocks]
        self.layers, self.depth, self.others = layer_numbers(model.config, in_lists)
        self.requested = requested_layers(layers, self.layers, self.depth, "that attend") if seen else ()
        parts_of = dict(zip(self.layers, by_layer, strict=True))
        sizes = sorted({each.weights.shape[-1] for number in self.requested for each in parts_of[number]})
        if len(sizes) != 1 or sizes[0] < (length or patches):
            reason = "no attention over all its tokens was seen, by torch's kernel or a softmax times values"
            causes = "windows, too short inputs=, or stages, of which layers= names one?"
            raise model.unprobed(f"{reason}, but over {sizes} at a time of {length}; {causes}")
        if axes is not None and [each.owner for each in seen] != [each.owner for each in axes]:
            reason = f"{len(seen)} softmaxes have {sizes[0]} columns, but {len(axes)} are attention at other lengths"
            raise model.unprobed(f"{reason}; measure another length")
        axes = [Axes(TOKENS)] * len(seen) if axes is None else axes
        self.heads_first, self.column = axes[0].heads_first, max(each.column for each in axes)
        heads = {number: sum(self._heads(model, each) for each in parts) for number, parts in parts_of.items()}
        self.heads = heads[self.requested[0]]
        if any(heads[number] != self.heads for number in self.requested):
            raise ValueError(f"layers of {model} have different numbers of heads {heads}; name some in layers")
        length = length or patches or sizes[0]
        weights, self.dtype = seen[0].tokens(self.column)[0], seen[0].weights.dtype
        at_first = model.adds_tokens and weights.shape[-1] == sizes[0]  # a later stage has no tokens before its input
        self.before = _added_before(model, inputs, weights, self.column, length) if at_first else 0
        self.added = sizes[0] - length
        self.sinks = tuple(any(each.sink for each in parts) for parts in by_layer)
        not_causal = {place for each, place in zip(axes, self.places, strict=True) if not each.causal}
        self.causal = tuple(place not in not_causal for place in range(len(self.layers)))
        self.cautions = tuple(cautions_of(axes, left_out))

    def includes(self, attention: Attention | KernelAttention) -> bool:
        """Return whether an attention is over the tokens."""
        return self.owners is None or attention.owner in self.owners

    def _heads(self, model: SequenceModel, attention: Attention) -> int:
        """Return the number of heads of an attention to one text."""
        shape = attention.weights.shape
        several = model.content is not None and len(shape) == 4  # such as (channel, head, n, n)
        return shape[0 if self.heads_first else 1] if several else math.prod(shape[:-2])

    def by_text(self, states: Tensor) -> Tensor:
        """Return weights or visible keys of all texts and heads as (batch, head, rows, n)."""
        shape = states.shape[-2:]
        if self.heads_first:
            states = states.reshape(self.heads, -1, *shape).transpose(0, 1)
        return states.reshape(-1, self.heads, *shape)


def requested_layers(layers: Sequence[int] | None, available: Sequence[int], depth: int, which: str) -> tuple[int, ...]:
    """Return the requested layers, counted from the start; all that are available for None.

    Args:
        layers: Indices into the model's layers, negative ones from the end.
        available: The layers that can be returned.
        depth: The number of the model's layers.
        which: What the available layers do, for the error.

    Raises:
        TypeError: ``layers`` is not a list of integers.
        ValueError: No layer, an index out of range, a layer that is not available, or a layer that is named twice.
    """
    indices = available if layers is None else map(operator.index, layers)
    numbers = tuple(i + depth if -depth <= i < 0 else i for i in indices)
    if not numbers or len(set(numbers)) < len(numbers) or not set(available).issuperset(numbers):
        choice = f"at least one of {list(available)}, the layers {which}, and each once"
        raise ValueError(f"layers must name {choice}, got {layers}")
    return numbers


def _places(seen: list[Attention], texts: int) -> tuple[int, ...]:
    """Return the place of the layer of each attention: successive ones of one head in one call are one layer."""
    places = [0] if seen else []
    for before, each in itertools.pairwise(seen):
        single = all(math.prod(one.weights.shape[:-2]) == texts for one in (before, each))
        places.append(places[-1] + (not single or each.call is None or each.call != before.call))
    return tuple(places)


def observe_layers(
    model: SequenceModel, attending: AttentionLayers, layers: Sequence[int], inputs: Any, use: Use, rows: bool = False
) -> None:
    """Run a model and pass the attention of each layer to a callback as it is computed, so that one is in memory.

    Args:
        model: The model.
        attending: Its layers that attend.
        layers: The numbers of the layers to pass to the callback.
        inputs: A batch: a dict with ``input_ids`` (batch, n), or what a model without token ids reads.
        use: The callback.
        rows: Pass `Rows` to the callback instead. Those of torch's kernel are computed as it asks for them.

    Raises:
        ValueError: Rows that do not sum to 1, or another number of attentions than before.
    """
    ids, images = _ids_of(inputs), model.holds_images(inputs)
    mask = None if ids is None else inputs.get("attention_mask")
    batch, length = (None, None) if ids is None else (len(ids), ids.shape[1] + attending.added)
    numbers = itertools.count()
    parts: list[Attention] = []  # a layer may compute its heads one by one

    def take(attention: Attention) -> None:
        if not attending.includes(attention):
            return
        number = next(numbers)
        if number >= len(attending.places) or (layer := attending.layers[attending.places[number]]) not in layers:
            return
        parts.append(attention)
        if len(parts) == attending.places.count(attending.places[number]):
            of_layer = functools.partial(rows_of, layer, tuple(parts))
            use(layers.index(layer), *((of_layer,) if rows else of_layer(slice(None))))
            parts.clear()

    def rows_of(layer: int, of_layer: tuple[Attention, ...], queries: slice) -> tuple[Tensor, Tensor]:
        each = [attention.tokens(attending.column, queries) for attention in of_layer]
        weights, visible = each[0]
        m, n = weights.shape[-2:]
        if len(each) > 1:
            heads = [(part.reshape(-1, m, n), seen.expand_as(part).reshape(-1, m, n)) for part, seen in each]
            weights, visible = (torch.stack(every, 1) for every in zip(*heads, strict=True))
        texts, rest = divmod(weights.numel(), attending.heads * m * n)
        if rest or (batch is not None and texts not in (1, batch)):  # 1 where content plays no part
            raise model.unprobed(f"the attention of layer {layer} is not one of {attending.heads} heads for each text")
        if attending.causal[attending.layers.index(layer)] and not images:  # patches may see later ones
            visible = visible & torch.ones(n, n, dtype=torch.bool, device=visible.device).tril()[queries]
        same = visible.ndim == 2  # for all texts and heads
        visible = visible.expand(texts, m, n) if same else attending.by_text(visible.expand_as(weights)).any(1)
        weights = attending.by_text(weights)
        if batch is not None:
            weights, visible = weights.expand(batch, -1, -1, -1), visible.expand(batch, -1, -1)
        if mask is not None and attending.added:
            raise model.unprobed("its own tokens before the input have no place in an attention_mask")
        tokens = None if mask is None else mask[:, queries]
        _check_rows(model, layer, weights, visible, any(part.sink for part in of_layer), tokens)
        return weights, visible

    model.watch(inputs, take, length, matrices=not rows)
    if next(numbers) != len(attending.places):
        raise model.unprobed("its attention differs between inputs")


def _ids_of(inputs: Any) -> Tensor | None:
    """Return the token ids of a batch (batch, n), None of a model that reads none."""
    return inputs.get("input_ids") if isinstance(inputs, Mapping) else None


def texts_of(inputs: Any) -> int:
    """Return the size of a batch: that of its first tensor or array, 1 without one."""
    parts = [inputs]
    for each in parts:  # grows by what is inside
        if isinstance(each, Mapping | tuple | list):
            parts += each.values() if isinstance(each, Mapping) else each
        elif getattr(each, "ndim", 0):
            return len(each)
    return 1


def _added_before(model: SequenceModel, inputs: Any, weights: Tensor, column: int, length: int) -> int:
    """Return how many tokens a model puts before its input: the position at which another first token changes logits.

    Raises:
        ValueError: The first and the last token of the input are not ``length`` positions apart, or cannot be found
            among more positions than these; or the first row of a grid of patches ends elsewhere.
    """
    indices = model.content.corners(grid) if (grid := model.grid_of(inputs)) else {0: 0, length - 1: -1}
    changed = getattr(model, "changed_token", functools.partial(_changed_position, model, weights, column))
    places = {token: changed(inputs, with_another(inputs, index)) for token, index in indices.items()}
    n, seen = weights.shape[-1], [place for place in places.values() if place is not None]
    if n == length and not grid and seen == sorted(seen):
        return 0
    before, unseen = (0, None) if n == length else (places[0], -1)  # logits of no token, or of several, say nothing
    if before is None or any(place not in (before + token, unseen) for token, place in places.items()):
        reason = f"it attends over {n} positions for an input of {length}, with tokens {list(places)} at"
        raise model.unprobed(f"{reason} {list(places.values())}; does inputs= fit, or is its order another?")
    return before


def _changed_position(model: SequenceModel, weights: Tensor, column: int, inputs: Any, other: Any) -> int | None:
    """Return the only position whose logits with the others differ from those of weights in the first attention.

    Args:
        model: The model.
        weights: The weights of the first attention on the inputs, (..., n, n).
        column: The column of the first token.
        inputs: The inputs.
        other: The inputs of which one token is another one.
    """
    first: list[Tensor] = []
    model.watch(other, lambda attention: first.append(attention.tokens(column)[0]) if not first else None, None)
    if not first or first[0].shape != weights.shape:
        return None
    # NaN where keys are hidden, or weights underflow
    changes = (first[0].double().log() - weights.double().log()).flatten(0, -3).nan_to_num(*3 * [torch.nan])
    changed = (changes - changes.nanmedian(-1, keepdim=True).values).nan_to_num(0).abs().amax(0)
    size = float(changed.max())
    place = int((changed.sum(0) + changed.sum(1)).argmax())
    others = torch.arange(len(changed), device=changed.device) != place
    rest = changes[:, others][:, :, others]  # each row is changed by one number
    spread = rest.nan_to_num(-torch.inf).amax(-1) - rest.nan_to_num(torch.inf).amin(-1)
    return place if size > 1e-6 and not bool((spread > _APART * size).any()) else None


def layer_numbers(config: Any, blocks: list[Block | None]) -> tuple[tuple[int, ...], int, dict[int, str]]:
    """Return the numbers of the layers that attend, the depth of the model, and what its other layers are.

    Layers are counted in the order in which they run if a block runs several times (ALBERT), or if the blocks are not
    the members of one list.
    """
    in_lists = [block for block in blocks if block is not None]
    numbers = tuple(index for _, index in in_lists)
    one_list = len(in_lists) == len(blocks) and len({layers for layers, _ in in_lists}) == 1
    if not one_list or list(numbers) != sorted(set(numbers)):
        return tuple(range(len(blocks))), len(blocks), {}
    members = in_lists[0][0]
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    names = types if len(types) == len(members) else [type(member).__name__ for member in members]
    return numbers, len(members), {index: name for index, name in enumerate(names) if index not in numbers}


def _check_rows(
    model: SequenceModel, layer: int, weights: Tensor, visible: Tensor, sink: bool, mask: Tensor | None
) -> None:
    """Refuse attention (batch, head, n, n) with rows that do not sum to 1, or with a sink to more than 1."""
    totals = weights.sum(-1, dtype=torch.promote_types(weights.dtype, torch.float32))  # (batch, head, n)
    defined = visible.any(-1) if mask is None else visible.any(-1) & mask.bool().to(visible.device)  # (batch, n)
    differences = torch.where(defined[:, None], totals - (totals.clamp(max=1) if sink else 1), 0).abs()
    off = float(differences.amax()) if totals.numel() else 0.0
    if not off <= ROW_SUM_TOLERANCE[weights.dtype]:  # NaN is refused too
        reason = "as with dropout, logits, or heads mixed after the softmax"
        raise model.unprobed(f"rows of attention in layer {layer} do not sum to 1 (off by {off:.3g}), {reason}")
