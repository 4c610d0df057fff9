"""Charts as SVG, drawn by matplotlib; text and lines take the colours of the page that holds them."""

import colorsys
import io
import math
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from pelocality.plots import _axes as axes
from pelocality.reports.contents import Chart

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f")
_SYMBOLS = "osDPX^*"
_DASHES = ("--", ":", "-.")
_MOST_NAMES = 12  # in a legend; more that have an order get a colour bar
_CLIPPED = 0.9  # share of numbers inside the range of a centred colour scale
_WIDTH = 4.8  # inches
_INK, _RULE = "#010203", "#040506"  # of page.mplstyle


def svg(chart: Chart) -> str:
    """Return a chart as an SVG element for an HTML page."""
    from matplotlib import style
    from matplotlib.figure import Figure

    grid = chart.kind == "grid"
    rows = len(chart.names) if grid and isinstance(chart.names[0], str) else 0
    names = [] if grid or len(chart.names) == 1 or _has_colour_bar(chart) else list(map(axes.as_label, chart.names))
    levels = {name if np.ndim(at) else f"{axes.short_number(at)} {name}": at for name, at in chart.levels.items()}
    columns = max(1, int(_WIDTH / (0.06 * max(map(len, [*names, *levels]), default=1) + 0.5)))
    height = min(max(0.14 * rows + 1.2, 3.0), 5.6) + 0.17 * math.ceil(len([*names, *levels]) / columns)
    with style.context(["default", str(Path(__file__).with_name("page.mplstyle"))]):  # whatever style a user has
        fig = Figure((_WIDTH, height), layout="constrained")
        _, ax = axes.figure_and_axes(fig.subplots(), (_WIDTH, height), axes.as_label(chart.title))
        beside = _DRAW[chart.kind](ax, chart) or ax
        ax.set(xlabel=chart.x_title, ylabel=chart.y_title)
        handles = ax.get_legend_handles_labels()[0] if names else []
        for (name, level), dash in zip(levels.items(), _DASHES, strict=False):
            options: dict[str, Any] = {"color": _COLOURS[1] if grid else _INK, "linestyle": dash, "label": name}
            handles += beside.plot(chart.x, level, **options) if np.ndim(level) else [beside.axhline(level, **options)]
        if handles:
            fig.legend(handles=handles, loc="outside lower center", ncols=columns)
        file = io.StringIO()
        fig.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = file.getvalue()
    return text[text.index("<svg") :].replace(_INK, "currentColor").replace(_RULE, "var(--rule)")


def _draw_grid(ax: Any, chart: Chart) -> Any:
    """Draw a matrix of colours, and numbers in cells of named rows and columns with room; return the colour bar's axes.

    Colours are those of plots, and their range holds the levels.
    """
    values = np.array(chart.values, dtype=float)
    shown = np.append(values, list(chart.levels.values()))
    options: dict[str, Any] = {"aspect": "auto"}
    if np.isfinite(shown).any():
        options |= {"vmin": np.nanmin(shown), "vmax": np.nanmax(shown)}
    sizes = np.abs(values[np.isfinite(values)])
    if chart.centred and sizes.size:
        end = float(np.quantile(sizes, _CLIPPED, method="lower"))
        options |= {"cmap": "RdBu_r", "vmin": -end, "vmax": end}
    named = [isinstance(names[0], str) for names in (chart.x, chart.names)]
    if chart.x == chart.names and not any(named):  # a matrix, whose diagonal is one of 45 degrees
        options["aspect"] = "equal"
    if not named[0]:
        options["extent"] = (chart.x[0] - 0.5, chart.x[-1] + 0.5, len(values) - 0.5, -0.5)
    bar = axes.draw_image(ax, values, "", **options)
    if chart.centred and sizes.size and sizes.max() > end:
        bar.set_ticks([-end, 0, end], labels=[f"≤ {-end:.2g}", "0", f"≥ {end:.2g}"])
    width, height = axes.size_in_inches(ax)
    if all(named):
        axes.draw_numbers(ax, values, least=6)
    if named[0]:
        ax.set_xticks(*axes.ticks_that_fit(chart.x, width, 0.08 * max(map(len, chart.x)) + 0.1))
    if named[1]:
        ax.set_yticks(*axes.ticks_that_fit(chart.names, height))
    return bar.ax


def _draw_lines(ax: Any, chart: Chart) -> None:
    """Draw a line for each name."""
    several = chart.x and isinstance(chart.x[0], list)
    places = chart.x if several else [chart.x] * len(chart.names)
    lines = zip(chart.names, places, chart.values, _colours(chart), axes.line_styles(), strict=False)
    for name, x, y, colour, style in lines:
        options = style | {"marker": style["marker"] if len(x) <= 40 else "", "markersize": 3.5, "linewidth": 1.4}
        ax.plot(x, np.array(y, dtype=float), color=colour, label=axes.as_label(name), **options)
    ax.grid(visible=True)
    ax.locator_params(axis="x", integer=not several, min_n_ticks=1)
    _add_colour_bar(ax, chart)


def _draw_points(ax: Any, chart: Chart) -> None:
    """Draw points, with a symbol and a colour for each name."""
    for name, x, y, colour, symbol in zip(chart.names, chart.x, chart.values, _colours(chart), cycle(_SYMBOLS)):
        x, y = np.array(x, dtype=float), np.array(y, dtype=float)
        ax.scatter(x, y, s=22, color=colour, marker=symbol, alpha=0.85, linewidth=0, label=axes.as_label(name))
    ax.grid(visible=True)
    _add_colour_bar(ax, chart)


_DRAW = {"grid": _draw_grid, "lines": _draw_lines, "points": _draw_points}


def _has_colour_bar(chart: Chart) -> bool:
    return chart.ordered and len(chart.names) > _MOST_NAMES


def _add_colour_bar(ax: Any, chart: Chart) -> None:
    """Show which colour is which of many names that have an order."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    if _has_colour_bar(chart):
        colours = ScalarMappable(Normalize(0, len(chart.names) - 1), ListedColormap(_colours(chart)))
        ax.figure.colorbar(colours, ax=ax, label=chart.names[0].split()[0], fraction=0.046, pad=0.03)


def _colours(chart: Chart) -> list[Any]:
    """Return a colour for each name that is readable on white and on black; if names have an order, blue to red."""
    if not chart.ordered:
        return [_COLOURS[place % len(_COLOURS)] for place in range(len(chart.names))]
    hues = 0.64 * np.linspace(1, 0, len(chart.names))
    return [colorsys.hls_to_rgb(hue, 0.5, 0.65) for hue in hues]
