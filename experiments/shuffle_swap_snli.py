"""How much accuracy do shuffled constituents and swapped roles cost a model fine-tuned on NLI?

    python experiments/shuffle_swap_snli.py                        # the few pairs in examples/data: to see it run
    python experiments/shuffle_swap_snli.py snli_1.0_dev.jsonl --train snli_train.jsonl mnli_train.jsonl

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
import numpy as np
import pandas as pd
import torch
from runs import (
    DATA,
    LABELS,
    claim,
    fine_tuning_arguments,
    fingerprint,
    last_complete_checkpoint,
    markdown,
    of_seeds,
    over_groups,
    packaged_model,
    shuffled_and_windows,
    train,
    unused_pairs,
)
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    set_seed,
)

from pelocality import measure, positional_attention
from pelocality.corpora import read_snli
from pelocality.evaluation import evaluate, paper_table
from pelocality.probes import probe_info, random_shuffling, semantic_role_swap

SIZES = (3, 4, 5, 6)
HELD_OUT = 1000


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


def constituents_beyond_windows(found):
    """Return accuracy of each shuffle minus that of its window control on the same pairs, mean over runs."""
    rows = []
    for size in SIZES:
        inside, window = ([run.examples.set_index("uid") for run in found[f"{name}-{size}"]] for name in ("Sh", "Win"))
        pairs = zip(inside, window, strict=True)
        change = pd.concat([one["correct"].astype(float) - two["correct"].astype(float) for one, two in pairs], axis=1)
        estimate = over_groups(100 * change.mean(axis=1), inside[0].loc[change.index, "group"])
        rows.append((size, len(change), f"{estimate:+.1f}"))
    return pd.DataFrame(rows, columns=["size", "pairs", "shuffle minus window, points"])


def agreements(found):
    """Return the share of unchanged predictions per run, and the largest p-value of the accuracies' change."""
    rows = [
        (
            name,
            len(runs[0].examples),
            " ".join(f"{run.agreement.value:.3f}" for run in runs),
            f"{max(run.p_value for run in runs):.2g}",
        )
        for name, runs in found.items()
    ]
    return pd.DataFrame(rows, columns=["probe", "pairs", "agreement, run by run", "largest p"])


def changes(scores):
    """Return the accuracy on the originals of each probe in percent, its change in points, and predictions unmoved."""
    rows = []
    for (side, probe), found in scores.groupby(["side", "probe"], sort=False):
        row = {"side": side, "probe": probe, "pairs": found["pairs"].iloc[0]}
        row["original"] = of_seeds(100 * found["original"], 1)
        row["change, points"] = of_seeds(100 * (found["perturbed"] - found["original"]), 1)
        rows.append(row | {"prediction unmoved": of_seeds(found["agreement"])})
    return pd.DataFrame(rows)


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
    parser.add_argument("--results", type=Path, help="print the table of these accuracies again, and run nothing")
    arguments = parser.parse_args()
    if arguments.results:
        print(markdown(changes(pd.read_csv(arguments.results))))
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
        print(f"{len(pairs)} training pairs, seeds {arguments.seeds}, {side} shuffled; ", end="")
        report(of_side, name, arguments.seeds, metrics, arguments.output / side)


def report(found, name, seeds, metrics, folder):
    """Print the tables of one side, and store them with every example."""
    table = paper_table({name: found}, **metrics)
    print(f"interval over {'runs (Student)' if len(seeds) > 1 else 'pairs'}\n{table.to_markdown()}\n")
    single = {
        f"{name}, seed {seed}": {probe: of_probe[i] for probe, of_probe in found.items()}
        for i, seed in enumerate(seeds)
    }
    print(f"each run; interval over pairs\n{paper_table(single).to_markdown()}\n")
    print(f"do constituents matter beyond windows?\n{markdown(constituents_beyond_windows(found))}\n")
    print(f"{markdown(agreements(found))}\n")
    folder.mkdir(parents=True, exist_ok=True)
    table.values.to_csv(folder / "table.csv", index=False)
    (folder / "table.tex").write_text(table.to_latex() + "\n")
    scores = [
        (seed, probe, len(run.examples), run.original.value, run.perturbed.value, run.agreement.value)
        for probe, runs_of_probe in found.items()
        for seed, run in zip(seeds, runs_of_probe, strict=True)
    ]
    columns = ["seed", "probe", "pairs", "original", "perturbed", "agreement"]
    pd.DataFrame(scores, columns=columns).to_csv(folder / "scores.csv", index=False, float_format="%.5g")
    for probe, runs_of_probe in found.items():
        examples = [run.examples.assign(seed_of_run=s) for s, run in zip(seeds, runs_of_probe, strict=True)]
        pd.concat(examples).to_csv(folder / f"{probe}.csv")


if __name__ == "__main__":
    main()
