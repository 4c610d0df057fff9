"""Do locality and symmetry rise while a small encoder is pre-trained, whatever its positions are?

    python -m experiments.paper.positions_in_training --steps 200 --output runs   # the story in examples/data
    python -m experiments.paper.positions_in_training --text books.txt.gz --output runs
    python -m experiments.paper.positions_in_training --text books.txt.gz --output runs \
        --family bert deberta-v2 mpnet modernbert xlnet --batch 16 --steps 2000 --workers 1

Pre-trains one model per family and seed with `pretrain.py`, every family by masked words (XLNet too, which was made for
words in a random order), and plots the metrics over training, as mean and interval over seeds. Complete runs are not
repeated, interrupted ones resume.

Predictions, written before the first full run of the four relative families:

1. Locality rises in all five families, because what a masked word needs first are the words beside it.
2. It rises earlier in the relative families than in BERT: a distance is one bias (MPNet), vector (DeBERTa, XLNet) or
   angle (ModernBERT) to them, while BERT has to fit 32 position vectors to each other. Order: MPNet, then DeBERTa and
   XLNet, then ModernBERT, whose angles act only on words' own queries and keys; BERT last.
3. BERT's locality is in its first layer alone. The relative families give every layer its positions anew, so more than
   one layer becomes local; MPNet, whose layers share their biases, in all layers about equally.
4. All become one-sided, as BERT's first layer did: relative asymmetry rises, and the most local heads are "the word
   before" and "the next word" (direction balance beyond 0.8), since left and right neighbours say different things and
   every one of these encodings has a sign.
5. The published symmetry rises in all five even so, because it takes "all on the next word" for symmetric.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from transformers import AutoModel, AutoTokenizer

from experiments.pretrain import pretrain
from experiments.runs import half_way, last_complete_checkpoint, markdown, of_seeds, parse_runs, runs_parser
from experiments.small_models import ENCODERS
from pelocality import direction_balance, measure, plots, positional_attention
from pelocality.statistics import mean_over_runs

METRICS = ("locality", "symmetry", "relative_asymmetry", "direction_balance")
RISING = METRICS[:3]


def before_and_after(trajectories: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the mean of each metric over the given layers, seed by seed, at the first and at the last step."""
    steps = trajectories["step"].agg(["min", "max"])
    first, last = (trajectories[trajectories["step"] == step].groupby("seed")[list(METRICS)].mean() for step in steps)
    return first, last


def summary(trajectories: pd.DataFrame) -> pd.DataFrame:
    """Return each metric by layer before and after training, with its rise and intervals over seeds."""
    layers = dict(iter(trajectories.groupby("layer")))
    return pd.DataFrame([{"layer": name} | rises(rows) for name, rows in (layers | {"mean": trajectories}).items()])


def rises(trajectories: pd.DataFrame) -> dict[str, str]:
    """Return each metric before and after training, with its rise and intervals over seeds."""
    first, last = before_and_after(trajectories)
    row = {}
    for metric in METRICS:
        name = metric.replace("_", " ")
        row[name] = f"{first[metric].mean():.3f} → {mean_over_runs(last[metric])}"
        if metric in RISING:
            row[f"{name}, rise"] = format(mean_over_runs(last[metric] - first[metric]), "+.3f")
    return row


def comparison(trajectories: pd.DataFrame) -> pd.DataFrame:
    """Return the rises of each family, mean over layers, with their dates seed by seed."""
    rows = []
    for family, of_family in trajectories.groupby("family", sort=False):
        runs = [run for _, run in of_family.groupby("seed")]
        row = {"family": family, "seeds": len(runs)} | rises(of_family)
        row["half of the rise of locality at step"] = ", ".join(str(half_way(run, "locality")) for run in runs)
        rows.append(row)
    return pd.DataFrame(rows).drop(columns="direction balance")


def by_layer(trajectories: pd.DataFrame) -> pd.DataFrame:
    """Return each family's layers after the last step: the mean over seeds, and the value of each."""
    last = trajectories[trajectories["step"] == trajectories["step"].max()]
    rows = []
    for (family, layer), rows_of in last.groupby(["family", "layer"], sort=False):
        values = {metric.replace("_", " "): of_seeds(rows_of[metric]) for metric in RISING}
        rows.append({"family": family, "layer": layer} | values)
    return pd.DataFrame(rows)


def most_local_heads(folder: Path, length: int, number: int = 4) -> pd.DataFrame:
    """Return the metrics of the heads with the highest locality in a trained model."""
    last = last_complete_checkpoint(folder)
    model, tokenizer = AutoModel.from_pretrained(last), AutoTokenizer.from_pretrained(last)
    attention = positional_attention(model, tokenizer, length=length, words=16, progress=False).attention
    measured, direction = measure(attention), direction_balance(attention)
    heads = [
        {
            "layer": layer,
            "head": head,
            "locality": float(measured.locality[layer, head]),
            "relative asymmetry": float(measured.relative_asymmetry[layer, head]),
            "direction balance": float(direction[layer, head]),
        }
        for layer, head in (divmod(int(place), attention.shape[1]) for place in measured.locality.flatten().argsort())
    ]
    table = pd.DataFrame(heads[::-1][:number])
    return table.astype({"layer": str, "head": str}).map(lambda x: x if isinstance(x, str) else f"{x:+.2f}")


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


def figure_of_families(trajectories: pd.DataFrame) -> plt.Figure:
    """Plot one row per metric, one column per family, one line per layer: the mean, and thin each seed."""
    families = trajectories["family"].unique()
    shape = {"nrows": len(RISING), "ncols": len(families), "squeeze": False}
    size = (2.3 * len(families) + 0.5, 6.4)
    fig, axes = plt.subplots(**shape, figsize=size, layout="constrained", sharex=True, sharey="row")
    for metric, of_metric in zip(RISING, axes, strict=True):
        for family, ax in zip(families, of_metric, strict=True):
            rows = trajectories[trajectories["family"] == family]
            plots.trajectory(rows.groupby(["step", "layer"], as_index=False)[metric].mean(), metric, ax=ax)
            for line, (_, of_layer) in zip(list(ax.lines), rows.groupby("layer"), strict=True):
                for _, run in of_layer.groupby("seed"):
                    ax.plot(run["step"], run[metric], color=line.get_color(), linewidth=0.7, alpha=0.6)
            top = 1.2 * trajectories[metric].max() if metric == "locality" else 1
            ax.set(xlabel="training step" if metric == RISING[-1] else "", ylim=(0, top))
            ax.set_title(family if metric == RISING[0] else "")
            ax.grid(alpha=0.25, linewidth=0.6)
            ax.get_legend().remove()
            ax.label_outer()
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=6, frameon=False)
    return fig


def main() -> None:
    plt.switch_backend("agg")
    parser = runs_parser(__doc__.split("\n")[0])
    parser.add_argument("--family", nargs="+", choices=ENCODERS, default=["bert"])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--every", type=int, default=100, help="steps between measurements")
    parser.add_argument("--results", type=Path, nargs="+", help="print the tables of these again, and run nothing")
    arguments, options = parse_runs(parser)
    if arguments.results:
        trajectories = pd.concat([pd.read_csv(file) for file in arguments.results])
        several = trajectories["family"].nunique() > 1
        tables = (comparison, by_layer) if several else (summary,)
        print("\n\n".join(markdown(table(trajectories)) for table in tables))
        draw = figure_of_families if several else figure
        arguments.output.mkdir(parents=True, exist_ok=True)
        draw(trajectories).savefig(arguments.output / "positions_in_training.png", dpi=150)
        return

    shared = ["--steps", arguments.steps, "--every", arguments.every, *options]
    runs = {
        (family, seed): arguments.output / f"long-{family}-{seed}"
        for seed in arguments.seeds
        for family in arguments.family
    }
    flags = {folder: [*shared, "--family", family, "--seed", seed] for (family, seed), folder in runs.items()}
    pretrain(arguments.text, flags, arguments.workers)
    tables = [
        pd.read_csv(folder / "trajectory.csv").assign(family=family, seed=seed)
        for (family, seed), folder in runs.items()
    ]
    trajectories = pd.concat(tables)
    of_family = dict(iter(trajectories.groupby("family", sort=False)))
    for family, rows in of_family.items():
        print(f"\n{family}\n\n{markdown(summary(rows))}")
        rows.to_csv(arguments.output / f"positions_in_training_{family}.csv", index=False)
        figure(rows).savefig(arguments.output / f"positions_in_training_{family}.png", dpi=150)
    losses: dict[str, list[float]] = {family: [] for family in of_family}
    for (family, seed), folder in runs.items():
        result = json.loads((folder / "result.json").read_text())
        losses[family].append(result["held_out_loss"])
        print(f"\n{family}, seed {seed}: held-out loss {result['held_out_loss']:.3f}; most local heads\n")
        print(markdown(most_local_heads(folder, result["length"])))
    if len(of_family) > 1:
        print(f"\n{markdown(comparison(trajectories))}\n\n{markdown(by_layer(trajectories))}")
        print(
            "\n"
            + "\n".join(f"{family}: held-out loss {of_seeds(pd.Series(found))}" for family, found in losses.items())
        )
        figure_of_families(trajectories).savefig(arguments.output / "positions_in_training_families.png", dpi=150)


if __name__ == "__main__":
    main()
