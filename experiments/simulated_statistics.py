"""Do the intervals and tests of docs/evaluation.md hold what they promise? Simulated, with known truth.

    python experiments/simulated_statistics.py

Prints (1) the share of false discoveries among the heads that are found to be better than an offset, with items that
depend on each other within sentences, by McNemar's test of the items and by exchanging whole sentences; (2) how often
the interval of a mean of skewed values contains it, by a percentile bootstrap and by `mean_over_groups`; (3) how often
the interval of an accuracy contains it, by Wilson's interval of the rows and by `proportion_over_groups`; (4) the same
as (2) for the mean change of rows of which few changed, each a group or in groups of several sizes; (5) how often the
interval of a slope over cells and tasks contains it, by the mixed model of `downstream_tables.py`, where cells differ
by 3.6 points (standard deviation), a score in a cell and task by 2, and slopes of tasks by nothing or one point.
"""

import argparse
from itertools import product

import numpy as np
import pandas as pd
from downstream_tables import slope
from scipy import stats

from pelocality.statistics import mean_over_groups, proportion, proportion_over_groups, sign_flip, wilson

RUNS, HEADS, TRUE, SENTENCES, ITEMS, MEANS, CHANGES, SLOPES = 400, 144, 14, 150, 5, 2000, 1000, 400
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


def slope_covered(rng, tasks, spread, cells=13):
    """Return whether the interval of a slope contains it: 0, of a metric that is 1 in half of the cells."""
    metric = np.where(np.arange(cells) < cells // 2, 1.0, rng.uniform(0.5, 0.7, cells))
    of_cell, of_task = rng.normal(0, 3.6, cells), rng.normal(0, spread, tasks)  # points; points per .1
    scores = of_cell[:, None] + 10 * (metric - metric.mean())[:, None] * of_task + rng.normal(0, 2, (cells, tasks))
    rows = pd.DataFrame(scores).stack().rename_axis(["cell", "task"]).rename("score").reset_index()
    found = slope(rows.astype({"task": str}).assign(seed=0, metric=np.repeat(metric, tasks)), "metric")
    return found.low <= 0 <= found.high


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
    print("\n95 % intervals of a slope that contain it, over 13 cells, with Wilson's interval")
    for tasks, spread in ((3, 0), (3, 1), (6, 0), (6, 1)):
        held = sum(slope_covered(rng, tasks, spread) for _ in range(slopes_of))
        low, high = wilson(held, slopes_of)
        print(f"{tasks} tasks, slopes differ by {spread}: {held / slopes_of:.1%} [{low:.1%}, {high:.1%}]")


if __name__ == "__main__":
    main()
