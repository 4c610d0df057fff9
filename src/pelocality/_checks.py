"""Validation of arguments of several packages: numbers, flags, names, files, masks, tokenizers and datasets."""

import difflib
import numbers
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

# A float mask hides a key if it is at most this: exp underflows to 0 below -745 in float64, which leaves room for large
# logits, and bfloat16 rounds the usual -1e4 to -9984. A weaker mask, such as -100, hides the future if no later key has
# more than the weight below it in any text and head: no logits of words differ by as much everywhere.
HIDDEN, NO_WEIGHT = -1e3, 1e-30

# Types of devices without float64: Apple's GPUs.
WITHOUT_FLOAT64 = {"mps"}


def count(name: str, value: Any, least: int | None = 1, most: int | None = None) -> int:
    """Return an integer argument after checking its type and size.

    Args:
        name: Name of the argument.
        value: Its value; numpy's integers and the symbolic ones of torch.export are integers too.
        least: The smallest that is allowed; None for any.
        most: The largest that is allowed.

    Returns:
        The number, as a Python integer where it is one of numpy's.

    Raises:
        TypeError: The value is not an integer.
        ValueError: It is too small or too large.
    """
    # __sym_max__: the symbolic integers of torch.export, recognised without importing torch
    if isinstance(value, bool) or not (isinstance(value, numbers.Integral) or hasattr(value, "__sym_max__")):
        raise TypeError(f"{name} must be an integer, got {described(value)}")
    if (least is not None and value < least) or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be {bounds}, got {value}")
    return int(value) if isinstance(value, np.integer) else value


def flag(name: str, value: bool) -> bool:
    """Return a boolean argument, which may be numpy's, after checking its type: 1 or "no" would be read as True."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return the choice that is most like a name that is none of them, as the end of an error message; or nothing."""
    similar = difflib.get_close_matches(name, list(choices), 1)
    return f"; did you mean {similar[0]!r}?" if similar else ""


def described(value: Any) -> str:
    """Return the type of an argument for an error message, short whatever its size; a class with how to make one."""
    if isinstance(value, type):
        return f"the class {value.__name__}; make one with {value.__name__}(...)"
    if getattr(value, "ndim", 0):
        return f"{type(value).__name__} of shape {tuple(value.shape)}"
    return repr(value)


def number(name: str, value: Any) -> float:
    """Return a numeric argument, which may be a tensor, after checking its type: True and "0.5" are not numbers."""
    scalar = value.item() if getattr(value, "ndim", None) == 0 else value
    if isinstance(scalar, bool) or not isinstance(scalar, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(scalar)


def real_numbers(name: str, value: Any) -> NDArray[Any]:
    """Return an argument with real numbers, which may be a tensor, as an array; "0.5", dates and 1j are refused."""
    check_unmasked(name, value)
    array = np.asarray(_without_tensors(value))
    if array.dtype.kind == "O" and all(hasattr(each, "__float__") for each in array.flat):
        array = array.astype(float)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{name} must be real numbers, got {type(value).__name__} of {array.dtype}")
    return array


def _without_tensors(value: Any) -> Any:
    """Return a tensor, also one in a list, as an array; anything else as it is."""
    if isinstance(value, list | tuple):
        return [_without_tensors(each) for each in value]
    if not hasattr(value, "detach"):  # a tensor, recognised without importing torch
        return value
    value = value.detach().cpu().resolve_neg()
    return (value.double() if value.is_floating_point() else value).numpy()  # numpy has no bfloat16


def on_float64_device(tensor: "Tensor") -> "Tensor":
    """Return a tensor, as a copy on the CPU where its own device has no float64."""
    return tensor.cpu() if tensor.device.type in WITHOUT_FLOAT64 else tensor


def check_unmasked(name: str, value: Any, advice: str = "give its .filled() or its .compressed() values") -> None:
    """Raise a TypeError if entries of a numpy array, also one in lists, are masked: conversions would read them."""
    if isinstance(value, list | tuple):
        for each in value:
            check_unmasked(name, each, advice)
    elif isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise TypeError(f"{name} must not be a masked array, whose mask would be lost; {advice}")


def check_confidence(confidence: Any) -> None:
    """Raise an error unless a coverage is a number in (0, 1)."""
    if not 0 < number("confidence", confidence) < 1:
        raise ValueError(f"confidence must be between 0 and 1, such as 0.95, got {confidence!r}")


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Raise a ValueError unless a value is among the choices."""
    if value not in choices:
        *most, last = map(repr, choices)
        names = f"{', '.join(most)} or {last}" if most else last
        advice = nearest(value, choices) if isinstance(value, str) else ""
        raise ValueError(f"{name} must be {names}, got {value!r}{advice}")


def are_names(value: Any) -> bool:
    """Return whether a value is a collection of strings; the letters of a single string are not meant as names."""
    return not isinstance(value, str) and isinstance(value, Collection) and all(isinstance(each, str) for each in value)


def check_several(name: str, value: Any) -> None:
    """Raise a TypeError if a value is one item in place of several: a text, a batch of tokens, or a whole table."""
    if isinstance(value, str | Mapping) or hasattr(value, "columns") or not isinstance(value, Iterable):
        advice = "put a single one in a list"
        raise TypeError(f"{name} must be a list, or a column, frame['text'], got {type(value).__name__}; {advice}")


def check_tokenizer(tokenizer: Any) -> None:
    """Raise a TypeError unless a tokenizer can be called on texts and has special tokens; a name cannot."""
    if isinstance(tokenizer, type) or not callable(tokenizer) or not hasattr(tokenizer, "all_special_ids"):
        what = f"the string {tokenizer!r}" if isinstance(tokenizer, str) else type(tokenizer).__name__
        advice = "the tokenizer comes before the texts" if isinstance(tokenizer, list) else "AutoTokenizer loads it"
        raise TypeError(f"tokenizer must be the model's tokenizer, got {what}; {advice}")


def check_dataset(name: str, value: Any) -> None:
    """Raise a TypeError unless a value is a dataset, which a dictionary of splits is not."""
    import datasets  # loaded here, because metrics do without datasets

    if not isinstance(value, datasets.Dataset):
        advice = f"take one of several splits, {name}['test'], or datasets.Dataset.from_list(list({name})) of a stream"
        raise TypeError(f"{name} must be a datasets.Dataset, such as of a probe, got {type(value).__name__}; {advice}")


def check_file(name: str, path: str | Path, *suffixes: str) -> None:
    """Refuse a file to write in an argument of this name, if it ends otherwise or its folder does not exist.

    Raises:
        ValueError: The name ends otherwise.
        FileNotFoundError: There is no such folder.
    """
    path = Path(path)
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"{name} must name a file that ends in {' or '.join(suffixes)}, got {path}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{name} must be in a folder that exists, got {path}; create {path.parent}")
