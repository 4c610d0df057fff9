"""Plots of dependencies: the heads that follow them, and how long they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pelocality._checks import check_choice, count
from pelocality.plots._axes import draw_by_distance, figure_and_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pelocality.evaluation.dependencies import DependencyDistances, HeadTypes


def head_types(
    result: HeadTypes, *, ax: Axes | None = None, direction: str = "dependent to head", title: str = ""
) -> tuple[Figure, Axes]:
    """Draw the best positional and the best contextual head for each relation, the shortest relations on top.

    Args:
        result: From `compare_head_types`.
        ax: Where to draw; a new figure if None.
        direction: ``"dependent to head"`` or ``"head to dependent"``.
        title: Title of the axes.

    Returns:
        Figure and axes. Horizontal bars are the intervals, the short vertical line is the best fixed offset. A
        star marks relations where the two types differ with q < 0.05; the mean distance in words is in brackets.

    Raises:
        ImportError: Matplotlib is missing.
        TypeError: Not a result of ``compare_head_types``.
        ValueError: The table has no such direction.

    Examples:
        >>> import pandas as pd
        >>> from types import SimpleNamespace
        >>> row = {"relation": "det", "direction": "dependent to head", "distance": 1.5, "q": 0.01, "baseline": 0.5}
        >>> row |= {"positional": 0.8, "positional_low": 0.7, "positional_high": 0.9}
        >>> row |= {"contextual": 0.4, "contextual_low": 0.3, "contextual_high": 0.5}
        >>> fig, ax = head_types(SimpleNamespace(table=pd.DataFrame([row])))
        >>> [label.get_text() for label in ax.get_yticklabels()]
        ['det* (1.5)']
    """
    if not hasattr(result, "table"):
        raise TypeError(f"result must come from compare_head_types, got {type(result).__name__}")
    check_choice("direction", direction, list(result.table["direction"].unique()))
    table = result.table[result.table["direction"] == direction]
    cells = table[["relation", "q", "distance"]].itertuples(index=False, name=None)
    labels = [f"{relation}{'*' if q < 0.05 else ''} ({distance:.1f})" for relation, q, distance in cells]
    height = 1.4 + 0.24 * len(table) + (0.5 if title else 0)
    fig, ax = figure_and_axes(ax, (5.2 + 0.08 * max(map(len, labels)), height), title)
    place = np.arange(len(table))
    for name, shift, mark, colour, face in (
        ("positional", -0.14, "o", "black", "black"),
        ("contextual", 0.14, "s", "0.45", "white"),
    ):
        value, label = table[name], f"best {name} head"
        ends = [value - table[f"{name}_low"], table[f"{name}_high"] - value]
        line: dict[str, Any] = {"fmt": mark, "color": colour, "markerfacecolor": face, "markersize": 5, "elinewidth": 1}
        ax.errorbar(value, place + shift, xerr=ends, label=label, **line)
    ax.scatter(table["baseline"], place, marker="|", s=110, color="0.3", label="best fixed offset", zorder=1)
    ax.set_yticks(place, labels)
    ax.set(xlabel=f"accuracy, {direction}", xlim=(0, 1))
    ax.set_ylim(len(table) - 0.4, -0.6)
    ax.grid(axis="y", color="0.92")
    ax.set_axisbelow(True)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, fontsize="small", columnspacing=1, frameon=False)
    ax.set_title(ax.get_title(), pad=26)  # above the legend, for which matplotlib leaves no room
    return fig, ax


def distances(
    result: DependencyDistances, *, ax: Axes | None = None, relation: str = "all", reach: int = 12, title: str = ""
) -> tuple[Figure, Axes]:
    """Draw the share of dependencies at each distance, with one line per language.

    Args:
        result: From `dependency_distances`.
        ax: Where to draw; a new figure if None.
        relation: A relation, or ``"all"``.
        reach: Largest distance drawn, in words.
        title: Title of the axes.

    Returns:
        Figure and axes.

    Raises:
        ImportError: Matplotlib is missing.
        TypeError: Not a result of ``dependency_distances``, or ``reach`` is not an integer.
        ValueError: No language has the relation, or ``reach`` is below 1.

    Examples:
        >>> from pelocality.evaluation.dependencies import dependency_distances
        >>> from pelocality.corpora import Dependencies, Sentence
        >>> tree = Dependencies((2, 0, 2), ("nsubj", "root", "obj"), "made up")
        >>> found = dependency_distances([Sentence(("Dogs", "chase", "cats"), language="en", dependencies=tree)])
        >>> fig, ax = distances(found)
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['en']
    """
    if not hasattr(result, "histogram"):
        raise TypeError(f"result must come from dependency_distances, got {type(result).__name__}")
    shares = result.histogram(relation).head(count("reach", reach))
    # a language keeps its style in every figure, also where another has no such relation
    lines = {language: (shares.index, shares.get(language)) for language in result.sentences}
    return draw_by_distance(ax, title, lines, "distance to the head (words)", "share of dependencies")
