"""Weights without the attached encodings, and folders that transformers alone would load without them: refused."""

import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from pelocality.models._restore import called, override, restoring
from pelocality.models.families import ATTACHED, attached_biases

BLOCKING_KEY = "experts_implementation"
"""The entry of a configuration of which each model class of transformers refuses, and repeats, an unknown value."""

_REASON = "an encoding is attached to this model, load it with pelocality.load"

_SAVES_ADAPTER = "get_peft_model_state_dict"  # the function of peft through which all adapters are saved

_ADAPTER = (
    "peft loads this adapter without an error into a model that has no encoding, and the outputs are then others; "
    "attach the same encoding, {}, to the base model before loading the adapter"
)

_MISSING = (
    "an encoding is attached here, and the weights come without one; load them before attaching, or take it off first "
    "with attached(model).remove()"
)


def check_state_dict(
    base: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool,
    missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
) -> None:  # fmt: skip
    """Refuse, also where ``strict`` is false, weights without the encodings attached here.

    Some of the weights alone (a head, an adapter, a shard of a checkpoint) are accepted. A shard may end between the
    weights of an attention module and its encoding, which follows them, so one module may lack it where there are more.
    """
    attentions = {name: module for name, module in base.named_modules() if ATTACHED in module._modules}
    lacking = [name for name, each in attentions.items() if _lacks_encoding(each, f"{prefix}{name}.", state_dict)]
    if lacking and (len(lacking) > 1 or len(attentions) == 1):
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        error_msgs.append(f"{prefix}{lacking[0]}{more}: {_MISSING}")


def _lacks_encoding(attention: nn.Module, prefix: str, state_dict: dict[str, Any]) -> bool:
    """Return whether a state dict holds the weights of an attention module without an encoding."""
    encoding = f"{prefix}{ATTACHED}."
    weights = {key for key in attention.state_dict(prefix=prefix, keep_vars=True) if not key.startswith(encoding)}
    return weights <= state_dict.keys() and not any(key.startswith(encoding) for key in state_dict)


def mark_saved_folders(model: Any) -> None:
    """Replace a model's ``save_pretrained``, so that transformers alone refuses to load the folder it writes.

    A model around this one is found when it collects the state dict of this one, and then gets the same replacement.
    """
    override(model, "save_pretrained", _save_pretrained)
    if _collected not in model._state_dict_hooks.values():
        model.register_state_dict_post_hook(_collected)


def _save_pretrained(model: Any, previous: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> None:
    state_dict = kwargs.get("state_dict", args[2] if len(args) > 2 else None)
    plain = state_dict is not None and not any(f".{ATTACHED}." in key for key in state_dict)
    with restoring(lambda: model.config.__dict__.pop(BLOCKING_KEY, None)):
        if attached_biases(model) and not plain:  # false if the encodings were removed through a part
            setattr(model.config, BLOCKING_KEY, _REASON)
            kwargs.setdefault("save_original_format", False)  # `load` looks for the names of the model's modules
        called(model, "save_pretrained", previous)(*args, **kwargs)


def _collected(model: Any, state_dict: Any, prefix: str, metadata: Any) -> None:
    """Mark the models around this one when its state dict is collected, and warn where that is for an adapter.

    A module knows nothing of the modules around it, and transformers and peft have no hook for saving. The functions
    that are running say both.
    """
    biases, around = attached_biases(model), []
    if not biases:  # the encodings were removed through a part of the model
        return
    for depth, (frame, _) in enumerate(traceback.walk_stack(sys._getframe(1)), start=2):
        if frame.f_code is nn.Module.state_dict.__code__:
            owner = frame.f_locals["self"]
            if owner is not model and _collected in owner._state_dict_hooks.values():  # this hook runs there too
                return
            if owner is not model and isinstance(owner, PreTrainedModel):
                around.append(owner)
        elif frame.f_code is PreTrainedModel.save_pretrained.__code__ and frame.f_locals["self"] in around:
            _mark_configuration(frame.f_locals["self"], frame.f_locals)
        elif frame.f_code.co_name == _SAVES_ADAPTER:
            warnings.warn(_ADAPTER.format(type(biases[0].encoding).__name__), stacklevel=depth)
            break
    for each in around:
        override(each, "save_pretrained", _save_pretrained)


def _mark_configuration(model: Any, call: dict[str, Any]) -> None:
    """Write the configuration of a model again, with the refusal, into the folder that it is being saved to."""
    if BLOCKING_KEY in model.config.__dict__ or getattr(model, "_hf_peft_config_loaded", False):
        return
    if call.get("save_on_this_rank", True):
        with restoring(lambda: model.config.__dict__.pop(BLOCKING_KEY, None)):
            setattr(model.config, BLOCKING_KEY, _REASON)
            model.config.save_pretrained(call["save_directory"])
