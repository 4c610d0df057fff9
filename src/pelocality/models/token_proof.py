"""Proof, by intervention, that the last two axes of an attention are its queries and its keys, one for each token.

A square matrix may be of something else: of texts, channels, experts, latents or mixtures of tokens. So a model reads a
text several times in one batch, each time with another token changed, and wherever a module is called, every other
token is put back as it was:

    text 0:  a b c d      nothing is changed
    text 1:  x b c d      may move row 0 and column 0 of every attention
    text 2:  a x c d      may move row 1 and column 1

The change has to travel along one place through the whole model, so each layer is proved, and the order of its tokens.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pelocality._checks import NO_WEIGHT
from pelocality._transforms import changed_without_vmap
from pelocality.models._restore import hooked
from pelocality.models.observer import Attention
from pelocality.models.sequence_model import SequenceModel, map_tensors

TOKENS, UNKNOWN = "tokens", "unknown"
_STILL, _TEXTS = "still", "the texts of a batch (batch_first=True?)"
_TEXT_BY_TEXT = "one text of a batch after the other"
_ORDER = "its tokens in another order than that of its input"
_MIXTURES = "mixtures of tokens or these in another order, such as projected keys, channels or reversed keys"
_FIXED = "something else than one key for each token, such as channels, latents or windows"
_REFUSED = {_TEXTS, _TEXT_BY_TEXT, _ORDER}  # a model with such attention reads its input in another way

_Attentions = list[Attention]
_LENGTHS = (*range(12, 4, -1), *range(13, 40))
_SHORT = 4
_CHANGED = 6  # tokens of a longer text that are changed, one at a time
_LEAK = 0.1  # how much the logits of other tokens may move, relative to those of the changed one: 8-bit weights round
_ROUNDING, _LARGE = 1e-4, 0.3  # changes of states, relative to these
_ALONE = 5e-3  # the largest difference of the weights of a text alone and in a batch


class Axes(NamedTuple):
    """What the queries and the keys of one attention are.

    Attributes:
        name: "tokens", or what they are instead; "unknown" where no token of a text could be changed alone.
        leak: The largest change of the logits of other tokens, relative to those of the changed token.
        column: The column of the first token: 1 behind a key that is no token's, otherwise 0.
        heads_first: Whether weights are (head, text, n, n) or (head * text, n, n).
        causal: Whether no later key has any weight, whatever hides it.
        owner: The module that computed it.
        still: The changes that moved nothing where all other tokens were put back, if there are too many.
    """

    name: str
    leak: float = 0.0
    column: int = 0
    heads_first: bool = False
    causal: bool = False
    owner: nn.Module | None = None
    still: tuple[int, ...] = ()


class Change(NamedTuple):
    """Which token is changed in which text of a batch.

    Attributes:
        tokens: The token that is changed in text 1, 2 and so on; in text 0 and in those behind none is.
        length: The number n of tokens.
        texts: The number of texts.
        before: How many tokens the model puts before those of its input; None if all of these change at once, because
            it is not known which is which.
    """

    tokens: Sequence[int]
    length: int
    texts: int
    before: int | None

    @property
    def places(self) -> tuple[list[int], list[int]]:
        """Each changed text and its changed token, as an index of states (text, n, ...)."""
        return [*range(1, len(self.tokens) + 1)], [*self.tokens]


def prove_tokens(model: SequenceModel, inputs: Any = None) -> list[Axes] | None:
    """Return the axes of each attention of a model over its tokens, in the order in which these run.

    Attention over something else, such as experts, is left out; results name it. The proof is made once per model.

    Args:
        model: The model.
        inputs: For a model that reads no token ids, a batch that it reads.

    Returns:
        The axes; None for a model whose attention is declared.

    Raises:
        ValueError: All attention is over something else than the tokens, or some of it over texts or tokens in another
            order, or a module combines several attentions; or the model fails.
    """
    if model.declares_attention:
        return None
    if model.axes is None or not {each.owner for each in model.axes} <= {None, *model.module.modules()}:  # or replaced
        model.axes = token_axes(model, inputs)
        if model.config is None and model.content is None and any(each.name == _TEXT_BY_TEXT for each in model.axes):
            model.text_by_text = True
            try:
                model.axes = token_axes(model, inputs)
            except ValueError:  # torch.vmap has no rule for what it does
                model.text_by_text = False
    proved = [axes for axes in model.axes if axes.name in (TOKENS, UNKNOWN)]
    others = [axes for axes in model.axes if axes not in proved]
    owners = {axes.owner for axes in proved}
    mixed = [each for each in others if each.name != _FIXED and each.owner in owners]  # with attention over tokens
    refused = mixed or [each for each in others if not proved or each.name in _REFUSED]
    if refused:
        raise model.unprobed(f"it attends over {refused[0].name}")
    return proved


def cautions_of(axes: Sequence[Axes] | None, left_out: Collection[str] = ()) -> Iterator[str]:
    """Yield what could not be proved, and the classes whose attention is left out."""
    if any(each.name == UNKNOWN for each in axes or ()):
        yield "no token could be changed alone, so it is not proved that the axes of attention are its tokens"
    if left_out:
        yield f"attention over something else than the tokens is left out: in {', '.join(sorted(left_out))}"


def token_axes(model: SequenceModel, inputs: Any = None) -> list[Axes]:
    """Return what the axes of each attention of a model are, in the order in which they run; see `prove_tokens`."""
    alone, others, inputs, length = _of_one_text(model, inputs)
    n = max((each.weights.shape[-1] for each in alone), default=0)
    fixed = [Axes(_FIXED, owner=each.owner) for each in others]
    if _combines(model, inputs, alone, length > 0):
        raise model.unprobed("a module computes several attentions at a time, and combines them")
    tokens = sorted({round(i * (n - 1) / (_CHANGED - 1)) for i in range(_CHANGED)}) if n > max(_LENGTHS) else range(n)
    sizes = {n, n + 1, *_sizes_inside(alone), *sizes_of_weights(model)}
    texts = next(size for size in itertools.count(len(tokens) + 1) if size not in sizes)
    unknown = [Axes(UNKNOWN)] * len(alone)
    widths = {each.numel() for each in model.module.parameters() if each.ndim == 1}
    if any(each.weights.shape[-1] != n for each in alone) or (not length and {n, n + 1} & widths):
        axes = unknown
    else:
        # tokens of the model's own come before the input, or behind it; None: which token is which is not known
        befores = range(n - length, -1, -1) if length and n >= length else [None]
        changes = (Change(tokens if each is None else range(each, each + length), n, texts, each) for each in befores)
        tried = [_judged(model, inputs, alone, change) or unknown for change in changes]
        axes = min(tried, key=lambda every: sum(each.name != TOKENS for each in every))
    if not alone and axes:
        return fixed + axes
    return fixed + [each._replace(owner=one.owner) for each, one in zip(axes, alone, strict=True)]


def _judged(model: SequenceModel, inputs: Any, alone: list[Attention], change: Change) -> list[Axes] | None:
    """Return what the axes of attentions are by a change of the tokens of a text; None if the model reads no copies."""
    batch = _changed_texts(inputs, change)
    if batch is None:
        return None
    images = {each.shape[1:] for each in tensors_of(inputs) if each.ndim > 3}  # which have no axis of tokens

    def put_back(states: Any) -> Any:
        return states if getattr(states, "shape", ())[1:] in images else _put_back(change, states)

    try:
        together = _attentions(model, batch, change.length or change.texts, output=put_back, calls=put_back)
    except ValueError:  # the model reads no batch of several
        return None
    if not alone or len(together) != len(alone):
        name = _TEXT_BY_TEXT if alone and len(together) == change.texts * len(alone) else _TEXTS
        return [Axes(name, owner=each.owner) for each in alone or together]
    pairs = enumerate(zip(alone, together, strict=True))
    constant = [at for at, (one, many) in pairs if one.weights.numel() == many.weights.numel()]
    other = _attentions(model, with_another(inputs, slice(None)), change.length) if constant else []
    # Weights that are one matrix for all texts, but another for another text, are of one text of the batch alone.
    if not all(same_numbers(alone[at].weights, other[at].weights) for at in constant):
        return [Axes(_TEXT_BY_TEXT, owner=each.owner) for each in alone]
    axes = [_axes(*each, change) for each in zip(alone, together, strict=True)]
    if change.before is None:  # some tokens may be the model's own, which do not change
        half = len(change.tokens) // 2
        axes = [each if len(each.still) > half else each._replace(still=()) for each in axes]
    if any(each.still for each in axes):  # does the token that was put back move anything?
        free = _attentions(model, batch, change.length)
        axes = [_of_still(*each, change.texts) for each in zip(axes, alone, free, strict=True)]
    proved: set[nn.Module | None] = set()
    for at, one in enumerate(alone):  # what a module computes between two attentions of its own is not put back
        if axes[at].name == _MIXTURES and one.owner in proved and one.shifted is None:
            axes[at] = axes[at]._replace(name=UNKNOWN)
        proved |= {one.owner} if axes[at].name == TOKENS else set()
    return axes


def clear_lengths(model: SequenceModel) -> list[int]:
    """Return numbers of tokens at which the axis of tokens differs in size from every axis of the weights."""
    sizes = sizes_of_weights(model)
    return [n for n in _LENGTHS if not {n, n + 1} & sizes] or [*_LENGTHS]


def text_of(model: SequenceModel, length: int) -> dict[str, Tensor]:
    """Return a batch of one text of different tokens, for a model of token ids."""
    return {"input_ids": torch.tensor([model.some_ids(length)], device=model.device)}


def with_another(inputs: Any, index: int | slice | tuple[slice, slice]) -> Any:
    """Return inputs with another first (0) or last (-1) token id, or number, in each text; all of them for a slice.

    Two slices are pixels of images.

    Of several tensors the token ids change, or else the largest tensor: not a mask, nor the time step of a diffusion.
    """
    several = isinstance(inputs, Mapping | tuple | list)
    parts: dict[Any, Any] = dict(inputs if isinstance(inputs, Mapping) else enumerate(inputs if several else [inputs]))
    sizes = {name: each.numel() for name, each in parts.items() if getattr(each, "dtype", torch.bool) != torch.bool}
    if not sizes:
        return inputs
    name = "input_ids" if "input_ids" in parts else max(sizes, key=lambda each: sizes[each])
    changed = parts[name].clone(memory_format=torch.contiguous_format)
    numbers = changed[..., *index] if isinstance(index, tuple) else changed.view(len(changed), -1)[:, index]
    if not changed.is_floating_point():
        numbers += torch.where(numbers > 0, -1, 1)
    elif isinstance(index, int):
        numbers += 1
    else:
        numbers.neg_().sub_(1)  # a constant alone would be lost in a layer norm
    parts[name] = changed
    return parts if isinstance(inputs, Mapping) else tuple(parts.values()) if several else changed


def first_text(inputs: Any, axis: int = 0) -> Any:
    """Return the first text of a batch."""
    return map_tensors(inputs, lambda each: each.narrow(axis, 0, 1) if each.ndim > axis else each)


def tensors_of(inputs: Any) -> list[Tensor]:
    """Return the tensors of a batch, in the order of `map_tensors`."""
    tensors: list[Tensor] = []
    map_tensors(inputs, lambda each: (tensors.append(each), each)[1])  # type: ignore[func-returns-value]
    return tensors


def same_numbers(one: Any, other: Any) -> bool:
    """Return whether two tensors have the same shape and numbers; anything else has not."""
    tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
    return tensors and one.shape == other.shape and torch.equal(one, other)


# ---- running it


def _attentions(
    model: SequenceModel,
    inputs: Any,
    length: int | None = None,
    *,
    output: Callable[[Any], Any] | None = None,
    calls: Callable[[Any], Any] | None = None,
) -> list[Attention]:
    """Return every attention of a run.

    Args:
        model: The model.
        inputs: A batch of it.
        length: The number of keys; None for any.
        output: A function that changes the output of each attention.
        calls: A function that changes what modules are called with.
    """
    attentions: list[Attention] = []

    def use(attention: Attention) -> Callable[[Any], Any] | None:
        attentions.append(attention)
        return None if output is None else partial(changed_without_vmap, output)

    def change(module: Any, args: Any, kwargs: Any) -> Any:
        every = partial(changed_without_vmap, calls)  # type: ignore[arg-type]
        return tuple(map(every, args)), dict(zip(kwargs, map(every, kwargs.values()), strict=True))

    modules = [each for each in model.module.modules() if not isinstance(each, torch.jit.ScriptModule)]
    with hooked(modules if calls else [], change):
        model.watch(inputs, use, length)
    return attentions


def _put_back(change: Change, states: Any) -> Any:
    """Return the states of texts in which every token but the changed one is as in the first text.

    States without exactly one axis of tokens and one of texts, such as weights, are returned as they are.
    """
    sizes = list(states.shape) if isinstance(states, Tensor) and states.is_floating_point() else []
    n, texts = change.length, change.texts
    if sizes.count(texts) != 1 or sizes.count(n) != 1 or n + 1 in sizes:  # weights may have a column more
        return states
    axes = sizes.index(texts), sizes.index(n)
    states = states.movedim(axes, (0, 1))  # (text, n, ...)
    put = states[:1].expand_as(states).clone()
    before = put[change.places]
    moved = states[change.places] - before
    # deep layers may shrink a change
    size, whole = (each.abs().reshape(len(each), -1).amax(1) for each in (moved, before))
    small = (size > _ROUNDING * whole) & (size < _LARGE * whole)
    factor = torch.where(small, _LARGE * whole / size, 1)
    put[change.places] += moved * factor.view(-1, *[1] * (moved.ndim - 1))
    return put.movedim((0, 1), axes)


def _of_one_text(model: SequenceModel, inputs: Any) -> tuple[_Attentions, _Attentions, Any, int]:
    """Return the attention on a text whose size grows with the number of tokens, all other attention, and the text.

    Its length is that of no axis of the weights, and comes last; 0 where the model reads no other than that of its
    inputs, or none is known, so that its tokens cannot be changed one by one.

    Args:
        model: The model.
        inputs: A batch of one text.
    """
    lengths = clear_lengths(model)
    try:
        if model.content is None:
            other_length = _SHORT
            others = _attentions(model, text_of(model, other_length))
            inside = {*_sizes_inside(others), other_length}
            length = next((n for n in lengths if not {n, n + 1} & inside), lengths[0])
            text: Any = text_of(model, length)
        else:
            # images have no axis of tokens
            shapes = {size for each in tensors_of(inputs) if each.ndim < 4 for size in each.shape}
            others = _attentions(model, inputs)
            other_length = max((n for each in others if (n := each.weights.shape[-1]) in shapes), default=0)
            length = next((n for n in lengths if n < other_length), 0)
            if not length:
                return others, [], inputs, 0
            text = map_tensors(inputs, partial(_narrowed, other_length, length))
        attentions = _attentions(model, text)
    except ValueError:  # the model reads no text of that length
        return _attentions(model, inputs), [], inputs, 0 if model.content else inputs["input_ids"].shape[1]
    grown = {each.weights.shape[-1] + length - other_length for each in others}
    by_tokens = [each for each in attentions if each.weights.shape[-1] in grown]
    return by_tokens, [each for each in attentions if each.weights.shape[-1] not in grown], text, length


def _narrowed(old: int, new: int, states: Tensor) -> Tensor:
    """Return states with another size of the axis of the old size, if there is one."""
    return states.narrow(states.shape.index(old), 0, new) if old in states.shape else states


def sizes_of_weights(model: SequenceModel) -> set[int]:
    """Return the sizes of all axes of the weights of a model."""
    return {size for each in model.module.parameters() for size in each.shape}


def _sizes_inside(attentions: Sequence[Attention]) -> set[int]:
    """Return the sizes of all axes of weights and values but those of queries and keys."""
    shapes: list[Any] = [each.weights.shape[:-2] for each in attentions]
    shapes += [(*each.values.shape[:-2], each.values.shape[-1]) for each in attentions if each.values is not None]
    return {size for shape in shapes for size in shape}


def _changed_texts(inputs: Any, change: Change) -> Any:
    """Return copies of one text: each but the first has one of its tokens changed, or all if they cannot be told.

    None where the inputs have no axis of one text.
    """
    length = len(change.tokens)
    pairs = zip(tensors_of(inputs), tensors_of(with_another(inputs, slice(None))), strict=True)
    old, new = next((pair for pair in pairs if not torch.equal(*pair)), (None, None))
    if any(each.ndim and 1 not in each.shape[:2] for each in tensors_of(inputs)):
        return None

    def copies(states: Tensor) -> Tensor:
        if not states.ndim:
            return states
        other: Any = new if same_numbers(old, states) else states  # query, key and value may be one tensor
        axis = states.shape[:2].index(1)
        many, changed = (each.repeat_interleave(change.texts, axis).transpose(0, axis) for each in (states, other))
        if change.before is not None and length in many.shape[1:]:
            axes = many.shape.index(length, 1), 1
            places = change.places[0], [*range(length)]
            many.movedim(*axes)[places] = changed.movedim(*axes)[places]
        else:
            many[1:] = changed[1:]
        return many.transpose(0, axis)

    return map_tensors(inputs, copies)


def _combines(model: SequenceModel, inputs: Any, alone: list[Attention], clear: bool) -> bool:
    """Return whether a module combines the weights of several attentions, by a difference or a product.

    Their values are the same, or depend on the attention before; unlike those of two layers, their weights do not.

    Args:
        model: The model.
        inputs: A text.
        alone: The attentions to it.
        clear: Whether its length is the size of no other axis.
    """
    # values that are weights make a product of two maps
    if clear and any(each.values is not None and each.values.shape[-1] == each.weights.shape[-1] for each in alone):
        return True
    several = [each for each in alone if each.weights.shape[:-2].numel() > 1]  # heads may run one by one
    if max(Counter((each.owner, each.call) for each in several).values(), default=0) < 2:
        return False
    sizes = {each.weights.shape[-1] for each in alone}
    length = sizes.pop() if len(sizes) == 1 else None  # stages have several
    changed = _attentions(model, inputs, length, output=lambda x: torch.arange(x.numel()).sin().view_as(x).to(x))
    return any(
        same_numbers(one.values, other.values) or not same_numbers(other.values, new.values)
        for (one, _), (other, new) in itertools.combinations(zip(alone, changed, strict=True), 2)
        if (one.owner, one.call) == (other.owner, other.call) and same_numbers(other.weights, new.weights)
    )


# ---- reading it


def _axes(one: Attention, many: Attention, change: Change) -> Axes:
    """Return what the axes of an attention are, of a text alone and of copies of it with changed tokens."""
    candidates = []
    for column in (0, 1) if one.shifted is not None else (0,):
        weights, heads_first = _by_text(_tokens_first(many, column), _tokens_first(one, column), change.texts)
        if weights is None:
            return Axes(_TEXTS)
        n = weights.shape[-2]
        most = weights[..., :n].amax((0, 1))  # of all texts and heads
        causal = n > 1 and float(most.triu(1).max()) < NO_WEIGHT < float(most.diagonal(-1).min())
        name, leak, still = _moved(weights, change)
        values, still_values = _moved_values(one, many, change, column, heads_first)
        if values != UNKNOWN:  # where others have all weight, a token may move no weight, but does move its value
            still = still_values
        content = name == _MIXTURES and _is_largest_in_own_row(weights, change)  # as of tokens between query and key
        if values == _ORDER or (values == TOKENS and (name == _STILL or content)):
            name = values
        candidates.append(Axes(name, leak, column, heads_first, causal, still=still))
    return min(candidates, key=lambda axes: (axes.name != TOKENS, axes.leak))


def _of_still(axes: Axes, one: Attention, many: Attention, texts: int) -> Axes:
    """Return the axes of an attention that some changes did not move: do they where no token is put back?"""
    if not axes.still:
        return axes
    weights, _ = _by_text(_tokens_first(many, 0), _tokens_first(one, 0), texts)
    moved = 1.0 if weights is None else float((weights[2:] - weights[1])[list(axes.still)].abs().max())
    if moved > max(_ROUNDING, 32 * torch.finfo(one.weights.dtype).eps):
        return axes._replace(name=_ORDER)
    return axes._replace(name=UNKNOWN) if axes.name == _STILL else axes


def _tokens_first(attention: Attention, column: int) -> Tensor:
    """Return weights (..., n, m) that begin with the column of the first token; a key that is no token's comes last."""
    if attention.shifted is None:
        return attention.weights
    return torch.cat([attention.weights, attention.shifted[0][..., -1:]], -1).roll(-column, -1)


def _by_text(weights: Tensor, alone: Tensor, texts: int) -> tuple[Tensor | None, bool]:
    """Return weights (1 + text, head, n, m), of which the first are of a text alone, and whether heads came first.

    None where the texts of the batch are others than this one, and its copies, alone would be.
    """
    weights, alone = weights.cpu(), alone.cpu().reshape(1, -1, *alone.shape[-2:])  # some devices have no float64
    matrix = weights.shape[-2:]
    if weights.numel() == alone.numel():  # content plays no part, so texts have no axis
        return alone.expand(1 + texts, -1, -1, -1), False
    if alone.shape[-2:] != matrix or weights.numel() != texts * alone.numel():
        return None, False
    orders = [weights.reshape(texts, -1, *matrix), weights.reshape(-1, texts, *matrix).transpose(0, 1)]
    off = [float((each[0] - alone).abs().nan_to_num().max()) for each in orders]
    weights = torch.cat([alone, orders[off[1] < off[0]]])
    moved = float((weights[2:] - weights[1]).abs().nan_to_num().max())
    rounding = max(_ALONE, 16 * torch.finfo(weights.dtype).eps, moved / 4)  # 8-bit weights round by the whole batch
    return weights if min(off) <= rounding else None, off[1] < off[0]


def _moved(weights: Tensor, change: Change) -> tuple[str, float, tuple[int, ...]]:
    """Return what moves in the logits of texts with a changed token, how much elsewhere, and which move nothing.

    Logits are known up to a number for each row, so that a row has moved if its changes differ.

    Args:
        weights: The weights of a text alone, in a batch and of its copies, (1 + text, head, n, m).
        change: The token that is changed in each copy.
    """
    weights = weights[: len(change.tokens) + 2]
    logs = weights.double().where(weights > NO_WEIGHT, torch.nan).log()
    changes = logs[2:] - logs[1]  # (token, head, n, m), NaN where keys are hidden
    place = torch.tensor(change.tokens, device="cpu").view(-1, 1, 1, 1)
    row, column = (torch.arange(size, device="cpu") for size in weights.shape[-2:])
    of_row, of_column = place == row[:, None], (place == column) & (place != row[:, None])
    others = changes.where(~of_row & ~of_column, torch.nan)
    by_key = changes.where(of_column, torch.nan) - others.nanmedian(-1, keepdim=True).values
    moved = (weights[2:] - weights[1]).abs()  # these alone move in a one-hot row
    rows = _spread(changes.where(of_row, torch.nan)).maximum(moved.where(of_row, 0).amax((2, 3)))  # (token, head)
    keys = by_key.abs().nan_to_num().amax((2, 3)).maximum(moved.where(of_column, 0).amax((2, 3)))
    noise = float((logs[0] - logs[1]).abs().nan_to_num().max())
    least = max(16 * torch.finfo(weights.dtype).eps, 4 * noise)
    elsewhere = _spread(others)
    if (
        max(float(each.max()) for each in (rows, keys, elsewhere)) <= least
        or float(moved.max()) <= 16 * torch.finfo(weights.dtype).eps
    ):
        return _STILL, 0.0, tuple(range(len(moved)))
    still = tuple((rows.maximum(keys).amax(1) <= least).nonzero().flatten().tolist())
    elsewhere, rows, keys = (each.amax(0) for each in (elsewhere, rows, keys))  # of each head
    own = keys.where(keys > least, rows).clamp(min=least)  # keys may be others, as in cross-attention
    leak = float((elsewhere / own).max())
    return TOKENS if leak <= _LEAK else _MIXTURES, leak, still


def _moved_values(
    one: Attention, many: Attention, change: Change, column: int, heads_first: bool
) -> tuple[str, tuple[int, ...]]:
    """Return what the values are, "tokens", these in another order or unknown, and which changes move none of them.

    Only the value of the changed token moves if they are tokens.
    """
    if one.values is None or many.values is None or many.values.numel() != change.texts * one.values.numel():
        return UNKNOWN, ()
    matrix = one.values.shape[-2:]
    shape = (-1, change.texts, *matrix) if heads_first else (change.texts, -1, *matrix)
    values = many.values.cpu().double().reshape(shape)
    values = values.transpose(0, 1) if heads_first else values
    texts, tokens = change.places
    moved = (values[texts] - values[:1]).abs().amax((1, 3)).roll(-column, -1)  # (token, key)
    own = moved[range(len(tokens)), tokens]
    moved[range(len(tokens)), tokens] = 0
    others = moved.amax(1)
    still = own.maximum(others) <= _ROUNDING * own.max()
    name = UNKNOWN
    if bool((others <= _LEAK * own).logical_or(still).all()):
        name = UNKNOWN if bool(still.all()) else TOKENS
    elif bool(((own <= _LEAK * others) & ~still).any()):
        name = _ORDER
    return name, tuple(still.nonzero().flatten().tolist())


def _is_largest_in_own_row(weights: Tensor, change: Change) -> bool:
    """Return whether most changed tokens move the weights of their own query most, though maybe others too."""
    moved = (weights[2 : len(change.tokens) + 2] - weights[1]).abs().amax((1, 3))  # (token, query)
    return 2 * int((moved.argmax(1) == torch.tensor(change.tokens, device="cpu")).sum()) > len(moved)


def _spread(changes: Tensor) -> Tensor:
    """Return the largest difference in a row of changes (token, head, n, m), (token, head), NaN apart."""
    spread = changes.nan_to_num(-torch.inf).amax(-1) - changes.nan_to_num(torch.inf).amin(-1)
    return spread.clamp(min=0).amax(2)
