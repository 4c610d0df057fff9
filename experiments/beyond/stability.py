"""Does an encoding make fine-tuning steadier, and does a model with it forget less of what it was?

    python -m experiments.beyond.stability --smoke --output runs                                 # a tiny model, seconds
    python -m experiments.beyond.stability --output runs --text books.txt.gz --glue GLUE --bf16  # MiniLM, twenty seeds
    python -m experiments.beyond.stability --results docs/results/stability.csv  # the published table again

Fine-tunes MiniLM on RTE, CoLA and STS-B from its original positions; these as a table per layer and head; that table
symmetrised (antisymmetric x 0); none; and ALiBi, all but the original fixed, and healed first with the same budget.
The controls are the original positions healed alike, and the table trained too, in healing and in fine-tuning. A
seed gives the new head, the order of the data and dropout; all seeds of a cell start from one healed model. Per task
and cell: the score on the development set (accuracy, Matthews' correlation, Pearson's correlation), its standard
deviation over seeds, the ratio of that to original positions' (bootstrap over seeds) with the Brown-Forsythe test
(false discoveries controlled over all comparisons), and failed runs: no better than the majority class, or than the
mean score of STS-B.
Forgetting: a model is fine-tuned on the three tasks in turn, each with a new head; `distillation_loss` of what is
below the head to the untouched model, on text that no model was healed on, before and after each task.

Predictions, written before the first full run:

1. No encoding is steadier or less steady than original positions by a factor of 1.5 or more on RTE and STS-B, and no
   test is significant there: the head and the order of the data, which all share, make the spread.
2. CoLA is order: its mean falls from original and table (within .05 of each other) over symmetrised to none (below .1),
   and ALiBi, which is symmetric too, is nearer to symmetrised. Its spread differs for the same reason: where there is
   nothing to learn, all seeds are alike, or some find a little and others none.
3. Failed runs: at most 1 of 20 for original and table on every task; on CoLA half or more of those without positions,
   and some of those with symmetric ones; none on STS-B, where words do.
4. Forgetting: the token loss rises as much for the table as for original positions (within a fifth), as both go the
   same way in the same weights. None and ALiBi start further away and rise less, and end further away all the same.
5. Most of the rise comes with CoLA, which is furthest from what the model was trained for and has the most steps.
6. Added after thirteen seeds of original, measured table and antisymmetric x 0 on STS-B, before the first run of the
   control: original positions, healed alike, are as steady as original (a ratio of spreads below 2) and no run fails,
   as they start healing without a loss and change little; so it is not healing as such that makes the tables unsteady.
7. Added after 6, before the first run of either: a table that is trained too is as unsteady as the fixed one, with a
   spread on STS-B at least three times that of original positions, as a few hundred numbers a head are little beside 22
   million weights. The fixed table after healing on 500,000 tokens (--tokens) has a spread below half of that after
   100,000, and at most one failed run of ten: what makes runs fail is what healing left undone.
8. Added after 7, before the first run with --head mean: where a linear layer reads the mean of all tokens instead of
   the first one through the pooler, no run of the table on STS-B fails and its spread is below three times that of
   original positions. A table by distance does not tell the first token from the others, as original positions do.
9. Added after 8, before the first run with --head "first linear", which reads the first token without the pooler: of
   the table on STS-B it is as unsteady as the pooler, at least one run of seven fails, and its mean is below .75; so it
   is the first token, and not the pooler's layer, that original positions help to find.
10. Added after five seeds of CoLA and RTE from six cells and of STS-B from none and ALiBi, before seeds 5 to 19. On
    CoLA the table spreads more than original positions, by a factor of 1.5 or more and significantly (q below .05),
    as it learns in some seeds and not in others: 6 to 14 of its 20 runs fail, at a mean between .05 and .15.
    Symmetrised, none and ALiBi have means below .06 and at least 12 failed runs of 20 each, original positions at
    most one. On STS-B none fails in 12 runs or more and ALiBi in 16 or more. On RTE no difference of scores or
    spreads is significant.
"""

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from datasets import Dataset
from scipy.stats import false_discovery_control, levene
from torch import nn
from transformers import AutoModel, AutoTokenizer, set_seed

from experiments.fine_tuned import LinearHead
from experiments.healed_models import (
    SMOKE,
    add_flags,
    device,
    fine_tune,
    forget_checkpoints,
    healed_folder,
    side_by_side,
    source,
    texts,
    tokenized,
    with_new_head,
)
from experiments.runs import DATA, claim, markdown, of_seeds, settings_of, write_atomically
from experiments.sentence_tasks import glue_rows, score
from pelocality import load
from pelocality.models import DistillationLoss, distillation_loss
from pelocality.statistics import mean_over_runs

CELLS = (
    "original",
    "measured table",
    "antisymmetric x 0",
    "none",
    "ALiBi",
    "original, healed",
    "measured table, learned",
)
TASKS = {"RTE": "accuracy", "CoLA": "Matthews' correlation", "STS-B": "Pearson's correlation"}


def read(task: str, part: str, arguments: argparse.Namespace) -> Dataset:
    """Return the rows of a task, or as many of them as the flags say, drawn at random, the same in every run."""
    rows = small(task).iloc[int(part == "dev") :: 2] if arguments.glue is None else glue(task, part, arguments.glue)
    most = dict(zip(TASKS, arguments.rows, strict=True))[task] if arguments.rows else None
    drawn = rows if most is None or most >= len(rows) else rows.sample(most, random_state=0)
    return Dataset.from_pandas(drawn, preserve_index=False)


def glue(task: str, part: str, folder: Path) -> pd.DataFrame:
    """Return the rows of a task of GLUE, with a number as label."""
    rows = glue_rows(folder, task, part)
    return rows.assign(label=(rows["label"] == "entailment").astype(int)) if task == "RTE" else rows


def small(task: str) -> pd.DataFrame:
    """Return a few rows like those of a task, made of examples/data: to see it run."""
    rows = pd.read_json(DATA / "nli_train.jsonl", lines=True)
    rows["label"] = 5.0 * (rows["label"] == "entailment") if task == "STS-B" else 1 * (rows["label"] == "entailment")
    if task == "CoLA":
        rows = rows[["hypothesis", "label"]].rename(columns={"hypothesis": "premise"})
    return rows


def failed(task: str, labels: np.ndarray, predicted: np.ndarray) -> bool:
    """Return whether predictions are no better than always the same answer."""
    if task == "STS-B":
        return bool(np.mean((predicted - labels) ** 2) >= labels.var())
    return bool((predicted == labels).mean() <= np.bincount(labels).max() / len(labels))


def head(task: str) -> dict[str, Any]:
    """Return the options of a task's head."""
    return (
        {"num_labels": 1, "problem_type": "regression"}
        if task == "STS-B"
        else {
            "num_labels": 2,
            "problem_type": "single_label_classification",
        }
    )


def classifier(cell: str, path: Path, task: str, seed: int, arguments: argparse.Namespace) -> nn.Module:
    """Return the model of a cell from a folder below a new head: the pooler's, or a linear one."""
    if arguments.head == "first":
        return with_new_head(path, cell, seed, **head(task))
    set_seed(seed)  # of the head's weights
    encoder = AutoModel.from_pretrained(path) if cell == "original" else load(path)
    return LinearHead(encoder, head(task)["num_labels"], first=arguments.head == "first linear").to(device())


def run(arguments: argparse.Namespace, cell: str, task: str, seed: int) -> dict[str, Any]:
    """Return the score of one fine-tuned model; stored when complete."""
    folder = arguments.output / f"{cell.replace(' ', '-')}-{task}-{seed}"
    file = folder / "result.json"
    if not file.exists():
        claim(folder, settings_of(arguments) | {"cell": cell, "task": task, "seed": seed})
        tokenizer = AutoTokenizer.from_pretrained(source(arguments))
        train, dev = (read(task, part, arguments) for part in ("train", "dev"))
        model = classifier(cell, healed_folder(cell, 0, arguments), task, seed, arguments)
        trainer = fine_tune(model, tokenizer, train, seed, folder, arguments)
        found = trainer.predict(tokenized(dev, tokenizer, arguments.length))
        predicted = found.predictions[:, 0] if task == "STS-B" else found.predictions.argmax(-1)
        answers = (task, found.label_ids, predicted)
        result = {"cell": cell, "task": task, "seed": seed, "score": score(*answers), "failed": failed(*answers)}
        write_atomically(file, json.dumps(result, indent=1))
        forget_checkpoints(folder)
        print(f"{folder.name} is complete", flush=True)
    return json.loads(file.read_text())


def forget(arguments: argparse.Namespace, cell: str, seed: int) -> pd.DataFrame:
    """Return the distillation loss of a model before and after each task of the sequence; stored when complete."""
    folder = arguments.output / f"{cell.replace(' ', '-')}-sequence-{seed}"
    file = folder / "forgetting.csv"
    if not file.exists():
        claim(folder, settings_of(arguments) | {"cell": cell, "seed": seed})
        path = source(arguments)
        reference, tokenizer = AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
        held_out = texts(arguments, seed)[1][: arguments.held_out]
        start, rows = healed_folder(cell, 0, arguments), []
        for task in TASKS:
            model = with_new_head(start, cell, seed, **head(task))
            data = read(task, "train", arguments)
            for after in ("before", task) if not rows else (task,):
                if after == task:
                    fine_tune(model, tokenizer, data, seed, folder / task, arguments)
                reference.to(model.device)
                losses = distillation_loss(model, reference, tokenizer, held_out, length=arguments.length)
                rows.append({"cell": cell, "seed": seed, "after": after} | losses._asdict())
            start = folder / task / "base"
            model.config.problem_type = None  # of this head
            model.base_model.save_pretrained(start)
        write_atomically(file, pd.DataFrame(rows).to_csv(index=False))
        for task in TASKS:
            forget_checkpoints(folder / task)
        print(f"{folder.name} is complete", flush=True)
    return pd.read_csv(file)


def summary(results: pd.DataFrame, against: str) -> pd.DataFrame:
    """Return one row per task and cell: scores, failed runs, and how scores and spread differ from those of a cell."""
    rows, tests = [], []
    for (task, cell), found in results.groupby(["task", "cell"], sort=False):
        runs, base = (
            results[(results["task"] == task) & (results["cell"] == name)].set_index("seed")["score"]
            for name in (cell, against)
        )
        row = {"task": task, "positions": cell, "runs": len(runs), "failed": int(found["failed"].sum())}
        row |= {"score": str(mean_over_runs(runs)), "standard deviation": f"{runs.std():.4f}"}
        paired = (runs - base).dropna()
        shown = cell != against and len(paired)
        row[f"against {against}, by seed"] = format(mean_over_runs(paired), "+.3f") if shown else ""
        compared = cell != against and min(len(base), len(runs)) > 2 and base.std() > 0 and runs.std() > 0
        row["ratio of deviations"] = ratio_of_spreads(runs, base) if compared else ""
        tests.append(levene(runs, base, center="median").pvalue if compared else np.nan)
        rows.append(row)
    known = ~np.isnan(tests)
    corrected = np.full(len(rows), np.nan)
    if known.any():
        corrected[known] = false_discovery_control(np.array(tests)[known])
    return pd.DataFrame(rows).assign(
        **{"Brown-Forsythe, q": ["" if np.isnan(q) else f"{q:.2g}" for q in corrected]},
    )


def ratio_of_spreads(scores: pd.Series, base: pd.Series) -> str:
    """Return the ratio of two standard deviations with its bootstrap interval over runs, by percentiles."""
    generator = np.random.default_rng(0)
    spreads = []
    for values in (scores.to_numpy(), base.to_numpy()):
        resampled = values[generator.integers(len(values), size=(9999, len(values)))]
        spreads.append(resampled.std(axis=1, ddof=1))
    drawn = np.divide(*spreads, out=np.full(9999, np.nan), where=spreads[1] > 0)  # one run, again and again
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return f"{scores.std() / base.std():.2f} [{low:.2f}, {high:.2f}]"


def forgetting(rows: pd.DataFrame) -> pd.DataFrame:
    """Return each cell's token loss before and after each task, and its rise: the mean over seeds, and each."""
    by_stage = rows.pivot_table(index=["cell", "seed"], columns="after", values="token_loss", sort=False)
    by_stage = by_stage.clip(lower=0)  # rounding
    by_stage["rise"] = by_stage[list(TASKS)[-1]] - by_stage["before"]
    found = []
    for cell, of_cell in by_stage.groupby("cell", sort=False):
        stages = {f"after {name}" if name in TASKS else name: of_seeds(of_cell[name]) for name in of_cell}
        found.append({"positions": cell, "runs": len(of_cell)} | stages)
    return pd.DataFrame(found)


def figure(results: pd.DataFrame, losses: pd.DataFrame) -> plt.Figure:
    """Plot every run's score by task and cell, crosses for failed ones, and the token loss along the sequence."""
    tasks = [task for task in TASKS if (results["task"] == task).any()]
    # a cell has its row and colour in every panel, also where it was not run
    cells = list(results["cell"].unique())
    panels = len(tasks) + bool(len(losses))
    size = (3 * panels + 2, max(3.2, 0.32 * len(cells) + 1.4))
    fig, axes = plt.subplots(1, panels, figsize=size, layout="constrained", squeeze=False)
    for task, ax in zip(tasks, axes[0], strict=False):
        for place, cell in enumerate(cells):
            runs = results[(results["task"] == task) & (results["cell"] == cell)]
            spread = np.linspace(-0.25, 0.25, len(runs)) if len(runs) > 1 else np.zeros(len(runs))
            for state, marker in ((False, "o"), (True, "x")):
                shown = (runs["failed"] == state).to_numpy()
                ax.plot(runs["score"][shown], place + spread[shown], marker, color=f"C{place}", markersize=4)
        first = ax is axes[0, 0]
        ax.set_yticks(range(len(cells)), cells if first else [""] * len(cells))
        ax.set(title=task, xlabel=TASKS[task], ylim=(len(cells) - 0.5, -0.5))
        ax.grid(axis="x", alpha=0.25, linewidth=0.6)
    if len(losses):
        last = axes[0, -1]
        for cell, of_cell in losses.groupby("cell", sort=False):
            place, means = cells.index(cell), of_cell.groupby("after", sort=False)["token_loss"].mean()
            last.plot(means.index, means, "osD^v"[place % 5] + "-", color=f"C{place}", label=cell)
        last.set(title="forgetting", ylabel="1 - cosine to the untouched model", ylim=(0, None))
        last.legend(frameon=False, fontsize=8)
        last.grid(axis="y", alpha=0.25, linewidth=0.6)
    return fig


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_flags(parser, CELLS, Path("outputs/stability"))
    parser.set_defaults(epochs=3, length=128)  # RTE has long premises
    reads = "what the head of the twenty seeds is: the pooler of the first token, or linear, on it or the mean of all"
    parser.add_argument("--head", choices=("first", "first linear", "mean"), default="first", help=reads)
    parser.add_argument("--glue", type=Path, help="folder with RTE, CoLA and STS-B; a few rows if left out")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="of the twenty seeds")
    parser.add_argument("--rows", type=int, nargs=3, help="of RTE, CoLA and STS-B, at most, to train and to test on")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(20)))
    again = "scores of an earlier run: print and draw what they say, of all cells, and train nothing"
    parser.add_argument("--results", type=Path, help=again)
    parser.add_argument("--against", default="original", help="the cell that the others are compared to")
    sequence = "seeds of the sequence, whose heads read the first token"
    parser.add_argument("--sequences", type=int, nargs="*", default=list(range(5)), help=sequence)
    arguments = parser.parse_args()
    if arguments.results is None and arguments.against not in CELLS:
        parser.error(f"--against must be one of {', '.join(CELLS)}, got {arguments.against}")
    if arguments.smoke:
        vars(arguments).update(
            SMOKE | {"rows": [16] * 3, "seeds": arguments.seeds[:3], "sequences": arguments.seeds[:1]}
        )
        arguments.cells = arguments.cells[:2]
    return arguments


def main() -> None:
    plt.switch_backend("agg")
    arguments = parse()
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.results is not None:
        results = pd.read_csv(arguments.results)
        results = results[results["task"].isin(arguments.tasks) & results["seed"].isin(arguments.seeds)]
        if arguments.against not in (cells := results["cell"].unique()):
            raise ValueError(f"--against must be one of {', '.join(cells)}, got {arguments.against}")
        print(markdown(summary(results, arguments.against)))
        if (beside := arguments.results.with_name("forgetting.csv")).exists():
            print(f"\n{markdown(forgetting(pd.read_csv(beside)))}")
        figure(results, pd.DataFrame()).savefig(arguments.output / "stability.png", dpi=150)
        return
    claim(arguments.output, settings_of(arguments))
    list(side_by_side(healed_folder, [(cell, 0, arguments) for cell in arguments.cells], arguments.workers))
    # an interrupted study has complete seeds
    jobs = [
        (arguments, cell, task, seed) for seed, task, cell in product(arguments.seeds, arguments.tasks, arguments.cells)
    ]
    results = pd.DataFrame(side_by_side(run, jobs, arguments.workers))
    sequences = [(arguments, cell, seed) for seed, cell in product(arguments.sequences, arguments.cells)]
    empty = pd.DataFrame(columns=["cell", "seed", "after", *DistillationLoss._fields])
    losses = pd.concat([empty, *side_by_side(forget, sequences, arguments.workers)])
    print(f"{len(arguments.seeds)} seeds, {arguments.epochs:g} epochs\n")
    print(markdown(summary(results, arguments.against)))
    if len(losses):
        print(f"\n{markdown(forgetting(losses))}")
    results.to_csv(arguments.output / "stability.csv", index=False)
    losses.to_csv(arguments.output / "forgetting.csv", index=False)
    figure(results, losses).savefig(arguments.output / "stability.png", dpi=150)


if __name__ == "__main__":
    main()
