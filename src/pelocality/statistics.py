"""Estimates with intervals, and a test of differences, also for rows that depend on each other within groups.

Numbers may be given as lists, arrays or tensors; the results are numpy's, in float64, or an `Estimate`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from pelocality._checks import check_confidence, check_unmasked, flag, number, real_numbers

Floats = NDArray[np.float64]
_FORMAT = re.compile(r"((?:.?[<>^])?)([-+ ]?z?#?0?)(\d*)(.*)")  # alignment, sign, width, precision and type


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its interval.

    Attributes:
        value: The estimate.
        low: Lower end of the interval.
        high: Upper end of the interval.

    Examples:
        >>> print(Estimate(0.9, 0.85, 0.94))
        0.900 [0.850, 0.940]
        >>> f"{Estimate(0.9, 0.85, 0.94):.0%}"
        '90% [85%, 94%]'
        >>> f"{Estimate(0.9, 0.85, 0.94):>22.1f}", round(Estimate(0.9, 0.85, 0.94), 1)
        ('        0.9 [0.8, 0.9]', Estimate(value=0.9, low=0.8, high=0.9))
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return format(self, ".3f")

    def __format__(self, form: str) -> str:
        align, sign, width, digits = _FORMAT.findall(form)[0]
        value, low, high = (format(float(each), sign + (digits or ".3f")) for each in (self.value, self.low, self.high))
        return format(f"{value} [{low}, {high}]", align + width)

    def __round__(self, digits: int = 0) -> "Estimate":
        return Estimate(*(round(float(each), digits) for each in (self.value, self.low, self.high)))

    def __float__(self) -> float:
        return float(self.value)

    def columns(self, name: str, ends: str | None = None) -> dict[str, float]:
        """Return the value and the ends of the interval as columns of a table.

        Args:
            name: Name of the column of the value.
            ends: Prefix of ``low`` and ``high``; None for the name and an underscore.

        Returns:
            Three numbers by column.
        """
        prefix = f"{name}_" if ends is None else ends
        return {name: self.value, f"{prefix}low": self.low, f"{prefix}high": self.high}


def wilson(successes: ArrayLike, trials: ArrayLike, confidence: float = 0.95) -> tuple[Floats, Floats]:
    r"""Return Wilson's score interval of proportions, elementwise.

    With $\hat p = k / n$ and $z$ the normal quantile, the ends are (Wilson, 1927)

    $$\frac{1}{1 + z^2 / n} \left(\hat p + \frac{z^2}{2n} \pm z \sqrt{\frac{\hat p (1 - \hat p)}{n} +
    \frac{z^2}{4n^2}}\right)$$

    If all trials succeed, the width is not zero, unlike that of a bootstrap. The trials are assumed to be independent.

    Args:
        successes: Number of successes, any shape.
        trials: Number of trials; 0 gives NaN.
        confidence: Coverage, in (0, 1).

    Returns:
        Lower and upper ends, in [0, 1].

    Raises:
        TypeError: Successes, trials or a coverage that are not real numbers.
        ValueError: Fewer than 0 successes, more successes than trials, shapes that do not agree, or a coverage outside
            (0, 1).

    Examples:
        >>> low, high = wilson(9, 10)
        >>> round(float(low), 3), round(float(high), 3)
        (0.596, 0.982)
    """
    check_confidence(confidence)
    k, n = real_numbers("successes", successes).astype(float), real_numbers("trials", trials).astype(float)
    if ((k < 0) | (k > n)).any():
        raise ValueError(f"successes must be between 0 and trials, got {k} of {n}")
    z = stats.norm.ppf(0.5 + confidence / 2)
    with np.errstate(invalid="ignore", divide="ignore"):
        p = k / n
        centre = (p + z**2 / (2 * n)) / (1 + z**2 / n)
        half = z / (1 + z**2 / n) * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
        # Rounding leaves -1e-17 where the end is 0, and an end short of 1 where all succeeded.
        return np.clip(centre - half, 0, p), np.clip(centre + half, p, 1)


def proportion(successes: int, trials: int, confidence: float = 0.95) -> Estimate:
    """Return a proportion with Wilson's interval; NaN for no trials.

    Args:
        successes: Number of successes.
        trials: Number of trials.
        confidence: Coverage, in (0, 1).

    Returns:
        The proportion in [0, 1] with its interval.

    Raises:
        TypeError: Successes, trials or a coverage that is not a number.
        ValueError: Fewer than 0 successes, more successes than trials, or a coverage outside (0, 1).

    Examples:
        >>> print(proportion(9, 10))
        0.900 [0.596, 0.982]
    """
    k, n = number("successes", successes), number("trials", trials)
    low, high = wilson(k, n, confidence)
    return Estimate(k / n if n else float("nan"), float(low), float(high))


def wilson_over_groups(successes: ArrayLike, trials: ArrayLike, confidence: float = 0.95) -> tuple[Floats, Floats]:
    r"""Return intervals of proportions whose trials depend on each other within groups, elementwise.

    This is Wilson's interval with the effective number of trials: the number of independent trials whose proportion
    would be as uncertain (Korn and Graubard, 1998; Dean and Pagano, 2015). With the proportion $\hat p$ of $N$ trials,
    and $s_g$ successes among the $n_g$ trials of each of $G$ groups, the jackknife over groups gives the variance

    $$v = \frac{G - 1}{G} \sum_g \left(\frac{s_g - \hat p n_g}{N - n_g}\right)^2$$

    and the effective number of trials is at most $N$ and

    $$\left(\frac{t_{N - 1}}{t_{m - 1}}\right)^2 \frac{k + 1}{k \, v / \hat p (1 - \hat p) + 1 / m}, \qquad
    m = \frac{N^2}{\sum_g n_g^2}$$

    with Student's quantiles $t$. The effective number of groups $m$ (Kish, 1965) is $G$ if all groups have one size. If
    all trials of a group succeed or fail together, $m$ is also the effective number of trials. Only the $k$ groups with
    a trial of the rarer outcome tell how alike the trials of a group are. So one further group is assumed, whose trials
    all succeed or fail together. With one trial in each group, the number is $N$. ``docs/evaluation.md`` has the
    coverage.

    Args:
        successes: (groups, ...) number of successes in each group.
        trials: (groups,) number of trials in each group, at least 1.
        confidence: Coverage, in (0, 1).

    Returns:
        Lower and upper ends, (...), in [0, 1]; NaN for no group, and for a single group of several trials.

    Raises:
        TypeError: Successes, trials or a coverage that are not real numbers.
        ValueError: Other shapes, a group without trials, fewer than 0 successes, more successes than trials, or a
            coverage outside (0, 1).

    Examples:
        >>> low, high = wilson_over_groups([2, 2, 0], [2, 2, 2])  # all trials of a group succeed or fail together
        >>> round(float(low), 3), round(float(high), 3)
        (0.083, 0.978)
    """
    check_confidence(confidence)
    k, n = real_numbers("successes", successes).astype(float), real_numbers("trials", trials).astype(float)
    sizes = n.reshape(-1, *[1] * (k.ndim - 1))
    if n.ndim != 1 or k.shape[:1] != n.shape or ((k < 0) | (k > sizes)).any() or (n < 1).any():
        rule = "(groups, ...), each between 0 and its group's trials (groups,), which are at least 1"
        raise ValueError(f"successes must be {rule}, got shapes {k.shape} and {n.shape}")
    if not len(n):
        return wilson(k.sum(0), 0, confidence)
    p = k.sum(0) / n.sum()
    rarer = np.where(p <= 0.5, k, sizes - k)
    rows = _effective_rows(p * (1 - p), k - p * sizes, n, (rarer > 0).sum(0), confidence)
    return wilson(p * rows, rows, confidence)


def _effective_rows(variance: Any, deviations: Floats, sizes: Any, informative: Any, confidence: float) -> Floats:
    """Return how many independent rows would leave a mean as uncertain as rows that depend on each other in groups.

    Args:
        variance: (...), variance of a single row.
        deviations: (groups, ...), sum of each group less its size times the mean.
        sizes: (groups,), rows of each group.
        informative: (...), number of groups with a row that differs from the most frequent value.
        confidence: Coverage of the interval.

    Returns:
        (...), at most the number of rows, which it is with one row in each group; NaN for one group of several rows.
    """
    groups, total = len(sizes), sizes.sum()
    if groups == total or groups == 1:
        return np.full(deviations.shape[1:], total if groups == total else np.nan)
    error, effective_groups = _jackknife(deviations, sizes)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(informative > 0, error**2 / variance, 0)
    relative = (informative * relative + 1 / effective_groups) / (informative + 1)
    of_rows, of_groups = (_t(confidence, number - 1) for number in (total, effective_groups))
    return np.minimum((of_rows / of_groups) ** 2 / relative, total)


def _jackknife(deviations: Floats, sizes: NDArray[Any]) -> tuple[Any, float]:
    """Return the standard error of a mean by the jackknife over two groups or more, and the effective number of groups.

    Args:
        deviations: As for `_effective_rows`.
        sizes: As for `_effective_rows`.
    """
    total, each = sizes.sum(), sizes.reshape(-1, *[1] * (deviations.ndim - 1))
    variance = (1 - 1 / len(sizes)) * ((deviations / (total - each)) ** 2).sum(0)
    return np.sqrt(variance), total**2 / (sizes**2).sum()


def _t(confidence: float, degrees: float) -> float:
    """Return Student's quantile for a two-sided interval, of at least one degree of freedom."""
    return float(stats.t.ppf(0.5 + confidence / 2, max(degrees, 1)))


def proportion_over_groups(successes: ArrayLike, groups: Iterable[Any], confidence: float = 0.95) -> Estimate:
    """Return the share of successes among rows that depend on each other within groups, with its interval.

    Args:
        successes: (rows,) booleans.
        groups: (rows,) names of groups, as of `mean_over_groups`.
        confidence: Coverage, in (0, 1).

    Returns:
        The share of all rows, in [0, 1], with the interval of `wilson_over_groups`.

    Raises:
        TypeError: Values that are not real numbers, or names that cannot be keys.
        ValueError: Values that are neither true nor false, or a coverage outside (0, 1).

    Examples:
        >>> print(proportion_over_groups([True, True, True, True, False, False], ["a", "a", "b", "b", "c", "c"]))
        0.667 [0.083, 0.978]
    """
    rows, index = real_numbers("successes", successes).astype(float), _group_numbers(groups)
    if not np.isin(rows, (0, 1)).all():
        raise ValueError(f"successes must be true or false, got {rows[~np.isin(rows, (0, 1))][0]:g}")
    low, high = wilson_over_groups(np.bincount(index, weights=rows), np.bincount(index), confidence)
    return Estimate(float(rows.mean()) if len(rows) else float("nan"), float(low), float(high))


def mean_over_groups(
    values: ArrayLike, groups: Iterable[Any], confidence: float = 0.95, *, least: float = -1.0, most: float = 1.0
) -> Estimate:
    r"""Return a mean with its interval over groups of rows, such as the mean of paired differences.

    Rows of one group (the perturbations or the words of one sentence) may depend on each other in any way.

    *Binary outcomes* get the exact interval of a proportion (Clopper and Pearson, 1934). These are values that are all
    ``least`` or ``most``. With the effective number of rows $n$ (see `wilson_over_groups`; all rows if each is a group)
    and $k$ the share of ``most`` times $n$, the ends of this share are quantiles of the distributions Beta(k, n - k +
    1) and Beta(k + 1, n - k), as by Korn and Graubard (1998).

    *Differences of paired proportions* get the interval of Bonett and Price (2012). These are values that are all
    ``least``, ``most`` or the middle of the two, such as -1, 0 and 1. With the shares $\hat p_+$ of ``most`` and
    $\hat p_-$ of ``least``, the interval is, for -1 and 1,

    $$p_\pm = \frac{n \hat p_\pm + 1}{n + 2}, \qquad
    p_+ - p_- \pm z \sqrt{\frac{p_+ + p_- - (p_+ - p_-)^2}{n + 2}}$$

    *Equal rows* of another value $c$ get $c$ plus ``least`` $- c$ and ``most`` $- c$, times the upper end of the exact
    interval of 0 of $n$ rows: the share of unseen rows that may be ``least`` or ``most``.

    *Other values* get Student's t interval of the jackknife over groups, with the mean $\bar x_{-g}$ without each of
    the $G$ groups, and the effective number of groups $m = N^2 / \sum_g n_g^2$:

    $$\bar x \pm t_{m - 1} \sqrt{\frac{G - 1}{G} \sum_g (\bar x_{-g} - \bar x)^2}$$

    All intervals are cut at the smallest and the largest possible value, and all but the last have a width even if all
    rows are equal. ``docs/evaluation.md`` has the coverage.

    Args:
        values: (rows,) numbers.
        groups: (rows,) names of groups: a tensor, or anything that can be the key of a dictionary. 1 and "1" are two
            groups, and so are None and NaN.
        confidence: Coverage, in (0, 1).
        least: The smallest possible value; -1 for differences of shares.
        most: The largest possible value.

    Returns:
        The mean of all rows and its interval. The interval is NaN for a single group of several rows. For a single row
        it is NaN too, except for binary outcomes and differences of paired proportions.

    Raises:
        TypeError: Values or a confidence that are not real numbers, or names that cannot be keys, such as lists.
        ValueError: A confidence outside (0, 1), or values beyond ``least`` and ``most``.

    Examples:
        >>> print(mean_over_groups([1, 1, 0, 0, 0, 0], ["a", "a", "b", "b", "c", "c"]))
        0.333 [-0.931, 1.000]
    """
    check_confidence(confidence)
    rows, index = real_numbers("values", values).astype(float), _group_numbers(groups)
    least, most = number("least", least), number("most", most)
    if not ((rows >= least) & (rows <= most)).all():  # nor NaN
        raise ValueError(f"values must be between least={least} and most={most}, got {rows.min():g} to {rows.max():g}")
    if not len(rows):
        return Estimate(float("nan"), float("nan"), float("nan"))
    mean, sizes = float(rows.mean()), np.bincount(index)
    deviations = np.bincount(index, weights=rows - mean).astype(float)
    distinct, counts = np.unique(rows, return_counts=True)
    informative = len(np.unique(index[rows != distinct[::-1][counts[::-1].argmax()]]))
    n = _effective_rows(rows.var(), deviations, sizes, informative, confidence)
    spread, middle = most - least, (least + most) / 2
    low = high = np.nan
    if np.isfinite(spread) and np.isin(rows, (least, most)).all():
        low, high = least + spread * _exact(n * (rows == most).mean(), n, confidence)
    elif np.isfinite(spread) and np.isin(rows, (least, middle, most)).all():
        changed, difference = (rows != middle).mean(), 2 * (mean - middle) / spread
        centre = n * difference / (n + 2)
        variance = (n * changed + 2) / (n + 2) - centre**2
        half = stats.norm.ppf(0.5 + confidence / 2) * np.sqrt(variance / (n + 2))
        low, high = middle + spread / 2 * np.array([centre - half, centre + half])
    elif np.isfinite(spread) and len(sizes) > len(distinct) == 1:
        low, high = mean + _exact(0, n, confidence)[1] * np.array([least - mean, most - mean])
    elif len(sizes) > 1:
        error, effective_groups = _jackknife(deviations, sizes)
        half = _t(confidence, effective_groups - 1) * error
        low, high = mean - half, mean + half
    low, high = np.clip([low, high], [least, mean], [mean, most])
    return Estimate(mean, float(low), float(high))


def _exact(successes: Any, trials: Any, confidence: float) -> Floats:
    """Return the exact interval of a proportion (Clopper and Pearson, 1934), also of parts of trials, (2,)."""
    tail = (1 - confidence) / 2
    low = stats.beta.ppf(tail, successes, trials - successes + 1) if successes != 0 else 0.0
    high = stats.beta.ppf(1 - tail, successes + 1, trials - successes) if successes != trials else 1.0
    return np.array([low, high])


def _group_numbers(groups: Iterable[Any]) -> NDArray[np.intp]:
    """Return the number of each row's group, in the order in which they come."""
    check_unmasked("groups", groups)
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(_as_key(each), len(numbers)) for each in groups], np.intp)


def _as_key(name: Any) -> Any:
    """Return a name with numbers for its tensors and arrays, and the type of a missing one: both equal no other."""
    if isinstance(name, tuple):
        return tuple(_as_key(each) for each in name)
    if hasattr(name, "detach") or isinstance(name, np.ndarray):
        name = name.item()
    return type(name) if name is pd.NA or name != name else name


def t_interval(values: ArrayLike, confidence: float = 0.95) -> tuple[Floats, Floats]:
    r"""Return Student's t interval of the mean over the first axis, elementwise.

    $$\bar x \pm t_{n - 1} \frac{s}{\sqrt n}$$

    Args:
        values: (n, ...) independent values.
        confidence: Coverage, in (0, 1).

    Returns:
        Lower and upper ends, (...), as numpy arrays, also for a tensor; NaN for fewer than two values.

    Raises:
        TypeError: Values or a coverage that are not real numbers.
        ValueError: A coverage outside (0, 1).

    Examples:
        >>> low, high = t_interval([0.70, 0.72, 0.74])
        >>> round(float(low), 3), round(float(high), 3)
        (0.67, 0.77)
    """
    check_confidence(confidence)
    x = real_numbers("values", values).astype(float)
    if len(x) < 2:
        return np.full(x.shape[1:], np.nan), np.full(x.shape[1:], np.nan)
    mean, half = x.mean(0), _t(confidence, len(x) - 1) * stats.sem(x, 0)
    return mean - half, mean + half


def mean_over_runs(values: ArrayLike, confidence: float = 0.95) -> Estimate:
    """Return the mean of independent runs with Student's t interval, such as runs of several seeds.

    Three runs give a wide interval, 2.5 standard deviations to each side at 95 %. The interval describes how the mean
    would vary over further seeds, not over further data.

    Args:
        values: One number for each run.
        confidence: Coverage, in (0, 1).

    Returns:
        The mean and its interval; the interval is NaN for a single run, the mean too for no runs.

    Raises:
        TypeError: Values or a coverage that are not real numbers.
        ValueError: A coverage outside (0, 1).

    Examples:
        >>> print(mean_over_runs([0.70, 0.72, 0.74]))
        0.720 [0.670, 0.770]
    """
    runs = real_numbers("values", values).astype(float)
    low, high = t_interval(runs, confidence)
    return Estimate(float(runs.mean()) if len(runs) else float("nan"), float(low), float(high))


def sign_flip(differences: ArrayLike, two_sided: bool = False) -> Floats:
    r"""Return exact p-values of sums over groups, if the sum of a group is as likely positive as negative.

    With the sum $d_g$ of each group (a sentence: items on which a head is correct and the other not, minus the
    reverse) and independent fair signs $s_g$,

    $$p = P\left(\sum_g s_g d_g \ge \sum_g d_g\right)$$

    over all $2^G$ signs. This permutation test exchanges whole groups, whose rows may depend on each other in any way.
    If no sum is larger than 1, it is McNemar's (1947) exact test. The distribution is a convolution of binomial
    distributions, one for the groups of each size of sum. No term is negative, so the smallest p-values are exact too.

    Args:
        differences: (groups, tests) whole numbers.
        two_sided: Test for a difference in either direction.

    Returns:
        (tests,), in (0, 1]. The smallest value is 2e-308, the smallest normal number of float64.

    Raises:
        TypeError: Differences that are not numbers, or ``two_sided`` is neither True nor False.
        ValueError: Numbers that are not whole, or other axes.

    Examples:
        >>> sign_flip([[1], [1], [1], [1], [1]]), sign_flip([[5]])
        (array([0.03125]), array([0.5]))
    """
    flag("two_sided", two_sided)
    numbers = real_numbers("differences", differences)
    if numbers.ndim != 2:
        raise ValueError(f"differences must be (groups, tests), got shape {numbers.shape}; for one test, add [:, None]")
    with np.errstate(invalid="ignore"):  # NaN and infinity
        sums = numbers.astype(np.int64)
    if (sums != numbers).any():
        raise ValueError(f"differences must be whole numbers, got {numbers[sums != numbers][0]}")
    p = np.array([_sign_flip(column[column != 0], two_sided) for column in sums.T], float)
    return np.clip(p, np.finfo(float).tiny, 1)


def _sign_flip(sums: NDArray[np.int64], two_sided: bool) -> float:
    observed = int(sums.sum())
    if two_sided:
        return min(1.0, 2 * _tail(abs(sums), abs(observed))) if observed else 1.0
    return _tail(abs(sums), observed) if observed > 0 else 1 - _tail(abs(sums), 1 - observed)


def _tail(sums: NDArray[np.int64], least: int) -> float:
    """Return the probability that the sum of positive numbers with random signs is at least this."""
    most = (int(sums.sum()) - least) // 2  # the largest sum of the numbers with a minus
    if most < 0:
        return 0.0
    chances = np.ones(1)  # chances of each sum of the numbers with a minus, from 0 on
    for value, repeats in zip(*np.unique(sums, return_counts=True), strict=True):
        steps = np.zeros(value * repeats + 1)
        steps[::value] = stats.binom.pmf(np.arange(repeats + 1), repeats, 0.5)
        chances = np.convolve(chances, steps)[: most + 1]  # an FFT would leave rounding noise at the far end
    return float(chances.sum())
