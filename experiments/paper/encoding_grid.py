"""How do decay and symmetry of an attenuated encoding change the loss of a small masked language model?

    python -m experiments.paper.encoding_grid --steps 20 --seeds 0 1 --output runs      # the story in examples/data
    python -m experiments.paper.encoding_grid --text books.txt.gz --output runs
    python -m experiments.paper.encoding_grid --results docs/results/encoding_grid.csv  # tables and figure again

Pre-trains with `pretrain.py`: attenuated encodings of every decay and symmetry (as logits, so that the positional
attention equals the encoding's weights), one in the published form, no encoding, learned positions; one run per seed.
A seed fixes the blocks, their order and their masks. Prints the held-out masked-LM loss, mean and interval over seeds,
beside the encoding's locality and symmetry. Complete runs are not repeated.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from scipy import stats

from experiments.pretrain import pretrain
from experiments.runs import markdown, parse_runs, runs_parser
from pelocality import AttenuatedEncoding, measure
from pelocality.statistics import mean_over_runs

DECAYS = (0.001, 0.01, 0.1, 1.0)
SYMMETRIES = (0.25, 1.0, 4.0)
MARKS = ("o--", "s-", "^:")


def configurations(decays: tuple[float, ...] = DECAYS) -> dict[str, dict[str, object]]:
    """Return the flags of `pretrain.py` for each encoding, by name."""
    attenuated = {
        f"w={decay:g},s={symmetry:g}": {"encoding": "attenuated", "decay": decay, "symmetry": symmetry}
        for decay in decays
        for symmetry in SYMMETRIES
    }
    published = {"encoding": "attenuated", "form": "weights"}
    others = {"learned": {"encoding": "learned"}, "none": {"encoding": "none"}, "form=weights,w=0.5,s=1": published}
    return others | attenuated


def collect(folders: dict[tuple[str, int], Path]) -> pd.DataFrame:
    """Return one row per run: its encoding, the encoding's metrics, its loss."""
    rows = []
    for (name, seed), folder in folders.items():
        result = json.loads((folder / "result.json").read_text())
        row = {"name": name, "seed": seed, "loss": result["held_out_loss"], "tokens": result["tokens"]}
        if result["encoding"] == "attenuated" and result["form"] == "logits":
            measured = measure(AttenuatedEncoding(1, result["decay"], result["symmetry"]).weights(result["length"]))
            row |= {"decay": result["decay"], "s": result["symmetry"]}
            row |= {"locality": float(measured.locality), "symmetry": float(measured.symmetry)}
            row |= {"relative asymmetry": float(measured.relative_asymmetry)}
        rows.append(row)
    return pd.DataFrame(rows)


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the loss of each encoding and its difference to no encoding, paired by seed, with intervals."""
    loss = runs.pivot(index="seed", columns="name", values="loss")
    rows = []
    for name, of_name in runs.groupby("name", sort=False):
        against_none = mean_over_runs(loss[name] - loss["none"])
        metrics = of_name[["locality", "symmetry", "relative asymmetry"]].iloc[0]
        rows.append(
            {"encoding": name}
            | {metric: "" if pd.isna(value) else f"{value:.3f}" for metric, value in metrics.items()}
            | {"held-out loss": str(mean_over_runs(of_name["loss"]))}
            | {"against none": "" if name == "none" else format(against_none, "+.3f")}
        )
    return pd.DataFrame(rows)


def figure(runs: pd.DataFrame) -> plt.Figure:
    """Plot loss against locality, one line per symmetry; learned positions and no encoding as horizontal lines."""
    fig, ax = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    attenuated = runs.dropna(subset="decay")
    for (s, of_s), mark in zip(attenuated.groupby("s"), MARKS, strict=True):
        means = [(place, mean_over_runs(rows["loss"])) for place, rows in of_s.groupby("locality")]
        places, estimates = zip(*means, strict=True)
        values = [float(estimate) for estimate in estimates]
        errors = [[one.value - one.low for one in estimates], [one.high - one.value for one in estimates]]
        ax.errorbar(places, values, errors, fmt=mark, capsize=3, lw=1.4, markersize=5, label=f"attenuated, s = {s:g}")
    for name, label, colour in (("learned", "learned positions", "0.25"), ("none", "no encoding", "0.6")):
        level = mean_over_runs(runs[runs["name"] == name]["loss"])
        ax.axhline(level.value, color=colour, lw=1.2)
        ax.axhspan(level.low, level.high, color=colour, alpha=0.15, lw=0)
        place = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom"}
        ax.annotate(label, (1, level.value), fontsize=9, **place)
    ax.set(xlabel="locality of the encoding", ylabel="masked-LM loss on held-out text (nats)")
    ax.grid(alpha=0.25, lw=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    return fig


def report(runs: pd.DataFrame, folder: Path) -> None:
    """Print the tables, and write the figure into a folder."""
    tokens, seeds = runs["tokens"].iloc[0], sorted(runs["seed"].unique().tolist())
    print(f"{tokens:,} tokens a run, seeds {seeds}\n\n{markdown(summary(runs))}\n")
    means = runs.dropna(subset="decay").groupby("name")[["locality", "symmetry", "relative asymmetry", "loss"]].mean()
    for metric in ("locality", "symmetry", "relative asymmetry"):
        print(f"rank correlation of loss and {metric}: {stats.spearmanr(means[metric], means['loss']).statistic:+.2f}")
    folder.mkdir(parents=True, exist_ok=True)
    figure(runs).savefig(folder / "encoding_grid.png", dpi=150)


def main() -> None:
    plt.switch_backend("agg")
    parser = runs_parser(__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--results", type=Path, help="an encoding_grid.csv to report again; trains nothing")
    arguments, options = parse_runs(parser)
    if arguments.results:
        return report(pd.read_csv(arguments.results), arguments.output)

    shared = ["--steps", arguments.steps, "--every", arguments.steps, "--layers", 2, *options]
    chosen = configurations(DECAYS[-1:] if arguments.smoke else DECAYS)
    folders, flags = {}, {}
    for seed in arguments.seeds:  # an interrupted grid has complete seeds
        for name, configuration in chosen.items():
            folders[name, seed] = arguments.output / f"grid-{name}-{seed}"
            given = [part for flag, value in configuration.items() for part in (f"--{flag}", value)]
            flags[folders[name, seed]] = [*shared, *given, "--seed", seed]
    pretrain(arguments.text, flags, arguments.workers)
    runs = collect(folders)
    runs.to_csv(arguments.output / "encoding_grid.csv", index=False)
    report(runs, arguments.output)


if __name__ == "__main__":
    main()
