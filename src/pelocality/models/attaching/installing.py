"""Encodings put into the attention modules of a model, and taken out again."""

import copy
import math
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pelocality.encodings import Encoding, RotaryEncoding
from pelocality.models._calls import argument_names, call_of
from pelocality.models._inference import depend_on_length, inference
from pelocality.models._restore import called, hooked, override, restore_module, restoring
from pelocality.models._weights import execution_device
from pelocality.models.attaching.calls import check_call, check_implementation, no_continuous_batching
from pelocality.models.attaching.positions import (
    angles_of,
    disable_named,
    disable_positions,
    enable_parameters,
    note_places,
    turns_of,
)
from pelocality.models.attaching.saving import warn_of_adapters
from pelocality.models.attaching.submodule import Attached, Place
from pelocality.models.families import ATTACHED, attached_biases
from pelocality.models.layers import texts_of
from pelocality.models.observer import Attention
from pelocality.models.rotations import content_places, read_rotations, tokens_seen, waves_of
from pelocality.models.sequence_model import SequenceModel, map_tensors
from pelocality.models.token_proof import Axes, first_text, prove_tokens, tensors_of

_NESTS, _NESTED = "use_nested_tensor", f"_{ATTACHED}_used_nested_tensor"


@dataclass(frozen=True)
class Plan:
    """Where encodings go in a model, and what they take the place of.

    Attributes:
        model: The model.
        disable: Whether its positions are disabled.
        names: The parts and parameters to disable in a model whose positions are not known.
        inputs: A batch that the model reads.
        places: Its attention modules, in the order in which they run first, and how each computes attention.
        own: The rotation of the model in each place, which the encoding replaces, or None.
        length: As for `on_model`.
    """

    model: SequenceModel
    disable: bool
    names: Sequence[str]
    inputs: Any = None
    places: dict[nn.Module, Place] = field(default_factory=dict)
    own: Sequence[RotaryEncoding | None] = ()
    length: int | None = None
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Tells the encodings of one plan from others; copies have the same key: peft replaces modules by copies."""

    @property
    def replaces(self) -> bool:
        """Whether the encodings take the place of the model's own rotation."""
        return any(each is not None for each in self.own)

    def on_model(self, *, rotary: bool, prove: bool = False, length: int | None = None) -> Self:
        """Return the plan with the places and rotations of the model, which is run for this.

        Args:
            rotary: Whether the encodings are rotations.
            prove: As for `find_places`.
            length: The number of tokens that encodings are for, or None; of a model that reads no token ids the number
                in constant content, on which its rotation is read.

        Raises:
            ValueError: The model takes no such encoding.
        """
        model = self.model
        _check_positions(model, self.disable, self.names, rotary=rotary)
        inputs = batch_for(model, self.inputs, None if rotary and not model.adds_tokens else length)
        of_images = model.adds_tokens and not (self.names and model.config is None)
        own = own_rotations(model, inputs, length) if self.disable and (rotary or of_images) else {}
        places = find_places(model, inputs, prove=prove, turning=own if model.adds_tokens else ())
        if model.adds_tokens and self.disable and not (self.names or own):
            advice = "name what holds positions, disable=[...], or add the encoding to them, position_embeddings='keep'"
            raise ValueError(f"the positions of {model} are not known; {advice}")
        if unread := [type(each).__name__ for each in places if own.get(each, ()) is None]:
            raise ValueError(f"the rotation of {unread[0]} in {model} cannot be read, as it attends over other tokens")
        places |= {each: places[each]._replace(waves=own[each][1]) for each in places if each in own}
        rotations = [own[each][0] if rotary and each in own else None for each in places]
        plan = replace(self, inputs=inputs, places=places, own=rotations, length=length)
        reason = None if model.adds_tokens else model.family.why_positions_remain(model.module)
        if self.disable and not plan.replaces and reason:
            raise ValueError(f"the positions of {model} cannot be disabled: {reason}; use position_embeddings='keep'")
        return plan

    def install(self, encodings: Sequence[Any], *, disable: bool) -> None:
        """Attach encodings, one for each place or None; `remove` undoes it, also where it was interrupted."""
        model, names = self.model, self.names if disable else ()
        base, record = model.module, None if model.adds_tokens else model.family
        implementation = getattr(model.config, "_attn_implementation", None)
        for each, (module, place) in zip(encodings, self.places.items(), strict=True):
            if each is not None:
                part = Attached(each, place, record, disable, names, implementation, disable and self.replaces)
                part.key = self.key
                part.install(module)
        for module in transformers_parts(model):
            override(module, "init_continuous_batching", _init_continuous_batching)
            if record is not None:
                module.register_forward_pre_hook(partial(check_call, next(iter(self.places))), with_kwargs=True)
        for module in base.modules():
            if vars(module).get(_NESTS):  # nn.TransformerEncoder packs texts for a kernel without encodings
                vars(module).update({_NESTS: False, _NESTED: True})
        if record is not None and any(getattr(each, "axes", 1) > 1 for each in encodings):
            for module in base.modules():
                if "position_ids" in argument_names(module):
                    module.register_forward_pre_hook(partial(note_places, list(self.places)), with_kwargs=True)
        base.register_state_dict_post_hook(warn_of_adapters)
        if record is None:
            disable_named(base, names)
        elif disable and not self.replaces:
            disable_positions(record, base)
        if "torch._dynamo" in sys.modules:  # compiled code notices a removed submodule, but no new hook
            torch.compiler.reset()

    @contextmanager
    def trial(self, encodings: Sequence[Any], *, disable: bool) -> Iterator[None]:
        """Attach copies of encodings for the time of a block."""
        with restoring(partial(remove, self.model)):
            self.install(fitted(self, encodings), disable=disable)
            yield


def remove(model: SequenceModel) -> None:
    """Remove the encodings of a model and all that was switched on with them, also where either was interrupted."""
    base = model.module
    for module in list(base.modules()):
        if ATTACHED in module._modules:
            getattr(module, ATTACHED).uninstall(module)
    for module in list(base.modules()):
        restore_module(module, __package__)
        enable_parameters(module)
        if vars(module).pop(_NESTED, False):
            setattr(module, _NESTS, True)
    for module in transformers_parts(model):
        restore_module(module, __package__)


def fitted(plan: Plan, encodings: Sequence[Any]) -> list[Any]:
    """Return copies on the devices of the attention modules, at least as precise as their weights."""
    base = plan.model.module
    return [
        None if each is None else _fitting(each, module, base)
        for each, module in zip(encodings, plan.places, strict=True)
    ]


def _fitting(encoding: Encoding, module: nn.Module, base: Any) -> Encoding:
    weights = [parameter for parameter in module.parameters() if parameter.is_floating_point()]
    # Weights of a quantised module are integers, and a softmax may be a module without any.
    weights = weights or [parameter for parameter in base.parameters() if parameter.is_floating_point()][:1]
    precision = reduce(torch.promote_types, {weight.dtype for weight in weights}, encoding.working_dtype)
    with torch.inference_mode(False):  # a parameter made in this mode cannot be trained
        copied = copy.deepcopy(encoding).to(execution_device(module) or weights[0].device, precision)
    return copied.train(module.training)


def _init_continuous_batching(model: Any, previous: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """Refuse continuous batching before transformers starts the thread in which it would call the model."""
    if attached_biases(model):  # false if the encodings were removed through a part of the model
        no_continuous_batching()
    return called(model, "init_continuous_batching", previous)(*args, **kwargs)


def transformers_parts(model: SequenceModel) -> list[Any]:
    """Return the transformers model with its head and without, where it is one."""
    return [each for each in dict.fromkeys((model.with_head, model.module)) if isinstance(each, PreTrainedModel)]


def reading(model: nn.Module, inputs: Any = None) -> SequenceModel:
    """Return the `SequenceModel` of a model that reads no token ids, or none that are known."""
    return SequenceModel(model, inputs=lambda sample, length: inputs)


# ---- what runs


def _check_positions(model: SequenceModel, disables: bool, names: Sequence[str], *, rotary: bool) -> None:
    """Refuse positions that cannot be disabled, names where positions are known, and models without exact logits."""
    if names and not (model.adds_tokens and disables):
        rule = "modules whose positions are not known, and position_embeddings='disable'"
        raise ValueError(f"disable is for {rule}; leave it out")
    if model.adds_tokens:
        return
    _ = model.device  # this property refuses weights on the meta device
    if not rotary and (reason := model.family.why_not_additive(model.module)):
        raise ValueError(f"an encoding cannot be attached to {model} exactly: {reason}")
    check_implementation(model.module)


def batch_for(model: SequenceModel, inputs: Any, length: int | None = None) -> Any:
    """Return a batch that a model reads: these inputs, or two texts of some tokens, or noise.

    Noise has the shape of the constant content of a model that reads no token ids.
    """
    if not model.adds_tokens or (inputs is None and model.content is None):
        n = length or 7
        inputs = {"input_ids": torch.tensor([model.some_ids(n), model.some_ids(n + 1)[1:]], device=model.device)}
    elif inputs is None:
        if length is None:
            raise ValueError(f"{model} reads no token ids; give example_inputs, a batch that it reads")
        noise = partial(torch.randn, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        inputs = map_tensors(model.content(0, length), lambda x: noise(x.shape) if x.is_floating_point() else x)
    return model.moved(inputs) if model.adds_tokens else inputs


def find_places(model: SequenceModel, inputs: Any, *, prove: bool = False, turning: Any = ()) -> dict[nn.Module, Place]:
    """Return how each module computes self-attention on a batch, in the order in which they run first.

    Args:
        model: The model.
        inputs: The batch.
        prove: Whether to prove first that the attention of a model of token ids is over its tokens.
        turning: The modules whose tokens are known by their rotation, if these alone attend over tokens.

    Raises:
        ValueError: No attention was seen, or attention outside of every part of the model, or with heads before texts,
            or not over the tokens.
    """
    axes = _proved_axes(model, inputs) if not turning and (prove or model.adds_tokens) else None
    causal = {each.owner: each.causal for each in axes or ()}
    column = {each.owner: each.column for each in axes or ()}
    singles: Counter[tuple[nn.Module, int | None]] = Counter()  # attentions of one head in one call of a module
    ran: set[nn.Module] = set()
    places: dict[nn.Module, Place] = {}

    def note(attention: Attention) -> None:
        shape, owner = attention.weights.shape, attention.owner
        if owner is None or (axes is not None and owner not in causal) or (turning and owner not in turning):
            return
        if not attention.whole:
            way = "by exponentials, for some queries at a time or inside torch.vmap, where no encoding enters"
            raise ValueError(f"an encoding cannot be attached to {model}: {type(owner).__name__} attends {way}")
        heads = math.prod(shape[1:-2]) if len(shape) > 3 else shape[0] // texts_of(inputs)
        singles[owner, attention.call] += heads == 1 and attention.call is not None
        no_later = causal.get(owner, False) or not bool(attention.visible.broadcast_to(shape).triu(1).any())
        first = attention.first + column.get(owner, 0)
        before = places.setdefault(owner, Place(heads, attention.sink, no_later, first=first))
        places[owner] = before._replace(causal=before.causal and no_later)

    attentions = [] if model.adds_tokens else model.family.attention_modules(model.module)
    with inference(model.module), hooked(attentions, lambda module, args, kwargs: ran.add(module)):
        model.watch(inputs, note, None)
    for (module, _), parts in singles.items():
        if parts > 1:
            places[module] = places[module]._replace(heads=parts, parts=parts)
    reason = None
    if unseen := [each for each in _unseen(model, places) if each in ran]:
        reason = f"it has {type(unseen[0]).__name__}, which computes no attention that torch shows"
    elif not places:
        reason = "it computed no attention over its tokens"
    elif axes and axes[0].heads_first:
        reason = "its attention has heads before texts in its shape, and an encoding needs (batch, head, n, n)"
    if reason:
        raise ValueError(f"an encoding cannot be attached to {model}: {reason}")
    return places


def _proved_axes(model: SequenceModel, inputs: Any) -> list[Axes] | None:
    """Return the axes of the attentions over the tokens on the first text of a batch, maybe along its second axis."""
    texts_are_second = model.content is not None and any(each.ndim > 2 for each in tensors_of(inputs))
    errors = []
    for axis in (0, 1) if texts_are_second else (0,):
        try:
            return prove_tokens(model, first_text(inputs, axis))
        except ValueError as error:
            errors.append(error)
            model.axes = None
    raise ValueError(f"an encoding cannot be attached to {model}: {errors[0]}") from errors[0]


def _unseen(model: SequenceModel, seen: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the attention modules of a transformers model of tokens, by its record, in which no attention was seen."""
    inside = {part for module in seen for part in module.modules()}
    attentions = [] if model.adds_tokens else model.family.attention_modules(model.module)
    return [module for module in attentions if inside.isdisjoint(module.modules())]


def own_rotations(model: SequenceModel, inputs: Any, length: int | None) -> dict[nn.Module, Any]:
    """Return the rotation of each attention module that is given angles, and the waves of these as in `Place`.

    None is in the place of both where a module is given other angles than those of all tokens.

    Args:
        model: The model.
        inputs: A batch of it.
        length: As for `Plan.on_model`.
    """
    given: dict[nn.Module, list[Any]] = {}

    def note(module: Any, args: Any, kwargs: Any) -> None:
        for angles in angles_of(call_of(module, args, kwargs)):
            given.setdefault(module, []).append(angles)

    modules = [each for each in model.module.modules() if not isinstance(each, torch.jit.ScriptModule)]
    with inference(model.module), hooked(modules, before=note):
        model.outputs(inputs)
        if not given:
            return {}
        given.clear()
        length = length if model.adds_tokens and length else max(tokens_seen(model, inputs))
        every = read_rotations(model, length if model.adds_tokens or depend_on_length(model.module) else None)
    read, own = {call.owner: each for call, each in every}, dict[nn.Module, Any]()
    for module, each in read.items():
        if each is not None and module in given:
            waves: Any = ()
            if model.adds_tokens:  # the second run is in float32
                turns = 1j * turns_of(given[module][1]).cpu()
                waves = waves_of(turns.exp(), content_places(model, length))[0][0].tolist()
            own[module] = RotaryEncoding.of_waves(*each[:2], attention_scaling=each.scaling, length=length), waves
    # Attention in windows is not over all tokens, but is given their angles.
    others = {module: each[1][0] for module, each in given.items() if model.adds_tokens and module not in read}
    by_angles = {id(given[module][1][0]): each for module, each in own.items() if others}
    return {module: by_angles.get(id(cos)) for module, cos in others.items()} | own


def states_of(output: Any) -> list[Tensor]:
    """Return the hidden states in the output of an attention module."""
    first = output[0] if isinstance(output, tuple) else output
    return [first] if isinstance(first, Tensor) else list(first)
