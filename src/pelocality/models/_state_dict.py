"""What an attached model says of itself in a state dict and in a folder, and which state dicts it accepts."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

from torch import Tensor, nn

from pelocality.encodings import Encoding
from pelocality.models._bias import PositionalBias
from pelocality.models._restore import restoring
from pelocality.models.families._record import ATTACHED

CONFIGURATION = "_extra_state"
"""The name under which a state dict holds what ``get_extra_state`` of a module returns."""

_LACKING = (
    "an encoding is attached here, and the weights come without one; load them before attaching, or take it off first "
    "with attached(model).remove()"
)

_NAMES = ("encoding", "position_embeddings", "attn_implementation")

REFUSED = "experts_implementation"
"""The entry of a configuration of which each model class of transformers refuses, and repeats, an unknown value."""

_REASON = "an encoding is attached to this model, load it with pelocality.load"


def read_configuration(name: str, written: Tensor) -> dict[str, Any]:
    """Return the configuration out of what `PositionalBias.get_extra_state` wrote; the name is for the error."""
    try:
        configuration = json.loads(bytes(written.tolist()))
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
    lacking: list[str] = []
    others: dict[str, str] = {}
    for name, attention in attentions.items():
        here = f"{prefix}{name}."
        saved = {key.removeprefix(here): value for key, value in state_dict.items() if key.startswith(here)}
        weights = {key for key in attention.state_dict(keep_vars=True) if not key.startswith(f"{ATTACHED}.")}
        if weights <= saved.keys() and not any(key.startswith(f"{ATTACHED}.") for key in saved):
            lacking.append(name)
        for part, bias in attention.named_modules():
            if isinstance(bias, PositionalBias) and f"{part}.{CONFIGURATION}" in saved:
                problem = _problem(bias, name, f"{part}.", saved)
                if problem is not None:
                    others[name] = problem
    if len(lacking) == 1 < len(attentions):
        lacking = []
    for names, problem in ((lacking, _LACKING), (list(others), next(iter(others.values()), ""))):
        if names:
            error_msgs.append(f"{prefix}{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {problem}")


def _problem(bias: PositionalBias, name: str, prefix: str, saved: dict[str, Any]) -> str | None:
    """Return what is wrong with the saved state of one bias, if anything."""
    try:
        configuration = read_configuration(name, saved[prefix + CONFIGURATION])
    except ValueError as error:
        return str(error)
    own = bias.configuration
    start = f"{prefix}encoding."
    numbers = {key.removeprefix(start): value for key, value in saved.items() if key.startswith(start)}
    if configuration["position_embeddings"] == own["position_embeddings"] and (
        configuration["encoding"] == own["encoding"] or _agrees(bias.encoding, configuration["encoding"], numbers)
    ):
        return None
    was, has = (
        f"{each['encoding']}, position_embeddings='{each['position_embeddings']}'" for each in (configuration, own)
    )
    return (
        f"the weights were saved with {was}, attached here is {has}; attach the saved encoding first, or load the "
        "whole model with pelocality.load"
    )


def _agrees(encoding: Encoding, configuration: dict[str, Any], numbers: dict[str, Tensor]) -> bool:
    """Return whether an encoding of that configuration is this one, once both hold the same numbers."""
    own = copy.deepcopy(encoding)
    numbers = own.state_dict() | numbers  # a shard may hold some of them
    try:
        other = Encoding.from_configuration(configuration).to(own._like.device, own._like.dtype)
        for each in (own, other):
            each.load_state_dict({name: value.to(own._like.device) for name, value in numbers.items()}, assign=True)
    except (TypeError, ValueError, RuntimeError):  # no such encoding, or other numbers than it has
        return False
    return own.configuration() == other.configuration()


def carries_encodings(model: nn.Module) -> bool:
    """Return whether an encoding is attached to a model or to any part of it."""
    return any(ATTACHED in module._modules for module in model.modules())


def guard_saving(model: Any) -> None:
    """Have a model save itself by the function below."""
    model.save_pretrained = functools.partial(save_pretrained, model)


def save_pretrained(model: Any, *args: Any, **kwargs: Any) -> None:
    """Save a model as transformers does, into a folder that transformers alone refuses to load the model from."""
    if not carries_encodings(model):  # removed through a part of it
        type(model).save_pretrained(model, *args, **kwargs)
        return
    with restoring(lambda: model.config.__dict__.pop(REFUSED, None)):
        setattr(model.config, REFUSED, _REASON)
        type(model).save_pretrained(model, *args, **kwargs)
