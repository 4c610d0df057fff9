"""Pictures of matrices, heads, profiles, comparisons and dependencies; each takes ``ax=`` and returns ``(fig, ax)``.

Weights are greys and lines differ in dash and marker, so that a black and white print says the same. Nothing is shown
or saved: that is the caller's. Needs matplotlib (the ``plot`` extra).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from pelocality.intervals import mean_over_runs
from pelocality.metrics import distance_profile

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pelocality.dependencies import DependencyDistances, HeadKinds
    from pelocality.metrics.door import Attention

COLOURS = "Greys"
_LINES = [("-", "o"), ("--", "s"), ("-.", "^"), (":", "D"), ("-", "v"), ("--", "P")]


def heatmap(
    attention: Attention, *, ax: Axes | None = None, scale: Literal["linear", "log"] = "linear", title: str = ""
) -> tuple[Figure, Axes]:
    """Draw one positional matrix: query down, key across, the darker, the more weight.

    Args:
        attention: One matrix (n, n), or a result with one; rows sum to 1.
        ax: Where to draw; a new figure if None.
        scale: ``"log"`` shows the tails, over at most six decades below the largest weight.
        title: Above the picture.

    Returns:
        Figure and axes.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: More than one matrix, or an unknown scale.

    Examples:
        >>> import torch
        >>> fig, ax = heatmap(torch.eye(8), title="attends to itself")
        >>> ax.get_xlabel()
        'key position (tokens)'
    """
    matrix = _array(getattr(attention, "attention", attention))
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(
            f"heatmap draws one matrix (n, n), got shape {matrix.shape}; choose a layer and head, A[layer, head], "
            "or average, A.mean((0, 1))"
        )
    if scale not in ("linear", "log"):
        raise ValueError(f"scale must be 'linear' or 'log', got {scale!r}")
    fig, ax = _figure(ax, (4.6, 4.0))
    top = float(matrix.max())
    if scale == "log":
        from matplotlib.colors import LogNorm

        held = matrix[matrix > 0]
        floor = max(float(held.min()), top * 1e-6)
        image = ax.imshow(np.maximum(matrix, floor), cmap=COLOURS, norm=LogNorm(floor, top))
    else:
        image = ax.imshow(matrix, cmap=COLOURS, vmin=0, vmax=top)
    ax.set(xlabel="key position (tokens)", ylabel="query position (tokens)", title=title)
    fig.colorbar(image, ax=ax, label="attention weight", fraction=0.046, pad=0.04)
    return fig, ax


def head_grid(
    values: Any, *, ax: Axes | None = None, label: str = "", title: str = "", limits: tuple[float, float] | None = None
) -> tuple[Figure, Axes]:
    """Draw one number per layer and head, such as a metric, as a grid with the numbers in it.

    Args:
        values: (layer, head), any metric.
        ax: Where to draw; a new figure if None.
        label: What the numbers are, beside the colour bar.
        title: Above the picture.
        limits: Smallest and largest value of the colours; those of the data if None.

    Returns:
        Figure and axes.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: Not two axes.

    Examples:
        >>> import torch
        >>> fig, ax = head_grid(torch.rand(6, 12), label="locality")
        >>> ax.get_ylabel()
        'layer'
    """
    grid = _array(values)
    if grid.ndim != 2:
        raise ValueError(f"head_grid draws (layer, head), got shape {grid.shape}")
    layers, heads = grid.shape
    fig, ax = _figure(ax, (1.6 + 0.52 * heads, 1.4 + 0.42 * layers))
    low, high = limits or (float(np.nanmin(grid)), float(np.nanmax(grid)))
    image = ax.imshow(grid, cmap=COLOURS, vmin=low, vmax=high, aspect="auto")
    middle = (low + high) / 2
    for layer, head in np.ndindex(layers, heads):
        value = float(grid[layer, head])
        ink = "white" if value > middle else "black"
        ax.text(head, layer, _short(value), ha="center", va="center", color=ink, fontsize=7)
    ax.set(xlabel="head", ylabel="layer", title=title, xticks=range(heads), yticks=range(layers))
    fig.colorbar(image, ax=ax, label=label, fraction=0.046, pad=0.02)
    return fig, ax


def profiles(
    attention: Attention | Mapping[str, Attention],
    *,
    ax: Axes | None = None,
    reach: int = 16,
    title: str = "",
) -> tuple[Figure, Axes]:
    """Draw the mean attention at every signed distance, several models or encodings overlaid.

    Args:
        attention: Matrices (..., n, n), averaged over the leading axes; or several by name.
        ax: Where to draw; a new figure if None.
        reach: Largest distance drawn, in tokens.
        title: Above the picture.

    Returns:
        Figure and axes.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: As for `distance_profile`.

    Examples:
        >>> import torch
        >>> fig, ax = profiles({"itself": torch.eye(8), "uniform": torch.full((8, 8), 1 / 8)})
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['itself', 'uniform']
    """
    named = attention if isinstance(attention, Mapping) else {"": attention}
    fig, ax = _figure(ax, (6.0, 3.4))
    for (name, matrices), (dash, marker) in zip(named.items(), cycle(_LINES), strict=False):
        profile = _array(distance_profile(matrices))
        profile = profile.reshape(-1, profile.shape[-1]).mean(0)
        n = (len(profile) + 1) // 2
        near = min(reach, n - 1)
        ax.plot(
            np.arange(-near, near + 1),
            profile[n - 1 - near : n + near],
            dash,
            marker=marker,
            markersize=3.5,
            linewidth=1.2,
            label=name,
        )
    ax.axvline(0, color="0.8", linewidth=0.8, zorder=0)
    ax.set(xlabel="distance, key - query (tokens)", ylabel="mean attention", title=title)
    ax.set_ylim(bottom=0)
    if any(named):
        ax.legend(framealpha=0.85, edgecolor="none")
    return fig, ax


def comparison(
    values: Mapping[str, Any], *, ax: Axes | None = None, label: str = "", title: str = ""
) -> tuple[Figure, Axes]:
    """Draw a metric per layer before and after, or for several models: heads as dots, their mean as a line.

    Args:
        values: By name, each (layer, head) or (layer,).
        ax: Where to draw; a new figure if None.
        label: What the numbers are, on the vertical axis.
        title: Above the picture.

    Returns:
        Figure and axes.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: Neither one nor two axes, or nothing to draw.

    Examples:
        >>> import torch
        >>> fig, ax = comparison({"random": torch.rand(6, 12), "trained": torch.rand(6, 12)}, label="locality")
        >>> ax.get_xlabel()
        'layer'
    """
    if not values:
        raise ValueError("values is empty; give at least one (layer, head) by name")
    fig, ax = _figure(ax, (5.2, 3.4))
    spread = 0.5 / len(values)
    for index, ((name, given), (dash, marker)) in enumerate(zip(values.items(), cycle(_LINES), strict=False)):
        grid = _array(given)
        if grid.ndim not in (1, 2):
            raise ValueError(f"values[{name!r}] must be (layer, head) or (layer,), got shape {grid.shape}")
        place = np.arange(len(grid)) + spread * (index - (len(values) - 1) / 2)
        by_head = grid.reshape(len(grid), -1)
        (line,) = ax.plot(
            place,
            np.nanmean(by_head, -1),
            dash,
            marker=marker,
            markersize=6,
            markeredgecolor="black",
            label=name,
            zorder=3,
        )
        if grid.ndim == 2:
            ax.scatter(np.repeat(place, by_head.shape[1]), by_head.ravel(), s=9, color=line.get_color(), alpha=0.35)
    ax.set(xlabel="layer", ylabel=label, title=title)
    ax.set_xticks(range(max(len(_array(given)) for given in values.values())))
    ax.legend(framealpha=0.85, edgecolor="none")
    return fig, ax


def head_kinds(
    kinds: HeadKinds, *, ax: Axes | None = None, direction: str = "dependent to head", title: str = ""
) -> tuple[Figure, Axes]:
    """Draw the best positional and the best contextual head for each relation, the shortest relations on top.

    Args:
        kinds: From `compare_head_kinds`.
        ax: Where to draw; a new figure if None.
        direction: ``"dependent to head"`` or ``"head to dependent"``.
        title: Above the picture.

    Returns:
        Figure and axes. Bars are the intervals, the short line is the best fixed offset; a relation is starred
        where the two kinds differ with q < 0.05, and its mean distance in words stands in brackets.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: The table has no such direction.

    Examples:
        >>> import pandas as pd
        >>> from types import SimpleNamespace
        >>> row = {"relation": "det", "direction": "dependent to head", "distance": 1.5, "q": 0.01, "baseline": 0.5}
        >>> row |= {"positional": 0.8, "positional_low": 0.7, "positional_high": 0.9}
        >>> row |= {"contextual": 0.4, "contextual_low": 0.3, "contextual_high": 0.5}
        >>> fig, ax = head_kinds(SimpleNamespace(table=pd.DataFrame([row])))
        >>> [label.get_text() for label in ax.get_yticklabels()]
        ['det* (1.5)']
    """
    table = kinds.table[kinds.table["direction"] == direction]
    if table.empty:
        known = ", ".join(map(repr, kinds.table["direction"].unique()))
        raise ValueError(f"direction must be one of {known}, got {direction!r}")
    fig, ax = _figure(ax, (6.4, 1.2 + 0.24 * len(table)))
    place = np.arange(len(table))
    styles = {"positional": ("o", "black", "black", -0.14), "contextual": ("s", "white", "0.45", 0.14)}
    for name, (marker, fill, line, shift) in styles.items():
        value = table[name]
        ends = [value - table[f"{name}_low"], table[f"{name}_high"] - value]
        ax.errorbar(
            value,
            place + shift,
            xerr=ends,
            fmt=marker,
            color=line,
            markerfacecolor=fill,
            markersize=5,
            elinewidth=1,
            label=f"best {name} head",
        )
    ax.scatter(table["baseline"], place, marker="|", s=110, color="0.3", label="best fixed offset", zorder=1)
    cells = table[["relation", "q", "distance"]].itertuples(index=False, name=None)
    labels = [f"{relation}{'*' if q < 0.05 else ''} ({distance:.1f})" for relation, q, distance in cells]
    ax.set_yticks(place, labels)
    ax.set(xlabel=f"accuracy, {direction}", xlim=(0, 1), title=title)
    ax.set_ylim(len(table) - 0.4, -0.6)
    ax.grid(axis="y", color="0.92")
    ax.set_axisbelow(True)
    ax.legend(framealpha=0.85, edgecolor="none")
    return fig, ax


def distances(
    found: DependencyDistances, *, ax: Axes | None = None, relation: str = "all", reach: int = 12, title: str = ""
) -> tuple[Figure, Axes]:
    """Draw how often dependents and heads stand how many words apart, one line per language.

    Args:
        found: From `dependency_distances`.
        ax: Where to draw; a new figure if None.
        relation: A relation, or ``"all"``.
        reach: Largest distance drawn, in words.
        title: Above the picture.

    Returns:
        Figure and axes.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: No language has the relation.

    Examples:
        >>> from pelocality.dependencies import dependency_distances
        >>> from pelocality.trees import Dependencies, Sentence
        >>> tree = Dependencies((2, 0, 2), ("nsubj", "root", "obj"), "made up")
        >>> found = dependency_distances([Sentence(("Dogs", "chase", "cats"), language="en", dependencies=tree)])
        >>> fig, ax = distances(found)
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['en']
    """
    shares = found.histogram(relation).head(reach)
    fig, ax = _figure(ax, (6.0, 3.4))
    for number, (language, (dash, marker)) in enumerate(zip(found.sentences, cycle(_LINES), strict=False)):
        if language in shares:  # one without the relation still keeps its line's look for itself
            share = shares[language]
            ax.plot(share.index, share, dash, marker=marker, markersize=3.5, color=f"C{number}", label=language)
    ax.set(xlabel="distance to the head (words)", ylabel="share of dependencies", title=title)
    ax.set_ylim(bottom=0)
    ax.legend(framealpha=0.85, edgecolor="none")
    return fig, ax


def trajectory(
    table: pd.DataFrame, metric: str = "locality", *, ax: Axes | None = None, title: str = ""
) -> tuple[Figure, Axes]:
    """Draw a metric per layer over training; over several seeds, their mean and its 95 % interval.

    Args:
        table: A row per step and layer, as ``LocalityCallback.table`` gives; with a column ``seed``, per seed too.
        metric: The column to draw.
        ax: Where to draw; a new figure if None.
        title: Above the picture.

    Returns:
        Figure and axes.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: A column is missing.

    Examples:
        >>> import pandas as pd
        >>> table = pd.DataFrame({"step": [0, 10, 0, 10], "layer": [0, 0, 1, 1], "locality": [0.02, 0.1, 0.02, 0.07]})
        >>> fig, ax = trajectory(table)
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['layer 0', 'layer 1']
    """
    missing = {"step", "layer", metric} - set(table.columns)
    if missing:
        raise ValueError(f"table has no column {', '.join(sorted(missing))}; it has {', '.join(table.columns)}")
    fig, ax = _figure(ax, (5.2, 3.4))
    for (layer, rows), (dash, marker) in zip(table.groupby("layer"), cycle(_LINES), strict=False):
        over_seeds = {step: mean_over_runs(values) for step, values in rows.groupby("step")[metric]}
        steps, means = np.array(list(over_seeds)), [mean.value for mean in over_seeds.values()]
        (line,) = ax.plot(steps, means, dash, marker=marker, markersize=3.5, label=f"layer {layer}")
        low, high = zip(*((mean.low, mean.high) for mean in over_seeds.values()), strict=True)
        ax.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    ax.set(xlabel="training step", ylabel=metric.replace("_", " "), title=title)
    ax.legend(framealpha=0.85, edgecolor="none")
    return fig, ax


def _figure(ax: Axes | None, size: tuple[float, float]) -> tuple[Figure, Axes]:
    if ax is not None:
        figure = ax.get_figure(root=True)
        assert figure is not None
        return figure, ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'pelocality[plot]'") from error
    return plt.subplots(figsize=size, layout="constrained")


def _array(values: Any) -> np.ndarray:
    return values.detach().float().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values, float)


def _short(value: float) -> str:
    if np.isnan(value):
        return ""
    shown = f"{value:.2f}" if abs(value) < 1 else f"{value:.2g}"
    return shown.replace("0.", ".", 1).replace("-.00", ".00")
