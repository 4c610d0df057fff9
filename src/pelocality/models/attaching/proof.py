"""Checks, on a few tokens or a batch, the guarantees of `attach`.

For a bias the model is run as it is, with a bias of zero, with a bias that differs between heads and distances, with
its positions disabled and its masks opened, and as it is again; for a rotation also with the model's own.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pelocality.encodings import DistanceTable, Encoding, NoEncoding, RotaryEncoding
from pelocality.models._calls import call_of, changes_call, hidden_argument
from pelocality.models._inference import inference
from pelocality.models._restore import hooked
from pelocality.models.attaching.calls import without_cache
from pelocality.models.attaching.installing import Plan, states_of
from pelocality.models.attaching.submodule import Attached, Place
from pelocality.models.families import ATTACHED, attached_biases
from pelocality.models.observer import Attention, blocks_of, plain_torch
from pelocality.models.rotations import read_rotations, tokens_seen
from pelocality.models.sequence_model import SequenceModel, equal_but_for_rounding, largest_difference, map_tensors

_TOKENS = 7
_ORDER = [3, 0, 6, 2, 5, 1, 4]
_MASK = 1e4  # numbers of masks are larger, and what is hidden stays hidden
_EXACT = 1e-4  # the largest accepted difference of a weight from the softmax of logits and bias, in float32


class NotProvedError(ValueError):
    """A guarantee of `attach` that does not hold for a model."""


def _rounded(states: Tensor) -> Tensor:
    """Return what a module is called with, rounded in another way."""
    if not states.is_floating_point():
        return states
    steps = 4 * torch.finfo(states.dtype).eps * torch.arange(states.numel(), device=states.device).sin()
    return states.where(states.abs() > _MASK, states * (1 + steps.view(states.shape)).to(states.dtype))


def _noise_of(run: Callable[[], list[Tensor]], modules: Iterable[nn.Module]) -> Callable[[], float]:
    """Return how much another rounding of what modules are called with changes outputs: 8 bits make steps of it."""

    @functools.cache
    def noise() -> float:
        plain = run()
        with hooked(modules, lambda module, *call: map_tensors(call, _rounded)):
            return 4 * max(map(largest_difference, run(), plain))

    return noise


def _equal(pairs: Iterable[tuple[Tensor, Tensor]], noise: Callable[[], float]) -> bool:
    """Return whether outputs differ by rounding alone, NaN apart."""
    numbers = [(one.nan_to_num(), other.nan_to_num()) for one, other in pairs]
    return all(equal_but_for_rounding(*each) or largest_difference(*each) <= noise() for each in numbers)


def _check_same(one: list[Tensor], other: list[Tensor], noise: Callable[[], float], problem: str) -> None:
    """Refuse outputs that differ by more than rounding."""
    if not _equal(zip(one, other, strict=True), noise):
        off = max(float((a - b).nan_to_num().abs().max()) for a, b in zip(one, other, strict=True))
        raise NotProvedError(f"{problem}, by up to {off:.3g}")


@contextmanager
def proving(plan: Plan, encoding: str, inputs: Any = None) -> Iterator[tuple[Any, list[Tensor], Any]]:
    """Put a model into evaluation mode for a proof, and check at its end that the model is as it was.

    Args:
        plan: The model and its attention modules.
        encoding: What is attached, in words.
        inputs: A batch on which to prove it; None for a few tokens.

    Yields:
        The inputs, what the model returns for them, and the function of `_noise_of`.

    Raises:
        ValueError: In the place of any error, with the model and the reason.
    """
    model = plan.model
    with inference(model.module), plain_torch():  # nn.TransformerEncoder fills padding with zeros on its fast path
        try:
            batch, before = _few_tokens(model) if inputs is None else (inputs, outputs_of(model, inputs))
            noise = _noise_of(functools.partial(outputs_of, model, batch), plan.places)
            yield batch, before, noise
            _check_same(outputs_of(model, batch), before, noise, "after removal its outputs differ from those before")
        except Exception as error:
            reason = str(error)
            if not isinstance(error, NotProvedError):
                on = f"{_TOKENS} tokens" if inputs is None else "the example_inputs"
                reason = f"it could not be run on {on}: {type(error).__name__}: {reason[:200]}"
            raise ValueError(f"{encoding} cannot be attached to {model}: {reason}") from error


def prove_encodings(plan: Plan) -> None:
    """Check that encodings enter a model exactly, and nothing else; the model is left as it was.

    1. A bias of zero changes no output. 2. A trial bias enters every softmax exactly: the weights are those of the
    softmax of logits and bias, and what was hidden, padding or the future, stays hidden. 3. With positions disabled and
    masks opened, the order of tokens makes no difference. 4. After removal the outputs are those before.

    Args:
        plan: The places, and what is disabled.

    Raises:
        ValueError: A check failed; the message names it.
    """
    model, inputs = plan.model, plan.inputs if plan.model.adds_tokens else None
    with proving(plan, "an encoding", inputs) as (batch, before, noise):
        nothing = [NoEncoding() for _ in plan.places]
        with plan.trial(nothing, disable=False):
            problem = "with a bias of zero its outputs differ from those without"
            _check_same(outputs_of(model, batch), before, noise, problem)
        seen = _Seen()
        with plan.trial([_trial_encoding(place.heads) for place in plan.places.values()], disable=plan.disable):
            biases = attached_biases(model.module)
            for bias in biases:
                bias.note = functools.partial(seen.note, bias)
            model.watch(batch, seen.biased.append, None)
        _check_seen(model, seen, biases)
        if plan.disable and (inputs is None or not plan.names):
            with plan.trial(nothing, disable=True):
                if inputs is None:
                    _check_equivariance(model, batch["input_ids"])
                else:
                    _check_constant(model, plan.length or 0)


def fit_rotations(plan: Plan, encodings: Sequence[Any]) -> Plan:
    """Make rotations rotate what the model rotates, and return the plan with the size of the keys that are rotated.

    The model's own rotation as an encoding, or angles of zero where it has none, change no output.

    Args:
        plan: The places, and the rotations that are replaced.
        encodings: What each place gets, or None; their pairs are set.

    Raises:
        ValueError: The rotations of the model are not such.
    """
    model = plan.model
    trials = [_trial_rotation(*each) for each in zip(encodings, plan.own, strict=True)]
    for each, own in zip(encodings, plan.own, strict=True):
        if each is not None and own is not None:
            each.interleaved, each.pairs = own.interleaved, own.pairs
    with proving(plan, "a rotary encoding", plan.inputs) as (inputs, before, noise):
        with plan.trial(trials, disable=plan.replaces):
            outputs = outputs_of(model, inputs)
            rotating = [module for module in plan.places if ATTACHED in module._modules]
            sizes = {module: getattr(module, ATTACHED).key_size for module in rotating}
        _check_same(outputs, before, noise, "with its own rotation, or with angles of zero, its outputs are others")
        if plan.disable and not plan.replaces and not model.adds_tokens:
            nothing = [NoEncoding() for _ in plan.places]
            with plan.trial(nothing, disable=True):
                _check_equivariance(model, inputs["input_ids"])
    # A layer that reads the keys of an earlier one rotates them by an encoding of its own.
    shared = any(getattr(module, "is_kv_shared_layer", False) for module in plan.places)
    sized = {each: place._replace(key_size=0 if shared else sizes.get(each, 0)) for each, place in plan.places.items()}
    return replace(plan, places=sized)


def _trial_rotation(encoding: Any, own: Any) -> Any:
    """Return an encoding that changes nothing in the place of a rotation: the model's own, or angles of zero."""
    return encoding.scaled(0.0) if own is None and isinstance(encoding, RotaryEncoding) else own or encoding


def _trial_encoding(heads: int) -> Encoding:
    """Return a bias that differs between distances and between heads, of numbers that every dtype holds."""
    table = DistanceTable(heads, length=9, signed=True)
    numbers = torch.arange(table.values.numel()).view(table.values.shape)
    with torch.no_grad():
        table.values.copy_((5 * numbers % 17 - 8) / 4)
    return table


def _few_tokens(model: SequenceModel) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return two texts of other tokens and the outputs; two tokens are padding where the model takes a mask of them."""
    text = torch.tensor(model.some_ids(_TOKENS + 1), device=model.device)
    ids = torch.stack([text[:_TOKENS], text[1:]])
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    try:
        return inputs, outputs_of(model, inputs)
    except Exception:
        return {"input_ids": ids}, outputs_of(model, {"input_ids": ids})


def outputs_of(model: SequenceModel, inputs: Any) -> list[Tensor]:
    """Return the tensors of floats that a model returns."""
    leaves = tree_leaves(model.outputs(inputs))
    return [each for each in leaves if isinstance(each, Tensor) and each.is_floating_point()]


# ---- the weights


class _Seen:
    """The attentions of a run with trial encodings.

    Attributes:
        biased: The weights of every attention, in the order of the run.
        plain: By the place of an attention in this order: its encoding, and what the attention is without the bias.
    """

    def __init__(self) -> None:
        self.biased: list[Attention] = []
        self.plain: dict[int, tuple[Attached, Tensor, Tensor]] = {}

    def note(self, bias: Attached, plain: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Note an attention before it gets the bias."""
        place = len(self.biased)
        if bias.place.parts > 1:  # the softmaxes of all heads may come before their products
            place = max([place, *(each + 1 for each in self.plain)])
        if place in self.plain:
            raise NotProvedError("an attention got a bias twice; has another library wrapped its forward pass?")
        self.plain[place] = (bias, *plain())


def _check_seen(model: SequenceModel, seen: _Seen, biases: list[Attached]) -> None:
    """Check that every encoding entered attention that was seen, and that the weights are those with the bias."""
    noted = {id(bias) for bias, *_ in seen.plain.values()}
    missing = sum(id(bias) not in noted for bias in biases)
    if missing or any(place >= len(seen.biased) for place in seen.plain):
        counts = f"{len(seen.biased)} attentions over all its tokens ran, {len(seen.plain)} got the bias"
        raise NotProvedError(f"{counts}, and {missing} of its {len(biases)} attention modules added none")
    parts: Counter[Attached] = Counter()  # attentions of the module so far
    for place, (bias, plain, visible) in seen.plain.items():
        added = bias.encoding(plain.shape[-2]).detach().cpu().double()
        added = added if bias.place.parts == 1 else added[parts[bias] % len(added)]
        _check_weights(model, bias.place, added, plain, visible, seen.biased[place].tokens(bias.place.first)[0])
        parts[bias] += 1


def _check_weights(
    model: SequenceModel, place: Place, bias: Tensor, plain: Tensor, visible: Tensor, biased: Tensor
) -> None:
    """Check that weights (..., n, n) are the softmax of logits and bias (..., n, n), given those without the bias."""
    n, columns = plain.shape[-2:]
    heads = place.heads // place.parts
    if biased.shape[-2:] != (n, n) or (plain.ndim > 3 and plain.shape[1] != heads):
        shapes = f"{tuple(plain.shape)} and {tuple(biased.shape)}"
        raise NotProvedError(f"its weights have the shapes {shapes}, wanted {heads} heads of {n} tokens")
    plain = plain.reshape(-1, heads, n, columns).cpu().double()
    biased = biased.reshape(-1, heads, n, n).cpu().double()
    visible = visible.cpu().broadcast_to(*visible.shape[:-2], n, n)
    visible = visible.reshape(-1, visible.shape[-3] if visible.ndim > 2 else 1, n, n)
    # Columns beside the tokens are sinks, which get no bias.
    added = nn.functional.pad(bias, (place.first, columns - n - place.first))
    exact = (plain.log() + added).softmax(-1)[..., place.first : place.first + n]
    rows = visible.any(-1, keepdim=True) & (plain.sum(-1, keepdim=True) > 0)
    off = float((exact - biased).masked_fill(~rows, 0).abs().max())
    device = model.device.type
    dtypes = [model.dtype, *([torch.get_autocast_dtype(device)] if torch.is_autocast_enabled(device) else [])]
    if not off <= max(_EXACT, *(64 * torch.finfo(dtype).eps for dtype in dtypes)):
        raise NotProvedError(f"the bias does not enter its softmax exactly, weights are off by {off:.3g}")


# ---- the order of tokens


def _check_equivariance(model: SequenceModel, ids: Tensor) -> None:
    """Check that tokens in another order give the same outputs in that order, without positions and with open masks.

    In a model with other layers between those of attention or beside them, each attention module is checked on its own.
    """
    family, hybrid, inputs = model.family, _is_hybrid(model), {"input_ids": torch.stack([ids[0], ids[0, _ORDER]])}
    pairs: list[tuple[Tensor, Tensor]] = []  # outputs of attention modules

    def permute(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if hybrid:
            name, call = hidden_argument(attention), call_of(attention, args, kwargs)
            again = attention.forward(**without_cache(call) | {name: call[name][:, _ORDER]})
            pairs.extend(
                (other, one[:, _ORDER]) for one, other in zip(states_of(output), states_of(again), strict=True)
            )

    modules = family.attention_modules(model.module)
    with hooked(modules, changes_call(family.open_mask), permute):
        one, other = model.run(inputs)[0]  # (n, d) each
        of_modules, noise = [*pairs], _noise_of(lambda: [model.run(inputs)[0]], modules)
        same = _equal([(one[_ORDER], other)], noise) or (hybrid and _equal(of_modules, noise))
    if not same:
        raise NotProvedError("with positions disabled and all masks opened, its outputs depend on the order of tokens")


def _check_constant(model: SequenceModel, length: int) -> None:
    """Check that patches of the same content have the same states, behind tokens of the model's own or before them."""
    content: Any = model.content and model.content(0, length)
    before = max(tokens_seen(model, content)) - length
    turning = [each for _, each in read_rotations(model, length) if each is not None]
    if turning or not any(model.equal_states(content, slice(first, first + length)) for first in (before, 0)):
        problem = "with its rotation disabled, tokens of the same content have other states"
        raise NotProvedError(f"{problem}; name what else holds positions, disable=[...]")


def _is_hybrid(model: SequenceModel) -> bool:
    """Return whether layers have no attention, or a state space beside it (Falcon-H1)."""
    base = model.module
    attentions = set(model.family.attention_modules(base))
    attends: dict[nn.ModuleList, set[bool]] = {}
    for layer, (layers, _) in blocks_of(base).items():
        attends.setdefault(layers, set()).add(not attentions.isdisjoint(layer.modules()))
    return {True, False} in attends.values() or any("A_log" in module._parameters for module in base.modules())
