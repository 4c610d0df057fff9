"""Examples of an evaluation: columns taken from a dataset, and numbers for the values of a column."""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import datasets
import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import Pipeline

from pelocality.models._names import name_with_encoding

T = TypeVar("T")


def scalar_columns(
    dataset: datasets.Dataset, argument: str, excluded: Collection[str], reserved: Collection[str]
) -> pd.DataFrame:
    """Return the columns of single values that are not excluded, after refusing column names that are reserved."""
    taken = [name for name in reserved if name in dataset.column_names]
    if taken:
        raise ValueError(f"{argument} has a column {taken[0]!r}, a name that the result uses; rename the column")
    scalar = datasets.Value | datasets.ClassLabel
    names = [name for name, kind in dataset.features.items() if isinstance(kind, scalar) and name not in excluded]
    return pd.DataFrame(dataset.select_columns(names).with_format(None)[:], index=range(len(dataset)))


def check_callable(model: Any, loader: str) -> None:
    """Raise a TypeError unless something in place of a model can be called on texts, and is not its tokenizer."""
    swapped, is_class = hasattr(model, "all_special_ids"), isinstance(model, type) and issubclass(model, nn.Module)
    of_pipeline = isinstance(model, Pipeline)
    if not callable(model) or swapped or is_class or of_pipeline:
        given = f"the class {model.__name__}" if is_class else type(model).__name__
        order = "that is a tokenizer: pass the model first, then its tokenizer"
        advice = order if swapped else "pass its .model and .tokenizer" if of_pipeline else f"load it with {loader}"
        raise TypeError(f"model must be a transformers model or a callable, got {given}; {advice}")


def name_of(model: Any) -> str:
    """Return the name of a model and of what is attached to it, or of the function in its place."""
    if isinstance(model, nn.Module):
        return name_with_encoding(model)
    return str(getattr(model, "__name__", type(model).__name__)).strip("<>")


def array_of(scores: Any) -> NDArray[Any]:
    """Return scores, which may be a list of tensors, as an array; those of torch in float64: numpy has no bfloat16."""
    if isinstance(scores, list) and scores and all(isinstance(score, torch.Tensor) for score in scores):
        scores = torch.stack(scores)
    if isinstance(scores, torch.Tensor):
        scores = scores.detach().cpu()
        scores = scores.double() if scores.is_floating_point() else scores
    return np.asarray(scores)


def by_columns(
    examples: pd.DataFrame, columns: Sequence[str], numbers: Callable[[pd.DataFrame], dict[str, Any]]
) -> pd.DataFrame:
    """Return one row of numbers for each combination of values in the columns."""
    unknown = [name for name in columns if not isinstance(name, str) or name not in examples]
    if unknown or not columns:
        raise ValueError(f"by must name columns among {', '.join(map(str, examples))}, got {list(columns)}")
    groups = examples.groupby(list(columns), dropna=False)
    return pd.DataFrame([dict(zip(columns, values, strict=True)) | numbers(group) for values, group in groups])


def equally_long(items: Iterable[T], length: Callable[[T], int], batch_size: int) -> Iterator[list[T]]:
    """Yield items that are in the order of their length in batches of one length.

    Padding changes what models answer that count positions through it (BERT and GPT-2 after padding on the left), read
    the first or last place, or mix neighbours (ConvBERT).
    """
    for _, equal in itertools.groupby(items, length):
        while batch := list(itertools.islice(equal, batch_size)):
            yield batch


def padded(rows: Sequence[Sequence[int]], value: int, device: torch.device) -> torch.Tensor:
    """Return rows of numbers (rows, longest), padded on the right with a value."""
    tensors = [torch.tensor(row, dtype=torch.long, device=device) for row in rows]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)
