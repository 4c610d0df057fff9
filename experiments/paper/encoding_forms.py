"""Does a small language model learn more with one of the five forms of the attenuated encoding?

    python -m experiments.paper.encoding_forms --smoke --output runs
    python -m experiments.paper.encoding_forms --text books.txt.gz --frames ewt_train.jsonl \
        --senteval sentcls --output runs
    python -m experiments.paper.encoding_forms --results docs/results/encoding_forms.csv  # the published tables
    python -m experiments.paper.encoding_forms --results docs/results/downstream_from_nothing.csv  # of 4 seeds

BERTs of 2 layers, 128 wide, are pre-trained from random weights by `pretrain.py` with each of the five forms of Chen et
al. (2023), all with w = .5 and s = 1: fixed (the weights are added to the logits), learnable (a number per distance and
head, which begins there), shared (the same for all heads), concat and sequence (the weights mix the values, or the
input of attention). Beside these: learned positions, none, T5's buckets, concat and sequence with uniform weights (as
many numbers to train, and no order), and the same weights in full, as the softmax of the bias (ours). A seed gives
every encoding the same blocks in the same order with the same masks, and the same random weights outside of attention.
Measured: the loss of masked words on held-out blocks, its rise when the words of each block are shuffled or reversed,
and from the frozen model tasks that need order: neighbours exchanged, constituents shuffled, roles swapped, each
against its original, and TREC. Complete runs are not repeated. The forms that add a bias in MiniLM:
`relocated_positions.py --cells`, whose numbers `--results` prints too.

Predictions, and the smallest effects that four seeds show, were committed before the run, on the page of the results.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from scipy.optimize import brentq
from scipy.stats import nct, t as student_t

from experiments.cells import FORMS as IN_MINILM
from experiments.pretrain import pretrained
from experiments.runs import (
    DATA,
    TINY,
    claim,
    markdown,
    of_seeds,
    settings_of,
    write_atomically,
)
from experiments.sentence_tasks import Task, order_sensitive, points, senteval
from pelocality.statistics import mean_over_runs

ENCODINGS: dict[str, tuple[str, ...]] = {
    "learned positions": ("--encoding=learned",),
    "none": ("--encoding=none",),
    "T5's buckets": ("--encoding=T5",),
    "fixed": ("--encoding=attenuated", "--form=weights"),
    "learnable": ("--encoding=table",),
    "shared": ("--encoding=shared table",),
    "concat": ("--encoding=concat",),
    "sequence": ("--encoding=sequence",),
    "concat, uniform": ("--encoding=uniform concat",),
    "sequence, uniform": ("--encoding=uniform sequence",),
    "in full": ("--encoding=attenuated", "--form=logits"),
}
LOSSES = ("held-out loss", "rise, shuffled", "rise, reversed")
TASKS = ("bigram shift", "constituents", "roles", "TREC")
SEEDS = (0, 1, 2, 3)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, default=DATA / "text.txt", help="one paragraph a line; may be .gz")
    parser.add_argument("--frames", type=Path, default=DATA / "frames.jsonl", help="sentences with trees and frames")
    parser.add_argument("--senteval", type=Path, help="folder of TREC among others; left out if none")
    parser.add_argument("--output", type=Path, default=Path("outputs/encoding_forms"), help="folder for runs and table")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=800, help="of pre-training, 2,048 tokens each")
    parser.add_argument("--sentences", type=int, default=4000, help="most of an order-sensitive task")
    parser.add_argument("--smoke", action="store_true", help="tiny models, one seed: to see it run")
    parser.add_argument("--results", type=Path, help="print the tables of these numbers, draw the figure, run nothing")
    arguments = parser.parse_args()
    if arguments.smoke:
        vars(arguments).update({"steps": 2, "sentences": 24, "seeds": arguments.seeds[:1]})
    return arguments


def run(arguments: argparse.Namespace) -> Iterator[pd.DataFrame]:
    """Yield the scores so far after each model; an interrupted study has complete seeds."""
    claim(arguments.output, settings_of(arguments))
    size = TINY if arguments.smoke else ["--layers=2", "--length=64"]
    rows: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        tasks: list[Task] = []
        for name, encoding in ENCODINGS.items():
            folder = arguments.output / f"{name.replace(' ', '_')}-{seed}"
            file = folder / "scores.json"
            if not file.exists():
                flags = [*size, *encoding, f"--steps={arguments.steps}", f"--every={arguments.steps}", f"--seed={seed}"]
                flags.append("--no-bf16")  # as on a CPU
                run_of_flags = pretrained(arguments.text, folder, flags)
                tasks = tasks or tasks_of(arguments, seed)
                found = measured(*run_of_flags, tasks)
                write_atomically(file, json.dumps(found, indent=1))
            found = json.loads(file.read_text())
            rows += [{"cell": name, "seed": seed, "task": task, "score": score} for task, score in found.items()]
            yield pd.DataFrame(rows)


def tasks_of(arguments: argparse.Namespace, seed: int) -> list[Task]:
    """Return the tasks of a seed; TREC is whole."""
    found = [task.sample(arguments.sentences, seed) for task in order_sensitive(arguments.frames, seed)]
    return (
        found + [task for task in senteval(arguments.senteval) if task.name == "TREC"] if arguments.senteval else found
    )


@torch.no_grad()
def measured(
    settings: argparse.Namespace, model: Any, tokenizer: Any, held_out: Any, tasks: list[Task]
) -> dict[str, float]:
    """Return the losses of a pre-trained model, in nats, and its scores, in points."""
    blocks = [torch.tensor(held_out[:][name]) for name in ("input_ids", "labels")]  # (blocks, n) each
    inner, generator = torch.arange(1, settings.length - 1), torch.Generator().manual_seed(0)
    orders = {"held-out loss": None, "rise, shuffled": inner, "rise, reversed": torch.arange(settings.length).flip(0)}
    found: dict[str, float] = {}
    for name, order in orders.items():
        total = 0.0
        for ids, labels in zip(*(each.split(64) for each in blocks), strict=True):
            if order is inner:  # every block in an order of its own, between [CLS] and [SEP]
                own = torch.rand(len(ids), len(inner), generator=generator).argsort(1) + 1
                ids, labels = (torch.cat([x[:, :1], x.gather(1, own), x[:, -1:]], 1) for x in (ids, labels))
            elif order is not None:
                ids, labels = ids[:, order], labels[:, order]
            total += float(model(ids, labels=labels).loss) * len(ids)  # each block has as many masked words
        found[name] = total / len(blocks[0]) - (found["held-out loss"] if found else 0)

    for task in tasks:
        found |= points(task, model.base_model, tokenizer, settings.seed)
    return found


# ---- tables and figure


def differences(rows: pd.DataFrame, task: str, base: str) -> pd.DataFrame:
    """Return by cell and seed the score less that of another cell with the same seed."""
    found = rows[rows["task"] == task].pivot(index="seed", columns="cell", values="score")
    return found.sub(found[base], axis=0).drop(columns=base)[[c for c in rows["cell"].unique() if c != base]]


def of_losses(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per encoding: its losses, and the first against other encodings with intervals over seeds."""
    found = []
    for cell, of_cell in rows.groupby("cell", sort=False):
        means = of_cell.groupby("task")["score"].mean().round(3) + 0.0  # no minus zero
        line = {"encoding": cell} | {name: f"{means[name]:.3f}" for name in LOSSES}
        for base in ("none", "learned positions", "T5's buckets"):
            paired = "" if cell == base else over_seeds(differences(rows, LOSSES[0], base)[cell], "+.3f")
            line[f"loss against {base}"] = paired
        found.append(line)
    return pd.DataFrame(found)


def of_tasks(rows: pd.DataFrame, base: str = "none") -> pd.DataFrame:
    """Return a row per encoding: its scores, and their differences to one encoding with intervals over seeds."""
    tasks = [task for task in TASKS if (rows["task"] == task).any()]
    found = []
    for cell, of_cell in rows.groupby("cell", sort=False):
        means = of_cell.groupby("task")["score"].mean()
        line = {"encoding": cell}
        for task in tasks:
            line[task] = f"{means[task]:.1f}"
            line[f"{task}, against {base}"] = (
                "" if cell == base else over_seeds(differences(rows, task, base)[cell], "+.1f")
            )
        found.append(line)
    return pd.DataFrame(found)


def over_seeds(values: pd.Series, form: str) -> str:
    """Format a mean with its interval over seeds, or the only value."""
    return format(mean_over_runs(values), form) if len(values) > 1 else format(values.iloc[0], form)


def power(rows: pd.DataFrame, base: str) -> pd.DataFrame:
    """Return the spread over seeds of paired differences, and the smallest effect that eight of ten studies would show.

    The spread is the root mean square of the cells' standard deviations. An effect is shown where Student's 95 %
    interval over the seeds excludes 0.
    """
    found = []
    for task in [task for task in (*LOSSES, *TASKS) if (rows["task"] == task).any()]:
        spread = float((differences(rows, task, base).var().mean()) ** 0.5)
        each = {f"smallest effect, {n} seeds": f"{spread * smallest_effect(n):.3f}" for n in (3, 4, 10)}
        found.append({"score": task, "spread of differences": f"{spread:.3f}"} | each)
    return pd.DataFrame(found)


def smallest_effect(number: int, probability: float = 0.8) -> float:
    """Return the mean difference, in standard deviations, that a t-test over a number of seeds shows so often."""
    free, limit = number - 1, student_t.ppf(0.975, number - 1)
    return float(brentq(lambda d: nct.sf(limit, free, d * number**0.5) - probability, 0.1, 50))


def of_minilm(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per encoding in MiniLM: distance to the untouched model and bigram shift, against none by seed."""
    found = []
    numbers = {name: of.set_index("seed") for name, of in rows.groupby("name")}
    for cell in ("none", *IN_MINILM):
        trained, none = numbers[f"{cell}, trained"], numbers["none, trained"]
        line = {"encoding": cell.removesuffix(" form")}
        line["token loss, untrained"] = f"{numbers[f'{cell}, untrained']['token_loss_1'].mean():.3f}"
        line["token loss"] = of_seeds(trained["token_loss_1"])
        line["bigram shift"] = of_seeds(100 * trained["bigram_shift"], 1)
        for name, column, factor, form in (("loss", "token_loss_1", 1, "+.3f"), ("shift", "bigram_shift", 100, "+.1f")):
            change = factor * (trained[column] - none[column])
            line[f"{name} against none"] = "" if cell == "none" else over_seeds(change, form)
        found.append(line)
    return pd.DataFrame(found)


def figure(rows: pd.DataFrame) -> plt.Figure:
    """Plot for each encoding the loss and the scores of tasks against none, means and intervals over seeds."""
    cells = [cell for cell in rows["cell"].unique() if cell != "none"]
    groups = {"masked-LM loss (nats)": LOSSES[:1], "tasks (points)": [t for t in TASKS if (rows["task"] == t).any()]}
    fig, axes = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained", sharey=True)
    for ax, (label, tasks) in zip(axes, groups.items(), strict=True):
        for number, task in enumerate(tasks):
            found = {cell: mean_over_runs(values) for cell, values in differences(rows, task, "none").items()}
            places = np.arange(len(cells)) + 0.18 * (number - (len(tasks) - 1) / 2)
            values = np.array([found[cell].value for cell in cells])
            reach = [[found[cell].value - found[cell].low for cell in cells]]
            style = {
                "marker": "osD^"[number],
                "ms": 5,
                "ls": "",
                "elinewidth": 1,
                "color": plt.get_cmap("tab10")(number),
            }
            ax.errorbar(values, places, xerr=reach * 2, label=task, **style)
        ax.axvline(0, color="0.6", lw=0.8, zorder=0)
        ax.set(xlabel=f"{label}, against no positions", yticks=range(len(cells)), yticklabels=cells)
        ax.grid(axis="x", alpha=0.25, lw=0.6)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    axes[1].legend(frameon=False, fontsize=8)
    return fig


def show(rows: pd.DataFrame, output: Path) -> None:
    """Print the tables of this study's numbers, of MiniLM's, or what those of `downstream_accuracy.py` can show."""
    if "name" in rows:
        print(markdown(of_minilm(rows)))
        return
    if "held_out_loss" in rows:  # of an earlier study
        rows = rows[rows["locality"].notna()].assign(cell=rows["cell"].str.removeprefix("from nothing: "))
        losses = rows.groupby(["cell", "seed"], as_index=False)["held_out_loss"].first()
        losses = losses.rename(columns={"held_out_loss": "score"}).assign(task=LOSSES[0])
        print(markdown(power(pd.concat([losses, rows]), "none")))
        return
    print(f"seeds {sorted(set(rows['seed']))}\n\n{markdown(of_losses(rows))}\n\n{markdown(of_tasks(rows))}")
    if rows["seed"].nunique() > 1:
        print(f"\n{markdown(power(rows, 'none'))}")
        output.mkdir(parents=True, exist_ok=True)
        figure(rows).savefig(output / "encoding_forms.png", dpi=150)


def main() -> None:
    plt.switch_backend("agg")
    arguments = parse()
    if arguments.results:
        return show(pd.read_csv(arguments.results), arguments.output)
    for rows in run(arguments):
        rows.round(5).to_csv(arguments.output / "encoding_forms.csv", index=False)
    show(rows, arguments.output)


if __name__ == "__main__":
    main()
