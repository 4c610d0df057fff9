"""What a part of a report holds: plain numbers, sentences and the code behind them; nothing of how they are drawn."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd

MODEL, CHANCE = "this model", "by chance"
DISTANCE = "how far a token looks, in tokens"
SHARE = "position share, mean over heads"


@dataclass(frozen=True)
class Chart:
    """The numbers of one figure.

    Attributes:
        kind: "grid" for a matrix of colours, "lines" for a line per name, "points".
        title: What is shown.
        x_title: Label of the horizontal axis, with its unit.
        y_title: Label of the vertical axis, with its unit.
        x: Values or names along the horizontal axis. For points, and for lines with different values, a list per name.
        values: For a grid a list per row, otherwise a list per name.
        names: Names of the rows, the lines or the groups of points.
        ordered: Whether the names have an order, such as layers.
        centred: Whether colours are centred at 0.
        levels: What the values stand beside, by name, such as chance: a value, or for lines one for each x.
    """

    kind: Literal["grid", "lines", "points"]
    title: str
    x_title: str
    y_title: str
    x: Any
    values: Any
    names: Sequence[Any]
    ordered: bool = False
    centred: bool = False
    levels: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """One question about a model, with its numbers and figures.

    Attributes:
        how: How to read the figure, one sentence.
        found: What is notable here, one sentence, computed from the numbers.
        code: The line that makes the numbers.
        table: ``columns`` and ``rows``.
        charts: The figures.
        by_layer: Numbers by name, a value per layer, for an atlas.
        notes: Cautions of the library's results.
        reason: Why the model does not support this part; empty if it does. All fields above are then empty.
        key: A short name, unique in a report.
        title: The question.
        plain: What is notable in a sentence for readers of another field; empty where there is none.
        beside: The main numbers by name, each of this model, by chance, and of the model's twins.
    """

    how: str = ""
    found: str = ""
    code: str = ""
    table: Mapping[str, Any] = field(default_factory=dict)
    charts: Sequence[Chart] = ()
    by_layer: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    reason: str = ""
    key: str = ""
    title: str = ""
    plain: str = ""
    beside: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def in_words(numbers: Mapping[str, float], form: str = ".2f", unit: str = "") -> str:
    """Return a number with those that it stands beside, such as "0.51 tokens (0.05 by chance)"."""
    others = ", ".join(f"{number:{form}} {name}" for name, number in levels_of(numbers).items())
    return f"{numbers[MODEL]:{form}}{unit}" + (f" ({others})" if others else "")


def levels_of(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a number stands beside, as the levels of a chart."""
    return {name: each for name, each in numbers.items() if name != MODEL and not np.isnan(each).all()}


def table_of(frame: pd.DataFrame) -> dict[str, Any]:
    """Return a table as plain values; names are shown without underscores."""
    columns = [str(name).replace("_", " ") for name in frame.columns]
    return {"columns": columns, "rows": plain(frame.astype(object).to_numpy().tolist())}


def plain(value: Any) -> Any:
    """Return values as JSON has them: lists, numbers of four significant digits, None for what is not a number."""
    if hasattr(value, "tolist"):  # tensors and arrays
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float | np.floating):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if isinstance(value, int | str | None):
        return value
    return None if value is pd.NA else str(value)
