"""Where does a model read the order of words, by intervention: in which layers, how far away, and on which side?

    python -m experiments.beyond.order_use --smoke  # MiniLM on examples/data
    python -m experiments.beyond.order_use --model minilm mpnet smollm2 --text wikitext2_valid.txt
    python -m experiments.beyond.order_use --results docs/results/order_use.csv  # the tables again

`order_use` exchanges pairs of neighbouring words, or their position ids in SmolLM2-135M, and replaces the same pairs by
words of another text. Each model is measured as it is and with random weights (seed 0); by direct reading, where every
layer reads the unchanged states of all tokens but the pair, and through all layers. Beside it stand the steps of each
layer's mean attention, of all its heads. Then all rotation angles of SmolLM2 are scaled. A run that is in the folder of
results is not repeated.
"""

import argparse
from functools import partial
from itertools import islice
from pathlib import Path

import pandas as pd
from transformers import AutoModelForCausalLM, logging

from experiments.beyond.real_models import untrained_copy
from experiments.runs import DATA, PACKAGES, markdown, packaged
from pelocality import NoEncoding, RotaryEncoding, attach, order_use, step_profile, text_average
from pelocality.statistics import Estimate

TEXTS = {"minilm": (32, 2), "mpnet": (16, 3), "smollm2": (12, 5)}  # number of texts, and every k-th pair of each
REACH = 16
SCALES = (0.5, 0.8, 1.0, 1.25, 2.0)


def readings(name):
    """Return what is measured of a model: its state, what is exchanged, and whether it is read directly."""
    both = ("trained", "untrained")
    if name == "smollm2":
        return [(state, *how) for how in (("ids", True), ("words", True), ("ids", False)) for state in both]
    return [(state, "words", direct) for direct in (True, False) for state in both] + [("no positions", "words", False)]


def texts_of(path, tokenizer, length, number):
    """Return the first lines of a text that have so many tokens, cut there, each a batch that knows its words."""
    cut = {"truncation": True, "max_length": length, "return_tensors": "pt"}
    rows = (tokenizer(line.strip(), **cut) for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    return list(islice((row for row in rows if row["input_ids"].shape[1] == length), number))


def steps(model, texts, tokenizer, name):
    """Return locality and balance of the steps of each layer's attention, as `order_use` has those of movement."""
    attention = text_average(model, texts, tokenizer, without_first=int(name == "smollm2"), progress=False)
    profile, n = step_profile(attention).sum(1), attention.length  # (layer, 2n - 1)
    columns = []
    for past, future in zip(profile[:, : n - 1].flip(1)[:, :REACH], profile[:, n : n + REACH], strict=True):
        left, right = past.nansum(), future.nansum()
        near = sum((past[k] + future[k]).nan_to_num() / 2**k for k in range(len(past)))
        columns.append({"step_locality": float(near / (left + right)), "step_balance": float(right / (left + right))})
    frame = pd.DataFrame(columns)
    return frame.assign(step_balance=2 * frame["step_balance"] - 1)


def once(path, measure):
    """Return a table, from its file if that is there."""
    if not path.exists():
        measure().round(5).to_csv(path, index=False)
        print(path.stem, flush=True)
    return pd.read_csv(path)


def layers_of(name, model, texts, tokenizer, run, every):
    """Return the table of one run, with a row for each layer."""
    state, change, direct = run
    measured = untrained_copy(model) if state == "untrained" else model
    options = {"change": change, "direct": direct, "reach": REACH, "every": every, "progress": False}
    if state == "no positions":
        with attach(model, NoEncoding()):
            frame = order_use(model, texts, tokenizer, **options).to_frame()
    else:
        frame = order_use(measured, texts, tokenizer, **options).to_frame()
    if direct:
        frame = frame.join(steps(measured, texts, tokenizer, name))
    return frame.assign(model=name, state=state, change=change, direct=direct)


def dialled(model, texts, tokenizer, scale, every):
    """Return the share of content of a decoder whose angles are scaled: the mean of its layers, and the next word."""
    with attach(model, RotaryEncoding.from_model(model).scaled(scale)):
        options = {"change": "ids", "output": True, "reach": REACH, "every": every, "progress": False}
        share = order_use(model, texts, tokenizer, **options).share
    return pd.DataFrame({"scale": scale, "layers": share[:, :-1].mean(1), "next word": share[:, -1]})


def with_interval(row, name):
    """Return a number of a row with its interval."""
    return format(Estimate(row[name], row[f"{name}_low"], row[f"{name}_high"]), ".2f")


def report(frame, dial):
    """Print the table of each model by layer, the mean over layers of every run, and the dial."""
    keys = ["layer", "state", "direct", "change"]
    for name, of_model in frame[frame["state"] != "no positions"].groupby("model", sort=False):
        main = of_model["change"].iloc[0]
        rows, of_model = [], of_model.set_index(keys).sort_index()
        for layer in of_model.index.unique("layer"):
            row, chance = (of_model.loc[(layer, state, True, main)] for state in ("trained", "untrained"))
            rows.append(
                {
                    "layer": layer,
                    "share, direct": with_interval(row, "share"),
                    "untrained": f"{chance['share']:.3f}",
                    "locality": with_interval(row, "locality"),
                    "of content": f"{row['content_locality']:.2f}",
                    "balance": with_interval(row, "balance"),
                    "step locality": f"{row['step_locality']:.2f}",
                    "step balance": f"{row['step_balance']:.2f}",
                    "share, through all layers": with_interval(of_model.loc[(layer, "trained", False, main)], "share"),
                }
            )
        print(f"\n{name}\n\n{markdown(pd.DataFrame(rows))}")
    means = frame.groupby(["model", "change", "direct", "state"], sort=False)["share"].mean().reset_index()
    means["share"] = means["share"].map("{:.3g}".format)
    print(f"\nmean over layers\n\n{markdown(means)}")
    if dial is not None:
        shares = dial.groupby("scale").agg(["mean", "sem"])
        rows = [{"angles x": scale, **{name: f"{row[name, 'mean']:.2f} ({row[name, 'sem']:.2f})" for name in
                 ("layers", "next word")}} for scale, row in shares.iterrows()]  # fmt: skip
        print(f"\nshare of content in SmolLM2, mean (standard error over texts)\n\n{markdown(pd.DataFrame(rows))}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", nargs="+", choices=PACKAGES, default=["minilm"])
    parser.add_argument("--text", type=Path, default=DATA / "text.txt", help="one paragraph a line")
    parser.add_argument("--length", type=int, default=48, help="tokens of a text")
    parser.add_argument("--output", type=Path, default=Path("outputs/order_use"), help="folder of the results")
    parser.add_argument("--results", type=Path, help="print the tables of these results again, measure nothing")
    parser.add_argument("--smoke", action="store_true", help="few short texts, to see it run")
    arguments = parser.parse_args()
    if arguments.results:
        dial = arguments.results.with_name("order_use_dial.csv")
        return report(pd.read_csv(arguments.results), pd.read_csv(dial) if dial.exists() else None)
    logging.set_verbosity_error()
    runs = arguments.output / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    tables, dial = [], None
    for name in arguments.model:
        number, every = (3, 2) if arguments.smoke else TEXTS[name]
        model, tokenizer = packaged(name)
        texts = texts_of(arguments.text, tokenizer, 12 if arguments.smoke else arguments.length, number)
        for run in readings(name):
            path = runs / f"{name}-{run[0].replace(' ', '_')}-{run[1]}-{'direct' if run[2] else 'through'}.csv"
            tables.append(once(path, partial(layers_of, name, model, texts, tokenizer, run, every)))
        if name == "smollm2":
            decoder, _ = packaged(name, AutoModelForCausalLM)
            scales = [
                once(runs / f"dial-{scale:g}.csv", partial(dialled, decoder, texts, tokenizer, scale, every))
                for scale in SCALES
            ]
            dial = pd.concat(scales)
            dial.to_csv(arguments.output / "order_use_dial.csv", index=False)
    frame = pd.concat(tables)
    frame.to_csv(arguments.output / "order_use.csv", index=False)
    report(frame, dial)


if __name__ == "__main__":
    main()
