"""Do the intervals and tests of docs/evaluation.md hold what they promise? Simulated, with known truth.

    python experiments/simulated_statistics.py

Prints (1) the share of false discoveries among the heads that are found to be better than an offset, with items that
depend on each other within sentences, by McNemar's test of the items and by exchanging whole sentences; (2) how often
the interval of a mean over few groups contains it, by a percentile bootstrap and by `mean_over_groups`; (3) how often
the interval of an accuracy contains it, by Wilson's interval of the rows and by `proportion_over_groups`; (4) how often
the interval of a slope over cells and tasks contains it, by the mixed model of `downstream_tables.py`, where cells
differ by 3.6 points (standard deviation), a score in a cell and task by 2, and slopes of tasks by nothing or one point.
"""

import argparse
from itertools import product

import numpy as np
import pandas as pd
from downstream_tables import slope
from scipy import stats

from pelocality.statistics import mean_over_groups, proportion, proportion_over_groups, sign_flip, wilson

RUNS, HEADS, TRUE, SENTENCES, ITEMS, MEANS, SLOPES = 400, 144, 14, 150, 5, 2000, 400


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


def covered(rng, groups, effect=0.5):
    """Return whether both intervals contain the mean 0 of rows in groups of 1 to 9, with an effect of each group."""
    sizes = rng.integers(1, 10, groups)
    numbers = np.repeat(np.arange(groups), sizes)
    centre = rng.choice([-effect, effect], groups)[numbers]
    values = np.where(rng.random(len(numbers)) < (1 + centre) / 2, 1.0, -1.0)
    here = mean_over_groups(values, numbers, 0.95, 999, 0)
    sums = np.bincount(numbers, weights=values)
    drawn = rng.integers(0, groups, (999, groups))
    low, high = np.percentile(sums[drawn].sum(1) / sizes[drawn].sum(1), [2.5, 97.5])
    return low <= 0 <= high, here.low <= 0 <= here.high


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="few runs: to see it run")
    runs, means_of, slopes_of = (2, 10, 2) if parser.parse_args().smoke else (RUNS, MEANS, SLOPES)
    rng = np.random.default_rng(0)
    print(f"{HEADS} heads, {TRUE} of them better; {SENTENCES} sentences of {ITEMS} items; {runs} runs")
    print("correlated   false: items  sentences   found: items  sentences")
    for correlated in (0, 0.5, 1):
        means = np.mean([discoveries(rng, correlated) for _ in range(runs)], 0)
        print(f"{correlated:10.0%}{means[0]:15.1%}{means[1]:11.1%}{means[2]:15.1%}{means[3]:11.1%}")
    print("\n95 % intervals of a mean that contain it, with Wilson's interval")
    for groups in (4, 8, 12, 19, 20, 50):
        both = np.sum([covered(rng, groups) for _ in range(means_of)], 0)
        low, high = wilson(both, means_of)
        names = ("bootstrap", "mean_over_groups")
        cells = [
            f"{n} {k / means_of:.1%} [{a:.1%}, {b:.1%}]" for n, k, a, b in zip(names, both, low, high, strict=True)
        ]
        print(f"{groups:3} groups: {', '.join(cells)}")
    print("\n95 % intervals of an accuracy that contain it")
    own = np.random.default_rng(0)  # so that numbers of the other parts do not depend on this one
    for groups, copies in product((10, 20, 60, 200), (0, 0.5, 1)):
        rows, here = np.mean([share_covered(own, groups, copies) for _ in range(means_of)], 0)
        print(f"{groups:3} groups, {copies:.0%} copies: rows {rows:.1%}, proportion_over_groups {here:.1%}")
    print("\n95 % intervals of a slope that contain it, over 13 cells, with Wilson's interval")
    for tasks, spread in ((3, 0), (3, 1), (6, 0), (6, 1)):
        held = sum(slope_covered(rng, tasks, spread) for _ in range(slopes_of))
        low, high = wilson(held, slopes_of)
        print(f"{tasks} tasks, slopes differ by {spread}: {held / slopes_of:.1%} [{low:.1%}, {high:.1%}]")


if __name__ == "__main__":
    main()
