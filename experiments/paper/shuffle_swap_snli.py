"""How much accuracy do shuffled constituents and swapped roles cost a model fine-tuned on NLI?

    python -m experiments.paper.shuffle_swap_snli                        # the few pairs in examples/data: to see it run
    python -m experiments.paper.shuffle_swap_snli snli_1.0_dev.jsonl --train snli_train.jsonl mnli_train.jsonl

Fine-tunes the model once per seed on every training pair whose premise is not among the parsed pairs, then prints the
paper's table on the parsed pairs: original, Shuffle-3 to 6, the same in windows that are not constituents, random order
and swapped roles. Interrupted runs resume from their last checkpoint, complete ones are not repeated, and a folder of a
run on other pairs or with other flags is refused.

Predictions, written before MiniLM was run again with today's role swaps, in bfloat16 and with hypotheses shuffled too
(the runs before had none):

1. Hypotheses in random order cost it 1 to 4 points, less than MPNet's 5.3, as its premises in random order cost less;
   Shuffle-3 to 6 cost 0 to 1.5, and none differs from its windows.
2. Premises cost what they did in float32, within 0.5 points: at most 0.5 points for each of the five.
3. The 30 role swaps fall by 60 to 85 points (74 on the 50 of older rules).

Predictions, written before MPNet was fine-tuned for two epochs (after one: originals .854, hypotheses in random order
-5.3 points, premises -2.3, none of their constituents' shuffles below -0.8, swaps -95.0 of 40 by older rules):

4. Originals rise by 0 to 2.5 points: the linear schedule spends more steps at a high rate, and one epoch of so few
   pairs is short.
5. Random order costs 1.5 to 4 points in premises and 4 to 8 in hypotheses: a model that fits the pairs better uses
   order no less. Shuffle-3 to 6 cost at most 1.2 in premises and 3.5 in hypotheses; of the eight differences from
   windows at most one excludes 0.
6. The 30 role swaps fall by 80 points or more: nothing in these pairs tells a swapped sentence from its original.
"""

import argparse
import json
import random
from itertools import islice
from pathlib import Path

import datasets
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    set_seed,
)

from experiments.runs import (
    DATA,
    LABELS,
    claim,
    fine_tuning_arguments,
    fingerprint,
    last_complete_checkpoint,
    markdown,
    of_seeds,
    packaged_model,
    percent,
    shuffled_and_windows,
    train,
    unused_pairs,
)
from pelocality import measure, positional_attention
from pelocality.corpora import read_snli
from pelocality.evaluation import evaluate, paper_table
from pelocality.probes import probe_info, random_shuffling, semantic_role_swap
from pelocality.statistics import mean_over_groups

SIZES = (3, 4, 5, 6)
HELD_OUT = 1000
NAMES = {"minilm": "MiniLM", "mpnet": "MPNet"}  # of models, by the name of a file of answers


def training_pairs(paths, corpus, limit):
    """Return every pair whose premise the probes do not use, in a fixed random order."""
    rows = unused_pairs(paths, {pair.premise.text for pair in corpus})
    random.Random(0).shuffle(rows)
    columns = {name: [row[name] for row in rows[:limit]] for name in ("premise", "hypothesis")}
    labels = {"label": [LABELS.index(row["label"]) for row in rows[:limit]]}
    return datasets.Dataset.from_dict(columns | labels)


def fine_tune(source, tokenizer, pairs, seed, folder, arguments):
    """Return the model of one seed, loaded from its folder if complete."""
    settings = {name: getattr(arguments, name) for name in ("model", "epochs", "batch", "rate", "bf16")}
    claim(folder, settings | {"seed": seed, "pairs": fingerprint(json.dumps(pairs.to_dict()).encode())})
    final = folder / "final"
    if final.exists():
        return AutoModelForSequenceClassification.from_pretrained(final)
    tokens = pairs.map(
        lambda batch: tokenizer(batch["premise"], batch["hypothesis"], truncation=True, max_length=128),
        batched=True,
        remove_columns=["premise", "hypothesis"],
    )
    held_out = min(HELD_OUT, len(tokens) // 10)
    set_seed(seed)  # before loading: the new classifier is initialised at random
    model = AutoModelForSequenceClassification.from_pretrained(
        source, id2label=dict(enumerate(LABELS)), label2id={name: i for i, name in enumerate(LABELS)}
    )
    trainer = Trainer(
        model,
        fine_tuning_arguments(
            folder,
            seed,
            arguments,
            use_cpu=arguments.bf16 and not torch.cuda.is_available(),  # else bf16 asks for a GPU
            eval_strategy="epoch",
            logging_steps=100,
        ),
        train_dataset=tokens.select(range(held_out, len(tokens))),
        eval_dataset=tokens.select(range(held_out)),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda found: {"accuracy": float((found[0].argmax(-1) == found[1]).mean())},
    )
    train(trainer, last_complete_checkpoint(folder))
    unfinished = folder / "unfinished"
    trainer.save_model(str(unfinished))
    unfinished.rename(final)
    return model


def build(corpus, side, swap_label):
    """Return the probes by name; a shuffle and its window control contain the same pairs."""
    probes = {}
    for size in SIZES:
        probes[f"Sh-{size}"], probes[f"Win-{size}"] = shuffled_and_windows(corpus, size, side=side)
    probes["Random"] = random_shuffling(corpus, side=side)
    swaps = semantic_role_swap(corpus, source="constituents", label_policy=swap_label, labels=("entailment",))
    probes["Sh-SR"] = swaps
    print(f"swaps: {len(swaps)} of {probe_info(swaps).items} pairs; rows per probe:")
    print({name: len(probe) for name, probe in probes.items()}, end="\n\n")
    return probes


def letters(found):
    """Return a row per side and pair, with the label and the answers to the original and to each probe.

    A label or an answer is its first letter, one for each seed: `een` are three seeds. Pairs with the same premise have
    the same number.
    """
    sides = []
    for side, of_side in found.items():
        columns, facts = {}, []
        for probe, runs in of_side.items():
            examples = [run.examples.set_index("uid") for run in runs]
            for name, column in (("original", "original_prediction"), (probe, "prediction")):
                answers = pd.concat([each[column].str[0] for each in examples], axis=1).sum(axis=1)
                columns[name] = columns[name].combine_first(answers) if name in columns else answers
            facts.append(examples[0][["group", "original_label"]])
        of_pair = pd.concat(facts).groupby(level="uid", sort=False).first()
        numbers = pd.Series(pd.factorize(of_pair["group"])[0] + 1, of_pair.index)
        known = {"side": side, "premise": numbers, "label": of_pair["original_label"].str[0]}
        sides.append(pd.DataFrame(known | columns, index=of_pair.index).rename_axis("uid").reset_index())
    return pd.concat(sides, ignore_index=True)


def accuracies(answers, swap_label="not entailment"):
    """Return a row per side, probe, pair and seed: whether both versions are classified rightly, and alike."""
    probes = [name for name in answers.columns if name.startswith(("Sh-", "Win-", "Random"))]
    known = ["side", "premise", "uid", "label", "original"]
    rows = answers.melt(known, probes, "probe", "perturbed").dropna(subset="perturbed")
    swapped = rows["probe"] == "Sh-SR"
    seeds = []
    for seed in range(rows["original"].str.len().max()):
        before, after = rows["original"].str[seed], rows["perturbed"].str[seed]
        right_swap = after != "e" if swap_label == "not entailment" else after == swap_label[0]
        right = {"original": before == rows["label"], "perturbed": right_swap.where(swapped, after == rows["label"])}
        seeds.append(rows[["side", "probe", "premise", "uid"]].assign(seed=seed, **right, same=before == after))
    return pd.concat(seeds).astype({"original": float, "perturbed": float, "same": float})


def by_seed(table):
    """Return the accuracy on the originals of each probe in percent, its change in points, and answers unmoved."""
    rows = []
    for side in table["side"].unique():
        for probe, found in table[table["side"] == side].groupby("probe", sort=False):
            means = found.groupby("seed")[["original", "perturbed", "same"]].mean()
            row = {"side": side, "probe": probe, "pairs": found["uid"].nunique()}
            row["original"] = of_seeds(100 * means["original"], 1)
            row["change, points"] = of_seeds(100 * (means["perturbed"] - means["original"]), 1)
            rows.append(row | {"prediction unmoved": of_seeds(means["same"])})
    return pd.DataFrame(rows)


def over_pairs(table):
    """Return the changes in points with intervals over pairs, and each shuffle minus its windows on the same pairs."""
    changes = table.assign(change=table["perturbed"] - table["original"])
    of_probe = {
        key: found.groupby("uid")[["change", "premise"]].mean() for key, found in changes.groupby(["side", "probe"])
    }

    def points(change, premises, most):
        return percent(mean_over_groups(change, premises, least=-most, most=most))

    rows = []
    for side in table["side"].unique():
        for probe in [*(f"Sh-{size}" for size in SIZES), "Random", "Sh-SR"]:
            found, windows = (of_probe.get((side, name)) for name in (probe, probe.replace("Sh-", "Win-")))
            if found is None:
                continue
            row = {"side": side, "probe": probe, "pairs": len(found)}
            row["change, points"] = points(found["change"], found["premise"], 1)
            if windows is not None and probe != "Random":
                row["windows"] = points(windows["change"], windows["premise"], 1)
                row["minus windows"] = points(found["change"] - windows["change"], found["premise"], 2)
            rows.append(row)
    return pd.DataFrame(rows)


def figure(changes):
    """Plot the change of accuracy by each shuffle of two sides, a row of panels for each model; bars over pairs."""
    sides = list(dict.fromkeys(side for found in changes.values() for side in found["side"]))
    size = {"figsize": (4.5 * len(sides), 0.6 + 2.6 * len(changes)), "layout": "constrained"}
    fig, axes = plt.subplots(len(changes), len(sides), sharey=True, squeeze=False, **size)
    marks = {"change, points": ("constituents, or all words", "o"), "windows": ("windows of as many words", "s")}
    for row, (model, found) in zip(axes, changes.items(), strict=True):
        for ax, side in zip(row, sides, strict=True):
            shuffles = found[(found["side"] == side) & (found["probe"] != "Sh-SR")].reset_index(drop=True)
            for shift, (column, (label, marker)) in zip((-0.1, 0.1), marks.items(), strict=True):
                drawn = shuffles[column].dropna() if column in shuffles else pd.Series()
                values = [each.value for each in drawn]
                bars = [[each.value - each.low for each in drawn], [each.high - each.value for each in drawn]]
                ax.errorbar(drawn.index + shift, values, bars, fmt=marker, mec="white", label=label)
            ax.axhline(0, color="0.7", ls="--", lw=0.8, zorder=0)
            ax.margins(x=0.1)
            ax.set(title=f"{model}, {side} shuffled", xticks=shuffles.index, xticklabels=shuffles["probe"])
        row[0].set_ylabel("change of accuracy, points")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    return fig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parsed, train_files = DATA / "nli_pairs.jsonl", [DATA / "nli_train.jsonl"]
    parser.add_argument("parsed", type=Path, nargs="?", default=parsed, help="SNLI JSON lines with parses, to probe")
    parser.add_argument("--train", type=Path, nargs="+", default=train_files, help="JSON: premise, hypothesis, label")
    parser.add_argument("--model", help="hub name or local folder; the packaged all-MiniLM-L6-v2 if left out")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--bf16", action="store_true", help="train and evaluate under bfloat16 autocast")
    sides = ["premise", "hypothesis", "both"]
    parser.add_argument("--side", nargs="+", default=["premise"], choices=sides, help="side to shuffle: a table each")
    parser.add_argument("--swap-label", default="not entailment", help="label of a swapped hypothesis")
    parser.add_argument("--limit", type=int, help="maximum number of training pairs")
    parser.add_argument("--pairs", type=int, help="maximum number of parsed pairs")
    parser.add_argument("--words", type=int, default=64, help="identical words to average over")
    parser.add_argument("--output", type=Path, default=Path("outputs/snli"), help="folder for models and tables")
    parser.add_argument("--smoke", action="store_true", help="one seed, few pairs, one epoch: to see it run")
    again = "print the tables of these answers again, a file for each model, and run nothing"
    parser.add_argument("--results", type=Path, nargs="+", help=again)
    arguments = parser.parse_args()
    if arguments.results:
        show(arguments.results, arguments)
        return
    if arguments.smoke:
        arguments.seeds, arguments.pairs, arguments.limit, arguments.epochs, arguments.words = [0], 40, 32, 1, 2

    source = arguments.model or packaged_model()
    tokenizer = AutoTokenizer.from_pretrained(source)
    corpus = list(islice(read_snli(arguments.parsed), arguments.pairs))
    pairs = training_pairs(arguments.train, corpus, arguments.limit)
    probes = {side: build(corpus, side, arguments.swap_label) for side in arguments.side}
    found = {side: {name: [] for name in of_side} for side, of_side in probes.items()}
    localities, symmetries = [], []
    for seed in arguments.seeds:
        model = fine_tune(source, tokenizer, pairs, seed, arguments.output / f"seed-{seed}", arguments)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model.to(device)  # where it was trained before and is only loaded now
        with torch.autocast(device, torch.bfloat16, enabled=arguments.bf16):
            for side, name in ((side, name) for side, of_side in probes.items() for name in of_side):
                found[side][name].append(evaluate(model, tokenizer, probes[side][name], groups="original_premise"))
        measured = measure(positional_attention(model, tokenizer, length=128, words=arguments.words))
        localities.append(float(measured.locality.mean()))
        symmetries.append(float(measured.symmetry.mean()))

    name = Path(source).parent.name if arguments.model is None else arguments.model.rstrip("/").rpartition("/")[2]
    metrics = {"symmetry": {name: np.mean(symmetries)}, "locality": {name: np.mean(localities)}}
    for side, of_side in found.items():
        print(f"{len(pairs)} training pairs, seeds {arguments.seeds}, {side} shuffled; interval over ", end="")
        table = paper_table({name: of_side}, **metrics)
        print(f"{'runs (Student)' if len(arguments.seeds) > 1 else 'pairs'}\n{table.to_markdown()}\n")
        (arguments.output / f"table_{side}.tex").write_text(table.to_latex() + "\n")
    file = arguments.output / "answers.csv"
    letters(found).to_csv(file, index=False)
    show([file], arguments)


def show(files, arguments):
    """Print the changes by seed and over pairs for each file of answers, and save their figure."""
    plt.switch_backend("agg")
    changes = {}
    for file in files:
        answers = pd.read_csv(file, keep_default_na=False, na_values=[""])
        table = accuracies(answers, arguments.swap_label)
        model = file.stem.removeprefix("shuffles_")
        changes[NAMES.get(model, model)] = found = over_pairs(table)
        numbers = found.columns[found.columns.isin(["change, points", "windows", "minus windows"])]
        shown = found.assign(**{name: found[name].map("{:+.1f}".format, na_action="ignore") for name in numbers})
        print(f"{markdown(by_seed(table))}\n\n{markdown(shown.fillna(''))}\n")
    arguments.output.mkdir(parents=True, exist_ok=True)
    figure(changes).savefig(arguments.output / "shuffles.png", dpi=150)


if __name__ == "__main__":
    main()
