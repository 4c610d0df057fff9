"""Rotations in the place of a rotary model's own: its own code, run with other frequencies for each layer and head.

transformers computes the cosines and sines of all layers in one rotary module and passes them to every attention
module. Here each attention module computes them again, by the same method, with the frequencies of its encoding.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pelocality.encodings import RotaryEncoding
from pelocality.encodings._frequencies import frequency_buffers
from pelocality.models._calls import argument_names, call_of
from pelocality.models._restore import called, hooked, inference, override_forward, restore_forward, restoring
from pelocality.models._rotations import depend_on_length
from pelocality.models._weights import loaded
from pelocality.models.attaching.bias import PositionalBias
from pelocality.models.attaching.places import Place
from pelocality.models.attaching.proof import NotProvedError, check_same, few_tokens, outputs_of, states_of
from pelocality.models.attaching.rotary.by_head import ByHead
from pelocality.models.families import ATTACHED, SOURCE, without_cache
from pelocality.models.sequence_model import SequenceModel

# Names under which attention modules take cosines and sines.
_ANGLES = re.compile("position_embeddings|^cos|^sin|freqs|rotary")


class _Source(NamedTuple):
    """Where a tensor of cosines or sines comes from: the rotary module, its call, and the place among its outputs."""

    rotary: nn.Module
    call: dict[str, Any]
    output: int

    @property
    def name(self) -> str:
        """The name of the buffer with the frequencies: one for all layers, or one per type of layer."""
        kind = self.call.get("layer_type")
        return "inv_freq" if kind is None else f"{kind}_inv_freq"


class PositionalRotary(PositionalBias):
    """A rotary encoding as a submodule of an attention module, whose forward pass then rotates by it."""

    encoding: RotaryEncoding
    is_rotation = True

    @property
    def method(self) -> Callable[..., Any]:  # noqa: D102
        return _forward_rotated

    def forward(self, source: _Source) -> Any:
        """Return what a rotary module returns, for the frequencies of the encoding."""
        with loaded(self.encoding, [self.encoding]):
            return _angles(self.encoding, source)


def _angles(encoding: RotaryEncoding, source: _Source) -> Any:
    """Return what a rotary module returns, for other frequencies: cosines and sines, or complex numbers."""
    method = inspect.unwrap(type(source.rotary).forward)  # without the decorators that stop gradients
    names = (source.name, source.name.replace("inv_freq", "attention_scaling"))
    others = [dict(zip(names, (each, encoding.attention_scaling), strict=True)) for each in encoding.frequencies]
    by_head = [method(_WithOther(source.rotary, each), **source.call) for each in others]
    if len(by_head) == 1:
        return by_head[0]
    if torch.compiler.is_exporting():
        raise ValueError("torch.export takes a rotary encoding of one head only; attach one for all heads")
    parts = zip(*(each if isinstance(each, tuple) else (each,) for each in by_head), strict=True)
    return tuple(ByHead.of(list(each)) for each in parts)


class _WithOther:
    """A module with other values of some attributes, as ``self`` of one of its methods."""

    def __init__(self, module: nn.Module, values: dict[str, Any]) -> None:
        self.__dict__.update(values | {"_module": module})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


# ---- the way from the rotary module to attention


def _forward_rotated(attention: Any, previous: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """Run an attention module with the cosines and sines of its own encoding."""
    forward, rotation = called(attention, "forward", previous), attention._modules.get(ATTACHED)
    if rotation is None:  # removed after another library had replaced the method
        return forward(*args, **kwargs)
    (args, kwargs), given = _with_angles(rotation, (args, kwargs))
    if not given:
        raise ValueError(
            f"{type(attention).__name__} got no cosines and sines of a rotary module of its model, by which an "
            "attached rotary encoding is passed on; call the model itself"
        )
    return forward(*args, **kwargs)


def _with_angles(angles: Callable[[_Source], Any], arguments: Any) -> tuple[Any, bool]:
    """Return arguments with other cosines and sines, and whether there were any."""
    found: dict[int, Any] = {}

    def own(value: Any) -> Any:
        source = getattr(value, SOURCE, None) if isinstance(value, Tensor) else None
        if source is None:
            return value
        if id(source.call) not in found:
            found[id(source.call)] = angles(source)
        every = found[id(source.call)]
        return every[source.output] if isinstance(every, tuple) else every

    return tree_map(own, arguments), bool(found)


def mark_sources(base: nn.Module) -> None:
    """Make the rotary modules of a model note on their outputs where they come from."""
    for module in rotary_modules(base):
        override_forward(module, _marked)


def unmark_sources(base: nn.Module) -> None:
    """Undo `mark_sources`."""
    for module in base.modules():
        restore_forward(module, _marked)


def _marked(rotary: Any, previous: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    output = called(rotary, "forward", previous)(*args, **kwargs)
    call = call_of(rotary, args, kwargs)
    for index, each in enumerate(output if isinstance(output, tuple) else (output,)):
        setattr(each, SOURCE, _Source(rotary, call, index))
    return output


def rotary_modules(base: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that have the frequencies of a rotation and are called with position ids."""
    return [each for each in base.modules() if frequency_buffers(each) and "position_ids" in argument_names(each)]


# ---- what a model is, and whether an encoding takes its place exactly


def has_rotations(model: SequenceModel) -> bool:
    """Return whether a model has rotations of its own.

    Raises:
        ValueError: They cannot be set, or the model is no transformers model of token ids.
    """
    found, reason = bool(rotary_modules(model.module)), None
    if model.adds_tokens:
        reason = "it is no transformers model of token ids; use RotaryEncoding in biased_attention"
    elif found and depend_on_length(model.module):
        reason = "its frequencies depend on the length of its input; load it with rope_parameters of another rope_type"
    if reason:
        raise ValueError(f"a rotary encoding cannot be attached to {model}: {reason}")
    return found


def key_heads(place: Place) -> int:
    """Return the number of heads of keys, each of which may have a rotation of its own."""
    return place.heads // getattr(place.module, "num_key_value_groups", 1)


def own_rotations(model: SequenceModel, places: Sequence[Place]) -> dict[int, RotaryEncoding]:
    """Return the rotations of the attention modules that rotate, by their place; found by running a few tokens.

    Raises:
        ValueError: No attention module rotates, or one is given cosines and sines whose source is not known.
    """
    found: dict[nn.Module, _Source] = {}
    turned: set[nn.Module] = set()
    unknown: set[nn.Module] = set()

    def note(attention: Any, args: Any, kwargs: Any, output: Any) -> None:
        call = call_of(attention, args, kwargs)
        source = next((getattr(each, SOURCE) for each in tree_leaves(call) if hasattr(each, SOURCE)), None)
        if source is None:
            if any(value is not None and _ANGLES.search(name) for name, value in call.items()):
                unknown.add(attention)
            return
        found[attention] = source
        still = _rotation_of(source).scaled(0.0)
        again = attention.forward(**_with_angles(functools.partial(_angles, still), without_cache(call))[0])
        if not all(map(torch.equal, states_of(output), states_of(again))):
            turned.add(attention)

    base, modules = model.module, [place.module for place in places]
    with inference(base), restoring(lambda: unmark_sources(base)), hooked(modules, after=note), refusing(model):
        mark_sources(base)
        few_tokens(model)
        if copied := [number for number, module in enumerate(modules) if module in unknown]:
            raise NotProvedError(f"the cosines and sines of attention layers {copied} are copied or cut on their way")
        if not turned:
            raise NotProvedError("its attention modules are given no cosines and sines of a rotary module")
    return {number: _rotation_of(found[module]) for number, module in enumerate(modules) if module in turned}


@contextmanager
def refusing(model: SequenceModel) -> Iterator[None]:
    """Name the model, and the reason why no rotary encoding can be attached to it, in any error."""
    try:
        yield
    except Exception as error:
        reason = str(error)
        if not isinstance(error, NotProvedError):
            reason = f"it could not be run on a few tokens: {type(error).__name__}: {reason[:200]}"
        raise ValueError(f"a rotary encoding cannot be attached to {model}: {reason}") from error


def _rotation_of(source: _Source) -> RotaryEncoding:
    frequencies: Tensor = getattr(source.rotary, source.name)
    scaling = float(getattr(source.rotary, source.name.replace("inv_freq", "attention_scaling"), 1.0))
    return RotaryEncoding(2 * len(frequencies), frequencies=frequencies, attention_scaling=scaling)


def check_fit(model: SequenceModel, encodings: Sequence[RotaryEncoding], own: Sequence[RotaryEncoding]) -> None:
    """Refuse encodings that do not fit a model, or its own rotations where these are known.

    Raises:
        ValueError: Another number of dimensions; pairs or a causality that the model decides.
    """
    causal, rotary = model.family.causal(model.module), rotary_modules(model.module)
    every = {2 * len(getattr(module, name)) for module in rotary for name in frequency_buffers(module)}
    for number, each in enumerate(encodings):
        dims = {own[number].dim} if own else every
        if dims and each.dim not in dims:
            wanted = " or ".join(map(str, sorted(dims)))
            raise ValueError(f"encoding must rotate the {wanted} dimensions of the model, got dim={each.dim}")
        if rotary and each.interleaved:
            raise ValueError("encoding pairs dimensions as the model does when attached; leave interleaved=False")
        if each.causal and not causal:
            raise ValueError("encoding must not be causal: a rotation hides nothing, and this model is bidirectional")


def check_shared_keys(
    model: SequenceModel, places: Sequence[Place], encodings: Sequence[RotaryEncoding], *, every: bool
) -> None:
    """Refuse rotations that may differ between layers that share their keys (Gemma 3n), which would be rotated once.

    Raises:
        ValueError: They may.
    """
    if not any(getattr(place.module, "is_kv_shared_layer", False) for place in places):
        return
    kinds: dict[Any, Tensor] = {}  # of the first layer of each type
    same = every
    for place, each in zip(places, encodings, strict=True):
        first = kinds.setdefault(getattr(place.module, "layer_type", None), each.frequencies)
        same = same and torch.equal(first, each.frequencies) and not each.learnable
    if not same:
        advice = "attach one encoding to all layers, not learned"
        raise ValueError(f"layers of {model} share their keys, which are rotated once: {advice}")


def prove_rotations(
    model: SequenceModel,
    own: Sequence[RotaryEncoding],
    heads: Sequence[int],
    trial: Callable[[Sequence[RotaryEncoding]], AbstractContextManager[None]],
) -> None:
    """Check, on a few tokens, that an encoding takes the place of a model's rotation exactly.

    1. The model's own frequencies give its own outputs, for all heads together and for each head. 2. Other frequencies
    give the outputs of the model with these in its buffers, and not its own. 3. After removal the outputs are those
    before.

    Args:
        model: The model.
        own: Its rotation in each attention module.
        heads: The number of heads that the rotation of each attention module will have.
        trial: Attaches encodings, one for each attention module, for the time of a block.

    Raises:
        ValueError: A check failed; the message names it.
    """
    base = model.module

    def outputs(encodings: Sequence[RotaryEncoding]) -> list[Tensor]:
        with trial(encodings):
            return outputs_of(model, inputs)

    with inference(base), refusing(model):
        inputs, before = few_tokens(model)
        _check_close(outputs(own), before, before, "with its own frequencies its outputs are others")
        with _halved(base):
            halved = outputs_of(model, inputs)
        if all(map(torch.equal, halved, before)):
            raise NotProvedError("its frequencies change no output")
        half = outputs([each.scaled(0.5) for each in own])
        _check_close(half, halved, before, "with half of its frequencies its outputs are not those of such buffers")
        if any(number > 1 for number in heads):
            by_head = [each.with_heads(number) for each, number in zip(own, heads, strict=True)]
            check_same(outputs(by_head), before, "with its own frequencies for each head its outputs are others")
            first = [each.scaled([0.5] + [1.0] * (each.heads - 1)) for each in by_head]
            one_head = outputs(first)
            if any(all(map(torch.equal, one_head, each)) for each in (before, halved)):
                raise NotProvedError("its heads do not rotate by frequencies of their own")
        check_same(outputs_of(model, inputs), before, "after removal its outputs differ from those before")


def _check_close(found: list[Tensor], wanted: list[Tensor], before: list[Tensor], problem: str) -> None:
    """Refuse outputs that are others than wanted, but for a hundredth of what the change to them makes."""
    check_same(found, wanted, problem)
    change = max(float((a - b).nan_to_num().abs().max()) for a, b in zip(wanted, before, strict=True))
    off = max(float((a - b).nan_to_num().abs().max()) for a, b in zip(found, wanted, strict=True))
    if change and off > change / 100:
        raise NotProvedError(f"{problem}, by up to {off:.3g} where the change is {change:.3g}")


@contextmanager
def _halved(base: nn.Module) -> Iterator[None]:
    """Halve the frequencies of a model for the time of a block."""
    buffers = [
        (module, name, getattr(module, name)) for module in rotary_modules(base) for name in frequency_buffers(module)
    ]

    def undo() -> None:
        for module, name, values in buffers:
            module._buffers[name] = values

    with restoring(undo):
        for module, name, values in buffers:
            module._buffers[name] = values / 2
        yield
