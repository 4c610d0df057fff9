"""Plots of attention matrices: their weights, and their mean at each distance."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pelocality._checks import check_choice
from pelocality.metrics import distance_profile, measure_relative
from pelocality.metrics._inputs import unwrap
from pelocality.plots._axes import as_array, attention_of, draw_by_distance, draw_image, figure_and_axes
from pelocality.positions import Positions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pelocality.metrics import RelativeMeasurement
    from pelocality.metrics._inputs import Attention, PositionsLike


def heatmap(
    attention: Attention, *, ax: Axes | None = None, scale: Literal["linear", "log"] = "linear", title: str = ""
) -> tuple[Figure, Axes]:
    """Draw one attention matrix: queries as rows, keys as columns, larger weights darker.

    Args:
        attention: One matrix (n, n) whose rows sum to 1, or a result or a model's output with one matrix. Queries need
            not be the keys, (m, n).
        ax: Where to draw; a new figure if None.
        scale: ``"log"`` shows small weights, over at most six decades below the largest weight; zero is white.
        title: Title of the axes.

    Returns:
        Figure and axes.

    Raises:
        ImportError: Matplotlib is missing.
        TypeError: Not attention.
        ValueError: More than one matrix, weights that are negative or infinite, or an unknown scale.

    Examples:
        >>> import torch
        >>> fig, ax = heatmap(torch.eye(8), title="attends to itself")
        >>> ax.get_xlabel()
        'key position (tokens)'
    """
    matrix = as_array("attention", unwrap(attention))
    if matrix.ndim != 2 or not matrix.size:
        advice = "choose one, A[0, 0], or average"
        raise ValueError(f"attention must be one matrix (n, n), got shape {matrix.shape}; {advice}")
    wrong = matrix[(matrix < 0) | np.isinf(matrix)]
    if wrong.size:
        raise ValueError(f"attention weights must be finite and at least 0, got {wrong[0]:g}; apply .softmax(-1)?")
    check_choice("scale", scale, ("linear", "log"))
    fig, ax = figure_and_axes(ax, (4.6, 4.4), title)
    positive = matrix[matrix > 0]
    top = float(positive.max(initial=0)) or 1.0
    if scale == "log":
        from matplotlib.colors import LogNorm

        floor = max(float(positive.min(initial=top)) / 10, top * 1e-6)  # a decade lower: only zero is white
        draw_image(ax, np.maximum(matrix, floor), "attention weight", norm=LogNorm(floor, top))
    else:
        draw_image(ax, matrix, "attention weight", vmin=0, vmax=top)
    ax.set(xlabel="key position (tokens)", ylabel="query position (tokens)")
    ax.spines[:].set_color("0.7")  # a black frame would hide the first key, on which attention often sinks
    ax.locator_params(integer=True, min_n_ticks=1)
    return fig, ax


def profiles(
    attention: Attention | RelativeMeasurement | Mapping[str, Any],
    *,
    positions: PositionsLike | None = None,
    ax: Axes | None = None,
    reach: float = 16,
    length: int = 128,
    scale: Literal["linear", "log"] = "linear",
    title: str = "",
) -> tuple[Figure, Axes]:
    """Draw the mean attention at each signed distance, with one line per model or encoding.

    Args:
        attention: Matrices (..., n, n), a result, an encoding, or what `measure_relative` returned for logits by
            distance, averaged over the leading axes; or a mapping of several by name. An encoding that depends on
            distance alone needs no n x n matrix; of a rotation, give ``measure_relative(rotary.kernel(q, k, n))``.
        positions: As for `distance_profile`, the same for all matrices. On a grid, distance has no sign.
        ax: Where to draw; a new figure if None.
        reach: Largest distance drawn, in tokens or in the unit of the positions. The label of the axis says how far
            distances go if some are not drawn.
        length: The number of positions of each encoding.
        scale: ``"log"`` shows small attention, over at most six decades below the largest.
        title: Title of the axes.

    Returns:
        Figure and axes.

    Raises:
        ImportError: Matplotlib is missing.
        TypeError: ``length`` is not an integer.
        ValueError: Matrices that `distance_profile` refuses, or an unknown scale.

    Examples:
        >>> import torch
        >>> from pelocality.encodings import ALiBi
        >>> fig, ax = profiles({"ALiBi": ALiBi(8), "uniform": torch.full((8, 8), 1 / 8)})
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['ALiBi', 'uniform']
    """
    check_choice("scale", scale, ("linear", "log"))
    lines, signed, farthest = {}, {}, 0.0
    named = {
        name: attention_of(each, length) if positions is not None else _without_matrix(each, length)
        for name, each in _by_name(attention).items()
    }
    for name, matrices in named.items():
        profile = getattr(matrices, "distance_profile", None)  # a RelativeMeasurement has one
        profile = distance_profile(matrices, positions=positions) if profile is None else profile
        profile = as_array("attention", profile)
        profile = profile.reshape(-1, profile.shape[-1]).mean(0)
        places = getattr(matrices, "positions", None) if positions is None else Positions.of(positions)
        n = (len(profile) + 1) // 2
        distance = np.arange(1 - n, n) if places is None else places.profile_distances.numpy()
        signed[name] = bool((distance < 0).any()) or places is None
        near = np.abs(distance) <= reach
        farthest = max(farthest, float(np.abs(distance).max()))
        lines[name] = distance[near], profile[near]
    if len(set(signed.values())) > 1:
        plain = ", ".join(name for name, has_sign in signed.items() if not has_sign)
        raise ValueError(f"distance has no sign at the positions of {plain}, but a sign at others; draw these apart")
    on_line = positions is None and all(getattr(each, "positions", None) is None for each in named.values())
    cut = f"to {reach:g} of {farthest:g}" if farthest > reach else ""
    units = ", ".join(filter(None, ["tokens" if on_line else "", cut]))
    label = ("distance, key - query" if all(signed.values()) else "distance") + (f" ({units})" if units else "")
    fig, ax = draw_by_distance(ax, title, lines, label, "mean attention", scale)
    if all(signed.values()):
        ax.axvline(0, color="0.8", linewidth=0.8, zorder=0)
    return fig, ax


def _without_matrix(value: Any, length: int) -> Any:
    """Return what has a profile: of an encoding by distance its measurement, of anything else what metrics read."""
    if hasattr(value, "relative") and not isinstance(value, type):
        # This fails if an encoding depends on more than distance, or if its logits are beyond the range of float64.
        with contextlib.suppress(TypeError, ValueError), warnings.catch_warnings(action="ignore"):
            return measure_relative(value.relative(length))
    return attention_of(value, length)


def key_profiles(
    attention: Attention | Mapping[str, Attention], *, query: int = -1, ax: Axes | None = None, title: str = ""
) -> tuple[Figure, Axes]:
    """Draw the attention of one query to each key position, with one line per layer or model.

    In a ``rollout`` or an ``influence`` of a decoder, the last query shows which parts of a text count over depth.

    Args:
        attention: Matrices (..., n, n), averaged over the leading axes; or a mapping of several by name, such as the
            layers of a rollout. Their lengths may differ, and queries need not be the keys, (..., m, n).
        query: The position of the query; negative numbers count from the end.
        ax: Where to draw; a new figure if None.
        title: Title of the axes.

    Returns:
        Figure and axes.

    Raises:
        ImportError: Matplotlib is missing.
        TypeError: Not attention.
        IndexError: A query outside of the positions.

    Examples:
        >>> import torch
        >>> causal = torch.ones(8, 8).tril()
        >>> fig, ax = key_profiles({"uniform": causal / causal.sum(-1, keepdim=True)}, query=3)
        >>> ax.get_xlabel()
        'key position (tokens)'
    """
    lines = {}
    for name, each in _by_name(attention).items():
        matrices = as_array("attention", unwrap(each))
        n = matrices.shape[-1]
        lines[name] = np.arange(n), matrices[..., query, :].reshape(-1, n).mean(0)
    of = "the last query" if query == -1 else f"query {query}"
    return draw_by_distance(ax, title, lines, "key position (tokens)", f"mean attention of {of}")


def on_grid(
    attention: Attention,
    *,
    query: int | None = None,
    positions: PositionsLike | None = None,
    ax: Axes | None = None,
    title: str = "",
) -> tuple[Figure, Axes]:
    """Draw the attention of one query to the places of a plane, or the mean attention around all queries.

    Around all queries, the image has the query in the middle, and a pixel for each displacement from query to key. A
    pixel is the mean attention over all pairs of places with this displacement.

    Args:
        attention: Matrices (..., n, n), averaged over the leading axes, or a result.
        query: The number of the query; None for all queries.
        positions: `Positions` on a plane at whole coordinates, or at equal steps along each axis. None: those of a
            result.
        ax: Where to draw; a new figure if None.
        title: Title of the axes.

    Returns:
        Figure and axes. Rows are the first coordinate, columns the second; places without a key are hatched.

    Raises:
        ImportError: Matplotlib is missing.
        TypeError: Not attention.
        IndexError: A query outside of the positions.
        ValueError: No positions, or positions that do not have two coordinates.

    Examples:
        >>> from pelocality import Positions
        >>> grid = Positions.grid(6, 6)
        >>> fig, ax = on_grid((-grid.distance).softmax(-1), positions=grid)
        >>> ax.get_xlabel()
        'key - query, second coordinate'
    """
    plane = getattr(attention, "positions", None) if positions is None else Positions.of(positions)
    if plane is None or plane.keys is None or plane.dimensions != 2:
        coordinates = "none" if plane is None else f"{plane.dimensions} coordinates"
        raise ValueError(f"positions must have two coordinates, as Positions.grid(14, 14), got {coordinates}")
    matrices = as_array("attention", unwrap(attention))
    rows, columns = (plane.before + size for size in plane.shape)
    if matrices.shape[-2:] != (rows, columns):
        raise ValueError(f"attention must be (..., {rows}, {columns}), as its positions are, got {matrices.shape}")
    matrix = matrices[..., plane.before :, plane.before :].reshape(-1, *plane.shape).mean(0)
    keys = plane.keys.numpy()
    queries = keys if plane.queries is None else plane.queries.numpy()
    if query is None:
        points, weights = (keys - queries[:, None]).reshape(-1, 2), matrix.flatten()
    else:
        points, weights = keys, matrix[query]
    (top, height, row), (left, width, column) = (_cells(points[:, axis], plane.tolerance) for axis in (0, 1))
    total, pairs = np.zeros((2, row.max() + 1, column.max() + 1))
    np.add.at(total, (row, column), weights)
    np.add.at(pairs, (row, column), 1)
    image = np.divide(total, pairs, out=np.full_like(total, np.nan), where=pairs > 0)
    fig, ax = figure_and_axes(ax, (4.6, 4.2), title)
    bottom, right = top + image.shape[0] * height, left + image.shape[1] * width
    extent = (left - width / 2, right - width / 2, bottom - height / 2, top - height / 2)
    draw_image(ax, image, "mean attention", vmin=0, extent=extent)
    what = "key - query, " if query is None else "key, "
    ax.set(xlabel=f"{what}second coordinate", ylabel=f"{what}first coordinate")
    if query is not None:
        ax.plot(*queries[query][::-1], marker="x", color="C3")
    return fig, ax


def _cells(values: np.ndarray, tolerance: float) -> tuple[float, float, np.ndarray]:
    """Return the first of the values, the step between them, and how many steps each is away from the first."""
    different = np.unique(values)
    steps = np.diff(different)
    steps = steps[steps > 4 * tolerance]
    step = float(steps.min()) if len(steps) else 1.0
    cell = np.round((values - different[0]) / step)
    if np.abs(values - different[0] - cell * step).max() > max(8 * tolerance, 1e-6 * step):
        raise ValueError("positions must be whole steps apart along each axis, to be drawn as an image")
    return float(different[0]), step, cell.astype(int)


def _by_name(attention: Any) -> dict[str, Any]:
    """Return matrices by name; a model's output is a mapping too, but one of them."""
    several = isinstance(attention, Mapping) and not hasattr(attention, "attentions")
    return dict(attention) if several else {"": attention}
