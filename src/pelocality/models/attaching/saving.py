"""Weights without the attached encodings, and folders that transformers alone would load without them: refused."""

from collections.abc import Callable
from typing import Any

from torch import nn

from pelocality.models._restore import called, override, restore_method, restoring
from pelocality.models.families import ATTACHED, attached_biases

BLOCKING_KEY = "experts_implementation"
"""The entry of a configuration of which each model class of transformers refuses, and repeats, an unknown value."""

_REASON = "an encoding is attached to this model, load it with pelocality.load"

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
    """Replace a model's ``save_pretrained``, so that transformers alone refuses to load the folder it writes."""
    override(model, "save_pretrained", _save_pretrained)


def unmark_saved_folders(model: Any) -> None:
    """Undo `mark_saved_folders`."""
    restore_method(model, "save_pretrained", _save_pretrained)


def _save_pretrained(model: Any, previous: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> None:
    state_dict = kwargs.get("state_dict", args[2] if len(args) > 2 else None)
    plain = state_dict is not None and not any(f".{ATTACHED}." in key for key in state_dict)
    with restoring(lambda: model.config.__dict__.pop(BLOCKING_KEY, None)):
        if attached_biases(model) and not plain:  # not removed through a part of the model
            setattr(model.config, BLOCKING_KEY, _REASON)
            kwargs.setdefault("save_original_format", False)  # `load` looks for the names of the model's modules
        called(model, "save_pretrained", previous)(*args, **kwargs)
