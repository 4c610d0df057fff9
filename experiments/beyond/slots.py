"""Which part of a document does its embedding forget, and which of four options does a decoder prefer by its place?

    python -m experiments.beyond.slots --smoke                              # MiniLM on the story in examples/data
    python -m experiments.beyond.slots --text wikitext2_valid.txt           # MiniLM and SmolLM2, as in real_models.py
    python -m experiments.beyond.slots --results docs/results/slots.csv     # the table again

Each group has four parts, which stand once in each of four places. The control is the same model without positions.
"""

import argparse
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from transformers import AutoModelForCausalLM, logging

from experiments.runs import DATA, lines_of, markdown, packaged
from pelocality import NoEncoding, attach
from pelocality.evaluation import similarity_to_parts, slot_effect
from pelocality.statistics import mean_over_runs

LETTERS = "ABCD"
QUESTION = "Which of these did Ann buy?\n{}\nAnswer:"
WITHOUT = "without positions"


def pieces_of(lines, tokenizer, tokens, number):
    """Return pieces of so many tokens from the beginning of evenly spread lines that are long enough."""
    cut = (tokenizer(line.strip(), add_special_tokens=False)["input_ids"][:tokens] for line in lines)
    long = [ids for ids in cut if len(ids) == tokens]
    return [tokenizer.decode(long[place * len(long) // number]) for place in range(number)]


@torch.no_grad()
def embedded(model, tokenizer, texts):
    """Return the mean state of the tokens of each text, as sentence-transformers has it for MiniLM and MPNet."""
    batch = tokenizer(texts, padding=True, return_tensors="pt").to(model.device)
    kept = batch["attention_mask"][..., None]
    return (model(**batch).last_hidden_state * kept).sum(1) / kept.sum(1)


@torch.no_grad()
def preferences(model, tokenizer, rows):
    """Return the probability of each letter as the answer to a question about options, of four letters."""
    letters = [tokenizer(f" {letter}")["input_ids"][-1] for letter in LETTERS]
    options = ("\n".join(f"{letter}. {each}" for letter, each in zip(LETTERS, row, strict=True)) for row in rows)
    batch = tokenizer([QUESTION.format(each) for each in options], return_tensors="pt", padding=True)
    last = batch["attention_mask"].sum(1) - 1
    logits = model(**batch).logits[torch.arange(len(rows)), last]
    return logits[:, letters].softmax(-1)


def measured(model, score, groups):
    """Return a row for each group: the effects as the model is, and without positions."""
    effects = {"as it is": slot_effect(score, groups)}
    with attach(model, NoEncoding()):
        effects[WITHOUT] = slot_effect(score, groups)
    rows = [pd.DataFrame(each.effects).assign(positions=name) for name, each in effects.items()]
    return pd.concat(rows).rename_axis("group").reset_index()


def table(frame):
    """Return the mean effect of each slot over groups, with Student's interval."""
    rows = []
    slots = [name for name in frame if name.isdigit()]
    for (model, question, positions), each in frame.groupby(["model", "question", "positions"], sort=False):
        means = {f"slot {int(slot) + 1}": format(mean_over_runs(each[slot]), "+.3f") for slot in slots}
        rows.append({"model": model, "question": question, "positions": positions, "groups": len(each), **means})
    return pd.DataFrame(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, default=DATA / "text.txt", help="one paragraph a line")
    parser.add_argument("--models", nargs="*", choices=("minilm", "mpnet", "smollm2"), default=["minilm", "smollm2"])
    parser.add_argument("--tokens", type=int, default=48, help="tokens of a part of a document")
    parser.add_argument("--groups", type=int, default=64, help="number of documents of four parts, and of questions")
    parser.add_argument("--output", type=Path, default=Path("outputs/slots"), help="folder of the table")
    parser.add_argument("--results", type=Path, help="print the table of these numbers, measure nothing")
    parser.add_argument("--smoke", action="store_true", help="MiniLM, few short parts: to see it run")
    arguments = parser.parse_args()
    if arguments.results:
        print(markdown(table(pd.read_csv(arguments.results))))
        return
    if arguments.smoke:
        arguments.models, arguments.tokens, arguments.groups = ["minilm"], 8, 2
    logging.set_verbosity_error()
    arguments.output.mkdir(parents=True, exist_ok=True)
    lines, frames = list(lines_of(arguments.text)), []
    for name in arguments.models:
        if name == "smollm2":
            model, tokenizer = packaged(name, AutoModelForCausalLM)
            tokenizer.padding_side = "right"
            things = ["lamp", "coat", "drum", "vase", "rope", "desk", "bell", "kite", "sofa", "tent", "ring", "boat"]
            drawn = np.random.default_rng(0)
            groups = [list(drawn.choice(things, 4, replace=False)) for _ in range(arguments.groups)]
            question, score = "option", partial(preferences, model, tokenizer)
        else:
            model, tokenizer = packaged(name)
            pieces = pieces_of(lines, tokenizer, arguments.tokens, 4 * arguments.groups)
            groups = [pieces[place :: arguments.groups] for place in range(arguments.groups)]  # of distant paragraphs
            question, score = "part of a document", similarity_to_parts(partial(embedded, model, tokenizer))
        frames.append(measured(model, score, groups).assign(model=name, question=question))
        print(markdown(table(pd.concat(frames).rename(columns=str))), "\n", flush=True)
    pd.concat(frames).rename(columns=str).round(5).to_csv(arguments.output / "slots.csv", index=False)


if __name__ == "__main__":
    main()
