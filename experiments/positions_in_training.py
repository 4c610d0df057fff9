"""Do locality and symmetry rise while a small BERT with learned positions is pre-trained?

    python experiments/positions_in_training.py --steps 200 --output runs   # the story in examples/data
    python experiments/positions_in_training.py --text books.txt.gz --output runs

Pre-trains one model per seed with `pretrain_mlm.py` and plots the metrics of each layer over training, as mean and
interval over seeds. Complete runs are not repeated, interrupted ones resume.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from pretrain_mlm import pretrain
from runs import last_complete_checkpoint, markdown, runs_parser, signed
from transformers import AutoModelForMaskedLM, AutoTokenizer

from pelocality import direction_balance, measure, plots, positional_attention
from pelocality.statistics import mean_over_runs

METRICS = ("locality", "symmetry", "relative_asymmetry", "direction_balance")


def summary(trajectories: pd.DataFrame) -> pd.DataFrame:
    """Return each metric by layer before and after training, with its rise and intervals over seeds."""
    first, last = (trajectories[trajectories["step"] == step] for step in trajectories["step"].agg(["min", "max"]))
    rows = []
    for layer in [*sorted(trajectories["layer"].unique()), "mean"]:
        row: dict[str, object] = {"layer": layer}
        for metric in METRICS:
            before, after = (
                (part if layer == "mean" else part[part["layer"] == layer]).groupby("seed")[metric].mean()
                for part in (first, last)
            )
            row[metric.replace("_", " ")] = f"{before.mean():.3f} → {mean_over_runs(after)}"
            if metric in ("locality", "symmetry"):
                row[f"{metric}, rise"] = signed(mean_over_runs(after - before))
        rows.append(row)
    return pd.DataFrame(rows)


def heads_of_first_layer(folder: Path, length: int) -> pd.DataFrame:
    """Return the metrics of each head in the first layer of a trained model."""
    last = last_complete_checkpoint(folder)
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(last), AutoTokenizer.from_pretrained(last)
    attention = positional_attention(model, tokenizer, length=length, words=16, layers=[0], progress=False).attention[0]
    measured = measure(attention)
    columns = {
        "locality": measured.locality,
        "relative asymmetry": measured.relative_asymmetry,
        "direction balance": direction_balance(attention),
    }
    heads = pd.DataFrame({name: values.tolist() for name, values in columns.items()})
    return heads.map("{:+.2f}".format).rename_axis("head").reset_index()


def figure(trajectories: pd.DataFrame) -> plt.Figure:
    """Plot one panel per metric over training steps, one line per layer."""
    fig, axes = plt.subplots(2, 2, figsize=(9.5, 6.6), layout="constrained", sharex=True)
    for metric, ax in zip(METRICS, axes.flat, strict=True):
        plots.trajectory(trajectories, metric, ax=ax)
        ax.set_ylim(
            -1 if metric == "direction_balance" else 0, 1
        )  # the metrics' ranges; intervals over few seeds exceed them
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.get_legend().remove()
    for ax in axes[0]:
        ax.set_xlabel("")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=6, frameon=False)
    return fig


def main() -> None:
    plt.switch_backend("agg")
    parser = runs_parser(__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--every", type=int, default=100, help="steps between measurements")
    arguments, options = parser.parse_known_args()

    shared = ["--steps", arguments.steps, "--every", arguments.every, *options]
    folders = {seed: arguments.output / f"long-learned-{seed}" for seed in arguments.seeds}
    pretrain(arguments.text, {folders[seed]: [*shared, "--seed", seed] for seed in folders}, arguments.workers)
    tables = [pd.read_csv(folder / "trajectory.csv").assign(seed=seed) for seed, folder in folders.items()]
    trajectories = pd.concat(tables)
    print(markdown(summary(trajectories)))
    for seed, folder in folders.items():
        result = json.loads((folder / "result.json").read_text())
        print(f"\nseed {seed}: held-out loss {result['held_out_loss']:.3f}; heads of the first layer\n")
        print(markdown(heads_of_first_layer(folder, result["length"])))
    trajectories.to_csv(arguments.output / "positions_in_training.csv", index=False)
    figure(trajectories).savefig(arguments.output / "positions_in_training.png", dpi=150)


if __name__ == "__main__":
    main()
