"""What every public door refuses in the same words."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np


def count(name: str, value: Any, least: int = 1) -> int:
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
    # __sym_max__: the symbolic integers of torch.export, told without importing torch
    if isinstance(value, bool) or not (isinstance(value, numbers.Integral) or hasattr(value, "__sym_max__")):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value) if isinstance(value, np.integer) else value


def flag(name: str, value: bool) -> bool:
    """Return a truth value that is one.

    Args:
        name: What the argument is called.
        value: What was given.

    Returns:
        It.

    Raises:
        TypeError: It is neither True nor False.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def check_tokenizer(tokenizer: Any) -> None:
    """Refuse what is not a tokenizer.

    Args:
        tokenizer: What was given.

    Raises:
        TypeError: It cannot be called on texts, or does not know its special tokens: a name, a processor.
    """
    if isinstance(tokenizer, type) or not callable(tokenizer) or not hasattr(tokenizer, "all_special_ids"):
        given = f"the string {tokenizer!r}" if isinstance(tokenizer, str) else type(tokenizer).__name__
        raise TypeError(
            f"tokenizer must be the model's tokenizer, got {given}; load it with "
            "transformers.AutoTokenizer.from_pretrained(...)"
        )
