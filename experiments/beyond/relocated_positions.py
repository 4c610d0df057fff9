"""Can a trained model's positions be moved into an encoding, and what does scaling them there do?

    python -m experiments.beyond.relocated_positions --smoke --output runs               # a tiny model, seconds
    python -m experiments.beyond.relocated_positions --text books.txt.gz --output runs   # MiniLM, three seeds
    python -m experiments.beyond.relocated_positions --text books.txt.gz --cells none "fixed form" "learnable form"

The positions of a model are measured on identical words and put into a signed `DistanceTable` per layer and head; its
own are disabled, and a copy is trained to give the hidden states of the untouched model (`relocate`). Controls with the
same training: no encoding, and an attenuated one (logits, w = 0.1, s = 1) in every head. Then the table is scaled
without further training: its antisymmetric part by .5, 0 (symmetrised), -1 (mirrored) and 1.5, all of it by .5 and 1.5,
a decay added.
Measured against the untouched model, on held-out text: 1 - cosine of the last hidden states (tokens and their mean), at
the length of training and at twice and four times that, beyond the table; and bigram shift (were two neighbouring words
exchanged? logistic regression on the mean and the maximum of three layers), which a model without order cannot tell.
A seed gives the order of the text and the sentences. Complete cells are not repeated, interrupted ones resume.

Predictions, written before the first full run; 1 to 4 after a pilot of one seed with other code and other sentences:

1. Untrained, the table costs half to two thirds of what no encoding does, the attenuated encoding more than twice as
   much: what attention does on identical words is the positional signal, and a decay of 0.1 is far more local than it.
2. After 250,000 tokens the table's token loss is below .04 and less than a third of that of both controls, which must
   learn order in each layer anew.
3. Bigram shift: table within .04 of original positions; no encoding at chance; attenuated below .56, since a symmetric
   bias shows distances and not directions; the trained table at chance once symmetrised, though its loss is below that
   of the controls.
4. Mirrored costs more than symmetrised, and flatter more than more local: the untouched heads are weakly local, and a
   softmax is steep where a bias is already large.
5. At twice and four times the length the table loses more than at its own but less than no encoding: far distances
   share one number, which is small beside the near ones that heads use.

Predictions for MPNet, whose absolute positions and buckets are both replaced, written before its run on 100,000 tokens
(known from a trial on few texts: untrained, its table costs .156 a token, no encoding .500, an attenuated one .823):

6. Trained, the table is below .06, and at less than half of both controls: it starts nearer than MiniLM's does beside
   its controls, but twice as many layers add up what is off in each.
7. Bigram shift: table within .05 of original positions, no encoding at chance; symmetrised, the trained table loses
   more than half of what it has over chance.
"""

import argparse
import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from experiments.cells import FORMS, SCALINGS, embeddings, encoding_of, load, paragraphs
from experiments.runs import DATA, claim, markdown, of_seeds, settings_of, write_atomically
from pelocality import attach, attached
from pelocality.models import distillation_loss, relocate
from pelocality.statistics import mean_over_runs

CELLS = ("measured table", "none", "attenuated w = .1")
SCALED = [cell for cell in SCALINGS if cell not in ("measured table", "antisymmetric x 2")]
SMOKE = {"tokens": 600, "length": 10, "held_out": 8, "sentences": [6, 4], "words": 2, "batch": 8, "every": 4}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, default=DATA / "text.txt", help="one paragraph a line; may be .gz")
    parser.add_argument("--output", type=Path, default=Path("outputs/relocated"), help="folder for cells and table")
    parser.add_argument("--model", type=Path, help="folder of an encoder that `attach` takes; default: MiniLM")
    parser.add_argument("--cells", nargs="+", choices=(*CELLS, *FORMS), default=list(CELLS), help="default the first 3")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tokens", type=int, default=250_000, help="of training, in each cell")
    parser.add_argument("--length", type=int, default=48, help="tokens of a piece, special tokens included")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--every", type=int, default=20, help="steps between points of the curve")
    parser.add_argument("--held-out", type=int, default=256, help="pieces that are not trained on")
    parser.add_argument("--sentences", type=int, nargs=2, default=[3000, 1000], help="of bigram shift, train and test")
    parser.add_argument("--words", type=int, default=32, help="identical words that the positions are measured on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--smoke", action="store_true", help="a tiny untrained model and few tokens")
    parser.add_argument("--results", type=Path, help="print the table of these numbers again, and run nothing")
    arguments = parser.parse_args()
    if arguments.smoke:
        vars(arguments).update(SMOKE | {"seeds": arguments.seeds[:1]})
    return arguments


def bigram_shift(text: list[str], counts: list[int], seed: int) -> tuple[list[str], np.ndarray]:
    """Return sentences of 5 to 25 words, and in which two neighbouring words were exchanged: half of them."""
    found = [sentence.split() for line in text for sentence in re.findall(r"[A-Z][^.!?\"]+[.!?]", line)]
    found = [words for words in found if 5 <= len(words) <= 25]
    if len(found) < sum(counts):
        raise ValueError(f"--text holds {len(found)} sentences of 5 to 25 words, --sentences asks for {sum(counts)}")
    generator = np.random.default_rng(seed)
    sentences, exchanged = [], np.arange(sum(counts)) % 2 == 1
    for index, shifted in zip(generator.permutation(len(found)), exchanged, strict=False):
        words = list(found[index])
        place = generator.integers(1, len(words) - 2)  # neither the capital at the start nor the stop at the end
        if shifted:
            words[place], words[place + 1] = words[place + 1], words[place]
        sentences.append(" ".join(words))
    return sentences, exchanged


def probe_accuracy(inputs: np.ndarray, labels: np.ndarray, train: int) -> float:
    """Return the test accuracy of a logistic regression on standardised features, with a ridge penalty."""
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=200))
    return float(model.fit(inputs[:train], labels[:train]).score(inputs[train:], labels[train:]))


class Cells:
    """One seed of the experiment: its models, measured one after another, each stored when complete."""

    def __init__(self, arguments: argparse.Namespace, seed: int, text: list[str], settings: dict[str, Any]):
        self.arguments, self.seed, self.text = arguments, seed, text
        self.folder = arguments.output / f"seed-{seed}"
        claim(self.folder, settings | {"seed": seed})
        self.model, self.tokenizer = load(text, arguments.output, arguments.smoke, arguments.device, arguments.model)
        order = np.random.default_rng(seed).permutation(len(text))
        tenth = max(1, len(text) // 10)
        self.held_out = [text[i] for i in sorted(order[:tenth])]
        self.train = [text[i] for i in order[tenth:]]
        self.sentences, self.exchanged = bigram_shift(self.held_out, arguments.sentences, seed)

    def path(self, name: str) -> Path:
        """Return a path in the folder of this seed, without spaces."""
        return self.folder / name.replace(" ", "_")

    def encoding(self, cell: str) -> Any:
        """Return what the positions of a cell are, as `attach` takes it; a table is trained with the model."""
        length, words = self.arguments.length + 2, self.arguments.words
        return encoding_of(cell, self.model, self.tokenizer, length, words, learnable=True)

    def measured(self, name: str, model: nn.Module, tokens: int = 0) -> dict[str, Any]:
        """Return the numbers of a model, read from its file if they are complete."""
        file = self.path(f"{name}.json")
        if not file.exists():
            row: dict[str, Any] = {"name": name, "seed": self.seed, "tokens": tokens}
            pieces = self.arguments.held_out
            for times in (1, 2, 4):
                length = times * self.arguments.length
                if length > self.model.config.max_position_embeddings:
                    continue
                text = self.sample(length, pieces // times)
                losses = distillation_loss(model, self.model, self.tokenizer, text, length=length)
                row |= {f"{name}_{times}": loss for name, loss in losses._asdict().items()}
            inputs = embeddings(model, self.tokenizer, self.sentences, layers=True)
            row["bigram_shift"] = probe_accuracy(inputs, self.exchanged, self.arguments.sentences[0])
            write_atomically(file, json.dumps(row, indent=1))
        return json.loads(file.read_text())

    def sample(self, length: int, pieces: int) -> list[str]:
        """Return held-out text, joined and cut to words so that most pieces are full."""
        words = " ".join(self.held_out).split()
        per_piece = max(1, round(0.7 * (length - 2)))
        return [" ".join(words[i * per_piece : (i + 1) * per_piece]) for i in range(pieces)]

    def run(self) -> Iterator[dict[str, Any]]:
        """Yield the numbers of each model."""
        options = {"length": self.arguments.length, "batch_size": self.arguments.batch, "every": self.arguments.every}
        options |= {"tokens": self.arguments.tokens, "held_out": self.arguments.held_out, "progress": False}
        trained = {}
        yield self.measured("original", self.model)
        for cell in self.arguments.cells:
            start = copy.deepcopy(self.model)
            attach(start, self.encoding(cell))
            yield self.measured(f"{cell}, untrained", start)
            found = relocate(
                self.model,
                self.encoding(cell),
                self.tokenizer,
                self.train,
                folder=self.path(f"cell-{cell}"),
                seed=self.seed,
                **options,
            )
            found.curve.to_csv(self.path(f"curve-{cell}.csv"), index=False)
            yield self.measured(f"{cell}, trained", found.model, int(found.curve["tokens"].iloc[-1]))
            trained[cell] = found.model
        for cell in SCALED if "measured table" in trained else ():
            yield self.measured(f"{cell}, scaled", scaled(trained["measured table"], **SCALINGS[cell]))


def scaled(model: nn.Module, **factors: float) -> nn.Module:
    """Return a copy of a model with its tables scaled, as by `DistanceTable.scaled`."""
    copied = copy.deepcopy(model)
    for table in attached(copied).encodings:
        with torch.no_grad():
            table.values.copy_(table.scaled(**factors).values)
    return copied


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the mean of each number over seeds, and of several the intervals of token losses and bigram shift."""
    found = []
    for name, of_name in rows.groupby("name", sort=False):
        line = {"positions": name}
        for times in [int(column.removeprefix("token_loss_")) for column in rows if column.startswith("token_loss")]:
            token = of_name[f"token_loss_{times}"]
            line[f"token loss at {times} x"] = str(mean_over_runs(token)) if len(token) > 1 else of_seeds(token)
            line[f"mean loss at {times} x"] = f"{of_name[f'mean_loss_{times}'].mean():.3f}"
        found.append(line | {"bigram shift": of_seeds(of_name["bigram_shift"])})
    return pd.DataFrame(found)


def figure(rows: pd.DataFrame, curves: dict[str, pd.DataFrame]) -> plt.Figure:
    """Plot the held-out loss over training, and what scaling the table costs."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    for (cell, curve), style in zip(curves.items(), ("o-", "s--", "^:", "D-.", "v-", "P--"), strict=False):
        evaluations = curve.groupby(curve.groupby("seed").cumcount())  # tokens a step differ a little between seeds
        tokens, losses = evaluations["tokens"].mean() / 1000, evaluations["token_loss"]
        left.plot(tokens, losses.mean(), style, markersize=4, label=cell)
        left.fill_between(tokens, losses.min(), losses.max(), alpha=0.2)
    left.set(xlabel="tokens of training (thousands)", ylabel="1 - cosine to the untouched model", ylim=(0, None))
    left.legend(frameon=False)
    shown = rows[~rows["name"].str.endswith("untrained")]
    means = shown.groupby("name", sort=False)[["token_loss_1", "bigram_shift"]].mean()
    for index, (name, (loss, accuracy)) in enumerate(means.iterrows()):
        mark = {
            "marker": "o" if name.endswith("scaled") or name.startswith("measured table") else "s",
            "color": plt.get_cmap("tab20")(index),
        }
        right.plot(loss, accuracy, **mark, ls="", markersize=7, label=name)
    right.axhline(0.5, color="0.7", lw=0.8)
    right.set(xlabel="1 - cosine to the untouched model", ylabel="bigram shift, accuracy")
    right.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return fig


def main() -> None:
    plt.switch_backend("agg")
    arguments = parse()
    if arguments.results:
        print(markdown(summary(pd.read_csv(arguments.results))))
        return
    torch.set_num_threads(arguments.threads)
    settings = settings_of(arguments)
    text = paragraphs(arguments.text)
    rows, curves = [], {cell: [] for cell in arguments.cells}
    for seed in arguments.seeds:  # an interrupted experiment has complete seeds
        cells = Cells(arguments, seed, text, settings)
        rows += list(cells.run())
        for cell in arguments.cells:
            curves[cell].append(pd.read_csv(cells.path(f"curve-{cell}.csv")).assign(seed=seed))
    table = pd.DataFrame(rows)
    table.to_csv(arguments.output / "relocated_positions.csv", index=False)
    joined = {cell: pd.concat(found) for cell, found in curves.items()}
    print(f"seeds {arguments.seeds}\n\n{markdown(summary(table))}")
    figure(table, joined).savefig(arguments.output / "relocated_positions.png", dpi=150)


if __name__ == "__main__":
    main()
