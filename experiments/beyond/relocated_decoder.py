"""Can a decoder's learned positions become relative ones, and does it then read beyond the length it was trained at?

    python -m experiments.beyond.relocated_decoder --smoke --output runs  # a tiny model on the story in examples/data
    python -m experiments.beyond.relocated_decoder --text books.txt.gz --output runs --batch 16
    python -m experiments.beyond.relocated_decoder --results docs/results/relocated_decoder.csv  # the table again

Pre-trains a small GPT-2 from random weights, as `decoders_in_training.py` does, on blocks of 32 tokens, for which it
has positions and no more. These are then replaced, and a copy is trained at the same length to give the hidden states
of the untouched model (`relocate`): by the table measured on identical words, by ALiBi, and by none (as DroPE drops
them, Gelberg et al. 2025). Measured is the loss of the next word on held-out text, in blocks of one, two and four times
that length, of which no model was trained on the longer ones. The token that ends each block is not counted: learned
positions know its place. Complete runs are not repeated.

Predictions, written before the first full run:

1. At 32 tokens, trained, the table is within .03 nats of the untouched model, ALiBi within .06 and none within .10:
   much of what a small decoder does is local, which ALiBi has, and its first layer looks at the word before, which no
   layer can do without positions.
2. Untrained, the table is off by less than half as much as none.
3. In blocks of 64 and 128 the loss of the table and of ALiBi is lower than at 32, by less than .05: far keys get little
   attention, and more context helps a model of this size little. That of none is higher at 128 than at 32: its later
   layers find places by the share of the first token, which there is outside what they know.
"""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import torch
from transformers import AutoTokenizer, GPT2LMHeadModel

from experiments.cells import encoding_of
from experiments.pretrain import blocks, pretrain, split_paragraphs
from experiments.runs import last_complete_checkpoint, markdown, parse_runs, runs_parser
from pelocality import attach
from pelocality.models import relocate
from pelocality.statistics import mean_over_runs

CELLS = ("measured table", "ALiBi", "none")
TIMES = (1, 2, 4)


@torch.no_grad()
def next_word_loss(model: GPT2LMHeadModel, rows: datasets.Dataset) -> float:
    """Return the mean loss of the next word, in nats, over blocks of one length, but for the token that ends them."""
    ids = torch.tensor(rows["input_ids"])[:, :-1]
    parts = ids.split(64)
    sums = [float(model(input_ids=part, labels=part, use_cache=False).loss) * len(part) for part in parts]
    return sum(sums) / len(ids)


def losses(model: GPT2LMHeadModel, held_out: dict[int, datasets.Dataset], longest: int) -> dict[str, float]:
    """Return the loss at each length that the model has positions for."""
    return {f"loss at {n}": next_word_loss(model, rows) for n, rows in held_out.items() if n <= longest}


def run(folder: Path, text: Path, seed: int, tokens: int, most: int) -> list[dict[str, Any]]:
    """Return the losses of the untouched model of one run, and of each cell untrained and trained.

    At every length they are those of the same held-out text, of at most so many blocks of the shortest.
    """
    checkpoint = last_complete_checkpoint(folder)
    model, tokenizer = GPT2LMHeadModel.from_pretrained(checkpoint).eval(), AutoTokenizer.from_pretrained(checkpoint)
    length = model.config.n_positions
    training, held_out_text = split_paragraphs(text)
    held_out = {n: blocks(held_out_text, tokenizer, n) for n in (length * times for times in TIMES)}
    held_out = {n: rows.select(range(min(len(rows), most * length // n))) for n, rows in held_out.items()}
    lines = [training[i] for i in np.random.default_rng(seed).permutation(len(training))]
    options: dict[str, Any] = {"tokens": tokens, "length": length, "seed": seed, "progress": False}
    options["held_out"] = min(64, len(lines) // 10)
    found = [{"positions": "original", "seed": seed} | losses(model, held_out, length)]
    for cell in CELLS:
        encoding = encoding_of(cell, model, tokenizer, length, words=16, learnable=True)
        with attach(model, encoding):
            untrained = losses(model, held_out, max(held_out))
        found.append({"positions": f"{cell}, untrained", "seed": seed} | untrained)
        trained = relocate(model, encoding, tokenizer, lines, folder=folder / f"cell-{cell}", **options).model
        found.append({"positions": f"{cell}, trained", "seed": seed} | losses(trained, held_out, max(held_out)))
    return found


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return mean losses with intervals over seeds, and differences seed by seed."""
    shortest, *_, longest = (column for column in table if column.startswith("loss at"))
    untouched = table[table["positions"] == "original"].set_index("seed")[shortest]
    rows = []
    for positions, of_cell in table.groupby("positions", sort=False):
        of_cell = of_cell.set_index("seed").drop(columns="positions").dropna(axis=1)
        row = {"positions": positions} | {column: str(mean_over_runs(of_cell[column])) for column in of_cell}
        if positions != "original":
            row["against original"] = format(mean_over_runs(of_cell[shortest] - untouched), "+.3f")
            row["longest against shortest"] = format(mean_over_runs(of_cell[longest] - of_cell[shortest]), "+.3f")
        rows.append(row)
    return pd.DataFrame(rows).fillna("")


def main() -> None:
    parser = runs_parser(__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--tokens", type=int, default=100_000, help="of training in each cell")
    parser.add_argument("--blocks", type=int, default=2000, help="of held-out text, at most")
    parser.add_argument("--results", type=Path, help="print the table of these losses again, and run nothing")
    arguments, options = parse_runs(parser)
    if arguments.results:
        print(markdown(summary(pd.read_csv(arguments.results))))
        return
    if arguments.smoke:
        arguments.tokens, arguments.blocks = 600, 16

    runs = {seed: arguments.output / f"decoder-{seed}" for seed in arguments.seeds}
    shared = ["--steps", arguments.steps, "--every", arguments.every, *options, "--family", "gpt2"]
    pretrain(arguments.text, {folder: [*shared, "--seed", seed] for seed, folder in runs.items()}, arguments.workers)
    rows = []
    for seed, folder in runs.items():
        rows += run(folder, arguments.text, seed, arguments.tokens, arguments.blocks)
    table = pd.DataFrame(rows)
    table.to_csv(arguments.output / "relocated_decoder.csv", index=False, float_format="%.5g")
    print(markdown(summary(table)))


if __name__ == "__main__":
    main()
