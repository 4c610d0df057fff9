"""Evaluations in the layout of the paper's table: one row for each model, one column for each probe."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from reprlib import repr as brief
from typing import Any

import numpy as np
import pandas as pd

from pelocality._checks import number
from pelocality._display import DisplayMixin
from pelocality.evaluation.result import Evaluation
from pelocality.statistics import Estimate, mean_over_runs, proportion_over_groups

METRICS = ("Sym", "Loc")
ORIGINAL, ORIGINAL_SWAPPED = "original", "original (SR)"
Runs = Evaluation | Sequence[Evaluation]


@dataclass(frozen=True, eq=False, repr=False)
class PaperTable(DisplayMixin):
    """Accuracies on originals, and differences after perturbation, in percent.

    Attributes:
        values: One row for each cell: ``model``, ``column``, ``value``, ``low``, ``high`` (percent), ``runs``. The
            interval of one run is over its examples, that of several runs is Student's t interval over the runs.
        columns: The columns, in order.
    """

    values: pd.DataFrame
    columns: tuple[str, ...]

    def to_frame(self, intervals: bool = True) -> pd.DataFrame:
        """Return the table as text: one row for each model, one column for each probe.

        Args:
            intervals: Whether to add the intervals.

        Returns:
            Text such as ``"-0.4 [-0.9, 0.1]"``, in percent, indexed by model.
        """
        cells = [_cell_text(row, intervals) for row in self.values.to_dict("records")]
        wide = self.values.assign(cell=cells).pivot(index="model", columns="column", values="cell")
        models = list(dict.fromkeys(self.values["model"]))
        wide = wide.loc[models, list(self.columns)].fillna("")
        wide.columns.name = None
        return wide

    def to_markdown(self, intervals: bool = True) -> str:
        """Return the table in Markdown.

        Args:
            intervals: Whether to add the intervals.

        Returns:
            A header and one line for each model.
        """
        frame = self.to_frame(intervals)
        rows = [["model", *frame.columns], ["---", *["---:"] * len(frame.columns)]]
        rows += [[str(name), *cells] for name, *cells in frame.itertuples()]
        return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)

    def to_latex(self, intervals: bool = True) -> str:
        r"""Return the table in LaTeX, for the booktabs package.

        Args:
            intervals: Whether to add the intervals.

        Returns:
            A ``tabular`` with one line for each model.
        """
        frame = self.to_frame(intervals).reset_index()
        text = frame.to_latex(index=False, escape=True, column_format="l" + "r" * len(self.columns))
        return re.sub(r"(?<![\w)])-(?=\d)", "$-$", text).rstrip()

    def _headline(self) -> str:
        return f"{self.values['model'].nunique()} models, in percent"

    def _table(self) -> pd.DataFrame:
        return self.to_frame().reset_index()


def paper_table(
    models: Mapping[str, Mapping[str, Runs]],
    *,
    symmetry: Mapping[str, float] | None = None,
    locality: Mapping[str, float] | None = None,
    confidence: float = 0.95,
) -> PaperTable:
    """Return evaluations in the layout of the paper: Sym, Loc, original, shuffles, original (SR), swaps.

    This is the table of Chen et al. (2023). Probes that keep the labels (shuffles) follow ``original``, the accuracy on
    their originals. Probes that change labels (swaps of roles) follow ``original (SR)``. Each number is the difference
    in percentage points from the accuracy on the originals of that probe. Probes perturb different pairs, so
    ``original`` is the accuracy on all pairs that any of the probes perturbs.

    Args:
        models: By name of the model, by name of the probe, an `Evaluation`. If models were trained with different
            seeds, give a list of evaluations of one probe. The table then has their mean, and Student's t interval over
            the runs, which describes how the mean would vary over seeds. With three runs this interval is wide.
        symmetry: Symmetry of each model in [0, 1], if known.
        locality: Locality of each model in [0, 1], if known.
        confidence: Coverage of the intervals, in (0, 1).

    Returns:
        A `PaperTable`, in percent.

    Raises:
        TypeError: No model, a model without evaluations, a value that is not an evaluation with labels, or a
            symmetry, locality or confidence that is not a number.
        ValueError: A model with more runs of one probe than of another, the same name for a probe that changes labels
            and a probe that keeps labels, or a confidence outside (0, 1).

    Examples:
        >>> from pelocality.corpora import read_pairs
        >>> from pelocality.evaluation import evaluate
        >>> from pelocality.probes import random_shuffling
        >>> words = ["dogs", "run", "far", "cats", "sit"]
        >>> rows = [{"premise": f"{a} {b}", "hypothesis": "x", "label": "neutral"} for a in words for b in words]
        >>> probe = random_shuffling(read_pairs(rows))
        >>> ordered = evaluate(lambda p, h: ["neutral" if s < "m" else "entailment" for s in p], None, probe)
        >>> print(paper_table({"first letter": {"Random": ordered}}).to_markdown(intervals=False))
        | model | original | Random |
        | --- | ---: | ---: |
        | first letter | 60.0 | 0.0 |
    """
    probes_of = list(models.values()) if isinstance(models, Mapping) else []
    if not probes_of or not all(isinstance(probes, Mapping) and probes for probes in probes_of):
        raise TypeError(f"models must be evaluations by name, {{model: {{probe: evaluation}}}}, got {brief(models)}")
    rows: list[dict[str, Any]] = []  # "part" orders the columns: metrics, shuffles, swaps
    for column, values in zip(METRICS, (symmetry, locality), strict=True):
        for model, value in (values or {}).items():
            percent = 100 * number(f"{column} of {model!r}", value)
            rows.append({"part": 0, "model": model, "column": column, "value": percent, "runs": 1})
    for model, probes in models.items():
        runs = {name: _evaluations(model, name, each) for name, each in probes.items()}
        for part, column in ((1, ORIGINAL), (2, ORIGINAL_SWAPPED)):
            chosen = {name: each for name, each in runs.items() if each[0].changes_labels == (part == 2)}
            if chosen:
                rows.append({"part": part, "model": model, "column": column} | _originals(chosen, confidence))
            for name, each in chosen.items():
                numbers = _over_runs([run.estimate("difference", confidence) for run in each], confidence, least=-1)
                rows.append({"part": part, "model": model, "column": name} | numbers)
    columns = sorted(dict.fromkeys((row["part"], row["column"]) for row in rows), key=itemgetter(0))
    names = tuple(name for _, name in columns)
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"models have a probe {name!r} that changes labels and one that keeps them; rename one")
    return PaperTable(pd.DataFrame(rows).drop(columns="part"), names)


def _evaluations(model: str, name: str, evaluations: Runs) -> list[Evaluation]:
    """Return the evaluations of one model on one probe, after refusing anything else."""
    if name in (*METRICS, ORIGINAL, ORIGINAL_SWAPPED):
        raise ValueError(f"models[{model!r}] calls a probe {name!r}, a reserved column; choose another name")
    runs = [*evaluations] if isinstance(evaluations, Iterable) else [evaluations]
    if not runs or not all(isinstance(run, Evaluation) and run.labelled for run in runs):
        raise TypeError(
            f"models[{model!r}][{name!r}] must be one or several Evaluations with labels, got {evaluations!r}"
        )
    return runs


def _originals(probes: Mapping[str, Sequence[Evaluation]], confidence: float) -> dict[str, float]:
    """Return the accuracy on all originals that any of the probes perturbs, over runs, of which all have as many."""
    shares = []
    for evaluations in zip(*probes.values(), strict=True):
        originals = pd.concat([each.examples for each in evaluations]).drop_duplicates("original")
        correct = originals["original_correct"].astype(bool)
        shares.append(proportion_over_groups(correct, originals["group"], confidence))
    return _over_runs(shares, confidence, least=0)


def _over_runs(estimates: Sequence[Estimate], confidence: float, least: float) -> dict[str, float]:
    """Return a single run, or the mean and t interval of several, clipped to the valid range, in percent."""
    over = estimates[0]
    if len(estimates) > 1:
        over = mean_over_runs([estimate.value for estimate in estimates], confidence)
        over = Estimate(over.value, max(over.low, least), min(over.high, 1.0))
    return {name: 100 * number for name, number in over.columns("value", ends="").items()} | {"runs": len(estimates)}


def _cell_text(row: Mapping[Any, Any], intervals: bool) -> str:
    """Return a cell as text: differences signed, metrics without an interval."""
    sign = "" if row["column"] in (*METRICS, ORIGINAL, ORIGINAL_SWAPPED) else "+"
    value = f"{row['value']:{sign}.1f}".replace("+0.0", "0.0").replace("-0.0", "0.0")
    return value if not intervals or np.isnan(row["low"]) else f"{value} [{row['low']:.1f}, {row['high']:.1f}]"
