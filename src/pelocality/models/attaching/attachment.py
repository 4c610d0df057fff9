"""Attaching encodings to a model, and removing them again."""

import copy
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pelocality._checks import check_choice, flag
from pelocality.encodings import ContentEncoding, Encoding, NoEncoding, RotaryEncoding
from pelocality.encodings.base import check_encoding
from pelocality.models._calls import call_of
from pelocality.models._restore import called, override, restore_method, restoring, restoring_on_error, unhook
from pelocality.models._weights import execution_device
from pelocality.models.attaching.bias import PositionalBias
from pelocality.models.attaching.disable import disable_named, disable_positions, enable_positions
from pelocality.models.attaching.places import Place, find_places, known_places
from pelocality.models.attaching.proof import prove as proved
from pelocality.models.attaching.rotary.modules import (
    PositionalRotary,
    check_fit,
    check_shared_keys,
    has_rotations,
    key_heads,
    mark_sources,
    own_rotations,
    prove_rotations,
    rotary_modules,
    unmark_sources,
)
from pelocality.models.attaching.rotary.projections import PositionalProjection, check_projections, prove_projections
from pelocality.models.attaching.saving import check_state_dict, mark_saved_folders, unmark_saved_folders
from pelocality.models.families import ATTACHED, attached_biases, no_continuous_batching
from pelocality.models.inputs.tokens import runs_of_tokens
from pelocality.models.sequence_model import SequenceModel, requested_layers

Positions = Literal["disable", "keep"]

_IMPLEMENTATIONS = ("eager", "sdpa")


@dataclass(frozen=True)
class Attachment:
    """The encodings attached to a model, with the method that removes them.

    Attributes:
        model: The model that was given to `attach`.
        encodings: The attached copies, one per attention module in the order they run; train these.
        position_embeddings: Whether the model's position embeddings are disabled: ``"disable"`` or ``"keep"``.
    """

    model: nn.Module = field(repr=False)
    encodings: tuple[Encoding, ...]
    position_embeddings: Positions
    _keys: frozenset[str] = field(default=frozenset(), init=False, repr=False, compare=False)
    _block: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_keys", self._attached_keys())

    def remove(self) -> None:
        """Remove the encodings and enable the model's position embeddings again.

        No weight of the model changes. A second call does nothing.
        """
        if self._is_attached():
            with restoring(functools.partial(_undo, _attached_model(self.model))):
                pass

    def _is_attached(self) -> bool:
        """Return whether one of the encodings, or a copy that peft trains, is in the model."""
        return not self._keys.isdisjoint(self._attached_keys())

    def _attached_keys(self) -> frozenset[str]:
        return frozenset(bias.key for bias in _biases(self.model))

    def __enter__(self) -> Self:
        # of a copy: in a reference cycle the block would not be closed where an interrupt skips its end
        object.__setattr__(self, "_block", restoring(replace(self).remove))
        self._block.__enter__()  # first, as an interrupt may come at any time
        if not self._is_attached():
            raise ValueError("the encodings of this attachment were removed; call attach again")
        return self

    def __exit__(self, *error: Any) -> None:
        self._block.__exit__(*error)


def attach(
    model: nn.Module | SequenceModel,
    encoding: Encoding | Sequence[Encoding],
    *,
    position_embeddings: Positions = "disable",
    prove: bool = True,
    example_inputs: Any = None,
    layers: Sequence[int] | None = None,
    disable: Sequence[str] = (),
) -> Attachment:
    r"""Attach an encoding to every layer of a model.

    $$\mathrm{attention} = \mathrm{softmax}(\mathrm{logits} + \mathrm{bias})$$

    with the encoding's bias for the number of queries and keys in the call. The model is changed in place, the encoding
    is copied. Padding and causal masks still apply, and are passed to encodings that normalise over keys: a sentence
    gives the same output with and without padding, a prefix the same with and without the tokens after it.

    Args:
        model: A transformers model, with or without a task head; or any module, with ``example_inputs``. Of an
            encoder-decoder model the encoder is changed; pass ``model.get_decoder()`` to change the decoder. In a
            hybrid the attention layers are changed, in a model of images and text the language model.
        encoding: One encoding, copied for every layer, or a list of one per layer. Layers that share their weights
            (ALBERT's) share their encoding, so there the list has one per group. An encoding of one head serves all
            heads. A `RotaryEncoding` takes the place of the rotation of a rotary model, or rotates the queries and keys
            of a model that has projections for them; a rotation adds no bias.
        position_embeddings: ``"disable"``: the model's position embeddings have no effect, so that only the encoding
            gives the order of the tokens, and inputs may be longer than the table of positions. ``"keep"``: the
            encoding is added to them.
        prove: Whether to run the model on a few tokens first, as it is and with trial encodings, and to refuse it
            unless: a bias of zero changes no output; any other enters the logits of every attention layer exactly; what
            was hidden, padding or the future, stays hidden; with positions disabled and all masks opened, the order of
            tokens makes no difference (in a hybrid, to its attention layers); after removal the outputs are those
            before. False for a model that cannot be run here, such as one sharded over processes.
        example_inputs: For a module that is no transformers model of token ids: a batch that it reads (a tensor, a
            tuple or a dict), on which its attention is found and the bias is proved.
        layers: The layers that get the encoding, by their number in the order in which they run; by default all.
        disable: For such a module: the names of its parts or parameters that hold positions, such as ``["pos_embed"]``.
            They give zeros while the encoding is attached.

    Returns:
        The handle, whose ``.remove()`` undoes everything, and so does leaving it as a context manager.

    Raises:
        TypeError: ``model`` is not a module, or is no transformers model and there are no ``example_inputs``;
            ``encoding`` is not an encoding, or it could not be saved.
        ValueError: A model for which a check failed, or to which the bias cannot be added exactly, an attention
            implementation other than ``"eager"`` and ``"sdpa"``, weights on the meta device, a wrong number of heads or
            layers, a symmetry for a causal model, a model with adapters of peft, or with an encoding already attached.

    Note:
        A sliding window or a causal mask is not a position embedding and remains when positions are disabled, though
        the output depends on the order of tokens through it. Under ``"sdpa"`` a call that asks for attention weights is
        refused, because that kernel does not return them. Under ``DistributedDataParallel`` pass
        ``find_unused_parameters=True`` when positions are disabled, because their weights are unused. Compiled models
        of this process are compiled again.

    Examples:
        >>> from pelocality.encodings import AttenuatedEncoding
        >>> from transformers import BertConfig, BertModel
        >>> bert = BertModel(BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8))
        >>> with attach(bert, AttenuatedEncoding(heads=2, decay=0.2, symmetry=0.5)) as attachment:
        ...     [encoding.decay for encoding in attachment.encodings]
        [tensor([0.2000, 0.2000]), tensor([0.2000, 0.2000])]
    """
    flag("prove", prove)
    check_choice("position_embeddings", position_embeddings, get_args(Positions))
    if example_inputs is not None and not isinstance(model, SequenceModel):
        model = _of_any_inputs(model, example_inputs)
    model = SequenceModel.of(model)
    _check_adapters(model.given)
    if _biases(model.given):
        raise ValueError(f"{model} has an encoding attached already; remove it first: attached(model).remove()")
    if _rotates(encoding):
        if disable:
            raise ValueError(f"disable is for encodings that add a bias; a rotation replaces that of {model}")
        return _attach_rotations(model, encoding, layers, position_embeddings, prove=prove)
    _check_model(model, position_embeddings, disable)
    inputs = _inputs(model, example_inputs)
    places = known_places(model) if inputs is None else find_places(model, inputs)
    # the proof first: it says of a model without attention that it has none, not that its heads are others
    causal = _prove(model, places, inputs, position_embeddings, disable) if prove else _declared(model, places)
    encodings = _copies(encoding, places, model.module, layers)
    _check_future(encodings, causal=causal)
    with restoring_on_error(functools.partial(_undo, model)):
        _install(encodings, places, model, disable=position_embeddings == "disable", names=disable)
        return Attachment(model.given, tuple(encodings), position_embeddings)


def _attach_rotations(
    model: SequenceModel, encoding: Any, layers: Sequence[int] | None, position_embeddings: Positions, *, prove: bool
) -> Attachment:
    """Attach rotary encodings: in the place of a model's own rotations, or to the projections of a model without."""
    rotary, disable = has_rotations(model), position_embeddings == "disable"
    if rotary and not disable:
        raise ValueError(f"position_embeddings must be 'disable': a rotary encoding replaces the rotation of {model}")
    places = [place._replace(heads=key_heads(place)) for place in known_places(model)]
    if not rotary:
        check_projections(model, places)
    own = own_rotations(model, places) if prove and rotary else {}
    available = list(own) if own else range(len(places))
    numbers = requested_layers(layers, available, len(places), f"in which {model} rotates no queries and keys")
    chosen = [places[number] for number in numbers]
    encodings = _copies(encoding, chosen, model.module)
    check_fit(model, encodings, [own[number] for number in numbers if own])
    if rotary:
        check_shared_keys(model, chosen, encodings, every=len(numbers) == len(available))
    undo = functools.partial(_undo, model)

    @contextmanager
    def trial(rotations: Sequence[Encoding]) -> Iterator[None]:
        every = [places[number] for number in available]
        with restoring(undo):
            _install(_copies(rotations, every, model.module), every, model, disable=rotary, names=())
            yield

    if prove and rotary:
        heads = dict(zip(numbers, (each.heads for each in encodings), strict=True))
        prove_rotations(model, list(own.values()), [heads.get(number, 1) for number in own], trial)
    elif prove:
        prove_projections(model, encodings[0].dim, len(places), trial)
    with restoring_on_error(undo):
        _install(encodings, chosen, model, disable=disable, names=())
        return Attachment(model.given, tuple(encodings), position_embeddings)


def _rotates(encoding: Any) -> bool:
    """Return whether encodings are rotations.

    Raises:
        TypeError: Some of several, or one that needs queries and keys and is no rotation.
    """
    every = encoding if isinstance(encoding, Sequence) else [encoding]
    others = [each for each in every if not isinstance(each, RotaryEncoding)]
    for each in others:
        if isinstance(each, ContentEncoding):
            raise TypeError(
                f"{type(each).__name__} needs queries and keys, which attach does not reach; use it in "
                "biased_attention or PositionalSelfAttention"
            )
    if others and len(others) < len(every):
        raise TypeError(f"encoding must be rotary for all layers or for none, got {type(others[0]).__name__} too")
    return bool(every) and not others


def attached(model: nn.Module | SequenceModel) -> Attachment | None:
    """Return the handle of a model with encodings attached, also of a copy or a loaded model.

    Args:
        model: The model that was given to `attach`, a copy of it, or the `SequenceModel` of either.

    Returns:
        The handle, or None where nothing is attached.

    Raises:
        TypeError: ``model`` is not a module.

    Examples:
        >>> from transformers import BertConfig, BertModel
        >>> bert = BertModel(BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8))
        >>> attached(bert) is None
        True
    """
    given = model.given if isinstance(model, SequenceModel) else model
    biases = _biases(given)
    if not biases:
        return None
    position_embeddings: Positions = "disable" if biases[0].positions_disabled else "keep"
    return Attachment(given, tuple(bias.encoding for bias in biases), position_embeddings)


def _biases(given: nn.Module) -> list[Any]:
    """Return each encoding that is attached to a model: to any module, or to the bare transformer in it."""
    found = attached_biases(given) if isinstance(given, nn.Module) else []
    if any(bias.record is None for bias in found):
        return found
    return SequenceModel(given).encodings if found or not isinstance(given, nn.Module) else []


def _attached_model(given: nn.Module) -> SequenceModel:
    """Return the model to which encodings are attached, for `_undo`."""
    own = any(bias.record is None for bias in _biases(given))
    return _of_any_inputs(given) if own else SequenceModel(given)


def _of_any_inputs(given: nn.Module, inputs: Any = None) -> SequenceModel:
    """Return the `SequenceModel` of a model that reads no token ids, or none that are known."""
    return SequenceModel(given, inputs=lambda sample, length: inputs)


def install_saved(model: nn.Module, saved: Mapping[nn.Module, Mapping[str, Any]]) -> None:
    """Add encodings that `PositionalBias.configuration` describes to these modules of a model without token ids."""
    places = [Place(module, **configuration["module"]) for module, configuration in saved.items()]
    encodings, names = [each["encoding"] for each in saved.values()], next(iter(saved.values()))["disabled"]
    _install(encodings, places, _of_any_inputs(model), disable=bool(names), names=names)


def _install(
    encodings: Sequence[Encoding], places: Sequence[Place], model: SequenceModel, *, disable: bool, names: Sequence[str]
) -> None:
    """Add biases to attention modules, checks to calls and loading, and disable positions; `_undo` undoes it.

    Args:
        encodings: One for each place.
        places: The attention modules.
        model: The model that they belong to.
        disable: Whether its positions are disabled.
        names: The parts and parameters to disable in a model whose positions are not known.
    """
    base, record = model.module, None if model.adds_tokens else model.family
    implementation = getattr(model.config, "_attn_implementation", None)
    kind = PositionalBias
    if any(isinstance(each, RotaryEncoding) for each in encodings):
        kind = PositionalRotary if rotary_modules(base) else PositionalProjection
    for each, place in zip(encodings, places, strict=True):
        bias = kind(each, place, record, positions_disabled=disable, disabled=names, implementation=implementation)
        bias.install(place.module)
    for module in _transformers_parts(model):
        if record is not None and kind is PositionalBias:
            module.register_forward_pre_hook(functools.partial(_check_call, places[0].module), with_kwargs=True)
        mark_saved_folders(module)
        if kind is PositionalBias:
            override(module, "init_continuous_batching", _init_continuous_batching)
    base.register_load_state_dict_pre_hook(check_state_dict)
    if kind is PositionalRotary:
        mark_sources(base)
    elif record is None:
        disable_named(base, names)
    elif disable:
        disable_positions(record, base)
    if "torch._dynamo" in sys.modules:  # compiled code does not notice new hooks, only a missing submodule on removal
        torch.compiler.reset()


def _undo(model: SequenceModel) -> None:
    """Undo `_install`, also where it was interrupted."""
    base = model.module
    for module in list(base.modules()):
        if ATTACHED in module._modules:
            getattr(module, ATTACHED).uninstall(module)
    for module in _transformers_parts(model):
        unhook(module, _check_call)
        if not attached_biases(module):  # the decoder of an encoder-decoder model may still have one
            unmark_saved_folders(module)
            restore_method(module, "init_continuous_batching", _init_continuous_batching)
    for key, hook in list(base._load_state_dict_pre_hooks.items()):
        if hook.hook is check_state_dict:
            del base._load_state_dict_pre_hooks[key]
    enable_positions(base)
    unmark_sources(base)


def _transformers_parts(model: SequenceModel) -> list[Any]:
    """Return the transformers model with its head and without, where it is one."""
    return [each for each in dict.fromkeys((model.with_head, model.module)) if isinstance(each, PreTrainedModel)]


def _prove(
    model: SequenceModel, places: list[Place], inputs: Any, position_embeddings: Positions, names: Sequence[str]
) -> bool:
    """Refuse a model for which a few tokens do not show that the bias, and nothing else, is added.

    Returns:
        Whether it was seen to be causal.
    """

    @contextmanager
    def trial(make: Callable[[int], Encoding], disabled: bool) -> Iterator[None]:
        made = [make(place.heads) for place in places]
        with restoring(functools.partial(_undo, model)):
            copies = _copies(made, places, model.module)
            _install(copies, places, model, disable=disabled, names=names if disabled else ())
            yield

    return proved(model, trial, inputs, disable=position_embeddings == "disable")


def _declared(model: SequenceModel, places: list[Place]) -> bool:
    """Return whether a model is causal by its configuration, or was seen to be where its attention was found."""
    known = not model.adds_tokens
    return bool(model.family.causal(model.module)) if known else all(place.causal for place in places)


def _inputs(model: SequenceModel, example_inputs: Any) -> Any:
    """Return a batch for a module that is no transformers model of token ids, None for such a model."""
    if not model.adds_tokens:
        return None
    if example_inputs is None and model.content is not None:
        raise ValueError(f"example_inputs must be a batch that {model} reads, got None")
    if example_inputs is None:
        example_inputs = {"input_ids": torch.tensor([model.some_ids(7), model.some_ids(8)[1:]])}
    return model.moved(example_inputs)


def _check_model(model: SequenceModel, position_embeddings: Positions, disable: Sequence[str]) -> None:
    """Refuse a model to which encodings cannot be attached, with the reason."""
    if model.adds_tokens:
        if position_embeddings == "disable" and not disable:
            advice = "name what holds positions, disable=[...], or add the encoding to them, position_embeddings='keep'"
            raise ValueError(f"the positions of {model} are not known; {advice}")
        if position_embeddings == "keep" and disable:
            raise ValueError(f"position_embeddings='keep' keeps what disable={list(disable)} names; give one of them")
        return
    if disable:
        raise ValueError(f"disable is for modules whose positions are not known, those of {model} are; leave it out")
    _ = model.device  # refuses weights on the meta device
    if not model.family.attention_modules(model.module):
        raise ValueError(f"{model} has no attention module that takes a mask, to which a bias could be added")
    if reason := model.family.why_not_additive(model.module):
        raise ValueError(f"an encoding cannot be attached to {model} exactly: {reason}")
    if position_embeddings == "disable" and (reason := model.family.why_positions_remain(model.module)):
        raise ValueError(f"the positions of {model} cannot be disabled: {reason}; use position_embeddings='keep'")
    _check_implementation(model.module)


def _check_adapters(model: Any) -> None:
    """Refuse a model with adapters of peft around it or in it: they would be saved without the encoding."""
    if isinstance(model, PreTrainedModel):
        adapted = [model] if model._hf_peft_config_loaded else []
        way = "to model.base_model" if model.base_model is not model else "after model.delete_adapter(name)"
    else:  # peft leaves its configuration on the transformers model in its own as well
        around = [module for module in model.modules() if not isinstance(module, PreTrainedModel)]
        adapted, way = [module for module in around if hasattr(module, "peft_config")], "to model.get_base_model()"
    if adapted:
        raise ValueError(
            f"{type(adapted[0]).__name__} has adapters, which are saved without the encoding; attach before they are "
            f"added, with modules_to_save=['{ATTACHED}'] in their configuration, or, to save nothing, {way}"
        )


def _check_implementation(module: Any) -> None:
    """Refuse an attention implementation that would ignore the bias."""
    implementation = module.config._attn_implementation
    if implementation not in (*_IMPLEMENTATIONS, None):
        raise ValueError(
            f"attention implementation '{implementation}' of {type(module).__name__} does not support a bias; call "
            "model.set_attn_implementation('sdpa') or 'eager'"
        )


def _check_call(attention: nn.Module, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call that would ignore the bias, or that asks for attention weights that are not computed."""
    if ATTACHED not in attention._modules:  # removed through a part of the model, without access to the whole
        return
    _check_implementation(module)
    call = call_of(module, args, kwargs)
    mask = call.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            "attention_mask of four axes must be boolean, True where a query sees a key, or a float that is added to "
            f"the logits, got {mask.dtype}; pass attention_mask.bool()"
        )
    _check_inner_padding(mask, call.get("position_ids"))
    wanted = kwargs.get("output_attentions")
    if wanted is None:
        wanted = module.config.output_attentions
    if wanted and module.config._attn_implementation == "sdpa":
        raise ValueError(
            "output_attentions=True under 'sdpa' would return no weights; call model.set_attn_implementation('eager')"
        )


def _check_inner_padding(mask: Any, position_ids: Any) -> None:
    """Refuse padding between tokens that the position ids do not count, but the distances of the encoding do.

    Args:
        mask: (batch, n) of 0 and 1, or anything else.
        position_ids: Of the last tokens of these, (batch or 1, m), or anything else.
    """
    given = isinstance(mask, Tensor) and isinstance(position_ids, Tensor)
    if not given or (mask.ndim, position_ids.ndim) != (2, 2) or torch.compiler.is_compiling():
        return
    tokens, positions = mask.bool(), position_ids.to(mask.device)
    last = positions.shape[1]
    between = runs_of_tokens(tokens) > 1
    if last > tokens.shape[1] or not bool(between.any()):
        return
    skipped = ((positions == (tokens.cumsum(1) - 1)[:, -last:]) | ~tokens[:, -last:]).all(1)
    if bool((between & skipped).any()):
        raise ValueError(
            "attention_mask has padding between tokens that position_ids skip, as with a learned prompt or a cache "
            "before padding on the left, and an attached encoding would count it; pad on the other side, or call with "
            "one text at a time"
        )


def _init_continuous_batching(model: Any, previous: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """Refuse continuous batching before transformers starts the thread in which it would call the model."""
    if attached_biases(model):  # not removed through a part of the model
        no_continuous_batching()
    return called(model, "init_continuous_batching", previous)(*args, **kwargs)


def _copies(
    encoding: Encoding | Sequence[Encoding],
    places: list[Place],
    base: Any,
    layers: Sequence[int] | None = None,
) -> list[Any]:
    """Return a copy of the encoding for each place, checked against the model; none for layers that are not named."""
    depth = len(places)
    numbers = requested_layers(layers, range(depth), depth, "which the model does not have")
    encodings = [encoding] * len(numbers) if isinstance(encoding, Encoding) else encoding
    if not isinstance(encodings, Sequence) or not all(isinstance(each, Encoding) for each in encodings):
        raise TypeError(f"encoding must be a pelocality Encoding, or a list of one per layer, got {encoding!r}")
    if len(encodings) != len(numbers):
        raise ValueError(
            f"encoding must be one, or a list of {len(numbers)}, one per layer that does not share its weights, "
            f"got a list of {len(encodings)}"
        )
    by_place = dict(zip(numbers, encodings, strict=True))
    for number, each in by_place.items():
        check_encoding(each, places[number].heads)
        if any(tensor.is_meta for tensor in each.state_dict().values()):
            raise ValueError(f"{type(each).__name__} is on the meta device; build it where tensors have numbers")
    all_of_them = [by_place.get(number, NoEncoding()) for number in range(depth)]
    return [_fitting(each, place.module, base) for each, place in zip(all_of_them, places, strict=True)]


def _check_future(encodings: list[Encoding], *, causal: bool) -> None:
    """Refuse encodings with an argument that has no effect in a causal model."""
    for part in (part for encoding in encodings for part in encoding.modules()):
        if causal and isinstance(part, Encoding) and not part.causal and part.future_only is not None:
            raise ValueError(
                f"{part.future_only} of {type(part).__name__} acts on future keys only, which this model hides: "
                f"leave {part.future_only} at its default and do not learn it (name the other learnable parameters)"
            )


def _fitting(encoding: Encoding, module: nn.Module, base: Any) -> Encoding:
    """Return a copy on the module's device, at least as precise as its weights (or the base's, if quantised)."""
    weights = [parameter for parameter in module.parameters() if parameter.is_floating_point()]
    weights = weights or [next(parameter for parameter in base.parameters() if parameter.is_floating_point())]
    precision = functools.reduce(torch.promote_types, {weight.dtype for weight in weights}, encoding.working_dtype)
    with torch.inference_mode(False):  # in which parameters are made that cannot be trained
        fitted = copy.deepcopy(encoding).to(execution_device(module) or weights[0].device, precision)
    return fitted.train(module.training)
