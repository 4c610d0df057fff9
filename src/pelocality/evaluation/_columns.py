"""Columns of an evaluation: those taken from a dataset, and numbers for each of their values."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import datasets
import pandas as pd


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


def check_texts(what: str, texts: Iterable[Any]) -> None:
    """Refuse texts that are not strings, such as an empty text of a CSV file."""
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"the {what} must be strings, got {text!r}; remove such rows")


def by_columns(
    examples: pd.DataFrame, columns: Sequence[str], numbers: Callable[[pd.DataFrame], dict[str, Any]]
) -> pd.DataFrame:
    """Return one row of numbers for each combination of values in the columns."""
    unknown = [name for name in columns if not isinstance(name, str) or name not in examples]
    if unknown or not columns:
        raise ValueError(f"by must name columns among {', '.join(map(str, examples))}, got {list(columns)}")
    rows = []
    for values, group in examples.groupby(list(columns), dropna=False):
        row = numbers(group)
        taken = [name for name in columns if name in row]
        if taken:
            raise ValueError(f"by cannot name {taken[0]!r}, which is also a number of its table; rename the column")
        rows.append(dict(zip(columns, values, strict=True)) | row)
    return pd.DataFrame(rows)
