"""Plots of attention matrices: their weights, and their mean at each distance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pelocality._checks import check_choice, count
from pelocality.metrics import distance_profile
from pelocality.metrics._inputs import unwrap
from pelocality.plots._axes import as_array, draw_by_distance, draw_image, figure_and_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pelocality.metrics._inputs import Attention


def heatmap(
    attention: Attention, *, ax: Axes | None = None, scale: Literal["linear", "log"] = "linear", title: str = ""
) -> tuple[Figure, Axes]:
    """Draw one attention matrix: queries as rows, keys as columns, larger weights darker.

    Args:
        attention: One matrix (n, n), or a result or a model's output with one; rows sum to 1.
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
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
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
    count("reach", reach)
    lines = {}
    for name, matrices in _by_name(attention).items():
        profile = as_array("attention", distance_profile(matrices))
        profile = profile.reshape(-1, profile.shape[-1]).mean(0)
        n = (len(profile) + 1) // 2
        near = min(reach, n - 1)
        lines[name] = np.arange(-near, near + 1), profile[n - 1 - near : n + near]
    fig, ax = draw_by_distance(ax, title, lines, "distance, key - query (tokens)", "mean attention")
    ax.axvline(0, color="0.8", linewidth=0.8, zorder=0)
    return fig, ax


def key_profiles(
    attention: Attention | Mapping[str, Attention],
    *,
    query: int = -1,
    ax: Axes | None = None,
    title: str = "",
) -> tuple[Figure, Axes]:
    """Draw the attention of one query to each key position, with one line per layer or model.

    Of a ``rollout`` or an ``influence`` of a decoder, the last query shows which parts of a text count over depth.

    Args:
        attention: Matrices (..., n, n), averaged over the leading axes; or a mapping of several by name, such as the
            layers of a rollout. Their lengths may differ.
        query: The position of the query; negative ones count from the end.
        ax: Where to draw; a new figure if None.
        title: Title of the axes.

    Returns:
        Figure and axes.

    Raises:
        ImportError: Matplotlib is missing.
        TypeError: Not attention, or a query that is not an integer.
        ValueError: Not square, nothing to draw, or a query outside of the positions.

    Examples:
        >>> import torch
        >>> causal = torch.ones(8, 8).tril()
        >>> fig, ax = key_profiles({"uniform": causal / causal.sum(-1, keepdim=True)}, query=3)
        >>> ax.get_xlabel()
        'key position (tokens)'
    """
    count("query", query, least=None)
    lines = {}
    for name, given in _by_name(attention).items():
        matrices = as_array("attention", unwrap(given))
        if matrices.ndim < 2 or matrices.shape[-1] != matrices.shape[-2] or not matrices.size:
            raise ValueError(f"attention must be square, (..., n, n), got shape {matrices.shape}")
        n = matrices.shape[-1]
        if not -n <= query < n:
            raise ValueError(f"query must be in {-n}..{n - 1} for {n} positions, got {query}")
        lines[name] = np.arange(n), matrices[..., query, :].reshape(-1, n).mean(0)
    of = "the last query" if query == -1 else f"query {query}"
    return draw_by_distance(ax, title, lines, "key position (tokens)", f"mean attention of {of}")


def _by_name(attention: Any) -> dict[str, Any]:
    """Return matrices by name; a model's output is a mapping too, but one of them."""
    several = isinstance(attention, Mapping) and not hasattr(attention, "attentions")
    named = dict(attention) if several else {"": attention}
    if not named:
        raise ValueError("attention is empty; give at least one matrix by name")
    return named
