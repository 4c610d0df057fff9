"""Validation of arguments with one number per head."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pelocality._checks import real_numbers

PerHead = float | Sequence[float] | Tensor


def per_head(name: str, value: PerHead, heads: int | None, *, positive: bool = True) -> Tensor:
    """Return an argument with one number for all heads, or one per head, as a float64 tensor.

    Args:
        name: Name of the argument.
        value: A number, or one per head.
        heads: Number of heads; None: as many as there are numbers.
        positive: Whether numbers must be above 0.

    Returns:
        (1,) or (heads,).

    Raises:
        TypeError: The value is not a number or a sequence of numbers.
        ValueError: The wrong number of numbers; or one that is NaN, infinite, not positive, or one of these after
            rounding to the dtype that encodings work in.
    """
    array = value if isinstance(value, Tensor) else real_numbers(name, value)
    if str(array.dtype).removeprefix("torch.").startswith(("bool", "complex")):
        raise TypeError(f"{name} must be a number, or one per head, got {value!r}")
    numbers = torch.as_tensor(array, dtype=torch.float64, device="cpu").detach()
    heads = max(numbers.numel(), 1) if heads is None else heads
    if numbers.ndim > 1 or numbers.numel() not in (1, heads):
        raise ValueError(f"{name} must be a number, or one for each of {heads} heads, got {value!r}")
    working = numbers.to(torch.promote_types(torch.get_default_dtype(), torch.float32))
    if not bool(working.isfinite().all()) or (positive and not bool((working > 0).all())):
        least = "above 0 and " if positive else ""
        raise ValueError(f"{name} must be {least}finite in {working.dtype}, got {value!r}")
    return numbers.reshape(-1)


def check_tensor(name: str, given: Any) -> None:
    """Raise an error unless this is a tensor, and not a nested one."""
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(given).__name__}")
    if given.is_nested:
        raise ValueError(f"{name} must be padded; use enable_nested_tensor=False in nn.TransformerEncoder")


def positive(logarithm: Tensor) -> Tensor:
    """Return exp of a learned logarithm, clamped to positive finite float32 numbers.

    The logarithm is clamped, not its exp: the gradient of an infinite exp would be NaN.
    """
    return logarithm.clamp(-87.33, 88.72).exp()  # nearly the smallest and the largest normal number of float32
