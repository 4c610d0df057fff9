"""What the constructors of encodings refuse."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

PerHead = float | Sequence[float] | Tensor


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
        ValueError: The wrong number of numbers, NaN or infinity, a number that is not positive, or one that is
            neither in the precision encodings work in.
    """
    try:
        numbers = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be a number, or one per head, got {value!r}") from error
    given = value if isinstance(value, Sequence) else [value]
    if any(isinstance(number, bool) for number in given) or getattr(value, "dtype", None) == torch.bool:
        raise TypeError(f"{name} must be a number, or one per head, got {value!r}")
    if numbers.ndim > 1 or numbers.numel() not in (1, heads):
        raise ValueError(f"{name} must be a number, or one for each of {heads} heads, got {value!r}")
    if not bool(torch.isfinite(numbers).all()):
        raise ValueError(f"{name} must be finite, got {value!r}")
    if positive and not bool((numbers > 0).all()):
        raise ValueError(f"{name} must be above 0, got {value!r}")
    working = numbers.to(torch.promote_types(torch.get_default_dtype(), torch.float32))
    if not bool(torch.isfinite(working).all()) or (positive and not bool((working > 0).all())):
        raise ValueError(f"{name} must be a number that {working.dtype} can hold, got {value!r}")
    return numbers.reshape(-1)


def positive(logarithm: Tensor) -> Tensor:
    """Return exp of what is learned, kept inside float32, so that it is never 0 or infinite and can be saved.

    Args:
        logarithm: Any shape.

    Returns:
        The same shape, above 0 and finite.
    """
    bounds = torch.finfo(torch.float32)
    return logarithm.exp().clamp(bounds.tiny, bounds.max)


def plain(value: object) -> object:
    """Return a value as JSON can hold it: a tensor becomes its number, or a list of them.

    Args:
        value: An argument of an encoding.

    Returns:
        Strings, numbers, booleans, None and lists of them; what is none of these as it came.
    """
    if isinstance(value, Tensor):
        flat = value.detach().to("cpu", torch.promote_types(value.dtype, torch.float32)).reshape(-1)
        numbers = [
            float(str(number)) for number in flat.numpy()
        ]  # float32 0.1 reads 0.1, and that is float32 0.1 again
        return numbers[0] if len(set(numbers)) == 1 else numbers
    return value.item() if isinstance(value, np.generic) else value
