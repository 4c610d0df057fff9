"""What the plots share: figures and axes, images in greys, lines that differ without colour, and legends."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from pelocality._checks import check_unmasked, real_numbers
from pelocality.metrics._inputs import float_tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar
    from matplotlib.figure import Figure

_DASHES, _MARKERS = ("-", "--", "-.", ":"), "os^DvPX<>*phd"  # 4 and 13 have no common divisor: 52 pairs


def figure_and_axes(ax: Axes | None, size: tuple[float, float], title: str) -> tuple[Figure, Axes]:
    """Return the given or new axes with their title set, and their figure."""
    if ax is None:
        import matplotlib.pyplot as plt

        _, ax = plt.subplots(figsize=size, layout="constrained")
    # wrap=True would wrap at the width of the figure instead of these axes, and may break at every word
    ax.set_title("\n".join(_wrapped(line, size_in_inches(ax)[0], 0.09) for line in title.split("\n")))
    figure = ax.get_figure(root=True)
    assert figure is not None
    return figure, ax


def as_array(name: str, values: Any) -> np.ndarray:
    """Return an argument, a tensor or lists of numbers or of tensors, as an array."""
    check_unmasked(name, values, "set masked entries to NaN, which is drawn as hatching")
    return real_numbers(name, values).astype(float)


def attention_of(value: Any, length: int) -> Any:
    """Return what metrics read: of an encoding its weights at this length, anything else as it is."""
    weights = None if isinstance(value, type) else getattr(value, "weights", None)
    if callable(weights):
        return weights(length)
    return float_tensor("attention", value) if hasattr(value, "parameters") else value  # refuses classes and models


def draw_image(ax: Axes, values: np.ndarray, label: str, cmap: str = "Greys", **options: Any) -> Colorbar:
    """Draw values, in greys unless other colours are named, and NaN as hatching; return the colour bar."""
    if np.isnan(values).any():
        ax.patch.set(hatch="////", edgecolor="0.6")
    image = ax.imshow(values, cmap=cmap, **options)
    label = _wrapped(label, size_in_inches(ax)[1], 0.075)
    return ax.figure.colorbar(image, ax=ax, label=label, fraction=0.046, pad=0.03)


def draw_numbers(ax: Axes, grid: np.ndarray, least: float = 4.0) -> None:
    """Write the number of each cell into an image, where there is room for the smallest size of letters."""
    width, height = size_in_inches(ax)
    numbers = {place: short_number(float(grid[place])) for place in np.ndindex(grid.shape)}
    longest = max(1, *map(len, numbers.values()))
    size = min(7.0, 72 * height / grid.shape[0] * 0.7, 72 * width / grid.shape[1] / longest * 1.4)
    light = ax.images[-1].to_rgba(grid)[..., :3] @ (0.299, 0.587, 0.114) > 0.45
    for place, text in numbers.items() if size >= least else ():
        row, column = place
        colour = "black" if light[place] else "white"
        ax.text(column, row, text, ha="center", va="center", color=colour, fontsize=size)


def short_number(value: float) -> str:
    """Return a number as a short text: two decimals below 1, two digits below 100, no decimals above."""
    if np.isnan(value) or value == 0:
        return "0" if value == 0 else ""
    if np.isinf(value):
        return "∞" if value > 0 else "-∞"
    size = abs(value)
    shown = f"{value:.2f}" if size < 1 else f"{value:.2g}" if size < 99.5 else f"{value:.0f}"
    return shown.replace("0.", ".", 1).replace("-.00", ".00")


def draw_lines(
    ax: Axes | None, title: str, lines: Mapping[str, tuple[Any, ...]], xlabel: str, ylabel: str
) -> tuple[Figure, Axes]:
    """Draw lines by name, each (x, y) or with the ends of its band (x, y, low, high); a line of None is left out."""
    new = ax is None
    fig, ax = figure_and_axes(ax, (6.0, 3.4), title)
    for number, ((name, (x, y, *band)), style) in enumerate(zip(lines.items(), line_styles(), strict=False)):
        if y is not None:
            ax.plot(x, y, markersize=3.5, linewidth=1.2, color=f"C{number}", label=as_label(name), **style)
        if band:
            ax.fill_between(x, *band, color=f"C{number}", alpha=min(0.2, 2 / len(lines)), linewidth=0)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    return with_legend(fig, ax, new)


def draw_by_distance(
    ax: Axes | None, title: str, lines: Mapping[str, tuple[Any, Any]], xlabel: str, ylabel: str, scale: str = "linear"
) -> tuple[Figure, Axes]:
    """Draw values by distance, given by name, from 0 on unless the scale is "log"."""
    fig, ax = draw_lines(ax, title, lines, xlabel, ylabel)
    ax.locator_params(axis="x", integer=True, min_n_ticks=1)
    ax.set_yscale(scale)
    top = max((float(np.nanmax(y)) for _, y in lines.values() if y is not None), default=1.0)
    ax.set_ylim(bottom=0 if scale == "linear" else max(ax.get_ylim()[0], top * 1e-6))
    return fig, ax


def line_styles() -> Iterator[dict[str, Any]]:
    """Yield the dash and the marker of each line."""
    return ({"linestyle": dash, "marker": mark} for dash, mark in zip(cycle(_DASHES), cycle(_MARKERS), strict=False))


def as_label(name: Any) -> str:
    """Return a name as matplotlib shows it in a legend: it hides one with a leading _, and reads $a$ as a formula."""
    shown = str(name).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def with_legend(fig: Figure, ax: Axes, resizable: bool) -> tuple[Figure, Axes]:
    """Return both with a legend of the named lines: beside the axes from seven rows on, in a figure made wider."""
    handles, labels = ax.get_legend_handles_labels()
    labels = [textwrap.fill(label, 32) for label in labels]
    rows = sum(label.count("\n") + 1 for label in labels)
    if rows <= 6:
        if rows:
            ax.legend(handles, labels, framealpha=0.85, edgecolor="none")
        return fig, ax
    columns = math.ceil(rows / max(1, int(size_in_inches(ax)[1] / 0.17)))
    legend = ax.legend(
        handles, labels, loc="upper left", bbox_to_anchor=(1, 1), ncols=columns, fontsize="small", frameon=False
    )
    if resizable:
        fig.set_figwidth(fig.get_figwidth() + legend.get_window_extent().width / fig.dpi)
    return fig, ax


def _wrapped(text: str, inches: float, character: float) -> str:
    """Return a text in lines of about this length, given the width of a character."""
    return textwrap.fill(text, max(10, int(inches / character)))


def size_in_inches(ax: Axes) -> tuple[float, float]:
    """Return the approximate width and height of the axes, in inches."""
    box = ax.get_window_extent()
    return box.width / ax.figure.dpi, box.height / ax.figure.dpi


def label_cells(
    ax: Axes, xlabel: str, columns: Sequence[int | str], ylabel: str, rows: Sequence[int | str], room: float = 0.22
) -> None:
    """Name the axes of an image, and as many of its columns and rows as have room, which for columns is in inches."""
    width, height = size_in_inches(ax)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.set_xticks(*ticks_that_fit(columns, width, room))
    ax.set_yticks(*ticks_that_fit(rows, height))


def ticks_that_fit(names: Sequence[int | str], inches: float, room: float = 0.22) -> tuple[range, list[str]]:
    """Return which places are labelled, all or every k-th where each has less room in inches, and the labels."""
    ticks = range(0, len(names), math.ceil(room * len(names) / inches))
    return ticks, [str(names[place]) for place in ticks]
