"""The result of ``evaluate``: all predictions before and after the perturbation, and the numbers computed from them."""

import dataclasses
import functools
from typing import Any

import pandas as pd

from pelocality._display import DisplayMixin
from pelocality.evaluation._columns import by_columns
from pelocality.statistics import Estimate, mean_over_groups, proportion_over_groups, sign_flip

NO_LABELS = Estimate(float("nan"), float("nan"), float("nan"))
_ESTIMATES = ("original", "perturbed", "difference", "agreement")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Evaluation(DisplayMixin):
    """A model's predictions for the original and for the perturbed texts of a probe.

    Attributes:
        examples: One row for each row of the probe, in its order: the probe's columns that are not texts
            (``uid``, ``size``, ``category`` ...), ``label`` and ``original_label``, ``prediction`` and
            ``original_prediction``, ``correct`` and ``original_correct`` (None without labels), ``agrees`` (the
            prediction did not change), ``probability`` and ``original_probability`` of the predicted class (NaN where
            the model is a callable), ``original`` (a digest of the original's texts and label) and ``group``.
        model: Name of the model, and what was attached to it.
        probe: Name of the builder, or ``"dataset"``.
        truncated: Number of texts that were truncated to the model's length.
        confidence: Coverage of the intervals.
        resamples: Bootstrap resamples behind the interval of the difference.
        seed: Seed of the bootstrap.
    """

    examples: pd.DataFrame
    model: str
    probe: str
    truncated: int
    confidence: float
    resamples: int
    seed: int

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
        return self._share("original_correct")

    @functools.cached_property
    def perturbed(self) -> Estimate:
        """Accuracy on the perturbed texts, in [0, 1], with Wilson's interval over groups; NaN without labels."""
        return self._share("correct")

    @functools.cached_property
    def difference(self) -> Estimate:
        """Accuracy on the perturbed texts minus accuracy on the originals, with a paired bootstrap over groups."""
        if not self.labelled:
            return NO_LABELS
        return mean_over_groups(self._change, self.examples["group"], self.confidence, self.resamples, self.seed)

    @functools.cached_property
    def agreement(self) -> Estimate:
        """Share of predictions that did not change, in [0, 1], with Wilson's interval over groups."""
        return self._share("agrees")

    @functools.cached_property
    def p_value(self) -> float:
        """Exact two-sided p-value of the change in accuracy, which exchanges original and perturbation in whole groups.

        The test of `sign_flip`: McNemar's where each row is a group. NaN without labels.
        """
        if not self.labelled:
            return float("nan")
        sums = self._change.groupby(self.examples["group"].to_numpy(), sort=False).sum()
        return float(sign_flip(sums.to_numpy()[:, None], two_sided=True)[0])

    @property
    def _change(self) -> pd.Series:
        """1 for each row that only the perturbation has right, -1 for one that only the original has."""
        return self.examples["correct"].astype(int) - self.examples["original_correct"].astype(int)

    def by(self, *columns: str) -> pd.DataFrame:
        """Return the numbers for each value of a column, such as a size, a label or a category.

        Args:
            columns: Columns of ``examples``, such as ``"size"``, ``"original_label"``, ``"category"``.

        Returns:
            One row for each value (or combination), with the columns of `to_frame`, not corrected for
            multiple comparisons.

        Raises:
            ValueError: No column, or an unknown one.
        """
        return by_columns(self.examples, columns, lambda rows: dataclasses.replace(self, examples=rows)._numbers())

    def to_frame(self) -> pd.DataFrame:
        """Return the numbers as one row.

        Returns:
            ``model``, ``probe``, ``n``; ``original``, ``perturbed``, ``difference`` and ``agreement``, each with
            ``_low`` and ``_high``; ``p``.
        """
        return pd.DataFrame([{"model": self.model, "probe": self.probe} | self._numbers()])

    def _numbers(self) -> dict[str, Any]:
        """Return the numbers of examples, estimates and p-value by column."""
        numbers: dict[str, Any] = {"n": len(self.examples)}
        for name in _ESTIMATES:
            numbers |= getattr(self, name).columns(name)
        return numbers | {"p": self.p_value}

    def _share(self, column: str) -> Estimate:
        """Return the share of rows with a true value in a column, with its interval over groups."""
        if column != "agrees" and not self.labelled:
            return NO_LABELS
        return proportion_over_groups(self.examples[column].astype(bool), self.examples["group"], self.confidence)

    def _headline(self) -> str:
        truncated = f", {self.truncated} texts truncated to the model's length" if self.truncated else ""
        return f"{self.model} on {self.probe}: {len(self.examples)} perturbed examples{truncated}"

    def _table(self) -> pd.DataFrame:
        names = _ESTIMATES if self.labelled else ("agreement",)
        rows = [(name, str(getattr(self, name))) for name in names]
        if self.labelled:
            rows.append(("p of the difference", f"{self.p_value:.2g}"))
        return pd.DataFrame(rows, columns=["", "estimate"])
