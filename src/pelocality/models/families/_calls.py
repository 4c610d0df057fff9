"""Reading and replacing the arguments of a call in a forward pre-hook."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments that a module's ``forward`` takes by position, in their order."""
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(type(module).forward).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind in by_position)[1:]


class Call:
    """The arguments of one call, by name; the tuple and the dictionary of the caller are never modified.

    Args:
        names: The `argument_names` of the module that is called.
        args: The positional arguments.
        kwargs: The keyword arguments.
    """

    def __init__(self, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.names = names
        self.args = args
        self.kwargs = kwargs

    def __getitem__(self, name: str) -> Any:
        """Return an argument, None where it was not passed."""
        if name in self.names[: len(self.args)]:
            return self.args[self.names.index(name)]
        return self.kwargs.get(name)

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self.names[: len(self.args)]:
            index = self.names.index(name)
            self.args = (*self.args[:index], value, *self.args[index + 1 :])
        else:
            self.kwargs = {**self.kwargs, name: value}
