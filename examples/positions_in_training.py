"""Do locality and symmetry rise while a small BERT with learned positions learns its language?

    python examples/positions_in_training.py --steps 200 --output runs   # the story in examples/data
    python examples/positions_in_training.py --text books.txt.gz --output runs

Pre-trains one model a seed with `pretrain_mlm.py` and draws what its callback measured, layer by layer, as mean and
interval over seeds. Runs that are complete are not repeated, and one that was cut off goes on where it was.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import pandas as pd
from dependency_heads import markdown
from pretrain_mlm import ingredients, parse
from runs import claim, last_complete_checkpoint
from transformers import AutoModelForMaskedLM, AutoTokenizer

from pelocality import direction_balance, measure, plots, positional_attention
from pelocality.statistics import mean_over_runs

PRETRAIN = Path(__file__).with_name("pretrain_mlm.py")
# glibc gives each large tensor back to the kernel and asks for it anew: half the time of a small model's step on a CPU
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**35)}
METRICS = ("locality", "symmetry", "relative_asymmetry", "direction_balance")


def runs_parser(description: str) -> argparse.ArgumentParser:
    """The flags of every script that makes several runs; those it does not know are for `pretrain_mlm.py`."""
    parser = argparse.ArgumentParser(
        description=description, epilog="Other flags go to pretrain_mlm.py.", allow_abbrev=False
    )
    ours = Path(__file__).with_name("data") / "text.txt"
    # a flag: a positional that may be left out would take the value of the first flag that is for pretrain_mlm.py
    parser.add_argument("--text", type=Path, default=ours, help="one paragraph a line; .gz is read as it is")
    parser.add_argument("--output", type=Path, default=Path("outputs/runs"), help="folder for runs, table and figure")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    return parser


def pretrain(text: Path, runs: dict[Path, Sequence[object]], workers: int) -> None:
    """Make every run, `workers` at a time with the cores shared among them; each logs into a file of its name.

    Raises:
        ValueError: a folder holds another run.
        RuntimeError: a run failed; the message holds the end of its log.
    """
    given = {folder: [str(part) for part in (text, "--output", folder, *flags)] for folder, flags in runs.items()}
    for folder, words in given.items():
        claim(folder, ingredients(parse(words)))
    threads = str(max(1, (os.cpu_count() or 1) // workers))
    environment = os.environ | {"OMP_NUM_THREADS": threads} | KEEP_MEMORY

    def one(folder: Path, words: Sequence[str]) -> None:
        if (folder / "result.json").exists():
            return
        log = folder.parent / f"{folder.name}.log"
        with log.open("a") as file:
            command = [sys.executable, str(PRETRAIN), *words]
            done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        if done.returncode:
            raise RuntimeError(f"{folder.name} failed:\n{log.read_text()[-2000:]}")

    with ThreadPoolExecutor(workers) as pool:
        for finished in [pool.submit(one, folder, words) for folder, words in given.items()]:
            finished.result()


def summary(trajectories: pd.DataFrame) -> pd.DataFrame:
    """Each metric before the first step and after the last, by layer: mean and interval over seeds, and the rise."""
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
                rise = mean_over_runs(after - before)
                row[f"{metric}, rise"] = f"{rise.value:+.3f} [{rise.low:+.3f}, {rise.high:+.3f}]"
        rows.append(row)
    return pd.DataFrame(rows)


def heads_of_first_layer(folder: Path, length: int) -> pd.DataFrame:
    """Locality and lean of each head of the first layer of a trained model."""
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
    """A panel a metric over training steps, a line a layer."""
    fig, axes = plt.subplots(2, 2, figsize=(9.5, 6.6), layout="constrained", sharex=True)
    for metric, ax in zip(METRICS, axes.flat, strict=True):
        plots.trajectory(trajectories, metric, ax=ax)
        ax.set_ylim(-1 if metric == "direction_balance" else 0, 1)  # what is possible; three seeds reach beyond
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.get_legend().remove()
    for ax in axes[0]:
        ax.set_xlabel("")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=6, frameon=False)
    return fig


def main() -> None:
    parser = runs_parser(__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--every", type=int, default=100, help="steps between measurements")
    arguments, options = parser.parse_known_args()

    shared = ["--steps", arguments.steps, "--every", arguments.every, *options]
    folders = {seed: arguments.output / f"long-learned-{seed}" for seed in arguments.seeds}
    pretrain(arguments.text, {folders[seed]: [*shared, "--seed", seed] for seed in folders}, arguments.workers)
    read = [pd.read_csv(folder / "trajectory.csv").assign(seed=seed) for seed, folder in folders.items()]
    trajectories = pd.concat(read)
    print(markdown(summary(trajectories)))
    for seed, folder in folders.items():
        result = json.loads((folder / "result.json").read_text())
        print(f"\nseed {seed}: held-out loss {result['held_out_loss']:.3f}; heads of its first layer\n")
        print(markdown(heads_of_first_layer(folder, result["length"])))
    trajectories.to_csv(arguments.output / "positions_in_training.csv", index=False)
    figure(trajectories).savefig(arguments.output / "positions_in_training.png", dpi=150)


if __name__ == "__main__":
    main()
