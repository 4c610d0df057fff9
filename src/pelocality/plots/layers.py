"""Plots of a metric by layer: of each head, of several models, and over training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pelocality._checks import check_choice, real_numbers
from pelocality.metrics import Measurement
from pelocality.metrics._inputs import unwrap
from pelocality.plots import _axes as axes
from pelocality.statistics import mean_over_runs

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Each class of heads has a sign, and a colour on which the sign can be read; the sign of an offset is its distance.
_CLASSES = {
    "previous": ("-1", "#9ecae1"),
    "self": ("0", "#c6dbef"),
    "next": ("+1", "#6baed6"),
    "offset": ("±k", "#deebf7"),
    "duplicate": ("D", "#fdae6b"),
    "induction": ("I", "#f16913"),
    "sink": ("s", "#d9d9d9"),
    "other": ("", "#ffffff"),
}


def head_grid(
    values: Any,
    *,
    metric: str | None = None,
    layers: Sequence[int] | None = None,
    length: int = 128,
    ax: Axes | None = None,
    label: str = "",
    title: str = "",
    limits: tuple[float, float] | None = None,
) -> tuple[Figure, Axes]:
    """Draw one number per layer and head as a grid, with the numbers in the cells where they fit.

    Args:
        values: Numbers (layer, head), any metric; or what is measured for them: a result of ``positional_attention`` or
            ``text_average``, attention (layer, head, n, n), the output of a model with its attentions (texts of a batch
            are averaged), an encoding, what `measure` returned.
        metric: What is measured: the name of a metric of ``pelocality.metrics``, or a name in the ``to_frame`` of a
            result. None: locality, or past locality of causal attention.
        layers: The numbers of these layers in the model; None: those of a result, otherwise from 0.
        length: The number of positions of an encoding.
        ax: Where to draw; a new figure if None.
        label: Label of the colour bar; the name of the metric if empty.
        title: Title of the axes.
        limits: Smallest and largest value of the colour scale; those of the data if None.

    Returns:
        Figure and axes.

    Raises:
        ImportError: Matplotlib is missing.
        TypeError: Values that are none of these.
        ValueError: Not two axes, nothing to draw, another number of layers, an unknown metric, a metric of numbers, or
            limits in another order.

    Examples:
        >>> import torch
        >>> fig, ax = head_grid(torch.rand(6, 12), label="locality")
        >>> ax.get_ylabel()
        'layer'
    """
    column, [(grid, layers, _)] = _by_layer({"values": values}, metric, layers, length, (2,))
    depth, heads = grid.shape
    fig, ax = axes.figure_and_axes(ax, (1.6 + 0.52 * heads, 1.4 + 0.42 * depth), title)
    finite = grid[np.isfinite(grid)]
    ends = (finite.min(), finite.max()) if finite.size else (0, 1)
    low, high = map(float, ends if limits is None else limits)
    axes.draw_image(ax, np.clip(grid, low, high), label or column, vmin=low, vmax=high, aspect="auto")
    axes.draw_numbers(ax, grid)
    axes.label_cells(ax, "head", range(heads), "layer", layers)
    return fig, ax


def bands(
    result: Any, column: str = "variance", *, layer: int | None = None, ax: Axes | None = None, title: str = ""
) -> tuple[Figure, Axes]:
    """Draw which frequencies heads use, as a heat map of bands (from fast to slow) and layers or heads.

    Args:
        result: What ``rotary_bands`` returned.
        column: Which number of its ``to_frame``.
        layer: A layer by its number in the model, whose heads are drawn; None: the mean over heads of every layer.
        ax: Where to draw; a new figure if None.
        title: Title of the axes.

    Returns:
        Figure and axes.

    Raises:
        ImportError: Matplotlib is missing.
        KeyError: An unknown column.
        ValueError: An unknown layer.

    Examples:
        >>> import torch
        >>> from pelocality.models import RotaryBands
        >>> use, turns = torch.rand(2, 3, 4), torch.tensor([6.3, 63, 628, torch.inf]).expand(2, 4)
        >>> one, axis = use > 2, torch.tensor([0, 0, 0, -1]).expand(2, 4)
        >>> fig, ax = bands(RotaryBands(turns, use, use, use, use, one, one, axis, (0, 1), 8), "use")
        >>> ax.get_xlabel()
        'wavelength (tokens)'
    """
    frame = result.to_frame()
    if layer is not None:
        check_choice("layer", layer, result.layers)
        frame = frame[frame["layer"] == layer]
    rows = "layer" if layer is None else "head"
    grid = frame.pivot_table(column, rows, "band", "mean")
    fig, ax = axes.figure_and_axes(ax, (6.0, 1.4 + 0.16 * len(grid)), title)
    axes.draw_image(ax, grid.to_numpy(dtype=float), column.replace("_", " "), aspect="auto")
    turns = frame.groupby("band")["wavelength"].median()
    waves = [f"{t / 1e3:.0f}k" if 1e4 <= t < np.inf else axes.short_number(t) for t in turns]
    axes.label_cells(ax, "wavelength (tokens)", waves, rows, list(grid.index), 0.5)
    return fig, ax


def head_classes(
    result: Any, *, threshold: float = 0.4, ax: Axes | None = None, title: str = ""
) -> tuple[Figure, Axes]:
    """Draw the class of each head as a map of layers and heads, with a symbol and a colour for each class.

    Heads of the class "other" are blank.

    Args:
        result: What ``head_classes`` of ``pelocality.models`` returned.
        threshold: The smallest score of a class, as for its ``classes``.
        ax: Where to draw; a new figure if None.
        title: Title of the axes.

    Returns:
        Figure and axes; the legend is beside the axes, with the number of heads of each class.

    Raises:
        ImportError: Matplotlib is missing.
        TypeError: A threshold that is not a number.

    Examples:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> from pelocality import head_classes as classes_of
        >>> size = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
        >>> fig, ax = head_classes(classes_of(LlamaModel(LlamaConfig(vocab_size=99, **size)), length=16))
        >>> ax.get_xlabel(), ax.get_ylabel()
        ('head', 'layer')
    """
    classes = np.array(result.classes(threshold))
    (depth, heads), offsets = classes.shape, result.scores["offset"].tolist()
    fig, ax = axes.figure_and_axes(ax, (3.2 + 0.3 * heads, 1.4 + 0.2 * depth), title)
    width, height = axes.size_in_inches(ax)
    from matplotlib.colors import to_rgb

    size = min(8.0, 72 * height / depth * 0.75, 72 * width / heads * 0.5)
    image = np.ones((depth, heads, 3))
    for name, (sign, colour) in _CLASSES.items():
        places = np.argwhere(classes == name)
        image[tuple(places.T)] = to_rgb(colour)
        for layer, head in places:
            text = f"{offsets[layer][head]:+.0f}" if name == "offset" else sign
            ax.text(head, layer, text, ha="center", va="center", fontsize=size)
        label = f"{name} ({sign}): {len(places)}" if sign else f"{name}: {len(places)}"
        ax.scatter([], [], s=60, marker="s", color=colour, edgecolor="0.5", label=label)
    ax.imshow(image, aspect="auto")
    axes.label_cells(ax, "head", range(heads), "layer", result.layers)
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize="small")
    return fig, ax


def comparison(
    values: Mapping[str, Any],
    *,
    metric: str | None = None,
    layers: Sequence[int] | None = None,
    length: int = 128,
    relative_depth: bool | None = None,
    ax: Axes | None = None,
    label: str = "",
    title: str = "",
) -> tuple[Figure, Axes]:
    """Draw a metric per layer for several models or states of training: heads as dots, their mean as a line.

    Args:
        values: By name, each (layer,), or as for `head_grid`.
        metric: As for `head_grid`. None: the one of `head_grid`, if that is the same for all of them; of bidirectional
            and causal models, name one.
        layers: The numbers of the layers of every line in its model; None: those of each result, otherwise from 0.
        length: The number of positions of encodings.
        relative_depth: Whether layers are placed from 0, the first, to 1, the last. None: if models differ in depth.
        ax: Where to draw; a new figure if None.
        label: Label of the vertical axis; the name of the metric if empty.
        title: Title of the axes.

    Returns:
        Figure and axes.

    Raises:
        ImportError: Matplotlib is missing.
        TypeError: As for `head_grid`, or values that are not a dictionary, or an empty one.
        ValueError: Neither one nor two axes, nothing to draw, another number of layers, an unknown metric, a metric of
            numbers, what would be drawn by different metrics, or ``relative_depth`` of some of a model's layers.

    Examples:
        >>> import torch
        >>> fig, ax = comparison({"random": torch.rand(6, 12), "trained": torch.rand(6, 12)}, label="locality")
        >>> ax.get_xlabel()
        'layer'
    """
    if not isinstance(values, Mapping) or not values:
        raise TypeError(f'values must be a dictionary by name, {{"before": result, ...}}, got {type(values).__name__}')
    named = {f"values[{name!r}]": each for name, each in values.items()}
    column, lines = _by_layer(named, metric, layers, length, (1, 2))
    depths = [depth for *_, depth in lines]
    if relative_depth is None:
        relative_depth = layers is None and None not in depths and len(set(depths)) > 1
    if relative_depth and None in depths:
        raise ValueError("relative_depth needs all layers, but some values have only some; leave relative_depth out")
    every_layer = sorted({layer for _, its_layers, _ in lines for layer in its_layers})
    new = ax is None
    fig, ax = axes.figure_and_axes(ax, (5.2, 3.4), title)
    spread = 0.5 / len(lines)
    drawn = zip(values, lines, axes.line_styles(), strict=False)
    for index, (name, (grid, its_layers, depth), style) in enumerate(drawn):
        place = np.searchsorted(every_layer, its_layers) + spread * (index - (len(lines) - 1) / 2)
        if relative_depth and depth is not None:
            place = np.array(its_layers) / max(depth - 1, 1)
        by_head = grid.reshape(len(grid), -1)
        mean = np.ma.masked_where(np.isnan(by_head), by_head).mean(-1)
        style |= {"label": axes.as_label(name), "zorder": 3}
        (line,) = ax.plot(place, mean, markersize=6, markeredgecolor="black", **style)
        if grid.ndim == 2:
            ax.scatter(np.repeat(place, by_head.shape[1]), by_head.ravel(), s=9, color=line.get_color(), alpha=0.35)
    ax.set(xlabel="layer", ylabel=label or column)
    if relative_depth:
        ax.set_xlabel("depth (0: first layer, 1: last layer)")
    else:
        ax.set_xlim(-0.6, len(every_layer) - 0.4)
        ax.set_xticks(*axes.ticks_that_fit(every_layer, axes.size_in_inches(ax)[0]))
    return axes.with_legend(fig, ax, new)


def trajectory(
    table: pd.DataFrame, metric: str | None = None, *, ax: Axes | None = None, title: str = ""
) -> tuple[Figure, Axes]:
    """Draw a metric per layer over training. For several seeds, draw their mean, and its 95 % interval as a band.

    Args:
        table: One row per step and layer, such as ``LocalityCallback.table``; with a column ``seed``, also per seed.
            The band is Student's t interval over the seeds. A single run has no band.
        metric: The column to draw. None: past locality if the table has it (causal models), otherwise locality.
        ax: Where to draw; a new figure if None.
        title: Title of the axes.

    Returns:
        Figure and axes.

    Raises:
        ImportError: Matplotlib is missing.
        TypeError: The table is not a DataFrame with rows.
        KeyError: A column is missing.
        ValueError: There are several rows for one step, layer and seed, or a row has no step or no layer.

    Examples:
        >>> import pandas as pd
        >>> table = pd.DataFrame({"step": [0, 10, 0, 10], "layer": [0, 0, 1, 1], "locality": [0.02, 0.1, 0.02, 0.07]})
        >>> fig, ax = trajectory(table)
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['layer 0', 'layer 1']
    """
    if not hasattr(table, "duplicated") or table.empty:
        advice = "such as LocalityCallback.table after training"
        raise TypeError(f"table must be a DataFrame with rows, {advice}, got {type(table).__name__}")
    if metric is None:
        metric = "past_locality" if "past_locality" in table else "locality"
    if table[["step", "layer"]].isna().any(axis=None):
        advice = 'table.dropna(subset=["step", "layer"])'
        raise ValueError(f"table has rows without a step or a layer; leave them out: {advice}")
    rows_by = [name for name in ("step", "layer", "seed") if name in table]
    repeated = table[table.duplicated(rows_by)]
    if len(repeated):
        place = ", ".join(f"{name} {repeated[name].iloc[0]}" for name in rows_by)
        advice = "give every run its own seed" if "seed" in rows_by else "add a column seed: table.assign(seed=...)"
        raise ValueError(f"table has several rows for {place}; {advice}")
    lines = {}
    for layer, rows in table.groupby("layer"):
        over_seeds = {step: mean_over_runs(values) for step, values in rows.groupby("step")[metric]}
        means = [(mean.value, mean.low, mean.high) for mean in over_seeds.values()]
        lines[f"layer {layer}"] = (list(over_seeds), *zip(*means, strict=True))
    return axes.draw_lines(ax, title, lines, "training step", metric.replace("_", " "))


def _by_layer(
    values: Mapping[str, Any], metric: Any, layers: Sequence[int] | None, length: int, dimensions: Sequence[int]
) -> tuple[str, list[tuple[np.ndarray, Sequence[int], int | None]]]:
    """Return the metric of all values in words, and each by layer, with the layers' numbers and the model's depth.

    The depth of a model of which some layers are missing is None.
    """
    values = {name: axes.attention_of(each, length) for name, each in values.items()}
    measured = {name: _measured(each, metric) for name, each in values.items()}
    # Results of some models have a number for each sample, and those of others only for the mean.
    if {metric, f"{metric}_of_mean"} <= {column for column, _ in measured.values()}:
        of_mean = {name: f"{metric}_of_mean" for name, each in values.items() if hasattr(each, "source")}
        measured = {name: _measured(each, of_mean.get(name, metric)) for name, each in values.items()}
    columns = {name: column for name, (column, _) in measured.items() if column is not None}
    if len(set(columns.values())) > 1 if metric is None else len(columns) < len(values):
        advice = 'choose one for all, such as metric="adjusted_locality", or none for numbers'
        raise ValueError(f"metric must be one that all values have, got {metric!r} and {columns}; {advice}")
    lines = []
    for name, each in values.items():
        grid = axes.as_array(name, measured[name][1])
        if grid.ndim == 3 and name in columns:  # (layer, text, head)
            grid = grid.mean(1)
        if grid.ndim == 1 and name in columns:
            grid = grid[None]
        if grid.ndim not in dimensions or not grid.size:
            shape = "(layer, head) or (layer,)" if 1 in dimensions else "(layer, head)"
            raise ValueError(f"{name} must be {shape}, got shape {grid.shape}")
        numbers = getattr(each, "layers", range(len(grid))) if layers is None else layers
        its_layers = real_numbers("layers", numbers).tolist()  # tensors have no label, and are all different
        if np.shape(its_layers) != (len(grid),):
            raise ValueError(f"layers must number the {len(grid)} layers of {name}, got {its_layers}")
        every = sorted([*its_layers, *getattr(each, "other_layers", ())])
        lines.append((grid, its_layers, len(every) if every == [*range(len(every))] else None))
    return next(iter(columns.values()), "").replace("_", " "), lines


def _measured(value: Any, metric: str | None) -> tuple[str | None, Any]:
    """Return a metric of a value and its numbers by layer and head; None and the value itself if it holds numbers."""
    if hasattr(value, "source"):
        frame = value.to_frame()
        column = metric or str(frame.columns[2])  # after layer and head
        if column not in frame:  # A metric that the frame does not show may be measured on the mean alone.
            frame = value.to_frame(metrics=[column.removesuffix("_of_mean")])
            column = column if column in frame else f"{column}_of_mean"
        return column, frame[column].to_numpy().reshape(len(value.layers), -1)
    if isinstance(value, Measurement):
        column = metric or "locality"
        check_choice("metric", column, list(vars(value)))
        return column, getattr(value, column)
    attention = unwrap(value)
    first = attention[0] if isinstance(attention, list | tuple) and attention else attention
    if len(getattr(first, "shape", ())) < 3:
        return None, value
    from pelocality.metrics.tables import to_frame  # loads pandas

    if metric is None:
        causal = np.shape(first)[-1] > 1 and not np.triu(axes.as_array("attention", first), 1).any()
        metric = "past_locality" if causal else "locality"
    frame = to_frame(value, metric)
    return metric, frame[metric].to_numpy().reshape(frame.iloc[:, :-1].max().to_numpy() + 1)
