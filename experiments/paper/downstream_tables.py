"""The tables and the figure of `downstream_accuracy.py`, from a table with a row per cell, seed and task."""

import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy.stats import t as student_t

from experiments.cells import SCALINGS
from experiments.runs import markdown
from experiments.sentence_tasks import SENTEVAL
from pelocality.statistics import Estimate, mean_over_runs

# healed models, but for the first; others are compared with it
RELOCATED = (
    "original",
    "measured table",
    "antisymmetric x 0",
    "antisymmetric x .5",
    "antisymmetric x -1",
    "none",
    "attenuated w = .1",
    "ALiBi",
    "all x .5",
    "all x 1.5",
    "decay + .1",
    "attenuated w = .01",
    "attenuated w = 1",
    "original, healed",
)
METRICS = ("locality", "symmetry", "relative_asymmetry")
LOSSES = ("token_loss", "held_out_loss")  # of healing; of pre-training from nothing
KINDS = dict.fromkeys(SENTEVAL, "sentences") | dict.fromkeys(("CoLA", "RTE", "STS-B", "NLI"), "GLUE")
KINDS |= dict.fromkeys(("bigram shift", "constituents", "roles"), "order")
AVERAGES = {"sentences": "sentence tasks", "GLUE": "GLUE and NLI", "fine-tuned": "fine-tuned"}


def long_table(found: list[dict[str, Any]]) -> pd.DataFrame:
    """Return a row per cell, seed and task, scores in points."""
    rows = []
    for cell in found:
        measured = {name: value for name, value in cell.items() if name != "scores"}
        rows += [measured | {"task": name, "score": 100 * value} for name, value in cell["scores"].items()]
    table = pd.DataFrame(rows)
    table = table.reindex(columns=table.columns.union([*METRICS, *LOSSES], sort=False))
    kinds = KINDS | {task: "fine-tuned" for task in table["task"] if task.endswith("fine-tuned")}
    kinds |= {task: "shuffled premises" for task in table["task"] if task.startswith("NLI, ") and task not in kinds}
    table["kind"] = table["task"].map(kinds).fillna("shuffled premises, fine-tuned")
    return table


def slope(rows: pd.DataFrame, metric: str, held: str | None = None) -> tuple[Estimate, Estimate]:
    """Return the change in points per .1 of a metric: for these tasks, and for tasks in general.

    A metric and the number that is held fixed are properties of a cell, so their means over its seeds enter. For each
    task least squares gives a slope over cells, and the result is the mean over tasks. For these tasks its variance
    is that of the slope of the cells' mean scores, with two degrees of freedom fewer than cells, and one fewer if
    something is held fixed. Tasks in general add the variance of the slopes over tasks, as in a random-effects
    meta-analysis, and have the degrees of freedom of Satterthwaite (1946). NaN for a single task in general, and for
    too few cells.
    """
    scores = rows.pivot_table(index="cell", columns=["task", "seed"], values="score").dropna(axis=1)
    scores = scores.T.groupby("task").mean().T  # (cell, task): the mean over seeds that all cells have
    cells = rows.groupby("cell")[[metric, *([held] if held else [])]].mean().loc[scores.index]
    design = np.column_stack([np.ones(len(cells)), 10 * cells[metric], cells.drop(columns=metric)])
    free, tasks = len(design) - design.shape[1], scores.shape[1]
    if free < 1 or np.linalg.matrix_rank(design) < design.shape[1]:
        return (Estimate(np.nan, np.nan, np.nan),) * 2
    inverse = np.linalg.inv(design.T @ design)
    found = inverse @ design.T @ scores.to_numpy()  # (intercept, slope, held; task)
    rest = (scores.to_numpy() - design @ found).mean(1)
    of_cells = inverse[1, 1] * (rest @ rest) / free
    of_tasks = found[1].var(ddof=1) / tasks if tasks > 1 else np.nan
    both = of_cells + of_tasks
    freedom = both**2 / (of_cells**2 / free + of_tasks**2 / max(1, tasks - 1)) if both else free
    return interval(found[1].mean(), of_cells, free), interval(found[1].mean(), both, min(free, freedom))


def interval(value: float, variance: float, freedom: float) -> Estimate:
    """Return an estimate with Student's 95 % interval."""
    reach = student_t.ppf(0.975, freedom) * np.sqrt(variance)
    return Estimate(value, value - reach, value + reach)


def slopes(table: pd.DataFrame, group: str, cells: Sequence[str]) -> pd.DataFrame:
    """Return the slopes of each kind of task on each metric over some cells, as they are and with the loss held."""
    found = []
    chosen = table[table["cell"].isin(cells)]
    losses = ("token_loss",) if chosen["token_loss"].notna().all() else ()
    for kind, rows in chosen.groupby("kind", sort=False):
        for metric in (*METRICS, *losses):
            numbers = dict(zip(("these tasks", "tasks in general"), slope(rows, metric), strict=True))
            if losses:
                held = slope(rows, metric, "token_loss") if metric in METRICS else ("", "")
                numbers |= dict(zip(("these tasks, loss held", "in general, loss held"), held, strict=True))
            line = {f"{group} ({rows['cell'].nunique()})": kind, "points per .1 of": metric.replace("_", " ")}
            found.append(line | {name: value and format(value, "+.2f") for name, value in numbers.items()})
    return pd.DataFrame(found)


def slopes_by_task(table: pd.DataFrame, cells: Sequence[str]) -> pd.DataFrame:
    """Return the slopes of each task that is not a fall under shuffled premises, over some cells."""
    chosen = table[table["cell"].isin(cells) & ~table["kind"].str.startswith("shuffled")]
    losses = ("token_loss",) if chosen["token_loss"].notna().all() else ()
    found = []
    for (kind, task), rows in chosen.groupby(["kind", "task"], sort=False):
        numbers = {metric.replace("_", " "): slope(rows, metric)[0] for metric in (*METRICS, *losses)}
        numbers |= {"locality, loss held": slope(rows, "locality", "token_loss")[0]} if losses else {}
        found.append({"task": task, "of": kind} | {name: format(value, "+.2f") for name, value in numbers.items()})
    return pd.DataFrame(found)


def correlations(table: pd.DataFrame, cells: Sequence[str]) -> pd.DataFrame:
    """Return the correlations over cells of metrics and loss, means over seeds."""
    means = table[table["cell"].isin(cells)].groupby("cell")[[*METRICS, "token_loss"]].mean()
    found = means.corr().map("{:+.2f}".format).rename(columns=lambda name: name.replace("_", " "))
    return found.rename(index=lambda name: name.replace("_", " ")).rename_axis("over cells").reset_index()


def contrasts(table: pd.DataFrame) -> pd.DataFrame:
    """Return differences between two scalings of one table on the same sentences: means, intervals, and each seed."""
    names = {"symmetrised": "antisymmetric x 0", "mirrored": "antisymmetric x -1"}
    pairs = [("symmetrised", "antisymmetric x .5"), ("symmetrised", "measured table"), ("mirrored", "measured table")]
    scored = table[~table["kind"].str.startswith("shuffled")]
    found = []
    for (kind, task), rows in [((kind, "mean"), each) for kind, each in scored.groupby("kind", sort=False)] + list(
        scored.groupby(["kind", "task"], sort=False)
    ):
        line = {"scores": kind if task == "mean" else task}
        seeds = rows.groupby(["cell", "seed"])["score"].mean()
        for changed, other in pairs:
            values = (seeds[names[changed]] - seeds[other]).dropna()
            each = ", ".join(f"{value:+.1f}" for value in values)
            line[f"{changed} minus {other}"] = f"{points(values)}: {each}" if len(values) > 1 else each
        found.append(line)
    return pd.DataFrame(found)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row per cell: metrics, loss and scores, means over its seeds; their number where that differs."""
    rows = []
    numbers = table.groupby("cell")["seed"].nunique()
    for cell, of_cell in table.groupby("cell", sort=False):
        first = of_cell.groupby("seed").first()
        seeds = {"seeds": len(first)} if numbers.nunique() > 1 else {}
        means = {name.replace("_", " "): formatted_mean(first[name]) for name in (*METRICS, *LOSSES)}
        scores = {name: f"{values.mean():.1f}" for name, values in by_seed(of_cell).items()}
        rows.append({"positions": cell} | seeds | means | scores)
    found = pd.DataFrame(rows)
    return found.loc[:, (found != "").any()]


def differences(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row per cell: its scores less those of the first one on the same sentences, intervals over seeds."""
    cells = {cell: by_seed(rows) for cell, rows in table[table["locality"].notna()].groupby("cell", sort=False)}
    (first, base), *others = cells.items()
    rows = [
        {f"against {first}": cell} | {name: points(values - base[name]) for name, values in scores.items()}
        for cell, scores in others
    ]
    return pd.DataFrame(rows)


def falls(table: pd.DataFrame, suffix: str = "") -> pd.DataFrame:
    """Return a row per cell: the accuracy on NLI, and its changes under shuffled premises."""
    rows = []
    for cell, of_cell in table.groupby("cell", sort=False):
        nli = of_cell.loc[of_cell["task"] == f"NLI{suffix}", "score"].mean()
        row = {"positions": cell, "symmetry": formatted_mean(of_cell["symmetry"]), f"NLI{suffix}": f"{nli:.1f}"}
        fallen = of_cell[of_cell["kind"] == f"shuffled premises{suffix}"]
        probes = {"Shuffle-3 to 6, mean": "Shuffle", "windows, mean": "Window", "random order": "Random"}
        for name, part in probes.items():
            row[name] = points(fallen[fallen["task"].str.contains(part)].groupby("seed")["score"].mean())
        rows.append(row)
    return pd.DataFrame(rows)


def by_seed(rows: pd.DataFrame) -> dict[str, pd.Series]:
    """Return the mean score in each seed of each kind of task, and of each order-sensitive and fine-tuned task."""
    alone = rows.loc[rows["kind"].isin(("order", "fine-tuned")), "task"].unique()
    found = {}
    for column, names in (("kind", AVERAGES), ("task", {task: task for task in alone})):
        for key, name in names.items():
            scores = rows[rows[column] == key].groupby("seed")["score"].mean()
            found |= {name: scores} if len(scores) else {}
    return found


def points(values: pd.Series) -> str:
    """Format the mean of differences, with its interval over seeds if there are several; NaN where one has no score."""
    values = values.dropna()
    return format(mean_over_runs(values), "+.1f") if len(values) > 1 else f"{values.mean():+.1f}"


def formatted_mean(values: pd.Series) -> str:
    """Format a mean of metrics, empty for what has none."""
    return "" if values.isna().all() else f"{values.mean():.3f}"


def figure(table: pd.DataFrame) -> plt.Figure:
    """Plot the points of each cell over the first one on each metric, a row for each kind of task; bars over seeds."""
    cells = table[table["locality"].notna()]
    first, *_ = marks = marks_of(cells["cell"].unique().tolist())
    metrics = cells.groupby("cell")[list(METRICS)].mean().apply(moved_apart)
    means = cells.groupby(["kind", "cell", "seed"])["score"].mean()
    names = AVERAGES | {"order": "order-sensitive tasks"}
    kinds = [kind for kind in names if kind in means.index]
    fig, axes = plt.subplots(len(kinds), 3, figsize=(8.5, 2.8 * len(kinds) + 1.4), layout="constrained", squeeze=False)
    for row, kind in zip(axes, kinds, strict=True):
        for (cell, mark), (ax, metric) in product(marks.items(), zip(row, METRICS, strict=True)):
            found = mean_over_runs((means[kind, cell] - means[kind, first]).dropna())  # the same sentences in a seed
            bar = [[found.value - found.low], [found.high - found.value]]  # NaN, not drawn, for one seed
            ax.errorbar(metrics.loc[cell, metric], found.value, bar, **mark, ls="", lw=0.8, label=cell)
        for ax, metric in zip(row, METRICS, strict=True):
            ax.axhline(0, color="0.7", ls="--", lw=0.8, zorder=0)
            ax.margins(x=0.1, y=0.12)
            ax.set(xlabel=metric.replace("_", " "))
        row[0].set(ylabel=f"{names[kind]},\npoints against {first}")
    legend = {cell: plt.Line2D([], [], ls="", **mark) for cell, mark in marks.items()}
    fig.legend(legend.values(), legend.keys(), frameon=False, loc="outside upper center", ncols=3)
    return fig


def moved_apart(values: pd.Series) -> pd.Series:
    """Move values that are the same to the second decimal apart, so that their marks and bars can be told."""
    same = values.groupby(values.round(2))
    return values + 0.015 * (values.max() - values.min()) * (same.cumcount() - (same.transform("size") - 1) / 2)


def marks_of(cells: list[str]) -> dict[str, dict[str, Any]]:
    """Return marks by cell: one colour for original positions, tables, decays and each other, shapes within."""
    kinds = pd.Series({cell: "table" if cell in SCALINGS else re.split(r",| w", cell)[0] for cell in cells})
    numbers, shapes = pd.factorize(kinds)[0], kinds.groupby(kinds).cumcount()
    colors = ["black", *plt.get_cmap("tab10").colors]
    found = {
        cell: {"color": colors[number], "marker": "os^vDXP"[shape], "ms": 7, "mec": "white", "mew": 0.4}
        for cell, number, shape in zip(cells, numbers, shapes, strict=True)
    }
    return {cell: found[cell] for cell in kinds.index[np.argsort(numbers, kind="stable")]}


def show(table: pd.DataFrame, output: Path) -> None:
    """Print all tables, and save the figure in a folder."""
    output.mkdir(parents=True, exist_ok=True)
    figure(table).savefig(output / "downstream_accuracy.png", dpi=150)
    print(f"seeds {sorted(table['seed'].unique().tolist())}\n\n{markdown(summary(table))}")
    print(f"\n{markdown(differences(table))}")
    for suffix in ("", ", fine-tuned"):
        if (table["task"] == f"NLI{suffix}").any():
            print(f"\n{markdown(falls(table, suffix))}")
    groups = {"all healed": RELOCATED[1:], "scaled tables": tuple(SCALINGS)}
    groups["from nothing"] = tuple(cell for cell in table["cell"].unique() if cell.startswith("from nothing"))
    for group, cells in groups.items():
        present = table.loc[table["cell"].isin(cells), "cell"].nunique()
        if present > 3:
            print(f"\n{markdown(slopes(table, group, cells))}")
            if group != "scaled tables":
                print(f"\n{markdown(slopes_by_task(table, cells))}")
            if group == "all healed":
                print(f"\n{markdown(correlations(table, cells))}")
    if {"antisymmetric x 0", "antisymmetric x .5", "antisymmetric x -1", "measured table"} <= set(table["cell"]):
        print(f"\n{markdown(contrasts(table))}")
