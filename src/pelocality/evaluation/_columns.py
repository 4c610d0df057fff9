"""Columns of an evaluation: those taken from a dataset, and numbers for each of their values."""

from collections.abc import Callable, Collection, Hashable, Sequence
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
    names = [name for name, feature in dataset.features.items() if isinstance(feature, scalar) and name not in excluded]
    return pd.DataFrame(dataset.select_columns(names).with_format(None)[:], index=range(len(dataset)))


def joined_groups(names: Sequence[Any], texts: Sequence[Hashable]) -> list[Any]:
    """Return the name of each row's group, after joining groups that have a text in common."""
    by_name, by_text = (pd.factorize(pd.Series(list(each), dtype=object))[0] for each in (names, texts))
    first = pd.Series(range(len(texts)))
    before = first[:0]
    while not first.equals(before):  # the first row of each group
        before, first = first, first.groupby(by_name).transform("min").groupby(by_text).transform("min")
    return [names[row] for row in first]


def in_groups(examples: pd.DataFrame, rows: str) -> str:
    """Return the number of examples in words, and of their groups where these are fewer."""
    groups = examples["group"].nunique()
    return f"{len(examples)} {rows}" + (f" in {groups} groups" if groups < len(examples) else "")


def by_columns(
    examples: pd.DataFrame, columns: Sequence[str], numbers: Callable[[pd.DataFrame], dict[str, Any]]
) -> pd.DataFrame:
    """Return one row of numbers for each combination of values in the columns."""
    rows = []
    for values, group in examples.groupby(list(columns), dropna=False):
        row = numbers(group)
        taken = [name for name in columns if name in row]
        if taken:
            raise ValueError(f"by cannot name {taken[0]!r}, which is also a number of its table; rename the column")
        rows.append(dict(zip(columns, values, strict=True)) | row)
    return pd.DataFrame(rows)
