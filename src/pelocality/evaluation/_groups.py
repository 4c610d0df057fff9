"""Examples taken apart by their columns."""

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd


def by_columns(
    examples: pd.DataFrame, columns: Sequence[str], numbers: Callable[[pd.DataFrame], dict[str, Any]]
) -> pd.DataFrame:
    """Return what ``numbers`` says of the examples of each value (or combination), a row each.

    Raises:
        ValueError: for no column, or one that the examples do not have.
    """
    unknown = [name for name in columns if not isinstance(name, str) or name not in examples]
    if unknown or not columns:
        raise ValueError(f"by must name columns among {', '.join(map(str, examples))}, got {list(columns)}")
    groups = examples.groupby(list(columns), dropna=False)
    return pd.DataFrame([dict(zip(columns, values, strict=True)) | numbers(group) for values, group in groups])
