"""The configuration of attached encodings in state dicts and folders, and the state dicts that a model refuses."""

from __future__ import annotations

import functools
import json
from typing import Any

from torch import Tensor, nn

from pelocality.encodings import Encoding
from pelocality.models._bias import PositionalBias
from pelocality.models._restore import restoring
from pelocality.models._weights import loaded
from pelocality.models.families._record import ATTACHED

CONFIGURATION = "_extra_state"
"""The key under which PyTorch keeps the result of ``get_extra_state`` in a state dict."""

BLOCKING_KEY = "experts_implementation"
"""The entry of a configuration of which each model class of transformers refuses, and repeats, an unknown value."""

_REASON = "an encoding is attached to this model, load it with pelocality.load"

_MISSING = (
    "an encoding is attached here, and the weights come without one; load them before attaching, or take it off first "
    "with attached(model).remove()"
)

_NAMES = ("encoding", "position_embeddings", "attn_implementation")


def read_configuration(name: str, saved: Tensor) -> dict[str, Any]:
    """Return the configuration that `PositionalBias.get_extra_state` saved; the name is for the error."""
    try:
        configuration = json.loads(bytes(saved.tolist()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the configuration of the encoding in '{name}' is not JSON ({error})") from error
    if not isinstance(configuration, dict) or not set(_NAMES) <= configuration.keys():
        raise ValueError(
            f"the configuration of the encoding in '{name}' must be an object with {', '.join(_NAMES)}, "
            f"got {json.dumps(configuration)[:200]}"
        )
    return configuration


def check_state_dict(
    base: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool,
    missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
) -> None:  # fmt: skip
    """Refuse, also where ``strict`` is false, weights without the encodings attached here, or with others.

    Some of the weights alone (a head, an adapter, a shard of a checkpoint) are accepted. A shard may end between the
    weights of an attention module and its encoding, which follows them, so one module may lack it where there are more.
    """
    attentions = {name: module for name, module in base.named_modules() if ATTACHED in module._modules}
    problems = {
        name: _MISSING
        for name, attention in attentions.items()
        if _lacks_encoding(attention, f"{prefix}{name}.", state_dict)
    }
    if len(problems) == 1 < len(attentions):
        problems = {}
    for name, module in base.named_modules():
        saved = state_dict.get(f"{prefix}{name}.{CONFIGURATION}")
        problem = _difference(module, name, saved) if isinstance(module, PositionalBias) and saved is not None else None
        if problem is not None:
            problems[name] = problem
    if problems:
        (name, problem), *more = problems.items()
        error_msgs.append(f"{prefix}{name}{f' and {len(more)} more' if more else ''}: {problem}")


def _lacks_encoding(attention: nn.Module, prefix: str, state_dict: dict[str, Any]) -> bool:
    """Return whether a state dict holds the weights of an attention module without an encoding."""
    encoding = f"{prefix}{ATTACHED}."
    weights = {key for key in attention.state_dict(prefix=prefix, keep_vars=True) if not key.startswith(encoding)}
    return weights <= state_dict.keys() and not any(key.startswith(encoding) for key in state_dict)


def _difference(bias: PositionalBias, name: str, saved: Tensor) -> str | None:
    """Return how a saved configuration differs from that of the attached encoding, None where only numbers do."""
    try:
        configuration = read_configuration(name, saved)
    except ValueError as error:
        return str(error)
    if configuration["position_embeddings"] == bias.configuration["position_embeddings"] and _same_but_for_numbers(
        bias.encoding, configuration["encoding"]
    ):
        return None
    was, has = (
        f"{each['encoding']}, position_embeddings='{each['position_embeddings']}'"
        for each in (configuration, bias.configuration)
    )
    return (
        f"the weights were saved with {was}, attached here is {has}; attach the saved encoding first, or load the "
        "whole model with pelocality.load"
    )


def _same_but_for_numbers(encoding: Encoding, configuration: dict[str, Any]) -> bool:
    """Return whether an encoding of that configuration equals this one, given the numbers in its state dict."""
    with loaded(encoding, [encoding]):
        try:
            other = Encoding.from_configuration(configuration).to(encoding._like.device, encoding._like.dtype)
            other.load_state_dict(encoding.state_dict(), assign=True)
        except (TypeError, ValueError, RuntimeError):  # there is no such encoding, or it has other numbers
            return False
        return other.configuration() == encoding.configuration()


def has_encodings(model: nn.Module) -> bool:
    """Return whether an encoding is attached to a model or to any part of it."""
    return any(ATTACHED in module._modules for module in model.modules())


def mark_saved_folders(model: Any) -> None:
    """Replace a model's ``save_pretrained``, so that transformers alone refuses to load the folder it writes."""
    model.save_pretrained = functools.partial(_save_pretrained, model)


def _save_pretrained(model: Any, *args: Any, **kwargs: Any) -> None:
    with restoring(lambda: model.config.__dict__.pop(BLOCKING_KEY, None)):
        if has_encodings(model):  # not removed through a part of the model
            setattr(model.config, BLOCKING_KEY, _REASON)
        type(model).save_pretrained(model, *args, **kwargs)
