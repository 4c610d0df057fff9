"""What is each head of a real model: positional, symbolic, a sink, an induction head; and of its untrained copy?

    python -m experiments.beyond.head_classes --smoke                             # MiniLM on examples/data
    python -m experiments.beyond.head_classes smollm2 --text wikitext2_valid.txt  # or minilm; packages: real_models.py

The random weights of the untrained copy have seed 0.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from scipy.stats import spearmanr
from transformers import logging

from experiments.beyond.real_models import paragraphs, untrained_copy
from experiments.runs import DATA, PACKAGES, markdown, packaged
from pelocality import head_classes, plots

SCORES = ["previous", "self", "next", "sink", "duplicate", "duplicate_control", "induction", "induction_control"]
KINDS = ["positional", "symbolic", "symmetry", "direction"]


def class_table(frames):
    """Return how many heads of each class the trained and the untrained model have, and in which layers."""
    rows = []
    for kind, heads in frames["trained"].groupby("class"):
        untrained = int((frames["untrained"]["class"] == kind).sum())
        layers = spans(sorted(heads["layer"].unique()))
        rows.append({"class": kind, "heads": len(heads), "untrained": untrained, "layers": layers})
    return pd.DataFrame(rows)


def spans(numbers):
    """Format ascending numbers, those in a row as "3 to 9"."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True))


def sink_table(frames):
    """Return how many heads give the first token of a text at least such a share of their attention."""
    shares = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    rows = [
        {"model": model} | {f"{share:g}": int((frame["sink"] >= share).sum()) for share in shares}
        for model, frame in frames.items()
    ]
    return pd.DataFrame(rows)


def score_table(frames):
    """Return the mean and the largest of each score over heads, and the mean without sign of the direction."""
    rows = []
    for name in [*SCORES, *KINDS, "direction without sign"]:
        row = {"score": name.replace("_", " ")}
        for model, frame in frames.items():
            values = frame[name] if name in frame else frame["direction"].abs()
            if values.notna().any():  # a decoder has no score for the next token
                row |= {f"{model}: mean": f"{values.mean():.3f}", f"{model}: largest": f"{values.max():.3f}"}
        rows.append(row)
    return pd.DataFrame(rows).fillna("")


def figure(result, frames):
    """Plot the classes of heads as a map, and what their attention does when tokens are permuted, one mark a head."""
    height = max(4.0, 1.4 + 0.2 * len(result.layers))
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, height), layout="constrained")
    plots.head_classes(result, ax=left)
    for (name, frame), marker in zip(frames.items(), "ox", strict=True):
        right.plot(frame["positional"], frame["symbolic"], f"k{marker}", markersize=4, fillstyle="none", label=name)
    right.set(xlabel="positional: attention stays in place", ylabel="symbolic: attention follows the tokens")
    right.set(xlim=(-0.15, 1.05), ylim=(-0.15, 1.05), aspect="equal")
    right.legend(frameon=False)
    return fig


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", choices=PACKAGES, default="minilm")
    parser.add_argument("--text", type=Path, default=DATA / "text.txt", help="one paragraph a line")
    parser.add_argument("--paragraphs", type=int, default=16, help="number of texts, each cut to --length tokens")
    parser.add_argument("--length", type=int, default=64, help="tokens of a text, and random tokens")
    parser.add_argument("--output", type=Path, default=Path("outputs/head_classes"), help="folder of the results")
    parser.add_argument("--smoke", action="store_true", help="few short texts, to see it run")
    parser.add_argument("--results", type=Path, help="print the tables of these heads again, and run nothing")
    arguments = parser.parse_args()
    if arguments.results:
        return show(dict(iter(pd.read_csv(arguments.results).groupby("model"))))
    if arguments.smoke:
        arguments.paragraphs, arguments.length = 4, 12
    logging.set_verbosity_error()
    plt.switch_backend("agg")
    arguments.output.mkdir(parents=True, exist_ok=True)
    trained, tokenizer = packaged(arguments.model)
    untrained = untrained_copy(trained)
    lines = arguments.text.read_text(encoding="utf-8").splitlines()
    ids = paragraphs(lines, tokenizer, arguments.length, arguments.paragraphs)
    batches = [{"input_ids": part} for part in ids.split(8)]
    models = {"trained": trained, "untrained": untrained}
    results = {name: head_classes(model, tokenizer, batches, length=arguments.length) for name, model in models.items()}
    frames = {name: result.to_frame() for name, result in results.items()}
    figure(results["trained"], frames).savefig(arguments.output / f"head_classes_{arguments.model}.png", dpi=150)
    table = pd.concat([frame.assign(model=name) for name, frame in frames.items()])
    table.round(4).to_csv(arguments.output / f"head_classes_{arguments.model}.csv", index=False)

    print(f"{len(ids)} texts of {arguments.length} tokens\n")
    show(frames)
    states = {name: result.to_frame("layer") for name, result in results.items()}
    columns = {
        f"{column.replace('_', ' ')}, {name}": frame[column].round(2 if column == "position_share" else 1)
        for column in ("position_share", "effective_rank")
        for name, frame in states.items()
    }
    print(f"\n\n{markdown(pd.DataFrame({'layer': states['trained']['layer'], **columns}))}")


def show(frames):
    """Print how many heads of each class the models have, their scores, and the heads with most induction."""
    print(markdown(class_table(frames)))
    print(f"\n{markdown(score_table(frames))}")
    print(f"\nheads by the attention to the first token\n\n{markdown(sink_table(frames))}")
    chosen = frames["trained"].assign(excess=lambda frame: frame["induction"] - frame["induction_control"])
    shown = ["layer", "head", "excess", "sink", "previous", "positional", "symbolic", "symmetry"]
    if (chosen["class"] == "induction").any():
        most = chosen.nlargest(8, "excess")[shown].astype({"layer": str, "head": str})
        most = most.map(lambda value: value if isinstance(value, str) else f"{value:.2f}")
        print(f"\nmost induction\n\n{markdown(most)}")
    for one, other in (("positional", "symbolic"), ("symbolic", "symmetry")):
        rank = spearmanr(chosen[one], chosen[other], nan_policy="omit").statistic
        print(f"\nrank correlation over heads of {one} and {other}: {rank:+.2f}", end="")


if __name__ == "__main__":
    main()
