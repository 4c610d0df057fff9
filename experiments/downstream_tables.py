"""The tables and the figure of `downstream_accuracy.py`, from a table with a row per cell, seed and task."""

import re
import warnings
from contextlib import suppress
from itertools import cycle, product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from cells import SCALINGS
from runs import markdown
from scipy.stats import t as student_t
from sentence_tasks import SENTEVAL
from statsmodels.regression.linear_model import OLS
from statsmodels.regression.mixed_linear_model import MixedLM

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


def best_fit(model: MixedLM) -> Any:
    """Return the fit of highest likelihood: two optimisers in turn, each from the best so far, until neither gains."""
    best, without_gain = None, 0
    for method in cycle(("powell", "nm")):
        if without_gain == 2:
            break
        without_gain += 1
        with suppress(np.linalg.LinAlgError):  # singular on the way of one optimiser
            fitted = model.fit(method=method, start_params=None if best is None else best.params_object)
            if best is None or fitted.llf > best.llf + 1e-6:
                best, without_gain = fitted, 0
    if best is None:
        raise np.linalg.LinAlgError("both optimisers met a singular matrix")
    return best


def slope(rows: pd.DataFrame, metric: str, held: str | None = None) -> Estimate:
    """Return the change in points per .1 of a metric, and its 95 % interval over cells, tasks and seeds.

    A linear mixed model with a fixed effect of each task in each seed, random effects of the cell, of the cell in its
    task, and of the task on the slope; Student's t with two degrees of freedom fewer than cells. `held` is a number
    that is held fixed, at the cost of one more. NaN where the model cannot be fitted.
    """
    rows = rows.assign(sample=rows["task"] + rows["seed"].astype(str), dose=10 * (rows[metric] - rows[metric].mean()))
    formula = "score ~ 0 + C(sample) + dose" + (f" + {held}" if held else "")
    several = {name: rows[name].nunique() > 1 for name in ("task", "seed")}
    effects = {"cell": "0 + C(cell)", "slope": "0 + C(task):dose"} if several["task"] else {}
    effects |= {"cell in task": "0 + C(cell):C(task)"} if several["seed"] else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a variance of 0 is on the boundary
        if effects:
            model = MixedLM.from_formula(formula, rows, groups=np.ones(len(rows)), vc_formula=effects)
            try:
                fitted = best_fit(model)
            except np.linalg.LinAlgError:  # few scores that hardly differ
                return Estimate(np.nan, np.nan, np.nan)
        else:
            fitted = OLS.from_formula(formula, rows).fit()
    value, error = fitted.params["dose"], fitted.bse["dose"]
    reach = student_t.ppf(0.975, max(1, rows["cell"].nunique() - 2 - bool(held))) * error
    return Estimate(value, value - reach, value + reach)


def slopes(table: pd.DataFrame, held: str | None = None) -> pd.DataFrame:
    """Return the slopes of each kind of task on each metric, over groups of cells."""
    groups = {"all healed": RELOCATED[1:], "scaled tables": tuple(SCALINGS)}
    groups |= {} if held else {"from nothing": [cell for cell in table["cell"] if cell.startswith("from nothing")]}
    found = []
    for (kind, of_kind), (group, cells) in product(table.groupby("kind", sort=False), groups.items()):
        chosen = of_kind[of_kind["cell"].isin(cells)]
        number = chosen["cell"].nunique()
        metrics = METRICS if held or group == "from nothing" else (*METRICS, "token_loss")
        if number > 3:
            numbers = {metric.replace("_", " "): format(slope(chosen, metric, held), "+.2f") for metric in metrics}
            found.append({"scores": kind, "cells": f"{group} ({number})"} | numbers)
    return pd.DataFrame(found).fillna("")


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
    fig, axes = plt.subplots(len(kinds), 3, figsize=(12, 3.2 * len(kinds) + 1), layout="constrained", squeeze=False)
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
    fig.legend(legend.values(), legend.keys(), frameon=False, loc="outside upper center", ncols=5)
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
    titles = {None: "points per .1 of the metric", "token_loss": "the same with the loss of healing held fixed"}
    for held, title in titles.items():
        if len(found := slopes(table, held)):
            print(f"\n{title}:\n\n{markdown(found)}")
