"""Rotations in the place of a rotary model's own: its own code, run with other frequencies for each layer and head.

transformers computes the cosines and sines of all layers in one rotary module and passes them to every attention
module. Here each attention module computes them again, by the same method, with the frequencies of its encoding.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pelocality.encodings import RotaryEncoding
from pelocality.encodings.rotary import frequency_buffers
from pelocality.models._calls import argument_names, call_of
from pelocality.models._restore import called, hooked, inference, override, restore_method, restoring
from pelocality.models._rotations import depend_on_length
from pelocality.models._weights import loaded
from pelocality.models.attaching.bias import PositionalBias
from pelocality.models.attaching.places import Place
from pelocality.models.attaching.proof import NotProvedError, check_same, few_tokens, outputs_of
from pelocality.models.attaching.rotary.by_head import ByHead
from pelocality.models.families import ATTACHED, SOURCE
from pelocality.models.sequence_model import SequenceModel


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
            frequencies, scaling = self.encoding.frequencies, self.encoding.attention_scaling
            method = inspect.unwrap(type(source.rotary).forward)  # without the decorators that stop gradients
            names = (source.name, source.name.replace("inv_freq", "attention_scaling"))
            by_head = [
                method(_WithOther(source.rotary, dict(zip(names, (each, scaling), strict=True))), **source.call)
                for each in frequencies
            ]
        if len(by_head) == 1:
            return by_head[0]
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
    angles: dict[int, Any] = {}

    def own(value: Any) -> Any:
        source = getattr(value, SOURCE, None) if isinstance(value, Tensor) else None
        if source is None:
            return value
        if id(source.call) not in angles:
            angles[id(source.call)] = rotation(source)
        found = angles[id(source.call)]
        return found[source.output] if isinstance(found, tuple) else found

    args, kwargs = tree_map(own, (args, kwargs))
    if not angles:
        raise ValueError(
            f"{type(attention).__name__} got no cosines and sines of a rotary module of its model, by which an "
            "attached rotary encoding is passed on; call the model itself"
        )
    return forward(*args, **kwargs)


def mark_sources(base: nn.Module) -> None:
    """Make the rotary modules of a model note on their outputs where they come from."""
    for module in rotary_modules(base):
        override(module, "_old_forward" if "_old_forward" in module.__dict__ else "forward", _marked)


def unmark_sources(base: nn.Module) -> None:
    """Undo `mark_sources`."""
    for module in base.modules():
        for name in ("forward", "_old_forward"):
            restore_method(module, name, _marked)


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
    """Return the rotation that attention modules are given, by their place; found by running a few tokens.

    Raises:
        ValueError: No attention module is given one.
    """
    found: dict[nn.Module, _Source] = {}

    def note(attention: nn.Module, args: Any, kwargs: Any) -> None:
        for each in tree_leaves((args, kwargs)):
            if (source := getattr(each, SOURCE, None)) is not None:
                found.setdefault(attention, source)

    base, modules = model.module, [place.module for place in places]
    with inference(base), restoring(lambda: unmark_sources(base)), hooked(modules, note):
        mark_sources(base)
        few_tokens(model)
    if not found:
        reason = "its attention modules are given no cosines and sines of a rotary module"
        raise ValueError(f"a rotary encoding cannot be attached to {model}: {reason}")
    return {number: _rotation_of(found[module]) for number, module in enumerate(modules) if module in found}


def _rotation_of(source: _Source) -> RotaryEncoding:
    frequencies: Tensor = getattr(source.rotary, source.name)
    scaling = float(getattr(source.rotary, source.name.replace("inv_freq", "attention_scaling"), 1.0))
    return RotaryEncoding(2 * len(frequencies), frequencies=frequencies, attention_scaling=scaling)


def check_fit(model: SequenceModel, encodings: Sequence[Any], own: Sequence[RotaryEncoding]) -> None:
    """Refuse encodings that do not fit a model, or its own rotations where these are given.

    Raises:
        TypeError: Not all of them are rotations.
        ValueError: Another number of dimensions; pairs or a causality that the model decides.
    """
    causal = model.family.causal(model.module)
    for place, each in enumerate(encodings):
        if not isinstance(each, RotaryEncoding):
            raise TypeError(f"encoding must be rotary for all layers or for none, got {type(each).__name__} too")
        if own and each.dim != own[place].dim:
            raise ValueError(f"encoding must rotate the {own[place].dim} dimensions of the model, got dim={each.dim}")
        if own and each.interleaved:
            raise ValueError("encoding pairs dimensions as the model does when attached; leave interleaved=False")
        if each.causal and not causal:
            raise ValueError("encoding must not be causal: a rotation hides nothing, and this model is bidirectional")


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

    with inference(base):
        inputs, before = few_tokens(model)
        try:
            check_same(outputs(own), before, "with its own frequencies its outputs are others")
            by_head = [each.with_heads(number) for each, number in zip(own, heads, strict=True)]
            check_same(outputs(by_head), before, "with its own frequencies for each head its outputs are others")
            with _halved(base):
                halved = outputs_of(model, inputs)
            half = outputs([each.scaled(0.5) for each in own])
            check_same(half, halved, "with half of its frequencies its outputs are not those of such buffers")
            if all(map(torch.equal, halved, before)):
                raise NotProvedError("its frequencies change no output")
            check_same(outputs_of(model, inputs), before, "after removal its outputs differ from those before")
        except ValueError as error:
            raise ValueError(f"a rotary encoding cannot be attached to {model}: {error}") from error


@contextmanager
def _halved(base: nn.Module) -> Iterator[None]:
    """Halve the frequencies of a model for the time of a block."""
    buffers = [getattr(module, name) for module in rotary_modules(base) for name in frequency_buffers(module)]
    before = [each.clone() for each in buffers]

    def undo() -> None:
        for buffer, values in zip(buffers, before, strict=True):
            buffer.copy_(values)

    with restoring(undo):
        for buffer, values in zip(buffers, before, strict=True):
            buffer.copy_(values / 2)
        yield
