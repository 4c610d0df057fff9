"""Do the intervals and tests of docs/evaluation.md hold what they promise? Simulated, with known truth.

    python -m experiments.beyond.simulated_statistics

Prints (1) the share of false discoveries among the heads that are found to be better than an offset, with items that
depend on each other within sentences, by McNemar's test of the items and by exchanging whole sentences; (2) how often
the interval of a mean of skewed values contains it, by a percentile bootstrap and by `mean_over_groups`; (3) how often
the interval of an accuracy contains it, by Wilson's interval of the rows and by `proportion_over_groups`; (4) the same
as (2) for the mean change of rows of which few changed, each a group or in groups of several sizes; (5) how often
both intervals of a slope over cells and tasks of `downstream_tables.py` contain it: the mean slope of these tasks, and
that of all tasks they were drawn from. A score in a cell and task differs by 2 points (standard deviation), cells and
slopes of tasks by as much as is said.
"""

import argparse
from itertools import product

import numpy as np
import pandas as pd
from scipy import stats

from experiments.paper.downstream_tables import slope
from pelocality.statistics import mean_over_groups, proportion, proportion_over_groups, sign_flip, wilson

RUNS, HEADS, TRUE, SENTENCES, ITEMS, MEANS, CHANGES, SLOPES = 400, 144, 14, 150, 5, 2000, 1000, 2000
# tasks, and the standard deviations in points of the slopes of tasks and of cells; cells; the metric
REGIMES = (
    *((3, slopes, 3.6, 13, "symmetry") for slopes in (0, 1, 2)),
    (3, 1, 1, 13, "symmetry"),
    (3, 2, 0.5, 13, "symmetry"),
    (4, 0.5, 0.5, 13, "symmetry"),
    (6, 1, 1, 13, "symmetry"),
    (6, 1, 3.6, 13, "symmetry"),
    (3, 1, 1, 7, "symmetry"),
    (3, 1, 3.6, 13, "locality"),
    (3, 1, 3.6, 13, "held"),
)
SIZES = {
    "5 rows": lambda rng, groups: np.full(groups, 5),
    "1 to 9": lambda rng, groups: rng.integers(1, 10, groups),
    "60, 30, 20, 15 ...": lambda rng, groups: np.maximum(1, 60 // np.arange(1, groups + 1)),
    "one has half of the rows": lambda rng, groups: np.append(2 * groups - 2, np.full(groups - 1, 2)),
}


def discoveries(rng, correlated):
    """Return the false shares of both tests: TRUE heads win 70 % of the items or sentences, the others half."""
    chance = np.where(np.arange(HEADS) < TRUE, 0.7, 0.5)
    own = rng.random((SENTENCES, ITEMS, HEADS)) < chance
    whole = (rng.random((SENTENCES, 1, HEADS)) < chance) & np.ones_like(own)
    wins = np.where(rng.random((SENTENCES, 1, HEADS)) < correlated, whole, own)
    gained = wins.sum((0, 1))
    items = stats.binom.sf(gained - 1, SENTENCES * ITEMS, 0.5)
    sentences = sign_flip((2 * wins.astype(int) - 1).sum(1))
    found = [stats.false_discovery_control(p) < 0.05 for p in (items, sentences)]
    return [each[TRUE:].sum() / max(each.sum(), 1) for each in found] + [each[:TRUE].mean() for each in found]


def covered(rng, sizes):
    """Return whether both intervals contain the mean 1 of positive values that are skewed, as is that of each group."""
    numbers = np.repeat(np.arange(len(sizes)), sizes)
    values = (rng.exponential(size=len(sizes))[numbers] + rng.exponential(size=len(numbers))) / 2
    return contain(rng, values, numbers, sizes, 1, least=0, most=np.inf)


def contain(rng, values, numbers, sizes, true, **bounds):
    """Return whether the percentile bootstrap over groups and `mean_over_groups` contain the true mean."""
    here = mean_over_groups(values, numbers, **bounds)
    sums = np.bincount(numbers, weights=values)
    drawn = rng.integers(0, len(sizes), (999, len(sizes)))
    low, high = np.percentile(sums[drawn].sum(1) / sizes[drawn].sum(1), [2.5, 97.5])
    return low <= true <= high, here.low <= true <= here.high


def change_covered(rng, sizes, rate, gains, copies):
    """Return whether both intervals contain the mean change, where some rows copy the change of their group."""
    numbers = np.repeat(np.arange(len(sizes)), sizes)
    shares = [rate * (1 - gains), 1 - rate, rate * gains]
    whole, own = (rng.choice([-1, 0, 1], n, p=shares) for n in (len(sizes), len(numbers)))
    values = np.where(rng.random(len(numbers)) < copies, whole[numbers], own)
    return contain(rng, values, numbers, sizes, rate * (2 * gains - 1))


def share_covered(rng, groups, copies, share=0.9):
    """Return whether both intervals contain the share of rows in groups of 1 to 9, where some copy their first row."""
    sizes = rng.integers(1, 10, groups)
    numbers = np.repeat(np.arange(groups), sizes)
    first = rng.random(groups)[numbers] < share
    rows = np.where(rng.random(len(numbers)) < copies, first, rng.random(len(numbers)) < share)
    both = proportion(int(rows.sum()), len(rows)), proportion_over_groups(rows, numbers)
    return [found.low <= share <= found.high for found in both]


def slope_covered(rng, tasks, slopes, cells, number=13, metric="symmetry"):
    """Return whether both intervals of a slope contain it: the mean slope of these tasks, and 0.

    The metric is 1 in half of the cells like symmetry, or has an outlier like locality; "held" is locality with a loss
    that correlates with it by .83.
    """
    values = np.where(np.arange(number) < number // 2, 1.0, rng.uniform(0.5, 0.7, number))
    if metric != "symmetry":
        values = np.append([0.78, 0.43], rng.uniform(0.06, 0.25, number - 2))
    standard = (values - values.mean()) / values.std()
    loss = 0.83 * standard + (1 - 0.83**2) ** 0.5 * rng.normal(size=number)
    of_task = rng.normal(0, slopes, tasks)  # points per .1
    scores = rng.normal(0, cells, number)[:, None] + 10 * (values - values.mean())[:, None] * of_task
    scores += rng.normal(0, 2, (number, tasks))
    rows = pd.DataFrame(scores).stack().rename_axis(["cell", "task"]).rename("score").reset_index()
    rows = rows.assign(seed=0, metric=np.repeat(values, tasks), loss=np.repeat(loss, tasks))
    these, general = slope(rows, "metric", "loss" if metric == "held" else None)
    return these.low <= of_task.mean() <= these.high, general.low <= 0 <= general.high


def least_of(cells):
    """Format the smallest share of samples of a cell, over all cells, for each of two intervals."""
    bootstrap, here = np.mean(cells, 1).min(0)
    return f"at least {bootstrap:.1%}, {here:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="few runs: to see it run")
    counts = (2, 10, 2, 2) if parser.parse_args().smoke else (RUNS, MEANS, CHANGES, SLOPES)
    runs, means_of, changes_of, slopes_of = counts
    rng = np.random.default_rng(0)
    print(f"{HEADS} heads, {TRUE} of them better; {SENTENCES} sentences of {ITEMS} items; {runs} runs")
    print("correlated   false: items  sentences   found: items  sentences")
    for correlated in (0, 0.5, 1):
        means = np.mean([discoveries(rng, correlated) for _ in range(runs)], 0)
        print(f"{correlated:10.0%}{means[0]:15.1%}{means[1]:11.1%}{means[2]:15.1%}{means[3]:11.1%}")
    print("\n95 % intervals of the mean of skewed values that contain it: percentile bootstrap, mean_over_groups")
    own = np.random.default_rng(0)  # so that numbers of the other parts do not depend on this one
    for (name, sizes), groups in product(SIZES.items(), (5, 10, 20, 50, 100)):
        bootstrap, here = np.mean([covered(own, sizes(own, groups)) for _ in range(means_of)], 0)
        print(f"{groups:3} groups, sizes {name}: {bootstrap:.1%}, {here:.1%}", flush=True)
    print("\n95 % intervals of an accuracy that contain it")
    own = np.random.default_rng(0)
    for groups, copies in product((10, 20, 60, 200), (0, 0.5, 1)):
        rows, here = np.mean([share_covered(own, groups, copies) for _ in range(means_of)], 0)
        print(f"{groups:3} groups, {copies:.0%} copies: rows {rows:.1%}, proportion_over_groups {here:.1%}")
    print("\n95 % intervals of a mean change that contain it: percentile bootstrap, mean_over_groups")
    rates, gains, own = (0.02, 0.05, 0.1, 0.2, 0.4), (0.5, 0.1), np.random.default_rng(0)
    for rows, rate in product((10, 20, 50, 100), rates):
        alone = np.ones(rows, int)
        cells = [[change_covered(own, alone, rate, share, 0) for _ in range(changes_of)] for share in gains]
        print(f"{rows:3} rows, {rate:3.0%} changed: {least_of(cells)}")
    for (name, sizes), groups in product(SIZES.items(), (10, 20, 50, 100)):
        cells = [
            [change_covered(own, sizes(own, groups), rate, share, copies) for _ in range(changes_of)]
            for rate, share, copies in product(rates[::2], gains, (0, 0.5, 1))
        ]
        print(f"{groups:3} groups, sizes {name}: {least_of(cells)}", flush=True)
    print("\n95 % intervals of a slope that contain it: these tasks, tasks in general, with Wilson's intervals")
    own = np.random.default_rng(0)
    for regime in REGIMES:
        of_both = np.sum([slope_covered(own, *regime) for _ in range(slopes_of)], 0)
        shares = (
            f"{n / slopes_of:.1%} [{low:.1%}, {high:.1%}]" for n in of_both for low, high in [wilson(n, slopes_of)]
        )
        tasks, slopes, cells, number, metric = regime
        print(
            f"{tasks} tasks, slopes {slopes}, cells {cells}, {number} of them, {metric}: {', '.join(shares)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
