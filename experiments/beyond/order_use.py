"""Where does a model read the order of words, by intervention: in which layers, how far away, and on which side?

    python -m experiments.beyond.order_use --smoke  # MiniLM on examples/data
    python -m experiments.beyond.order_use --model minilm mpnet smollm2 --text wikitext2_valid.txt
    python -m experiments.beyond.order_use --results docs/results/order_use*.csv  # the tables again

`order_use` exchanges pairs of neighbouring words, or their position ids in SmolLM2-135M, and replaces the same pairs by
words of another text. Each model is measured by direct reading, where every layer reads the unchanged states of all
tokens but the pair, as it is and with random weights (seed 0), and through all layers. Beside it stand the steps of
each layer's mean attention, of all its heads. Then all rotation angles of SmolLM2 are scaled. A run that is in the
folder of results is not repeated.
"""

import argparse
from functools import partial
from itertools import islice
from pathlib import Path

import pandas as pd
import torch
from scipy.stats import spearmanr
from transformers import AutoModelForCausalLM, logging

from experiments.beyond.real_models import untrained_copy
from experiments.runs import DATA, PACKAGES, markdown, packaged
from pelocality import RotaryEncoding, attach, order_use, step_profile, text_average
from pelocality.statistics import Estimate, mean_over_runs

TEXTS = {"minilm": (32, 2), "mpnet": (8, 6), "smollm2": (8, 5)}  # number of texts, and every k-th pair of each
RUNS = {"trained, directly": True, "untrained, directly": True, "trained, through all layers": False}
REACH = 16
SCALES = (0.5, 0.8, 1.0, 1.25, 2.0)


def texts_of(path, tokenizer, length, number):
    """Return the first lines of a text that have so many tokens, cut there, each a batch that knows its words."""
    cut = {"truncation": True, "max_length": length, "return_tensors": "pt"}
    rows = (tokenizer(line.strip(), **cut) for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    return list(islice((row for row in rows if row["input_ids"].shape[1] == length), number))


def steps(model, texts, tokenizer, name):
    """Return locality and balance of the steps of each layer's attention, as `order_use` has those of movement."""
    attention = text_average(model, texts, tokenizer, without_first=int(name == "smollm2"), progress=False)
    profile, n = step_profile(attention).sum(1).nan_to_num(), attention.length  # (layer, 2n - 1)
    past, future = profile[:, : n - 1].flip(1)[:, :REACH], profile[:, n:][:, :REACH]
    near, both = (past + future) / 2.0 ** torch.arange(past.shape[1]), past + future
    balance = (future - past).sum(1) / both.sum(1)
    return pd.DataFrame({"step_locality": (near.sum(1) / both.sum(1)).tolist(), "step_balance": balance.tolist()})


def once(path, measure):
    """Return a table, from its file if that is there."""
    if not path.exists():
        measure().round(5).to_csv(path, index=False)
        print(path.stem, flush=True)
    return pd.read_csv(path)


def layers_of(name, model, texts, tokenizer, run, every):
    """Return the table of one run, with a row for each layer."""
    measured = untrained_copy(model) if run.startswith("untrained") else model
    change = "ids" if name == "smollm2" else "words"
    options = {"change": change, "direct": RUNS[run], "reach": REACH, "every": every, "progress": False}
    frame = order_use(measured, texts, tokenizer, **options).to_frame()
    return frame.join(steps(measured, texts, tokenizer, name)).assign(model=name, run=run, change=change)


def dialled(model, texts, tokenizer, scale, every):
    """Return the share of content of a decoder whose angles are scaled: the mean of its layers, and the next word."""
    with attach(model, RotaryEncoding.from_model(model).scaled(scale)):
        options = {"change": "ids", "output": True, "reach": REACH, "every": every, "progress": False}
        share = order_use(model, texts, tokenizer, **options).share
    return pd.DataFrame({"scale": scale, "layers": share[:, :-1].mean(1), "next word": share[:, -1]})


def interval(row, name):
    """Return a number of a row with its interval."""
    return format(Estimate(row[name], row[f"{name}_low"], row[f"{name}_high"]), ".2f")


def table_of(trained, untrained, through):
    """Return the table of a model by layer: what is read directly, beside its controls, and through all layers."""
    table = pd.DataFrame({"layer": trained["layer"], "share of content": trained.apply(interval, axis=1, name="share")})
    table["untrained"] = untrained["share"].map("{:.3f}".format)
    table["locality"] = trained.apply(interval, axis=1, name="locality")
    table["locality of content"] = trained["content_locality"].map("{:.2f}".format)
    table["of steps"] = trained["step_locality"].map("{:.2f}".format)
    table["balance"] = trained.apply(interval, axis=1, name="balance")
    table["balance of steps"] = trained["step_balance"].map("{:.2f}".format)
    table["share through all layers"] = through.apply(interval, axis=1, name="share")
    return table


def report(frame):
    """Print the table of each model, and ranks over layers."""
    ranks = []
    for name, of_model in frame.groupby("model", sort=False):
        direct, untrained, through = (of_model[of_model["run"] == run].reset_index(drop=True) for run in RUNS)
        table = table_of(direct, untrained, through)
        heading = f"{name}, exchange of {direct['change'][0]}"
        print(f"\n{heading}\n\n{markdown(table)}")
        pairs = {
            "through all layers: order, content": (through["locality"], through["content_locality"]),
            "directly: order, content": (direct["locality"], direct["content_locality"]),
            "directly: order, steps": (direct["locality"], direct["step_locality"]),
        }
        means = {"share": direct, "untrained": untrained, "through all layers": through}
        row = {"model": name} | {key: f"{run['share'].mean():.3f}" for key, run in means.items()}
        ranks.append(row | {key: f"{spearmanr(*pair).statistic:.2f}" for key, pair in pairs.items()})
    print(
        f"\nmean share over layers, and rank correlation over layers of localities\n\n{markdown(pd.DataFrame(ranks))}"
    )


def report_dial(dial):
    """Print the share of content by the scale of the angles, with intervals over texts."""
    rows = [
        {
            "angles x": f"{scale:g}",
            **{name: format(mean_over_runs(each[name]), ".2f") for name in ("layers", "next word")},
        }
        for scale, each in dial.groupby("scale")
    ]
    print(f"\nshare of content in SmolLM2 by ids, through all layers\n\n{markdown(pd.DataFrame(rows))}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", nargs="+", choices=PACKAGES, default=["minilm"])
    parser.add_argument("--text", type=Path, default=DATA / "text.txt", help="one paragraph a line")
    parser.add_argument("--length", type=int, default=48, help="tokens of a text")
    parser.add_argument("--output", type=Path, default=Path("outputs/order_use"), help="folder of the results")
    parser.add_argument("--results", type=Path, nargs="+", help="print the tables of these results, measure nothing")
    parser.add_argument("--smoke", action="store_true", help="few short texts, to see it run")
    arguments = parser.parse_args()
    if arguments.results:
        for path in arguments.results:
            (report_dial if "dial" in path.stem else report)(pd.read_csv(path))
        return
    logging.set_verbosity_error()
    runs = arguments.output / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    tables, scaled = [], []
    for name in arguments.model:
        number, every = (2, 3) if arguments.smoke else TEXTS[name]
        model, tokenizer = packaged(name)
        texts = texts_of(arguments.text, tokenizer, 12 if arguments.smoke else arguments.length, number)
        for run in RUNS:
            path = runs / f"{name}, {run}.csv"
            tables.append(once(path, partial(layers_of, name, model, texts, tokenizer, run, every)))
        if name == "smollm2":
            decoder, _ = packaged(name, AutoModelForCausalLM)
            for scale in SCALES:
                measure = partial(dialled, decoder, texts, tokenizer, scale, 2 * every)
                scaled.append(once(runs / f"dial-{scale:g}.csv", measure))
    parts = {"order_use": (tables, report), "order_use_dial": (scaled, report_dial)}
    for name, (measured, show) in parts.items():
        if measured:
            pd.concat(measured).to_csv(arguments.output / f"{name}.csv", index=False)
            show(pd.concat(measured))


if __name__ == "__main__":
    main()
