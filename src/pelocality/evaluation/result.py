"""The result of ``evaluate``: all predictions before and after the perturbation, and the numbers computed from them."""

import dataclasses
import functools
from typing import Any

import pandas as pd

from pelocality._checks import check_choice
from pelocality._display import DisplayMixin
from pelocality.evaluation._columns import by_columns, in_groups
from pelocality.statistics import Estimate, mean_over_groups, proportion_over_groups, sign_flip

_ESTIMATES = ("original", "perturbed", "difference", "agreement")
_COLUMNS = {"original": "original_correct", "perturbed": "correct", "agreement": "agrees"}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Evaluation(DisplayMixin):
    """A model's predictions for the original and for the perturbed texts of a probe.

    The intervals of ``original``, ``perturbed``, ``difference`` and ``agreement`` have a coverage of 95 %. The methods
    accept another coverage, and do not run the model again.

    Attributes:
        examples: One row for each row of the probe, in its order: the probe's columns that are not texts
            (``uid``, ``size``, ``category`` ...), ``label`` and ``original_label``, ``prediction`` and
            ``original_prediction``, ``correct`` and ``original_correct`` (None without labels), ``agrees`` (the
            prediction did not change), ``probability`` and ``original_probability`` of the predicted class (NaN if the
            model is a callable), ``original`` (a digest of the original's texts and label) and ``group``.
        model: Name of the model, and what was attached to it.
        probe: Name of the builder, or ``"dataset"``.
        truncated: Number of texts that were truncated to the model's length.
    """

    examples: pd.DataFrame
    model: str
    probe: str
    truncated: int

    @functools.cached_property
    def labelled(self) -> bool:
        """Whether the probe has labels; without them only ``agreement`` is known."""
        return bool(self.examples["correct"].notna().all())

    @functools.cached_property
    def changes_labels(self) -> bool:
        """Whether the perturbation changes a label, as a swap of roles does and a shuffle does not."""
        return bool((self.examples["label"] != self.examples["original_label"]).any()) and self.labelled

    @functools.cached_property
    def original(self) -> Estimate:
        """Accuracy on the originals, in [0, 1], with Wilson's interval over groups; NaN without labels."""
        return self.estimate("original")

    @functools.cached_property
    def perturbed(self) -> Estimate:
        """Accuracy on the perturbed texts, in [0, 1], with Wilson's interval over groups; NaN without labels."""
        return self.estimate("perturbed")

    @functools.cached_property
    def difference(self) -> Estimate:
        """Accuracy on the perturbed texts minus accuracy on the originals, with an interval over groups."""
        return self.estimate("difference")

    @functools.cached_property
    def agreement(self) -> Estimate:
        """Share of predictions that did not change, in [0, 1], with Wilson's interval over groups."""
        return self.estimate("agreement")

    @functools.cached_property
    def p_value(self) -> float:
        """Exact two-sided p-value of the change in accuracy, which exchanges original and perturbation in whole groups.

        The test is `sign_flip`. If each row is a group, this is McNemar's test. NaN without labels.
        """
        if not self.labelled:
            return float("nan")
        sums = self._change.groupby(self.examples["group"].to_numpy(), sort=False).sum()
        return float(sign_flip(sums.to_numpy()[:, None], two_sided=True)[0])

    @property
    def _change(self) -> pd.Series:
        """1 for each row that only the perturbation has right, -1 for one that only the original has."""
        return self.examples["correct"].astype(int) - self.examples["original_correct"].astype(int)

    def estimate(self, name: str, confidence: float = 0.95) -> Estimate:
        """Return one of the four numbers with an interval of any coverage.

        Args:
            name: ``"original"``, ``"perturbed"``, ``"difference"`` or ``"agreement"``.
            confidence: Coverage of the interval, in (0, 1).

        Returns:
            The number and its interval. Without labels, only the agreement is not NaN.

        Raises:
            TypeError: A confidence that is not a number.
            ValueError: Another name, or a confidence outside (0, 1).
        """
        check_choice("name", name, _ESTIMATES)
        if not self.labelled and name != "agreement":
            return Estimate(float("nan"), float("nan"), float("nan"))
        if name == "difference":
            return mean_over_groups(self._change, self.examples["group"], confidence)
        return proportion_over_groups(self.examples[_COLUMNS[name]].astype(bool), self.examples["group"], confidence)

    def by(self, *columns: str, confidence: float = 0.95) -> pd.DataFrame:
        """Return the numbers for each value of a column, such as a size, a label or a category.

        Args:
            columns: Columns of ``examples``, such as ``"size"``, ``"original_label"``, ``"category"``.
            confidence: Coverage of the intervals, in (0, 1).

        Returns:
            One row for each value (or combination), with the columns of `to_frame`, not corrected for
            multiple comparisons.

        Raises:
            TypeError: A confidence that is not a number.
            KeyError: An unknown column.
            ValueError: No column, one with the name of a number, or a confidence outside (0, 1).
        """

        def numbers(rows: pd.DataFrame) -> dict[str, Any]:
            return dataclasses.replace(self, examples=rows)._numbers(confidence)

        return by_columns(self.examples, columns, numbers)

    def to_frame(self, confidence: float = 0.95) -> pd.DataFrame:
        """Return the numbers as one row.

        Args:
            confidence: Coverage of the intervals, in (0, 1).

        Returns:
            ``model``, ``probe``, ``n``; ``original``, ``perturbed``, ``difference`` and ``agreement``, each with
            ``_low`` and ``_high``; ``p``.

        Raises:
            TypeError: A confidence that is not a number.
            ValueError: A confidence outside (0, 1).
        """
        return pd.DataFrame([{"model": self.model, "probe": self.probe} | self._numbers(confidence)])

    def _numbers(self, confidence: float) -> dict[str, Any]:
        """Return the numbers of examples, estimates and p-value by column."""
        numbers: dict[str, Any] = {"n": len(self.examples)}
        for name in _ESTIMATES:
            numbers |= self.estimate(name, confidence).columns(name)
        return numbers | {"p": self.p_value}

    def _headline(self) -> str:
        truncated = f", {self.truncated} texts truncated to the model's length" if self.truncated else ""
        size = in_groups(self.examples, "perturbed examples")
        return f"{self.model} on {self.probe}: {size}{truncated}"

    def _table(self) -> pd.DataFrame:
        names = _ESTIMATES if self.labelled else ("agreement",)
        rows = [(name, str(getattr(self, name))) for name in names]
        if self.labelled:
            rows.append(("p of the difference", f"{self.p_value:.2g}"))
        return pd.DataFrame(rows, columns=["", "estimate"])
