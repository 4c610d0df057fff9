"""What the constructors of encodings refuse."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PerHead = float | Sequence[float] | Tensor


def count(name: str, value: int, least: int = 1) -> int:
    """Return a whole number that is large enough.

    Args:
        name: What the argument is called.
        value: What was given.
        least: The smallest that makes sense.

    Returns:
        The number.

    Raises:
        TypeError: It is no integer.
        ValueError: It is too small.
    """
    # a tuple: older torch.compile cannot read a union of types
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value


def per_head(name: str, value: PerHead, heads: int, *, positive: bool = True) -> Tensor:
    """Return numbers as a float64 tensor: one for all heads, or one each.

    Args:
        name: What the argument is called.
        value: A number, or one per head.
        heads: How many heads there are.
        positive: Whether zero and below are refused.

    Returns:
        (1,) or (heads,).

    Raises:
        TypeError: It is no number or sequence of them.
        ValueError: The wrong number of numbers, NaN or infinity, or a number that is not positive.
    """
    try:
        numbers = torch.as_tensor(value, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be a number, or one per head, got {value!r}") from error
    if numbers.ndim > 1 or numbers.numel() not in (1, heads):
        raise ValueError(f"{name} must be a number, or one for each of {heads} heads, got {value!r}")
    if not bool(torch.isfinite(numbers).all()):
        raise ValueError(f"{name} must be finite, got {value!r}")
    if positive and not bool((numbers > 0).all()):
        raise ValueError(f"{name} must be above 0, got {value!r}")
    return numbers.reshape(-1)


def plain(value: object) -> object:
    """Return a value as JSON can hold it: a tensor becomes its number, or a list of them.

    Args:
        value: An argument of an encoding.

    Returns:
        Strings, numbers, booleans, None and lists of them.
    """
    if isinstance(value, Tensor):
        flat = value.detach().to("cpu", torch.promote_types(value.dtype, torch.float32)).reshape(-1)
        numbers = [
            float(str(number)) for number in flat.numpy()
        ]  # float32 0.1 reads 0.1, and that is float32 0.1 again
        return numbers[0] if len(set(numbers)) == 1 else numbers
    return list(value) if isinstance(value, tuple) else value
