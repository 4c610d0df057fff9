"""Putting encodings into a model, and taking them out again."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, Self, get_args

import torch
from torch import nn
from transformers import PreTrainedModel

from pelocality.encodings import Encoding
from pelocality.models._bias import PositionalBias
from pelocality.models._disable import disable_positions, enable_positions
from pelocality.models._offloading import execution_device
from pelocality.models._restore import restoring, unhook
from pelocality.models._state_dict import carries_encodings, check_state_dict, guard_saving
from pelocality.models.families import architecture
from pelocality.models.families._record import ATTACHED, Architecture
from pelocality.models.families._wrapper import pretrained

Positions = Literal["disable", "keep"]

_IMPLEMENTATIONS = ("eager", "sdpa")


@dataclass(frozen=True)
class Attachment:
    """What `attach` did to a model, and the way to undo it.

    Attributes:
        model: The model, as it was given.
        encodings: The copies at work, one per attention module in the order they run; train these.
        position_embeddings: What became of the model's own positions, ``"disable"`` or ``"keep"``.
    """

    model: nn.Module = field(repr=False)
    encodings: tuple[Encoding, ...]
    position_embeddings: Positions
    _block: Any = field(default=None, init=False, repr=False, compare=False)

    def remove(self) -> None:
        """Take the encodings out, and give the model its own positions back.

        Disabled positions have their weights again, to the bit. What is no longer there is not removed again, so a
        second call does nothing.
        """
        record, base = _find(self.model)
        if any(part in self.encodings for bias in _biases(record, base) for part in bias.modules()):
            with restoring(functools.partial(_undo, self.model, record, base)):
                pass

    def __enter__(self) -> Self:
        # a copy removes, for a cycle would keep the block from ending where an interrupt skips the end of it
        object.__setattr__(self, "_block", restoring(replace(self).remove))
        self._block.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._block.__exit__(kind, error, trace)


def attach(
    model: nn.Module, encoding: Encoding | Sequence[Encoding], *, position_embeddings: Positions = "disable"
) -> Attachment:
    r"""Put an encoding into every layer of a Hugging Face model.

    $$\mathrm{attention} = \mathrm{softmax}(\mathrm{logits} + \mathrm{bias})$$

    with the encoding's bias for as many queries and keys as there are. The model is changed in place, the encoding is
    copied. Padding and causality stay what they were, and are told to encodings that share something out among the
    keys: a sentence gives the same with and without padding, a prefix the same with and without what follows.

    Args:
        model: A transformers model of a known family, with or without a task head. Of an encoder-decoder model the
            encoder is changed; give ``model.decoder`` for the other half.
        encoding: One encoding, of which every layer gets a copy, or one per layer in a list. Layers that share their
            weights (ALBERT's) share their encoding, so there the list has one per group. An encoding of one head
            serves all heads.
        position_embeddings: What becomes of the model's own positions. ``"disable"``: they have no effect, so the
            encoding alone tells the model the order, and inputs may be longer than its table. ``"keep"``: they stay,
            and the encoding is added to them.

    Returns:
        The handle: ``.remove()`` undoes everything, and so does leaving it as a context manager.

    Raises:
        TypeError: No transformers model, no encoding, or one of your own that could not be saved.
        ValueError: A family without a record, a model to which the bias cannot be added exactly, an attention
            implementation other than ``"eager"`` and ``"sdpa"``, weights on the meta device, a number of heads or
            layers that does not fit, a symmetry for a causal model, a model with adapters of peft, or one that carries
            an encoding already.

    Note:
        A sliding window or a causal mask is not a position embedding and stays when positions are disabled; it tells
        the model something of order all the same. Under ``"sdpa"`` a call that asks for attention weights is refused:
        that kernel has none to give. Under ``DistributedDataParallel`` pass ``find_unused_parameters=True`` when
        positions are disabled, for their weights take no part. What ``torch.compile`` has compiled in this process is
        compiled anew.

    Examples:
        >>> from pelocality.encodings import AttenuatedEncoding
        >>> from transformers import BertConfig, BertModel
        >>> bert = BertModel(BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8))
        >>> with attach(bert, AttenuatedEncoding(heads=2, decay=0.2, symmetry=0.5)) as attachment:
        ...     [encoding.decay for encoding in attachment.encodings]
        [tensor([0.2000, 0.2000]), tensor([0.2000, 0.2000])]
    """
    if position_embeddings not in get_args(Positions):
        raise ValueError(f"position_embeddings must be 'disable' or 'keep', got {position_embeddings!r}")
    _refuse_adapters(model)
    record, base = _find(model)
    modules = _modules(record, base)
    _check_model(record, base, modules, disable=position_embeddings == "disable")
    given = _per_module(encoding, modules)
    _check_encodings(given, base.config.num_attention_heads, causal=record.causal(base))
    encodings = [_fitting(each, module, base) for each, module in zip(given, modules, strict=True)]
    biases = [
        PositionalBias(
            each,
            record,
            module,
            positions_disabled=position_embeddings == "disable",
            implementation=base.config._attn_implementation,
        )
        for each, module in zip(encodings, modules, strict=True)
    ]
    for bias in biases:
        bias.get_extra_state()  # what could not be saved is better refused now
    try:
        for bias, module in zip(biases, modules, strict=True):
            bias.install(module)
        for guarded in _guarded(model, base):
            guard = functools.partial(_refuse_what_would_be_ignored, modules[0])
            guarded.register_forward_pre_hook(guard, with_kwargs=True)
            guard_saving(guarded)
        base.register_load_state_dict_pre_hook(check_state_dict)
        if position_embeddings == "disable":
            disable_positions(record, base)
        _forget_compiled()
        return Attachment(model, tuple(encodings), position_embeddings)
    except BaseException:
        with restoring(functools.partial(_undo, model, record, base)):
            raise


def attached(model: nn.Module) -> Attachment | None:
    """Return the handle of a model that carries encodings, of a copy or a loaded one too.

    Args:
        model: A transformers model of a known family.

    Returns:
        The handle, or None where nothing is attached.

    Raises:
        TypeError: No transformers model.
        ValueError: A family without a record.

    Examples:
        >>> from transformers import BertConfig, BertModel
        >>> bert = BertModel(BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8))
        >>> attached(bert) is None
        True
    """
    record, base = _find(model)
    present = _biases(record, base)
    if not present:
        return None
    return Attachment(
        model, tuple(bias.encoding for bias in present), "disable" if present[0].positions_disabled else "keep"
    )


def _find(model: nn.Module) -> tuple[Architecture, Any]:
    inner = pretrained(model)
    record = architecture(inner)
    return record, record.base(inner)


def _modules(record: Architecture, base: Any) -> list[nn.Module]:
    return list(dict.fromkeys(record.attentions(base)))


def _biases(record: Architecture, base: Any) -> list[Any]:
    """Return each `PositionalBias`, or peft's wrapper around it, which behaves like the copy it trains."""
    return [getattr(module, ATTACHED) for module in _modules(record, base) if hasattr(module, ATTACHED)]


def _guarded(model: nn.Module, base: Any) -> list[Any]:
    return list(dict.fromkeys([pretrained(model), base]))


def _forget_compiled() -> None:
    """Have compiled code compiled anew: torch.compile does not notice that a module was given hooks.

    On removal it does, by the missing submodule.
    """
    if "torch._dynamo" in sys.modules:  # otherwise nothing has been compiled
        torch.compiler.reset()


def _undo(model: nn.Module, record: Architecture, base: Any) -> None:
    for module in _modules(record, base):
        if hasattr(module, ATTACHED):
            getattr(module, ATTACHED).uninstall(module)
    for guarded in _guarded(model, base):
        unhook(guarded, _refuse_what_would_be_ignored)
        if not carries_encodings(guarded):  # the other half of an encoder-decoder model may
            guarded.__dict__.pop("save_pretrained", None)
    for key, hook in list(base._load_state_dict_pre_hooks.items()):
        if hook.hook is check_state_dict:
            del base._load_state_dict_pre_hooks[key]
    enable_positions(record, base)


def _check_model(record: Architecture, base: Any, modules: list[nn.Module], *, disable: bool) -> None:
    name = f"{type(base).__name__} (model type '{base.config.model_type}')"
    if any(hasattr(module, ATTACHED) for module in modules):
        raise ValueError(f"{name} carries an encoding already; remove it first: attached(model).remove()")
    if any(parameter.is_meta for parameter in base.parameters()) and execution_device(base) is None:
        raise ValueError(
            f"weights of {name} are on the meta device, which holds no numbers; load them first, with from_pretrained"
        )
    reason = record.not_additive(base)
    if reason is not None:
        raise ValueError(f"an encoding cannot be attached to {name} exactly: {reason}")
    reason = record.positions_remain(base) if disable else None
    if reason is not None:
        raise ValueError(f"the positions of {name} cannot be disabled: {reason}; use position_embeddings='keep'")
    _check_implementation(base)


def _refuse_adapters(model: Any) -> None:
    """Refuse a model with adapters of peft around it or in it: they would be saved without the encoding."""
    transformers_own = isinstance(model, PreTrainedModel)
    inside = "base_model" if transformers_own else "get_base_model()"
    if model._hf_peft_config_loaded if transformers_own else hasattr(model, "peft_config"):
        raise ValueError(
            f"{type(model).__name__} has adapters, which are saved without the encoding; attach before they are added, "
            f"with modules_to_save=['{ATTACHED}'] in their configuration, or, to save nothing, to model.{inside}"
        )


def _check_implementation(module: Any) -> None:
    implementation = module.config._attn_implementation
    if implementation not in (*_IMPLEMENTATIONS, None):
        raise ValueError(
            f"attention implementation '{implementation}' of {type(module).__name__} takes no bias; call "
            "model.set_attn_implementation('sdpa') or 'eager'"
        )


def _refuse_what_would_be_ignored(
    attention: nn.Module, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Stand before the model's forward: an implementation that would drop the bias, weights that nobody computes."""
    if ATTACHED not in attention._modules:  # removed through a part of the model, which does not know the whole
        return
    _check_implementation(module)
    wanted = kwargs.get("output_attentions")
    if wanted is None:
        wanted = module.config.output_attentions
    if wanted and module.config._attn_implementation == "sdpa":
        raise ValueError(
            "output_attentions=True under 'sdpa' would return no weights; call model.set_attn_implementation('eager')"
        )


def _per_module(encoding: Encoding | Sequence[Encoding], modules: list[nn.Module]) -> list[Encoding]:
    if isinstance(encoding, Encoding):
        return [encoding] * len(modules)
    if not isinstance(encoding, Sequence) or not all(isinstance(each, Encoding) for each in encoding):
        raise TypeError(f"encoding must be a pelocality Encoding, or a list of one per layer, got {encoding!r}")
    if len(encoding) != len(modules):
        raise ValueError(
            f"encoding must be one, or a list of {len(modules)}, one per layer with weights of its own, "
            f"got a list of {len(encoding)}"
        )
    return list(encoding)


def _fitting(encoding: Encoding, module: nn.Module, base: Any) -> Encoding:
    """Return a copy on the module's device, at least as precise as its weights; quantised ones are no parameters."""
    weights = [parameter for parameter in module.parameters() if parameter.is_floating_point()]
    weights = weights or [next(parameter for parameter in base.parameters() if parameter.is_floating_point())]
    precision = functools.reduce(torch.promote_types, {weight.dtype for weight in weights}, encoding.working_dtype)
    fitted = copy.deepcopy(encoding).to(execution_device(module) or weights[0].device, precision)
    return fitted.train(module.training)


def _check_encodings(encodings: list[Encoding], heads: int, *, causal: bool) -> None:
    for encoding in encodings:
        if encoding.heads not in (1, heads):
            raise ValueError(f"encoding must have 1 head or the model's {heads}, got {encoding.heads}")
        if any(tensor.is_meta for tensor in encoding.state_dict().values()):
            raise ValueError(f"{type(encoding).__name__} is on the meta device; build it where tensors have numbers")
        for part in encoding.modules():
            if causal and isinstance(part, Encoding) and not part.causal and part.future_only is not None:
                raise ValueError(
                    f"{part.future_only} of {type(part).__name__} acts on the future alone, which this model hides: "
                    f"leave {part.future_only} at its default and do not learn it (of what is learnable, name the rest)"
                )
