"""An encoding, or positions, as JSON values: the type and the arguments of the constructor, and the way back."""

import inspect
import math
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn


class Configurable:
    """What `Encoding` and `Positions` inherit to be described by the arguments of their constructor."""

    _per_head: tuple[str, ...] = ()  # arguments that are one number or one per head

    def configuration(self) -> dict[str, Any]:
        """Return the type and arguments of the encoding as JSON values, from which `from_configuration` rebuilds it.

        Returns:
            A dictionary of ``"type"``, the name of the class, and each argument. Arguments that are learned have their
            current value, rounded to its precision; the ``state_dict`` has them exactly. A tensor is a list, nested by
            its axes; per-head numbers that are equal are one number. An argument that is an encoding is represented by
            its own configuration.

        Raises:
            TypeError: An argument of the constructor is not stored as an attribute of the same name, or is a list of
                encodings that is not an ``nn.ModuleList``.
        """
        names = inspect.signature(type(self)).parameters
        missing = [name for name in names if not hasattr(self, name)]
        if missing:
            raise TypeError(f"{type(self).__name__} must store its argument '{missing[0]}' under that name")
        arguments = {name: _to_json(getattr(self, name)) for name in names}
        for name in self._per_head:
            numbers = arguments.get(name)  # a subclass may lack it
            if isinstance(numbers, list) and numbers.count(numbers[0]) == len(numbers):
                arguments[name] = numbers[0]
        return {"type": type(self).__name__, **arguments}

    @classmethod
    def from_configuration(cls, configuration: dict[str, Any]) -> Self:
        """Build an encoding from its configuration.

        Args:
            configuration: As returned by `configuration`. The class of a custom encoding must have been imported.

        Returns:
            The encoding.

        Raises:
            ValueError: The type is not a known encoding, or is the name of two.
        """
        arguments = dict(configuration)
        name = arguments.pop("type", None)
        classes = [each for each in _subclasses(Configurable) if issubclass(each, cls) and not inspect.isabstract(each)]
        modules = {each.__module__: each for each in classes if each.__name__ == name}  # the last one of each module
        if len(modules) != 1:
            names = ", ".join(sorted({each.__name__ for each in classes if not each.__name__.startswith("_")}))
            rule = f"must be the name of one class, of {' and of '.join(modules) or 'none'}"
            raise ValueError(f"encoding type {name!r} is not known: it {rule}; known: {names}")
        return next(iter(modules.values()))._from_arguments(arguments)

    @classmethod
    def _from_arguments(cls, arguments: dict[str, Any]) -> Self:
        """Build an encoding of this class from the arguments of a configuration, without its type."""
        return cls(**{name: _from_json(value) for name, value in arguments.items()})


def _to_json(value: Any) -> Any:
    """Return an argument of an encoding as a JSON value; a tensor becomes a number or nested lists of numbers."""
    if isinstance(value, Configurable):
        return value.configuration()
    if isinstance(value, (list, tuple)) and any(isinstance(each, Configurable) for each in value):
        raise TypeError("encodings in a list are not moved, trained or saved; keep them in a torch.nn.ModuleList")
    if isinstance(value, (list, tuple, nn.ModuleList)):
        return [_to_json(each) for each in value]
    if isinstance(value, Tensor):
        if hasattr(value, "full_tensor"):  # sharded over processes, each of which asks for a state dict
            value = value.full_tensor()
        value = value.detach().cpu()
        if not value.is_floating_point():
            return value.tolist()
        array = value.to(torch.promote_types(value.dtype, torch.float32)).numpy()
        # Through str, the float32 number 0.1 becomes 0.1, which rounds to the same float32 number.
        return _to_json(np.array([float(str(number)) for number in array.ravel()]).reshape(array.shape).tolist())
    value = value.item() if isinstance(value, np.generic) else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no infinity


def _from_json(value: Any) -> Any:
    """Return the argument that `_to_json` converted."""
    if isinstance(value, dict) and "type" in value:
        return Configurable.from_configuration(value)
    if value in ("inf", "-inf", "nan"):
        return float(value)
    return [_from_json(each) for each in value] if isinstance(value, list) else value


def _subclasses(parent: type[Configurable]) -> list[type[Configurable]]:
    """Return all direct and indirect subclasses."""
    return [each for child in parent.__subclasses__() for each in (child, *_subclasses(child))]
