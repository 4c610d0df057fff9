"""Does downstream accuracy rise with the locality and the symmetry of a model's positions?

    python experiments/downstream_accuracy.py --smoke --output runs
    python experiments/downstream_accuracy.py --text books.txt.gz --senteval sentcls --glue glue \
        --frames ewt_train.jsonl --nli snli_dev_full.jsonl mnli_dev.jsonl --pairs snli_dev_subset.jsonl --output runs
    python experiments/downstream_accuracy.py --results docs/results/downstream_accuracy.csv    # the published tables

One model: MiniLM's positions, measured on identical words, in a fixed signed table per layer and head, scaled (see
`cells.py`) and healed: a copy is trained on the same tokens in every cell to give the hidden states of the untouched
model. Controls with the same training: its original positions kept, none, attenuated encodings, ALiBi.
From nothing: BERTs of 4 layers, 128 wide, pre-trained with learned positions, none, an attenuated encoding in its
published form (w = .5), in logits with w = .1 and 1, and mixed: half of the heads decay by .05 to the left and .2 to
the right, the other half are their mirror images, so that the model is symmetric and no head is.
Each cell is frozen and its mean embeddings go to a logistic regression, as in SentEval: MR, CR, SUBJ, MPQA by
cross-validation, TREC, SST-2, CoLA, RTE, STS-B and NLI by their fixed split. Order-sensitive tasks (two neighbouring
words exchanged; a constituent of 3 to 6 words shuffled; roles swapped; each against its original, cross-validated so
that both stay together) get the mean and the maximum of three layers. Floors: TF-IDF of words, and of words and pairs
of words. NLI is also tested on premises with shuffled words: the fall against the same pairs unshuffled.
A seed gives the sample of sentences, the splits and the text of the healing. Complete cells are not repeated.

Predictions, written before the first full run:

1. Healing: measured table ends nearest to the untouched model, then antisymmetric x .5, then the other scaled tables;
   mirrored is worse than symmetrised, as its directions are wrong and not only lost; attenuated with w = .1 and 1 are
   farthest, since they are far more local than any layer of the model.
2. Sentence tasks: all cells within 3 points of each other on average, bigrams add at most 2 points over words, and the
   slopes on locality, symmetry and relative asymmetry include 0 over the scaled tables. Over all cells the slope on
   locality is below 0, through w = .1 and 1 alone: what they lose is the model's content, not its order. So the paper's
   claim does not reproduce here: words are enough for these tasks.
3. Order-sensitive tasks: none is at .50 in bigram shift and constituents, exactly, as a bag of words is; measured
   table is within .03 of original positions; symmetrised loses more than half of what original has over .50; x .5 lies
   between; mirrored is healed to more than symmetrised, as the directions are all there. So the slope is above 0 on
   relative asymmetry and below 0 on symmetry. On locality it is above 0 over the scaled tables (flatter .03 below
   original, sharper not).
4. Swapped roles are recognised above .55 even without order, by what the builder changes beside order (the case of
   pronouns), and by TF-IDF as well; original positions add .05 to that.
5. Shuffled premises cost less than 2 points in every cell, random order the most, and the falls have no slope on
   symmetry: a mean over words hardly moves when words do.
6. From nothing: sentence tasks within 3 points of each other; learned positions and w = 1 have the lowest loss; mixed
   is above w = .1 in bigram shift, although both are symmetric as models, and w = .1 is near chance there.
7. Added before the first run with fine-tuned scores, after CoLA and STS-B of `stability.py`: CoLA falls from original
   over measured table to symmetrised and none, both below .1, and NLI by less than 10 points from original to none, as
   words do most of it. So the slope of the fine-tuned tasks is below 0 on symmetry, through CoLA, and includes 0 on
   locality.
8. Added with 7: of fine-tuned NLI random order costs original positions at least 3 points, none nothing, and
   constituents of 3 to 6 words at most 3 points in every cell. The falls get smaller with symmetry, as the paper says,
   but in the cells whose accuracy is lower to begin with: they know less of the order that is taken from them.
9. Added after seed 0 of four cells (original 57 points on average, measured table 54, symmetrised 51, none 42), before
   all others were fine-tuned: the average falls by .5 to 2 points per .1 of symmetry over all healed cells, with an
   interval below 0, as a direction is what CoLA needs. Mirrored is within 2 points of measured table and above
   symmetrised: training turns directions, it does not have to find them. w = .1, w = 1 and ALiBi lie between
   symmetrised and none, so that the slope on locality includes 0; original, healed is within 1 point of original.
   Seeds agree on the order of original, measured table, symmetrised and none, in NLI and STS-B.
10. Added after eight cells (w = .1 and ALiBi 34 points, below none with 42), before the other six were fine-tuned:
   antisymmetric x .5 lies between symmetrised and measured table, all x 1.5 and decay + .1 within 2 points of the
   table, original, healed within 1 point of original. w = 1 is below none, as w = .1 is, through STS-B; w = .01, which
   hardly changes the model's attention, lies between none and symmetrised. So over all cells the slope on locality is
   below 0 with its interval, through w = .1 and 1, and that on symmetry still includes 0.
11. Added after seed 0 of all cells, before seeds 1 and 2 of six were fine-tuned: original, measured table, symmetrised
   and none have this order in the average of every seed, and w = .1 and ALiBi are below none, with STS-B below 40.
   CoLA of the measured table is above symmetrised in every seed; RTE differs from the majority in no cell. NLI of
   w = .1 and ALiBi is 1 to 4 points above none in the mean, with an interval over seeds that includes 0.
"""

import argparse
import json
import re
import sys
import time
import warnings
from contextlib import suppress
from itertools import cycle, product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from cells import CELLS, SCALINGS, embeddings, load, paragraphs, position_metrics, relocated
from fine_tuned import fine_tuned_scores
from healed_models import side_by_side
from joblib.externals.loky import get_reusable_executor
from pretrain import parse as parse_pretraining, prepare, pretrain
from runs import (
    DATA,
    TINY,
    claim,
    last_complete_checkpoint,
    markdown,
    settings_of,
    signed,
    write_atomically,
)
from safetensors.torch import load_model
from scipy.stats import t as student_t
from sentence_tasks import SENTEVAL, Task, glue, inference, order_sensitive, scores, senteval, tfidf
from small_models import make_model
from statsmodels.regression.linear_model import OLS
from statsmodels.regression.mixed_linear_model import MixedLM

from pelocality.statistics import Estimate, mean_over_runs

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
# small BERTs by their flags for pretrain.py; in "mixed" each half of the heads is the mirror image of the other
ATTENUATED = ("--encoding", "attenuated")
FROM_NOTHING: dict[str, tuple[Any, ...]] = {
    "from nothing: learned": ("--encoding", "learned"),
    "from nothing: none": ("--encoding", "none"),
    "from nothing: mixed": (*ATTENUATED, "--decay", "mixed"),
    "from nothing: w = .1": (*ATTENUATED, "--decay", 0.1),
    "from nothing: w = 1": (*ATTENUATED, "--decay", 1),
    "from nothing: published form": (*ATTENUATED, "--form", "weights"),
}
METRICS = ("locality", "symmetry", "relative_asymmetry")
LOSSES = ("token_loss", "held_out_loss")  # of healing; of pre-training from nothing
KINDS = dict.fromkeys(SENTEVAL, "sentences") | dict.fromkeys(("CoLA", "RTE", "STS-B", "NLI"), "GLUE")
KINDS |= dict.fromkeys(("bigram shift", "constituents", "roles"), "order")
AVERAGES = {"sentences": "sentence tasks", "GLUE": "GLUE and NLI", "fine-tuned": "fine-tuned"}
FLOORS = {"TF-IDF, words": 1, "TF-IDF, words and pairs": 2}
SMOKE = {"tokens": 600, "length": 10, "held_out": 8, "sentences": 24, "folds": 2, "words": 2, "batch": 8, "steps": 2}
SMOKE_CELLS = ["original", "measured table", "antisymmetric x 0", "all x .5", "none", "from nothing: mixed"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--text", type=Path, default=DATA / "text.txt", help="to heal on, a paragraph a line; may be .gz"
    )
    parser.add_argument("--senteval", type=Path, help="folder of MR, CR, SUBJ, MPQA, TREC and SST-2; left out if none")
    parser.add_argument("--glue", type=Path, help="folder of CoLA, RTE and STS-B; left out if none")
    parser.add_argument("--frames", type=Path, default=DATA / "frames.jsonl", help="sentences with trees and frames")
    parser.add_argument("--nli", type=Path, nargs="+", default=[DATA / "nli_train.jsonl"], help="pairs to train on")
    parser.add_argument("--pairs", type=Path, default=DATA / "nli_pairs.jsonl", help="parsed pairs to test NLI on")
    parser.add_argument("--output", type=Path, default=Path("outputs/downstream"), help="folder for cells and tables")
    parser.add_argument("--cells", nargs="+", choices=(*CELLS, *FROM_NOTHING), default=[*RELOCATED, *FROM_NOTHING])
    parser.add_argument("--steps", type=int, default=2500, help="of pre-training from nothing, 2,048 tokens each")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tokens", type=int, default=250_000, help="of healing, in each cell")
    parser.add_argument("--length", type=int, default=48, help="tokens of a piece of text to heal on")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--held-out", type=int, default=256, help="pieces that are not trained on")
    parser.add_argument("--words", type=int, default=32, help="identical words that the positions are measured on")
    parser.add_argument("--sentences", type=int, default=2000, help="most of a task, half as many to test on; 0: all")
    parser.add_argument("--folds", type=int, default=5)
    gpu = torch.cuda.is_available()
    parser.add_argument(
        "--scores",
        nargs="+",
        choices=("frozen", "fine-tuned"),
        default=["frozen", "fine-tuned"] if gpu else ["frozen"],
        help="of a logistic regression on frozen models, or of models fine-tuned on CoLA, RTE, STS-B and NLI; "
        "both on a GPU, otherwise frozen",
    )
    parser.add_argument("--workers", type=int, default=3 if gpu else 1, help="seeds at a time; default 3 on a GPU")
    parser.add_argument("--jobs", type=int, default=4 if gpu else 1, help="processes of a seed that fit classifiers")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--bf16", action="store_true", help="mixed precision: twice as fast where the processor has it")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--smoke", action="store_true", help="a tiny untrained model and few tokens")
    parser.add_argument("--results", type=Path, help="scores of an earlier run: show what they say, and train nothing")
    arguments = parser.parse_args()
    if arguments.smoke:
        vars(arguments).update(SMOKE | {"seeds": arguments.seeds[:1], "cells": SMOKE_CELLS})
    return arguments


def pretrained(arguments: argparse.Namespace, cell: str, seed: int) -> tuple[Any, Any, dict[str, Any]]:
    """Return a small BERT pre-trained with an encoding, its tokenizer and its result; an interrupted run resumes."""
    folder = arguments.output / "pretrained" / f"{cell.rpartition(': ')[2].replace(' ', '_')}-{seed}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    size = TINY if arguments.smoke else ["--length=64", "--batch=32"]
    flags = [*size, *FROM_NOTHING[cell], "--steps", arguments.steps, "--every", min(500, arguments.steps)]
    heads = parse_pretraining(["--output", str(folder), *size]).heads
    if "mixed" in flags:
        half = heads // 2
        pairs = ["--decay", *[0.05] * half, *[0.2] * half, "--symmetry", *[4] * half, *[0.25] * half]
        flags = [*size, *ATTENUATED, *pairs, *flags[flags.index("mixed") + 1 :]]
    flags = [str(flag) for flag in (*flags, "--seed", seed)]
    pretrain(arguments.text, {folder: flags}, workers=1)
    settings = parse_pretraining([str(arguments.text), "--output", str(folder), *flags])
    tokenizer, _, _ = prepare(settings)
    model = make_model(settings, tokenizer)
    load_model(model, last_complete_checkpoint(folder) / "model.safetensors")
    result = json.loads((folder / "result.json").read_text())
    found = {name: result[name] for name in ("held_out_loss", "tokens")}
    return model.base_model.to(arguments.device).eval(), tokenizer, found


def tasks_of(arguments: argparse.Namespace, seed: int) -> list[Task]:
    """Return the tasks of a seed, sampled."""
    found = senteval(arguments.senteval) if arguments.senteval else []
    found += glue(arguments.glue) if arguments.glue else []
    most = arguments.sentences or None
    found.append(inference(arguments.nli, arguments.pairs, seed, most and 2 * most, most and most // 2))
    found += order_sensitive(arguments.frames, seed)
    return [task.sample(most, seed) for task in found]


def all_scores(
    tasks: list[Task], model: Any, tokenizer: Any, arguments: argparse.Namespace, seed: int
) -> dict[str, float]:
    """Return the scores of a model on all tasks: frozen, fine-tuned or both."""
    found: dict[str, float] = {}
    for task in tasks:

        def embed(texts: list[str], layers: bool = task.kind == "order") -> np.ndarray:
            unique, places = np.unique(np.array(texts, dtype=object), return_inverse=True)
            return embeddings(model, tokenizer, list(unique), layers=layers, bf16=arguments.bf16)[places]

        if "frozen" in arguments.scores:
            found |= scores(task, embed, arguments.folds, seed, jobs=arguments.jobs)
        if "fine-tuned" in arguments.scores and task.kind == "GLUE":
            found |= fine_tuned_scores(task, model, tokenizer, seed, bf16=arguments.bf16)
    return found


def run_seed(
    arguments: argparse.Namespace, seed: int, text: list[str], settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the cells of a seed, each read from its file if it is complete."""
    torch.set_num_threads(arguments.threads)
    folder = arguments.output / f"seed-{seed}"
    claim(folder, settings | {"seed": seed})
    floors = FLOORS if "frozen" in arguments.scores else {}
    files = {cell: folder / f"{cell.replace(' ', '_')}.json" for cell in (*floors, *arguments.cells)}
    tasks: list[Task] = []
    for cell, file in files.items():
        if file.exists():
            continue
        started = time.time()
        if not tasks:
            model, tokenizer = load(text, arguments.output, arguments.smoke, arguments.device)
            tasks = tasks_of(arguments, seed)
            sizes = {
                task.name: [len(task.labels), None if task.test is None else int(task.test.sum())] for task in tasks
            }
            write_atomically(folder / "sizes.json", json.dumps(sizes, indent=1))
            order = np.random.default_rng(seed).permutation(len(text))
            enough = 2 * arguments.tokens + 2 * arguments.held_out * arguments.length  # of words; a token is less
            counts = np.cumsum([len(text[index].split()) for index in order])
            chosen = [text[index] for index in order[: 1 + int(np.searchsorted(counts, enough))]]
        row: dict[str, Any] = {"cell": cell, "seed": seed}
        if cell in FLOORS:
            row["scores"] = {}
            for task in tasks:
                row["scores"] |= scores(task, tfidf(task, FLOORS[cell]), arguments.folds, seed)
        else:
            of_cell, of_tokenizer = model, tokenizer
            if cell in FROM_NOTHING:
                of_cell, of_tokenizer, result = pretrained(arguments, cell, seed)
                row |= result
            elif cell != "original":
                options = {"length": arguments.length, "batch_size": arguments.batch, "held_out": arguments.held_out}
                options |= {"tokens": arguments.tokens, "every": 10**6, "seed": seed, "words": arguments.words}
                found = relocated(cell, model, tokenizer, chosen, bf16=arguments.bf16, **options)
                of_cell, losses = found.model.eval(), found.curve.iloc[[0, -1]]
                row |= {"token_loss_before": losses["token_loss"].iloc[0], "token_loss": losses["token_loss"].iloc[1]}
                row |= {"mean_loss": losses["mean_loss"].iloc[1], "tokens": int(losses["tokens"].iloc[1])}
            row |= position_metrics(of_cell, of_tokenizer, arguments.length + 2, arguments.words)
            row["scores"] = all_scores(tasks, of_cell, of_tokenizer, arguments, seed)
        write_atomically(file, json.dumps(row, indent=1))
        print(f"seed {seed}, {cell}: {time.time() - started:.0f} s", file=sys.stderr, flush=True)
    if arguments.jobs > 1:
        get_reusable_executor().shutdown()  # else a process of several seeds waits minutes for it when it ends
    return [json.loads(file.read_text()) for file in files.values()]


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
    groups |= {} if held else {"from nothing": tuple(FROM_NOTHING)}
    found = []
    for (kind, of_kind), (group, cells) in product(table.groupby("kind", sort=False), groups.items()):
        chosen = of_kind[of_kind["cell"].isin(cells)]
        number = chosen["cell"].nunique()
        metrics = METRICS if held or group == "from nothing" else (*METRICS, "token_loss")
        if number > 3:
            numbers = {metric.replace("_", " "): signed(slope(chosen, metric, held), "+.2f") for metric in metrics}
            found.append({"scores": kind, "cells": f"{group} ({number})"} | numbers)
    return pd.DataFrame(found).fillna("")


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row per cell: metrics, loss and scores, means over seeds."""
    rows = []
    for cell, of_cell in table.groupby("cell", sort=False):
        first = of_cell.groupby("seed").first()
        means = {name.replace("_", " "): formatted_mean(first[name]) for name in (*METRICS, *LOSSES)}
        scores = {name: f"{values.mean():.1f}" for name, values in by_seed(of_cell).items()}
        rows.append({"positions": cell} | means | scores)
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
    """Format the mean of differences, with its interval over seeds if there are several."""
    return signed(mean_over_runs(values), "+.1f") if len(values) > 1 else f"{values.mean():+.1f}"


def formatted_mean(values: pd.Series) -> str:
    """Format a mean of metrics, empty for what has none."""
    return "" if values.isna().all() else f"{values.mean():.3f}"


def figure(table: pd.DataFrame) -> plt.Figure:
    """Plot the points of each cell over the first one on each metric, a row for each kind of task; bars over seeds."""
    cells = table[table["locality"].notna()]
    first, *_ = marks = marks_of(cells["cell"].unique().tolist())
    metrics = cells.groupby("cell")[list(METRICS)].mean()
    means = cells.groupby(["kind", "cell", "seed"])["score"].mean()
    names = AVERAGES | {"order": "order-sensitive tasks"}
    kinds = [kind for kind in names if kind in means.index]
    fig, axes = plt.subplots(len(kinds), 3, figsize=(12, 3.2 * len(kinds) + 1), layout="constrained", squeeze=False)
    for row, kind in zip(axes, kinds, strict=True):
        for (cell, mark), (ax, metric) in product(marks.items(), zip(row, METRICS, strict=True)):
            found = mean_over_runs(means[kind, cell] - means[kind, first])  # the same sentences in a seed
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


def marks_of(cells: list[str]) -> dict[str, dict[str, Any]]:
    """Return marks by cell: one colour for original positions, tables, decays and each other, shapes within."""
    kinds = pd.Series({cell: "table" if cell in SCALINGS else re.split(r",| w", cell)[0] for cell in cells})
    numbers, shapes = pd.factorize(kinds)[0], kinds.groupby(kinds).cumcount()
    colors = ["black", *plt.get_cmap("tab10").colors]
    found = {
        cell: {"color": colors[number], "marker": "os^vD*P"[shape], "ms": 7, "mec": "white", "mew": 0.5}
        for cell, number, shape in zip(cells, numbers, shapes, strict=True)
    }
    return {cell: found[cell] for cell in kinds.index[np.argsort(numbers, kind="stable")]}


def main() -> None:
    plt.switch_backend("agg")
    arguments = parse()
    if arguments.results is None:
        given = (paragraphs(arguments.text), settings_of(arguments))
        # in order: an interrupted study has complete seeds
        jobs = [(arguments, seed, *given) for seed in arguments.seeds]
        table = long_table([row for of_seed in side_by_side(run_seed, jobs, arguments.workers) for row in of_seed])
        table.to_csv(arguments.output / "downstream_accuracy.csv", index=False, float_format="%.5g")
    else:
        table = pd.read_csv(arguments.results)
        table = table[table["cell"].isin([*FLOORS, *arguments.cells]) & table["seed"].isin(arguments.seeds)]
    arguments.output.mkdir(parents=True, exist_ok=True)
    figure(table).savefig(arguments.output / "downstream_accuracy.png", dpi=150)
    print(f"seeds {sorted(table['seed'].unique().tolist())}\n\n{markdown(summary(table))}")
    print(f"\n{markdown(differences(table))}")
    for suffix in ("", ", fine-tuned"):
        if (table["task"] == f"NLI{suffix}").any():
            print(f"\n{markdown(falls(table, suffix))}")
    titles = {None: "points per .1 of the metric", "token_loss": "the same with the loss of healing held fixed"}
    for held, title in titles.items():
        if len(found := slopes(table, held)):
            print(f"\n{title}:\n\n{markdown(found)}")


if __name__ == "__main__":
    main()
