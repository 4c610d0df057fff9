"""Rotations in the place of a rotary model's own: its own code, run with other frequencies for each layer and head.

transformers computes the cosines and sines of all layers in one rotary module and passes them to every attention
module. Here each attention module computes them again, by the same method, with the frequencies of its encoding.
"""

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pelocality.encodings import RotaryEncoding
from pelocality.encodings._frequencies import by_length, frequency_buffers, rope_types, scaling_name, scaling_of
from pelocality.models._calls import argument_names, call_of
from pelocality.models._restore import called, changed, hooked, override_forward, restoring
from pelocality.models._weights import loaded
from pelocality.models.attaching.bias import Place, PositionalBias
from pelocality.models.attaching.kind import Kind, known_places, remove
from pelocality.models.attaching.proof import NotProvedError, check_same, outputs_of, proving, states_of
from pelocality.models.attaching.rotary.by_head import ByHead
from pelocality.models.families import SOURCE, without_cache
from pelocality.models.sequence_model import SequenceModel

# Attention modules take cosines and sines under these names.
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

    @property
    def rotation(self) -> RotaryEncoding:
        """The rotation of the model by this tensor."""
        frequencies: Tensor = getattr(self.rotary, self.name)
        scaling = scaling_of(self.rotary, self.name)
        return RotaryEncoding(2 * len(frequencies), frequencies=frequencies, attention_scaling=scaling)


class PositionalRotary(PositionalBias):
    """A rotary encoding as a submodule of an attention module, whose forward pass then rotates by it."""

    encoding: RotaryEncoding
    is_rotation = True

    def run(self, attention: Any, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Return what the forward pass of the attention module returns with the cosines and sines of the encoding."""
        (args, kwargs), given = _with_angles(self, (args, kwargs))
        if not given:
            raise ValueError(
                f"{type(attention).__name__} got no cosines and sines of a rotary module of its model, by which an "
                "attached rotary encoding is passed on; call the model itself"
            )
        return forward(*args, **kwargs)

    def forward(self, source: _Source) -> Any:
        """Return what a rotary module returns, for the frequencies of the encoding."""
        with loaded(self.encoding, [self.encoding]):
            return _angles(self.encoding, source)


def _angles(encoding: RotaryEncoding, source: _Source) -> Any:
    """Return what a rotary module returns, for other frequencies: cosines and sines, or complex numbers."""
    method = inspect.unwrap(type(source.rotary).forward)  # the decorators of this method stop gradients
    scaling = {scaling_name(source.name): encoding.attention_scaling}
    others = [{source.name: each} | scaling for each in encoding.frequencies]
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


def _marked(rotary: Any, previous: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """Return the output of a rotary module, with a note on it of where it comes from."""
    output = called(rotary, "forward", previous)(*args, **kwargs)
    call = call_of(rotary, args, kwargs)
    for index, each in enumerate(output if isinstance(output, tuple) else (output,)):
        setattr(each, SOURCE, _Source(rotary, call, index))
    return output


# ---- the kind


class ModuleRotation(Kind):
    """A rotation in the place of that of a rotary model."""

    submodule = PositionalRotary

    def prepare(self, encoding: Any, layers: Sequence[int] | None, *, prove: bool) -> list[Any]:
        """Find the layers that rotate, refuse encodings that do not fit them, and prove the rotation."""
        model = self.model
        refuse_options(self)
        if not self.disable:
            raise ValueError(
                f"position_embeddings must be 'disable': a rotary encoding replaces the rotation of {model}"
            )
        self.places = rotary_places(model)
        own = self.own_rotations() if prove else [None for _ in self.places]
        known = [number for number, each in enumerate(own) if each is not None] or [*range(len(own))]
        encodings = self.copies(encoding, layers, known, f"in which {model} rotates no queries and keys")
        self._check_fit(encodings, own)
        self._check_shared_keys(encodings, known)
        if prove:
            self._prove(own, encodings)
        return encodings

    def switch_on(self, *, disable: bool) -> None:
        """Make rotary modules mark their cosines and sines, by which attention modules compute others."""
        for module in rotary_modules(self.model.module):
            override_forward(module, _marked)

    def own_rotations(self) -> list[Any]:
        """Return the rotation of each attention module, None where it does not rotate; found by running a few tokens.

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
            still = source.rotation.scaled(0.0)
            again = attention.forward(**_with_angles(functools.partial(_angles, still), without_cache(call))[0])
            if not all(map(torch.equal, states_of(output), states_of(again))):
                turned.add(attention)

        model, modules = self.model, [place.module for place in self.places]
        marked = restoring(functools.partial(remove, model))
        with proving(model, "a rotary encoding") as (inputs, _), marked, hooked(modules, after=note):
            self.switch_on(disable=True)
            model.outputs(inputs)
            if copied := [number for number, module in enumerate(modules) if module in unknown]:
                raise NotProvedError(
                    f"the cosines and sines of attention layers {copied} are copied or cut on their way"
                )
            if not turned:
                raise NotProvedError("its attention modules are given no cosines and sines of a rotary module")
        return [found[module].rotation if module in turned else None for module in modules]

    def _check_fit(self, encodings: Sequence[Any], own: Sequence[Any]) -> None:
        """Refuse encodings that rotate other dimensions than the model, or pair them by themselves."""
        modules = rotary_modules(self.model.module)
        every = {2 * len(getattr(module, name)) for module in modules for name in frequency_buffers(module)}
        for each, known in zip(encodings, own, strict=True):
            dims = every if known is None else {known.dim}
            if each is not None and each.dim not in dims:
                wanted = " or ".join(map(str, sorted(dims)))
                raise ValueError(f"encoding must rotate the {wanted} dimensions of the model, got dim={each.dim}")
            if each is not None and each.interleaved:
                raise ValueError("encoding pairs dimensions as the model does when attached; leave interleaved=False")
        refuse_causal(self.model, encodings)

    def _check_shared_keys(self, encodings: Sequence[Any], known: Sequence[int]) -> None:
        """Refuse rotations that may differ between layers that share their keys (Gemma 3n), which are rotated once."""
        chosen = [(place.module, each) for place, each in zip(self.places, encodings, strict=True) if each is not None]
        if not any(getattr(module, "is_kv_shared_layer", False) for module, _ in chosen):
            return
        first: dict[Any, Tensor] = {}
        same = len(chosen) == len(known)
        for module, each in chosen:
            frequencies = first.setdefault(getattr(module, "layer_type", None), each.frequencies)
            same = same and torch.equal(frequencies, each.frequencies) and not each.learnable
        if not same:
            advice = "attach one encoding to all layers, not learned"
            raise ValueError(f"layers of {self.model} share their keys, which are rotated once: {advice}")

    def _prove(self, own: Sequence[Any], encodings: Sequence[Any]) -> None:
        """Check, on a few tokens, that an encoding takes the place of the model's rotation exactly.

        1. The model's own frequencies give its own outputs, for all heads together and for each head. 2. Other
        frequencies give the outputs of the model with these in its buffers, and not its own. 3. After removal the
        outputs are those before.

        Args:
            own: The rotation of the model in each place.
            encodings: What each place gets, of which the number of heads is proved.

        Raises:
            ValueError: A check failed; the message names it.
        """
        model = self.model
        heads = [1 if each is None else each.heads for each in encodings]

        def outputs(change: Callable[[RotaryEncoding, int], RotaryEncoding]) -> list[Tensor]:
            changed = [None if one is None else change(one, number) for one, number in zip(own, heads, strict=True)]
            with self.trial(changed, disable=True):
                return outputs_of(model, inputs)

        with proving(model, "a rotary encoding") as (inputs, before):
            same = outputs(lambda one, _: one)
            _check_close(same, before, before, "with its own frequencies its outputs are others")
            with ExitStack() as stack:
                for module in rotary_modules(model.module):
                    for name in frequency_buffers(module):
                        stack.enter_context(changed(module, name, getattr(module, name) / 2))
                halved = outputs_of(model, inputs)
            if all(map(torch.equal, halved, before)):
                raise NotProvedError("its frequencies change no output")
            half = outputs(lambda one, _: one.scaled(0.5))
            _check_close(half, halved, before, "with half of its frequencies its outputs are not those of such buffers")
            if any(number > 1 for number in heads):
                by_head = outputs(lambda one, number: one.with_heads(number))
                check_same(by_head, before, "with its own frequencies for each head its outputs are others")
                one_head = outputs(lambda one, number: one.with_heads(number).scaled([0.5] + [1.0] * (number - 1)))
                if any(all(map(torch.equal, one_head, each)) for each in (before, halved)):
                    raise NotProvedError("its heads do not rotate by frequencies of their own")


def _check_close(found: list[Tensor], wanted: list[Tensor], before: list[Tensor], problem: str) -> None:
    """Refuse outputs that are others than wanted, but for a hundredth of what the change to them makes."""
    check_same(found, wanted, problem)
    change = max(float((a - b).nan_to_num().abs().max()) for a, b in zip(wanted, before, strict=True))
    off = max(float((a - b).nan_to_num().abs().max()) for a, b in zip(found, wanted, strict=True))
    if change and off > change / 100:
        raise NotProvedError(f"{problem}, by up to {off:.3g} where the change is {change:.3g}")


# ---- what is known of a model


def rotary_modules(base: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that have the frequencies of a rotation and are called with position ids."""
    return [each for each in base.modules() if "position_ids" in argument_names(each) and frequency_buffers(each)]


def has_rotations(model: SequenceModel) -> bool:
    """Return whether a model has rotations of its own.

    Raises:
        ValueError: They cannot be set, or the model is no transformers model of token ids.
    """
    found, reason = rotary_modules(model.module), None
    if model.adds_tokens:
        reason = "it is no transformers model of token ids; use RotaryEncoding in biased_attention"
    elif any(by_length(kind) for module in found for kind in rope_types(module)):
        reason = "its frequencies depend on the length of its input; load it with rope_parameters of another rope_type"
    if reason:
        raise ValueError(f"a rotary encoding cannot be attached to {model}: {reason}")
    return bool(found)


def rotary_places(model: SequenceModel) -> list[Place]:
    """Return the attention modules of a model with the number of heads of keys, which may have a rotation each."""
    groups = [(place, getattr(place.module, "num_key_value_groups", 1)) for place in known_places(model)]
    return [place._replace(heads=place.heads // number) for place, number in groups]


def refuse_options(kind: Kind) -> None:
    """Refuse names of parts that hold positions, and a batch."""
    if kind.names:
        raise ValueError(f"disable is for encodings that add a bias; a rotation replaces the rotation of {kind.model}")
    if kind.inputs is not None:
        raise ValueError(f"example_inputs is for encodings that add a bias; a rotation of {kind.model} needs none")


def refuse_causal(model: SequenceModel, encodings: Sequence[Any]) -> None:
    """Refuse causal rotations in a bidirectional model."""
    if any(each is not None and each.causal for each in encodings) and not model.family.causal(model.module):
        raise ValueError("encoding must not be causal: a rotation hides nothing, and this model is bidirectional")
