"""Cosines and sines that differ between heads, in the place of one tensor for all heads."""

from typing import Any, Self

import torch
from torch import Tensor


class ByHead(Tensor):
    """Cosines or sines that differ between heads, in the place of a tensor (batch, n, d) for all heads.

    An operation is done for each of them; with queries or keys, for the heads that each belongs to.
    """

    parts: list[Tensor]
    axis: int

    @classmethod
    def of(cls, parts: list[Tensor], axis: int = 1) -> Self:
        """Return one tensor for a list of them.

        Args:
            parts: A tensor for each head of the keys.
            axis: The axis of heads in queries and keys: where attention modules insert an axis.
        """
        made = torch.full_like(parts[0], torch.nan).as_subclass(cls)  # code that bypasses torch's functions reads NaN
        made.parts, made.axis = parts, axis
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Apply a function to each part."""
        kwargs = kwargs or {}
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        given = [each for each in tensors if isinstance(each, ByHead)]
        parts, axis = len(given[0].parts), given[0].axis
        if func in (torch.unsqueeze, Tensor.unsqueeze):
            axis = int(kwargs.get("dim", args[1] if len(args) > 1 else axis))
        elif func is Tensor.__getitem__ and isinstance(args[1], tuple) and None in args[1]:
            axis = args[1].index(None)
        states = [each for each in tensors if not isinstance(each, ByHead) and each.ndim > 3]
        for shape in (tuple(each.shape) for each in states):
            if shape[axis] % parts:
                raise ValueError(f"queries or keys of shape {shape} do not have {parts} heads, or a multiple")

        def part(value: Any, number: int) -> Any:
            if isinstance(value, ByHead):
                return value.parts[number]
            return value.chunk(parts, axis)[number] if any(value is each for each in states) else value

        with torch._C.DisableTorchFunctionSubclass():
            results = [
                func(*(part(each, i) for each in args), **{name: part(each, i) for name, each in kwargs.items()})
                for i in range(parts)
            ]
        if states:
            return torch.cat(results, axis)
        if isinstance(results[0], Tensor):
            return cls.of(results, axis)
        if isinstance(results[0], tuple | list) and results[0] and isinstance(results[0][0], Tensor):
            return type(results[0])(cls.of(list(each), axis) for each in zip(*results, strict=True))
        return results[0]
