"""Reading and changing the arguments of a call in a forward pre-hook."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

_NAMES: dict[type, tuple[str, ...]] = {}  # a dict, because the compiler traces through the caches of functools


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments of a module's ``forward``, in their order."""
    if type(module) not in _NAMES:
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        forwards = (each.__dict__.get("forward") for each in type(module).__mro__)
        calls = (inspect.signature(each).parameters.values() for each in forwards if callable(each))
        names = (tuple(each.name for each in call if each.kind not in variable)[1:] for call in calls)
        # A subclass may take just *args and **kwargs, and pass them on.
        _NAMES[type(module)] = next(filter(None, names), ())
    return _NAMES[type(module)]


def hidden_argument(attention: nn.Module) -> str:
    """Return the name of the hidden states among the arguments of an attention module: the first of them."""
    return argument_names(attention)[0]


def call_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a module by name."""
    return dict(zip(argument_names(module), args, strict=False)) | kwargs


def changes_call(change: Callable[[Any, dict[str, Any]], None]) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Make a forward pre-hook of a function that changes the arguments of a call of a module, given by name."""

    @functools.wraps(change)
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        call = call_of(module, args, kwargs)
        change(module, call)
        by_place = argument_names(module)[: len(args)]  # arguments stay where other hooks look for them
        return (*(call.pop(name) for name in by_place), *args[len(by_place) :]), call

    return hook
