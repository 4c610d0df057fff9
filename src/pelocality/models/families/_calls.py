"""Reading and changing the arguments of a call on its way into a module."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Self

from torch import nn


@dataclass(frozen=True)
class Arguments:
    """The names of the arguments that a module's ``forward`` takes by position, in their order."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        """Read them off the module's class."""
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(type(module).forward).parameters.values()
        return cls(tuple(parameter.name for parameter in parameters if parameter.kind in by_position)[1:])


class Call:
    """The arguments of one call, by name; the caller's own tuple and dictionary are never written into."""

    def __init__(self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.names = arguments.names
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
