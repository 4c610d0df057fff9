"""What do shuffled constituents and swapped roles cost a model fine-tuned on natural language inference?

    python examples/shuffle_swap_snli.py                        # the few pairs in examples/data: to see it run
    python examples/shuffle_swap_snli.py snli_1.0_dev.jsonl --train snli_train.jsonl mnli_train.jsonl

Fine-tunes the model once per seed on every training pair whose premise is none of the parsed ones, then prints the
paper's table on the parsed pairs: original, Shuffle-3 to 6, the same in windows that are no constituents, random order,
and swapped roles. Runs are resumable: a run that was cut off goes on from its last checkpoint, one that is complete
is not repeated, and one on other pairs or with other flags is refused.
"""

import argparse
import json
import random
from itertools import islice
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import torch
from dependency_heads import markdown
from measure_model import packaged_model
from runs import claim, fingerprint, last_complete_checkpoint, train
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

from pelocality import locality, measure, positional_attention
from pelocality.corpora import read_snli
from pelocality.evaluation import evaluate, paper_table
from pelocality.probes import constituency_shuffling, probe_info, random_shuffling, semantic_role_swap, window_shuffling
from pelocality.statistics import mean_over_groups

LABELS = ["entailment", "neutral", "contradiction"]
SIZES = (3, 4, 5, 6)
HELD_OUT = 1000


def training_pairs(paths, corpus, limit):
    """Every pair whose premise the probes do not use, in a fixed random order."""
    used = {pair.premise.text for pair in corpus}
    rows = [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row["premise"].strip() not in used and row["label"] in LABELS]
    random.Random(0).shuffle(rows)
    columns = {name: [row[name] for row in rows[:limit]] for name in ("premise", "hypothesis")}
    labels = {"label": [LABELS.index(row["label"]) for row in rows[:limit]]}
    return datasets.Dataset.from_dict(columns | labels)


def fine_tune(source, tokenizer, pairs, seed, folder, arguments):
    """A model trained with one seed, from its folder where it is complete."""
    made_of = {name: getattr(arguments, name) for name in ("model", "epochs", "batch", "rate")}
    claim(folder, made_of | {"seed": seed, "pairs": fingerprint(json.dumps(pairs.to_dict()).encode())})
    final = folder / "final"
    if final.exists():
        return AutoModelForSequenceClassification.from_pretrained(final)
    tokens = pairs.map(
        lambda batch: tokenizer(batch["premise"], batch["hypothesis"], truncation=True, max_length=128),
        batched=True,
        remove_columns=["premise", "hypothesis"],
    )
    held_out = min(HELD_OUT, len(tokens) // 10)
    set_seed(seed)  # the classifier on top is drawn, too
    model = AutoModelForSequenceClassification.from_pretrained(
        source, id2label=dict(enumerate(LABELS)), label2id={name: i for i, name in enumerate(LABELS)}
    )
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(folder),
            seed=seed,
            num_train_epochs=arguments.epochs,
            per_device_train_batch_size=arguments.batch,
            per_device_eval_batch_size=128,
            learning_rate=arguments.rate,
            warmup_steps=0.1,  # a share of all steps
            train_sampling_strategy="group_by_length",
            eval_strategy="epoch",
            save_strategy="steps",
            save_steps=200,
            save_total_limit=1,
            logging_steps=100,
            report_to="none",
            dataloader_pin_memory=torch.cuda.is_available(),
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
    """The probes by name. A shuffle and its control in windows hold the same pairs."""
    probes = {}
    for size in SIZES:
        inside = constituency_shuffling(corpus, size, side=side)
        window = window_shuffling(corpus, size, side=side)
        both = set(inside["uid"]) & set(window["uid"])
        probes[f"Sh-{size}"] = inside.filter(lambda row, both=both: row["uid"] in both)
        probes[f"Win-{size}"] = window.filter(lambda row, both=both: row["uid"] in both)
    probes["Random"] = random_shuffling(corpus, side=side)
    swaps = semantic_role_swap(corpus, source="constituents", label_policy=swap_label, labels=("entailment",))
    probes["Sh-SR"] = swaps
    print(f"swaps: {len(swaps)} of {probe_info(swaps).items} pairs; rows a probe:")
    print({name: len(probe) for name, probe in probes.items()}, end="\n\n")
    return probes


def constituents_beyond_windows(found):
    """Accuracy of a shuffle minus accuracy of its control, the same pairs, the mean over runs."""
    rows = []
    for size in SIZES:
        inside, window = ([run.examples.set_index("uid") for run in found[f"{name}-{size}"]] for name in ("Sh", "Win"))
        pairs = zip(inside, window, strict=True)
        change = pd.concat([one["correct"].astype(float) - two["correct"].astype(float) for one, two in pairs], axis=1)
        estimate = mean_over_groups(change.mean(axis=1), inside[0].loc[change.index, "group"], 0.95, 9999, 0)
        value, low, high = (f"{100 * number:+.1f}" for number in (estimate.value, estimate.low, estimate.high))
        rows.append((size, len(change), f"{value} [{low}, {high}]"))
    return pd.DataFrame(rows, columns=["size", "pairs", "shuffle minus window, points"])


def agreements(found):
    """How often the prediction did not move, and how surely the accuracy did."""
    rows = [
        (
            name,
            len(runs[0].examples),
            " ".join(f"{run.agreement.value:.3f}" for run in runs),
            f"{max(run.p_value for run in runs):.2g}",
        )
        for name, runs in found.items()
    ]
    return pd.DataFrame(rows, columns=["probe", "pairs", "agreement, run by run", "largest McNemar p"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    data = Path(__file__).with_name("data")
    parser.add_argument(
        "parsed",
        type=Path,
        nargs="?",
        default=data / "nli_pairs.jsonl",
        help="SNLI JSON lines with their parses, for the probes",
    )
    parser.add_argument(
        "--train",
        type=Path,
        nargs="+",
        default=[data / "nli_train.jsonl"],
        help="JSON lines: premise, hypothesis, label",
    )
    parser.add_argument("--model", help="hub name or local folder; the packaged all-MiniLM-L6-v2 if left out")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--side", default="premise", choices=["premise", "hypothesis", "both"], help="what is shuffled")
    parser.add_argument("--swap-label", default="not entailment", help="the label of a swapped hypothesis")
    parser.add_argument("--limit", type=int, help="use only so many training pairs")
    parser.add_argument("--pairs", type=int, help="use only so many parsed pairs")
    parser.add_argument("--words", type=int, default=64, help="identical words for locality and symmetry")
    parser.add_argument("--output", type=Path, default=Path("outputs/snli"), help="folder for models and tables")
    arguments = parser.parse_args()

    source = arguments.model or packaged_model()
    tokenizer = AutoTokenizer.from_pretrained(source)
    corpus = list(islice(read_snli(arguments.parsed), arguments.pairs))
    pairs = training_pairs(arguments.train, corpus, arguments.limit)
    probes = build(corpus, arguments.side, arguments.swap_label)
    found = {name: [] for name in probes}
    local, symmetric = [], []
    for seed in arguments.seeds:
        folder = arguments.output / f"seed-{seed}"
        model = fine_tune(source, tokenizer, pairs, seed, folder, arguments)
        for name, probe in probes.items():
            found[name].append(evaluate(model, tokenizer, probe, groups="original_premise"))
        attention = positional_attention(model, tokenizer, length=128, words=arguments.words)
        local.append(float(locality(attention.attention).mean()))
        symmetric.append(float(measure(attention.attention).symmetry.mean()))

    name = Path(source).parent.name if arguments.model is None else arguments.model
    metrics = {"symmetry": {name: np.mean(symmetric)}, "locality": {name: np.mean(local)}}
    table = paper_table({name: found}, **metrics)
    runs = f"{len(pairs)} training pairs, seeds {arguments.seeds}, {arguments.side} shuffled"
    print(f"{runs}; Student's interval over runs\n{table.to_markdown()}\n")
    single = {
        f"{name}, seed {seed}": {probe: of_probe[i] for probe, of_probe in found.items()}
        for i, seed in enumerate(arguments.seeds)
    }
    print(f"each run, interval over pairs\n{paper_table(single).to_markdown()}\n")
    print(f"do constituents matter beyond windows?\n{markdown(constituents_beyond_windows(found))}\n")
    print(markdown(agreements(found)))
    table.values.to_csv(arguments.output / "table.csv", index=False)
    (arguments.output / "table.tex").write_text(table.to_latex() + "\n")
    for probe, runs_of_probe in found.items():
        examples = [run.examples.assign(seed_of_run=s) for s, run in zip(arguments.seeds, runs_of_probe, strict=True)]
        pd.concat(examples).to_csv(arguments.output / f"{probe}.csv")


if __name__ == "__main__":
    main()
