"""Charts as plotly draws them: the only file that knows its JSON."""

import colorsys
from collections.abc import Callable
from itertools import cycle, repeat
from typing import Any

from pelocality.reports.contents import Chart

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f")
_REST = "#9aa0a6"
_DASHES = ("solid", "dash", "dot", "dashdot")
_PATTERNS = ("", "/", "x", ".", "-", "\\", "+", "|")
_SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star")
_MOST_NAMES = 12  # in a legend; more that have an order get a colour bar
_CLIPPED = 0.9  # share of numbers inside the range of a centred colour scale


def figure(chart: Chart) -> dict[str, Any]:
    """Return the ``data`` and ``layout`` of a chart; colours of text and grid are those of the page."""
    data = _KINDS[chart.kind](chart)
    named = any(isinstance(name, str) for name in chart.names)
    rows = len(chart.names) if chart.kind == "grid" and named else 0
    layout: dict[str, Any] = {
        "title": {"text": chart.title, "font": {"size": 14}, "x": 0.02, "xanchor": "left"},
        "xaxis": {"title": {"text": chart.x_title}, "automargin": True},
        "yaxis": {"title": {"text": chart.y_title}, "automargin": True},
        "margin": {"l": 50, "r": 10, "t": 40, "b": 45},
        "height": min(max(18 * rows + 110, 340), 620),
        "hovermode": "closest",
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        "modebar": {"bgcolor": "rgba(0,0,0,0)"},
        "showlegend": len(chart.names) > 1 and chart.kind != "grid" and not _has_colour_bar(chart),
    }
    if chart.kind == "grid":
        layout["yaxis"]["autorange"] = "reversed"
        if not named and chart.x == chart.names:  # a matrix, whose diagonal is one of 45 degrees
            layout["yaxis"] |= {"scaleanchor": "x", "constrain": "domain"}
            layout["xaxis"]["constrain"] = "domain"
        if named:
            layout["yaxis"]["type"] = "category"
    if chart.x and isinstance(chart.x[0], str):
        layout["xaxis"]["type"] = "category"
    elif chart.x_title == "layer" and len(chart.x) <= 16:
        layout["xaxis"]["dtick"] = 1
    if chart.kind == "bars":
        layout["barmode"] = "stack"
    return {"data": data, "layout": layout}


def _grid(chart: Chart) -> list[dict[str, Any]]:
    trace: dict[str, Any] = {
        "type": "heatmap",
        "x": chart.x,
        "y": chart.names,
        "z": chart.values,
        "colorscale": "Cividis" if chart.centred else "Viridis",
        "hovertemplate": f"{chart.y_title} %{{y}}, {chart.x_title} %{{x}}: %{{z:.3f}}<extra></extra>",
        "colorbar": {"thickness": 12, "outlinewidth": 0},
    }
    if chart.centred:
        sizes = sorted(abs(value) for row in chart.values for value in row if value is not None)
        end = sizes[int(_CLIPPED * (len(sizes) - 1))] if sizes else 1
        trace |= {"zmin": -end, "zmax": end}
        if sizes and sizes[-1] > end:
            trace["colorbar"] |= {"tickvals": [-end, 0, end], "ticktext": [f"≤ {-end:.2g}", "0", f"≥ {end:.2g}"]}
    return [trace]


def _lines(chart: Chart) -> list[dict[str, Any]]:
    places = chart.x if chart.x and isinstance(chart.x[0], list) else repeat(chart.x)
    styles = zip(_colours(chart), cycle(_DASHES))
    return [
        {
            "type": "scatter",
            "mode": "lines+markers" if len(x) <= 40 else "lines",
            "name": name,
            "x": x,
            "y": values,
            "line": {"color": colour, "dash": dash, "width": 1.8},
            "marker": {"size": 5},
            "hovertemplate": f"{name}, {chart.x_title} %{{x}}: %{{y:.3f}}<extra></extra>",
        }
        for name, x, values, (colour, dash) in zip(chart.names, places, chart.values, styles, strict=False)
    ] + _colour_bar(chart)


def _bars(chart: Chart) -> list[dict[str, Any]]:
    return [
        {
            "type": "bar",
            "name": name,
            "x": chart.x,
            "y": values,
            "marker": {"color": colour, "pattern": {"shape": pattern, "solidity": 0.3}},
            "hovertemplate": f"{name}: %{{y:.3~f}}<extra></extra>",
        }
        for name, values, colour, pattern in zip(chart.names, chart.values, _colours(chart), cycle(_PATTERNS))
    ]


def _points(chart: Chart) -> list[dict[str, Any]]:
    styles = zip(_colours(chart), cycle(_SYMBOLS))
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": x,
            "y": y,
            "text": text,
            "marker": {"color": colour, "symbol": symbol, "size": 8, "opacity": 0.85},
            "hovertemplate": "%{text}<br>%{x:.3f}, %{y:.3f}<extra></extra>",
        }
        for name, x, y, text, (colour, symbol) in zip(
            chart.names, chart.x, chart.values, chart.labels, styles, strict=False
        )
    ] + _colour_bar(chart)


_KINDS: dict[str, Callable[[Chart], list[dict[str, Any]]]] = {
    "grid": _grid,
    "lines": _lines,
    "bars": _bars,
    "groups": _bars,
    "points": _points,
}


def _has_colour_bar(chart: Chart) -> bool:
    return chart.ordered and len(chart.names) > _MOST_NAMES


def _colour_bar(chart: Chart) -> list[dict[str, Any]]:
    """Return a trace without points that shows which colour is which of many names."""
    if not _has_colour_bar(chart):
        return []
    colours = _colours(chart)
    scale = [[place / (len(colours) - 1), colour] for place, colour in enumerate(colours)]
    bar = {"thickness": 12, "outlinewidth": 0, "title": {"text": chart.names[0].split()[0]}}
    marker = {
        "color": [0],
        "cmin": 0,
        "cmax": len(colours) - 1,
        "colorscale": scale,
        "showscale": True,
        "colorbar": bar,
    }
    return [{"type": "scatter", "mode": "markers", "x": [None], "y": [None], "marker": marker, "hoverinfo": "skip"}]


def _colours(chart: Chart) -> list[str]:
    """Return a colour for each name that is readable on white and on black; if names have an order, blue to red."""
    number = len(chart.names)
    if not chart.ordered:
        return [_REST if chart.names[place] == "other" else _COLOURS[place % len(_COLOURS)] for place in range(number)]
    hues = [0.64 * (1 - place / max(number - 1, 1)) for place in range(number)]
    rgb = [colorsys.hls_to_rgb(hue, 0.5, 0.65) for hue in hues]
    return ["#" + "".join(f"{round(255 * each):02x}" for each in colour) for colour in rgb]
