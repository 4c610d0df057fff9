"""Does downstream accuracy rise with the locality and the symmetry of a model's positions?

    python -m experiments.paper.downstream_accuracy --smoke --output runs
    python -m experiments.paper.downstream_accuracy --text books.txt.gz --senteval sentcls --glue glue \
        --frames ewt_train.jsonl --nli snli_dev_full.jsonl mnli_dev.jsonl --pairs snli_dev_subset.jsonl --output runs
    python -m experiments.paper.downstream_accuracy --results docs/results/downstream_accuracy.csv  # the tables again

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
12. Added with three seeds of those six, before seeds 1 and 2 of the other eight were fine-tuned: in both seeds
   original, healed is within 1.5 points of original, all x 1.5 within 2 of the table, antisymmetric x -1 is 2 to 6
   below the table, decay + .1 has STS-B below 70, and w = 1 the lowest average of all, with w = .01 too below none.
   CoLA of antisymmetric x .5 and x -1 is below the table's in the mean of three seeds, of all x 1.5 and decay + .1
   within 4 points of it. Slopes on locality and symmetry over 13 healed cells still include 0; the one on token loss
   does not.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from joblib.externals.loky import get_reusable_executor

from experiments.cells import CELLS, embeddings, load, paragraphs, position_metrics, relocated
from experiments.fine_tuned import fine_tuned_scores
from experiments.healed_models import side_by_side
from experiments.paper.downstream_tables import RELOCATED, long_table, show
from experiments.pretrain import parse as parse_pretraining, pretrained
from experiments.runs import DATA, TINY, claim, settings_of, write_atomically
from experiments.sentence_tasks import Task, glue, inference, order_sensitive, scores, senteval, tfidf

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
    parser.add_argument(
        "--cells",
        nargs="+",
        choices=(*CELLS, *FROM_NOTHING),
        default=[*RELOCATED, *FROM_NOTHING],
        help="others are compared with the first; default all",
    )
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


def from_nothing(arguments: argparse.Namespace, cell: str, seed: int) -> tuple[Any, Any, dict[str, Any]]:
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
    _, model, tokenizer, _ = pretrained(arguments.text, folder, [*flags, "--seed", seed])
    result = json.loads((folder / "result.json").read_text())
    found = {name: result[name] for name in ("held_out_loss", "tokens")}
    return model.base_model.to(arguments.device), tokenizer, found


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
                of_cell, of_tokenizer, result = from_nothing(arguments, cell, seed)
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
        cells = [*FLOORS, *arguments.cells]
        table = pd.read_csv(arguments.results)
        table = table[table["cell"].isin(cells) & table["seed"].isin(arguments.seeds)]
        table = table.sort_values("cell", key=lambda column: column.map(cells.index), kind="stable")
    show(table, arguments.output)


if __name__ == "__main__":
    main()
