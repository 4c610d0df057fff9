"""When does a decoder become local, with learned positions and without any?

    python -m experiments.beyond.decoders_in_training --smoke  # tiny models on the story in examples/data
    python -m experiments.beyond.decoders_in_training --text books.txt.gz --output runs --batch 16 --steps 2000 \
        --workers 1

Pre-trains a small GPT-2, and the same without positions (NoPE), from random weights with `pretrain.py`, one run per
seed, and follows past-locality from the first step on: on running text, and on identical words after a first token that
differs. Complete runs are not repeated, interrupted ones resume.

Predictions, written before the first full run:

1. On text GPT-2's past-locality rises first in the first layer: a head for the word before, as in BERT, but earlier
   than BERT's at equal budget, since a decoder predicts from the word before in every place.
2. NoPE stays at the value of uniform attention over the past on identical words in the first layer, at every step: its
   states differ in nothing there. Above, it can tell places apart by the first token's share, which falls with the
   position, so later layers become local; within a million tokens by less than half of GPT-2's rise.
3. NoPE becomes local later than GPT-2: half of its final rise on text is reached at a later step in every seed.
4. Its loss at the end is not higher than GPT-2's, as among encoders after as few tokens learned positions were worse
   than none.
5. The first token's share of attention grows in both (a sink), mostly above the first layer.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from torch import ones

from experiments.past_locality import read
from experiments.pretrain import pretrain
from experiments.runs import half_way, markdown, of_seeds, parse_runs, runs_parser
from pelocality import past_locality, plots

MODELS = {"GPT-2": "learned", "NoPE": "none"}
COLUMNS = {
    "text": "past locality on text",
    "identical_words": "past locality on identical words",
    "position_share": "position share",
    "first_token": "share of the first token",
}


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return each column by model and layer: its mean before training, and its mean and each seed after."""
    steps = table["step"].min(), table["step"].max()
    rows = []
    for (model, layer), of_layer in table.groupby(["model", "layer"], sort=False):
        row = {"model": model, "layer": layer}
        for column, name in COLUMNS.items():
            first, last = (of_layer[of_layer["step"] == step].set_index("seed")[column] for step in steps)
            row[name] = f"{first.mean():.3f} → {of_seeds(last)}"
        rows.append(row)
    return pd.DataFrame(rows)


def figure(table: pd.DataFrame) -> plt.Figure:
    """Plot one row per model, one column per measurement, one line per layer, steps on a logarithmic axis from 1."""
    fig, axes = plt.subplots(4, 2, figsize=(7.5, 9.5), layout="constrained", sharex=True, sharey="row")
    for (model, rows), of_model in zip(table.groupby("model", sort=False), axes.T, strict=True):
        for (column, name), ax in zip(COLUMNS.items(), of_model, strict=True):
            plots.trajectory(rows, column, ax=ax)
            ax.set_xscale("symlog", linthresh=1)
            ax.set(xlabel="", ylabel="", ylim=(0, 0.6 if "locality" in name else 1))
            ax.grid(alpha=0.25, linewidth=0.6)
            ax.get_legend().remove()
        of_model[0].set_title(model)
        of_model[-1].set_xlabel("training step")
    for name, ax in zip(COLUMNS.values(), axes[:, 0], strict=True):
        ax.set_ylabel(name)
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=6, frameon=False)
    return fig


def main() -> None:
    plt.switch_backend("agg")
    parser = runs_parser(__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=100, help="steps between measurements")
    parser.add_argument("--results", type=Path, help="print the table of these measurements again, and run nothing")
    arguments, options = parse_runs(parser)
    if arguments.results:
        table = pd.read_csv(arguments.results)
        arguments.output.mkdir(parents=True, exist_ok=True)
        figure(table).savefig(arguments.output / "decoders_in_training.png", dpi=150)
        print(markdown(summary(table)))
        return

    shared = ["--steps", arguments.steps, "--every", arguments.every, *options, "--family", "gpt2"]
    runs = {(model, seed): arguments.output / f"decoder-{model}-{seed}" for seed in arguments.seeds for model in MODELS}
    flags = {folder: [*shared, "--encoding", MODELS[model], "--seed", seed] for (model, seed), folder in runs.items()}
    pretrain(arguments.text, flags, arguments.workers)
    table = pd.concat([read(folder).assign(model=model, seed=seed) for (model, seed), folder in runs.items()])
    table = table.sort_values("model", kind="stable")
    table.to_csv(arguments.output / "decoders_in_training.csv", index=False)
    figure(table).savefig(arguments.output / "decoders_in_training.png", dpi=150)
    print(markdown(summary(table)))
    rows = []
    for (model, seed), folder in runs.items():
        result = json.loads((folder / "result.json").read_text())
        of_run = table[(table["model"] == model) & (table["seed"] == seed)]
        half = {
            f"half of the rise, {name.replace('_', ' ')}": half_way(of_run, name)
            for name in ("text", "identical_words")
        }
        rows.append({"model": model, "seed": seed, "held-out loss": f"{result['held_out_loss']:.3f}"} | half)
        n = result["length"]
    print(f"\n{markdown(pd.DataFrame(rows).sort_values(['model', 'seed']))}")
    print("\nuniform attention over the past:", end=" ")
    for name, length in (("text", n), ("identical words", n - 1)):
        uniform = ones(length, length).tril()
        print(f"{past_locality(uniform / uniform.sum(-1, keepdim=True)):.3f} ({name})", end=" ")
    print()


if __name__ == "__main__":
    main()
