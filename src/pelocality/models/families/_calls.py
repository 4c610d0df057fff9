"""Reading and changing the arguments of a call in a forward pre-hook."""

import functools
import inspect
from typing import Any

import torch
from torch import nn


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # else the compiler warns of the cache
def argument_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments of a module's ``forward``, in their order."""
    module_class: Any = type(module)
    return _argument_names(module_class)


@functools.cache
def _argument_names(module_class: Any) -> tuple[str, ...]:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for each in module_class.__mro__:  # a subclass may take just *args and **kwargs, and pass them on
        forward = each.__dict__.get("forward")
        parameters = inspect.signature(forward).parameters.values() if callable(forward) else ()
        names = tuple(parameter.name for parameter in parameters if parameter.kind not in variable)[1:]
        if names:
            return names
    return ()


def by_name(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by name."""
    return dict(zip(names, args, strict=False)) | kwargs


def as_given(names: tuple[str, ...], args: tuple[Any, ...], call: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments by name as the caller gave them: as many by place, where other hooks look for them."""
    by_place = names[: len(args)]
    others = {name: value for name, value in call.items() if name not in by_place}
    return (*(call[name] for name in by_place), *args[len(by_place) :]), others
