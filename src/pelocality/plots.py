"""Plots of attention matrices, metrics, distance profiles and dependencies; all take ``ax=`` and return ``(fig, ax)``.

Plots are readable in black and white: weights are greys, NaN is hatched, and up to 52 lines differ in dash and marker.
A legend of more than six rows is placed beside the axes; create your own figures with ``layout="constrained"`` to leave
room for it. Nothing is shown or saved. Needs matplotlib (the ``plot`` extra).
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from pelocality._checks import check_choice, count
from pelocality.metrics import distance_profile
from pelocality.statistics import mean_over_runs

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pelocality.evaluation.dependencies import DependencyDistances, HeadTypes
    from pelocality.metrics._inputs import Attention

_DASHES, _MARKERS = ("-", "--", "-.", ":"), "os^DvPX<>*phd"  # 4 and 13 have no common divisor: 52 pairs


def heatmap(
    attention: Attention, *, ax: Axes | None = None, scale: Literal["linear", "log"] = "linear", title: str = ""
) -> tuple[Figure, Axes]:
    """Draw one attention matrix: queries as rows, keys as columns, larger weights darker.

    Args:
        attention: One matrix (n, n), or a result with one; rows sum to 1.
        ax: Where to draw; a new figure if None.
        scale: ``"log"`` shows small weights, over at most six decades below the largest weight; zero is white.
        title: Title of the axes.

    Returns:
        Figure and axes.

    Raises:
        ImportError: Matplotlib is missing.
        ValueError: More than one matrix, weights that are negative or infinite, or an unknown scale.

    Examples:
        >>> import torch
        >>> fig, ax = heatmap(torch.eye(8), title="attends to itself")
        >>> ax.get_xlabel()
        'key position (tokens)'
    """
    matrix = _array(getattr(attention, "attention", attention))
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise ValueError(f"heatmap draws one matrix (n, n), got shape {matrix.shape}; choose one, A[0, 0], or average")
    wrong = matrix[(matrix < 0) | np.isinf(matrix)]
    if wrong.size:
        raise ValueError(f"attention weights must be finite and at least 0, got {wrong[0]:g}; apply .softmax(-1)?")
    check_choice("scale", scale, ("linear", "log"))
    fig, ax = _figure(ax, (4.6, 4.4), title)
    positive = matrix[matrix > 0]
    top = float(positive.max(initial=0)) or 1.0
    if scale == "log":
        from matplotlib.colors import LogNorm

        floor = max(float(positive.min(initial=top)) / 10, top * 1e-6)  # a decade lower: only zero is white
        _image(ax, np.maximum(matrix, floor), "attention weight", norm=LogNorm(floor, top))
    else:
        _image(ax, matrix, "attention weight", vmin=0, vmax=top)
    ax.set(xlabel="key position (tokens)", ylabel="query position (tokens)")
    ax.spines[:].set_color("0.7")  # a black frame would hide the first key, on which attention often sinks
    ax.locator_params(integer=True, min_n_ticks=1)
    return fig, ax


def head_grid(
    values: Any,
    *,
    metric: str | None = None,
    layers: Sequence[int] | None = None,
    ax: Axes | None = None,
    label: str = "",
    title: str = "",
    limits: tuple[float, float] | None = None,
) -> tuple[Figure, Axes]:
    """Draw one number per layer and head as a grid, with the numbers in the cells where they fit.

    Args:
        values: (layer, head), any metric; or a result of ``positional_attention`` or ``text_average``.
        metric: Which number of a result: a name in its ``to_frame``. None: locality, past locality if it is causal.
        layers: The numbers of these layers in the model; None: those of a result, otherwise from 0.
        ax: Where to draw; a new figure if None.
        label: Label of the colour bar; the name of a result's metric if empty.
        title: Title of the axes.
        limits: Smallest and largest value of the colour scale; those of the data if None.

    Returns:
        Figure and axes.

    Raises:
        ImportError: Matplotlib is missing.
        ValueError: Not two axes, nothing to draw, another number of layers, a metric of numbers that are no result, or
            limits in the wrong order.

    Examples:
        >>> import torch
        >>> fig, ax = head_grid(torch.rand(6, 12), label="locality")
        >>> ax.get_ylabel()
        'layer'
    """
    column, [(grid, layers)] = _by_layer({"values": values}, metric, layers, (2,))
    if limits is not None and not limits[0] <= limits[1]:
        raise ValueError(f"limits must be the smallest and the largest value, in this order, got {limits}")
    depth, heads = grid.shape
    fig, ax = _figure(ax, (1.6 + 0.52 * heads, 1.4 + 0.42 * depth), title)
    finite = grid[np.isfinite(grid)]
    low, high = limits or ((float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0))
    _image(ax, np.clip(grid, low, high), label or column, vmin=low, vmax=high, aspect="auto")
    width, height = _inches(ax)
    numbers = {place: _short(float(grid[place])) for place in np.ndindex(depth, heads)}
    longest = max(1, *map(len, numbers.values()))
    size = min(7.0, 72 * height / depth * 0.7, 72 * width / heads / longest * 1.4)
    for (layer, head), text in numbers.items() if size >= 4 else ():
        colour = "white" if grid[layer, head] > low + 0.6 * (high - low) else "black"
        ax.text(head, layer, text, ha="center", va="center", color=colour, fontsize=size)
    ax.set(xlabel="head", ylabel="layer")
    ax.set_xticks(*_ticks(range(heads), width))
    ax.set_yticks(*_ticks(layers, height))
    return fig, ax


def profiles(
    attention: Attention | Mapping[str, Attention],
    *,
    ax: Axes | None = None,
    reach: int = 16,
    title: str = "",
) -> tuple[Figure, Axes]:
    """Draw the mean attention at each signed distance, with one line per model or encoding.

    Args:
        attention: Matrices (..., n, n), averaged over the leading axes; or a mapping of several by name.
        ax: Where to draw; a new figure if None.
        reach: Largest distance drawn, in tokens.
        title: Title of the axes.

    Returns:
        Figure and axes.

    Raises:
        ImportError: Matplotlib is missing.
        TypeError: ``reach`` is not an integer.
        ValueError: Matrices that `distance_profile` refuses, nothing to draw, or ``reach`` below 1.

    Examples:
        >>> import torch
        >>> fig, ax = profiles({"itself": torch.eye(8), "uniform": torch.full((8, 8), 1 / 8)})
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['itself', 'uniform']
    """
    named: Any = {"": attention}
    if isinstance(attention, Mapping) and not hasattr(attention, "attentions"):  # as a model's output has
        named = attention
    if not named:
        raise ValueError("attention is empty; give at least one matrix by name")
    count("reach", reach)
    lines = {}
    for name, matrices in named.items():
        profile = _array(distance_profile(matrices))
        profile = profile.reshape(-1, profile.shape[-1]).mean(0)
        n = (len(profile) + 1) // 2
        near = min(reach, n - 1)
        lines[name] = np.arange(-near, near + 1), profile[n - 1 - near : n + near]
    fig, ax = _by_distance(ax, title, lines, "distance, key - query (tokens)", "mean attention")
    ax.axvline(0, color="0.8", linewidth=0.8, zorder=0)
    return fig, ax


def comparison(
    values: Mapping[str, Any],
    *,
    metric: str | None = None,
    layers: Sequence[int] | None = None,
    ax: Axes | None = None,
    label: str = "",
    title: str = "",
) -> tuple[Figure, Axes]:
    """Draw a metric per layer for several models or states of training: heads as dots, their mean as a line.

    Args:
        values: By name, each (layer, head) or (layer,), or a result as for `head_grid`.
        metric: Which number of results: a name in their ``to_frame``. None: as for `head_grid`, if that is the same for
            all of them; of bidirectional and causal models, name one.
        layers: The numbers of the layers of every line in its model; None: those of each result, otherwise from 0.
        ax: Where to draw; a new figure if None.
        label: Label of the vertical axis; the name of the results' metric if empty.
        title: Title of the axes.

    Returns:
        Figure and axes.

    Raises:
        ImportError: Matplotlib is missing.
        ValueError: Neither one nor two axes, nothing to draw, another number of layers, a metric of numbers that are no
            result, or results that would be drawn by different metrics.

    Examples:
        >>> import torch
        >>> fig, ax = comparison({"random": torch.rand(6, 12), "trained": torch.rand(6, 12)}, label="locality")
        >>> ax.get_xlabel()
        'layer'
    """
    if not values:
        raise ValueError("values is empty; give at least one (layer, head) by name")
    given = {f"values[{name!r}]": each for name, each in values.items()}
    column, lines = _by_layer(given, metric, layers, (1, 2))
    every_layer = sorted({layer for _, its_layers in lines for layer in its_layers})
    new = ax is None
    fig, ax = _figure(ax, (5.2, 3.4), title)
    spread = 0.5 / len(lines)
    for index, (name, (grid, its_layers), style) in enumerate(zip(values, lines, _styles(), strict=False)):
        place = np.searchsorted(every_layer, its_layers) + spread * (index - (len(lines) - 1) / 2)
        by_head = grid.reshape(len(grid), -1)
        mean = np.ma.masked_where(np.isnan(by_head), by_head).mean(-1)
        (line,) = ax.plot(place, mean, markersize=6, markeredgecolor="black", label=name, zorder=3, **style)
        if grid.ndim == 2:
            ax.scatter(np.repeat(place, by_head.shape[1]), by_head.ravel(), s=9, color=line.get_color(), alpha=0.35)
    ax.set(xlabel="layer", ylabel=label or column, xlim=(-0.6, len(every_layer) - 0.4))
    ax.set_xticks(*_ticks(every_layer, _inches(ax)[0]))
    return _with_legend(fig, ax, new)


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
    fig, ax = _figure(ax, (5.2 + 0.08 * max(map(len, labels)), 1.4 + 0.24 * len(table)), title)
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
    return _by_distance(ax, title, lines, "distance to the head (words)", "share of dependencies")


def trajectory(
    table: pd.DataFrame, metric: str | None = None, *, ax: Axes | None = None, title: str = ""
) -> tuple[Figure, Axes]:
    """Draw a metric per layer over training; over several seeds, their mean, and as a band its 95 % interval.

    Args:
        table: One row per step and layer, such as ``LocalityCallback.table``; with a column ``seed``, also per seed.
            The band is Student's t interval over the seeds; a single run has none.
        metric: The column to draw. None: locality, past locality if the table has that, as of causal models.
        ax: Where to draw; a new figure if None.
        title: Title of the axes.

    Returns:
        Figure and axes.

    Raises:
        ImportError: Matplotlib is missing.
        ValueError: A column is missing, the table is empty, or it has several rows for one step, layer and seed.

    Examples:
        >>> import pandas as pd
        >>> table = pd.DataFrame({"step": [0, 10, 0, 10], "layer": [0, 0, 1, 1], "locality": [0.02, 0.1, 0.02, 0.07]})
        >>> fig, ax = trajectory(table)
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['layer 0', 'layer 1']
    """
    if table.empty:
        raise ValueError("table is empty; a LocalityCallback fills it while its Trainer trains")
    if metric is None:
        metric = "past_locality" if "past_locality" in table else "locality"
    missing = {"step", "layer", metric} - set(table.columns)
    if missing:
        raise ValueError(f"table has no column {', '.join(sorted(missing))}; it has {', '.join(table.columns)}")
    rows_by = [name for name in ("step", "layer", "seed") if name in table]
    repeated = table[table.duplicated(rows_by)]
    if len(repeated):
        place = ", ".join(f"{name} {repeated[name].iloc[0]}" for name in rows_by)
        advice = "give every run its own seed" if "seed" in rows_by else "add a column seed: table.assign(seed=...)"
        raise ValueError(f"table has several rows for {place}; {advice}")
    new = ax is None
    fig, ax = _figure(ax, (5.2, 3.4), title)
    layers = table.groupby("layer")
    for (layer, rows), style in zip(layers, _styles(), strict=False):
        over_seeds = {step: mean_over_runs(values) for step, values in rows.groupby("step")[metric]}
        steps, means = np.array(list(over_seeds)), [mean.value for mean in over_seeds.values()]
        (line,) = ax.plot(steps, means, markersize=3.5, label=f"layer {layer}", **style)
        low, high = zip(*((mean.low, mean.high) for mean in over_seeds.values()), strict=True)
        ax.fill_between(steps, low, high, color=line.get_color(), alpha=min(0.2, 2 / len(layers)), linewidth=0)
    ax.set(xlabel="training step", ylabel=metric.replace("_", " "))
    return _with_legend(fig, ax, new)


def _by_distance(
    ax: Axes | None, title: str, lines: Mapping[str, tuple[Any, Any]], xlabel: str, ylabel: str
) -> tuple[Figure, Axes]:
    """Draw values from 0 on by distance, given by name; a line without values is left out."""
    new = ax is None
    fig, ax = _figure(ax, (6.0, 3.4), title)
    for number, ((name, (x, y)), style) in enumerate(zip(lines.items(), _styles(), strict=False)):
        if y is not None:
            ax.plot(x, y, markersize=3.5, linewidth=1.2, color=f"C{number}", label=name, **style)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.locator_params(axis="x", integer=True)
    ax.set_ylim(bottom=0)
    return _with_legend(fig, ax, new)


def _by_layer(
    values: Mapping[str, Any], metric: str | None, layers: Sequence[int] | None, axes: Sequence[int]
) -> tuple[str, list[tuple[np.ndarray, Sequence[int]]]]:
    """Return what results are drawn by, the same for all, in words; and each by layer with the layers' numbers."""
    frames = {name: each.to_frame() for name, each in values.items() if hasattr(each, "per_sample")}
    if metric is not None:  # a metric that is not shown by default is measured
        frames = {n: f if metric in f else values[n].to_frame(metrics=[metric]) for n, f in frames.items()}
    if metric is None:
        columns = {frame.columns[2]: name for name, frame in frames.items()}  # after layer and head
        if len(columns) > 1:
            different = ", ".join(f"{column} of {name}" for column, name in columns.items())
            raise ValueError(f"results would be drawn by different metrics: {different}; choose one for all, metric=")
        column = next(iter(columns), "")
    else:
        if plain := [name for name in values if name not in frames]:
            raise ValueError(f"metric={metric!r} is read from results, and {plain[0]} is numbers; leave metric out")
        column = metric if all(metric in frame for frame in frames.values()) else f"{metric}_of_mean"
    found = []
    for name, each in values.items():
        its_layers = layers
        if name in frames:
            its_layers = each.layers if layers is None else layers
            each = frames[name][column].to_numpy().reshape(each.attention.shape[:2])
        grid = _array(each)
        if grid.ndim not in axes or not grid.size:
            wanted = "(layer, head) or (layer,)" if 1 in axes else "(layer, head)"
            raise ValueError(f"{name} must be {wanted}, got shape {grid.shape}")
        numbers = range(len(grid)) if its_layers is None else its_layers
        if len(numbers) != len(grid):
            raise ValueError(
                f"layers must number the {len(grid)} layers of {name}, got {len(numbers)}: {list(numbers)}"
            )
        found.append((grid, numbers))
    return column.replace("_", " "), found


def _figure(ax: Axes | None, size: tuple[float, float], title: str) -> tuple[Figure, Axes]:
    """Return the given or new axes with their title set, and their figure."""
    if ax is None:
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError("plots need matplotlib: pip install matplotlib") from error
        _, ax = plt.subplots(figsize=size, layout="constrained")
    ax.set_title(title, wrap=True)
    figure = ax.get_figure(root=True)
    assert figure is not None
    return figure, ax


def _image(ax: Axes, values: np.ndarray, label: str, **options: Any) -> None:
    """Draw values in greys with a colour bar, and NaN as hatching."""
    if np.isnan(values).any():
        ax.patch.set(hatch="////", edgecolor="0.6")
    image = ax.imshow(values, cmap="Greys", **options)
    image.figure.colorbar(image, ax=ax, label=label, fraction=0.046, pad=0.03)


def _styles() -> Iterator[dict[str, Any]]:
    """Yield the dash and the marker of each line."""
    return ({"linestyle": dash, "marker": mark} for dash, mark in zip(cycle(_DASHES), cycle(_MARKERS), strict=False))


def _with_legend(fig: Figure, ax: Axes, resizable: bool) -> tuple[Figure, Axes]:
    """Return both with a legend of the named lines: beside the axes from seven rows on, in a figure made wider."""
    handles, labels = ax.get_legend_handles_labels()
    labels = [textwrap.fill(label, 32) for label in labels]
    rows = sum(label.count("\n") + 1 for label in labels)
    if rows <= 6:
        if rows:
            ax.legend(handles, labels, framealpha=0.85, edgecolor="none")
        return fig, ax
    columns = math.ceil(rows / max(1, int(_inches(ax)[1] / 0.17)))
    legend = ax.legend(
        handles, labels, loc="upper left", bbox_to_anchor=(1, 1), ncols=columns, fontsize="small", frameon=False
    )
    if resizable:
        fig.set_figwidth(fig.get_figwidth() + legend.get_window_extent().width / fig.dpi)
    return fig, ax


def _inches(ax: Axes) -> tuple[float, float]:
    """Return the approximate width and height of the axes, in inches."""
    box = ax.get_window_extent()
    return box.width / ax.figure.dpi, box.height / ax.figure.dpi


def _ticks(numbers: Sequence[int], inches: float) -> tuple[range, list[str]]:
    """Return which layers or heads are labelled, all or every k-th where there is not enough room, and the labels."""
    ticks = range(0, len(numbers), math.ceil(0.22 * len(numbers) / inches))
    return ticks, [str(numbers[place]) for place in ticks]


def _array(values: Any) -> np.ndarray:
    """Return a tensor or nested lists as an array."""
    return values.detach().float().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values, float)


def _short(value: float) -> str:
    """Return a number as a short text: two decimals below 1, two digits below 100, no decimals above."""
    if np.isnan(value):
        return ""
    if np.isinf(value):
        return "∞" if value > 0 else "-∞"
    size = abs(value)
    shown = f"{value:.2f}" if size < 1 else f"{value:.2g}" if size < 99.5 else f"{value:.0f}"
    return shown.replace("0.", ".", 1).replace("-.00", ".00")
