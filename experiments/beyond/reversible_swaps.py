r"""Does a decoder know who did it, or only what is plausible? Role swaps of two persons beside those with a thing.

    python -m experiments.beyond.reversible_swaps --smoke            # a tiny random model on examples/data
    python -m experiments.beyond.reversible_swaps ewt_train.jsonl ewt_dev.jsonl --pairs snli_dev_subset.jsonl \
        --plain snli_dev_full.jsonl mnli_dev.jsonl --text books.txt.gz --treebanks en_ewt-up-dev.conllu ...
    python -m experiments.beyond.reversible_swaps --results docs/results/reversible_swaps.csv

If one argument of a verb is a thing, its swap is odd in any context (*a cigar lit Ukridge*), and a model may prefer the
original for that alone. If both are persons, either may act, and word order says which does. The column `reversible` of
a role swap tells both kinds apart. Swaps come from gold frames and trees (`sentences`, `--pairs`), from treebanks, with
the frames of Universal Propositions where they have any (`--treebanks`), and from text that spaCy parses: both sides of
NLI pairs (`--plain`), and lines of the novels (`--novels` of them), which the bigrams then do not read. In sentences of
at most `--longest` words, SmolLM2-135M and bigrams score all swaps of two persons, and `--number` of each other kind
and corpus. Where in the sentence SmolLM2 pays for a swap is read from its scores of words. What positions add, by the
same column, is in `order_without_positions.py`.

Predictions, written before this run. Known were the 739 swaps of `order_without_positions.py` together (74.8, 82.9 and
89.9 %), and a pilot by another reader: 86 % with a thing, 66 % of two personal pronouns.

1. SmolLM2 prefers 65 to 80 % of originals in swaps of two persons, at least 10 points fewer than in those with a thing.
2. Bigrams prefer at most 65 % in swaps of two persons.
3. It pays most for the first phrase or the verb, and at least a third less behind the last phrase.
"""

import argparse
import json
import random
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from datasets import concatenate_datasets, load_from_disk

from experiments.beyond.decoder_minimal_pairs import bigrams, smollm2
from experiments.beyond.order_without_positions import LARGE, preferred
from experiments.runs import DATA, claim, fingerprint, lines_of, markdown, over_groups, write_atomically
from pelocality import evaluate_minimal_pairs, plots, read_conllu, read_frames, read_snli
from pelocality.probes import minimal_pairs, semantic_role_swap
from pelocality.probes.role_swap.english import PERSONAL

KINDS = ("both", "one", "none")
REGIONS = ("before", "phrase 1", "between", "phrase 2", "behind")


def sampled_lines(path, number):
    """Return lines of a text, in the order of a shuffle."""
    lines = [line.strip() for line in lines_of(path) if line.strip()]
    random.Random(0).shuffle(lines)
    return lines[:number]


def swaps(arguments):
    """Yield the name of each corpus with its minimal pairs: roles of frames and trees, then those of a parser."""
    options = {"spans": "all", "agreement": "reinflect", "progress": False}
    for path, source in product(arguments.sentences, ("frames", "constituents")):
        yield path.stem.split("_")[0], semantic_role_swap(list(read_frames(path)), source=source, **options)
    captions = {side.text: side for pair in read_snli(arguments.pairs) for side in (pair.premise, pair.hypothesis)}
    yield "snli", semantic_role_swap(list(captions.values()), source="constituents", **options)
    for path in arguments.treebanks:
        sentences, name = list(read_conllu(path, "en")), path.stem.lower()
        names = ("eslspok", "gum", "pud", "up")  # of other files, the children of CHILDES
        name = next((each for each in names if each in name.split("-")[0] or f"-{each}-" in name), "childes")
        for source in ("frames", "dependencies") if sentences[0].frames is not None else ("dependencies",):
            yield name, semantic_role_swap(sentences, source=source, **options)
    plain = {path.stem.split("_")[0]: path.read_text("utf-8").splitlines() for path in arguments.plain}
    texts = {name: [json.loads(line)[side] for line in lines for side in ("premise", "hypothesis")]
             for name, lines in plain.items()}  # fmt: skip
    if arguments.novels:
        texts["novels"] = sampled_lines(arguments.text, arguments.novels)
    for name, each in texts.items():
        yield name, semantic_role_swap(list(dict.fromkeys(each)), parser="spacy", **options)


def build(arguments):
    """Return the different minimal pairs of short sentences: of two persons all, of other kinds some of each corpus."""
    folder, found = arguments.output / "pairs", []
    if not folder.exists():  # the parser takes longest
        for corpus, probe in swaps(arguments):
            pairs = minimal_pairs(probe)
            found.append(pairs.add_column("corpus", [corpus] * len(pairs)))
            print(f"{corpus}: {len(pairs)} swaps", flush=True)
        concatenate_datasets(found).save_to_disk(folder)
    pairs = load_from_disk(folder)
    rows = pairs.select_columns(["sentence_good", "sentence_bad", "corpus", "reversible"]).to_pandas()
    rows = rows.drop_duplicates(["sentence_good", "sentence_bad"])
    print(markdown(rows.groupby(["corpus", "reversible"]).size().unstack(fill_value=0).reset_index()), flush=True)
    short = rows["sentence_good"].str.split().str.len() <= arguments.longest
    rows = rows[short & (rows["reversible"] != "unknown")].sample(frac=1, random_state=0)
    place = rows.groupby(["corpus", "reversible"]).cumcount()
    return pairs.select(sorted(rows[(place < arguments.number) | (rows["reversible"] == "both")].index))


def about(row):
    """Return whether the verb of a pair was inflected anew, and whether both arguments are personal pronouns."""
    moved = [span for span in row["spans"] if span["category"] != "agreement"]
    pronouns = all(span["original"].lower() in PERSONAL for span in moved)
    verb = "as it was" if len(moved) == len(row["spans"]) else "inflected anew"
    return {"verb": verb, "pronouns": pronouns, "words": len(row["sentence_good"].split())}


def score(pairs, arguments):
    """Return a row per pair: its scores, and the nats that SmolLM2 pays in each region."""
    table = pairs.select_columns(["corpus", "reversible"]).to_pandas().join(pd.DataFrame(map(about, pairs)))
    used = set(sampled_lines(arguments.text, arguments.novels))
    model, tokenizer = smollm2(arguments.smoke)
    for name, scorer in (("bigrams", bigrams(arguments.text, used)), (LARGE, model)):
        file = arguments.output / f"{name}.csv"
        if not file.exists():
            result = evaluate_minimal_pairs(scorer, tokenizer, pairs, batch_size=32)
            own = result.examples[["group", "difference"]].rename(columns={"difference": name})
            if name == LARGE:
                sums = result.words.pivot_table("score", ["pair", "region"], "sentence", "sum", observed=True)
                own = own.join((sums["good"] - sums["bad"]).unstack())
                plt.switch_backend("agg")
                plots.regions(result, by="reversible")[0].savefig(arguments.output / "reversible_swaps.png", dpi=150)
            write_atomically(file, own.to_csv(index=False))
            print(name, flush=True)
        own = pd.read_csv(file)
        table = table.assign(group=own.pop("group")).join(own)
    return table.round(3)


def parts_of(table):
    """Return the swaps by kind, those of two persons by what and where they are, by name."""
    both = table[table["reversible"] == "both"]
    parts = {f"{kind}": table[table["reversible"] == kind] for kind in KINDS}
    parts |= {"both: personal pronouns": both[both["pronouns"]], "both: a noun among them": both[~both["pronouns"]]}
    parts |= {f"both: verb {verb}": rows for verb, rows in both.groupby("verb", sort=False)}
    parts |= {f"{kind}: {corpus}": rows[rows["reversible"] == kind]
              for corpus, rows in table.groupby("corpus", sort=False) for kind in ("both", "one")}  # fmt: skip
    return {name: rows for name, rows in parts.items() if len(rows)}


def by_part(table):
    """Return how many originals bigrams and SmolLM2 prefer in each part, and by how much."""
    return pd.DataFrame(
        {
            "persons": name,
            "pairs": len(rows),
            **{f"{each}, %": f"{preferred(rows, each):.1f}" for each in ("bigrams", LARGE)},
            "nats": f"{over_groups(rows[LARGE], rows['group']):.1f}",
        }
        for name, rows in parts_of(table).items()
    )


def by_region(table):
    """Return the nats that SmolLM2 pays for a swap in each region of the sentence."""
    lines = []
    for kind, rows in table.groupby("reversible"):
        line = {"persons": kind}
        for region in [each for each in REGIONS if each in table]:
            there = rows[rows[region].notna()]
            line[region] = f"{over_groups(there[region], there['group']):.1f}"
        lines.append(line)
    return pd.DataFrame(lines)


def show(table):
    """Print both tables."""
    print(f"{markdown(by_part(table))}\n\n{markdown(by_region(table))}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = DATA / "frames.jsonl"
    parser.add_argument("sentences", type=Path, nargs="*", default=[default], help="JSON lines with frames and trees")
    parser.add_argument("--pairs", type=Path, default=DATA / "nli_pairs.jsonl", help="SNLI JSON lines with parses")
    parser.add_argument("--treebanks", type=Path, nargs="+", default=[], help="English CoNLL-U files")
    parser.add_argument("--plain", type=Path, nargs="+", default=[], help="JSON lines of NLI pairs, which spaCy parses")
    parser.add_argument("--text", type=Path, default=DATA / "text.txt", help="running text for the bigrams; may be .gz")
    parser.add_argument("--novels", type=int, default=0, help="lines of the text that spaCy parses for swaps")
    parser.add_argument("--number", type=int, default=60, help="pairs of other kinds per corpus, at most")
    parser.add_argument("--longest", type=int, default=20, help="words of the longest sentence")
    parser.add_argument("--output", type=Path, default=Path("outputs/reversible_swaps"), help="folder of scores")
    parser.add_argument("--smoke", action="store_true", help="a tiny random model, to see it run")
    parser.add_argument("--results", type=Path, help="print the tables of these pairs again, and run nothing")
    arguments = parser.parse_args()
    if arguments.results:
        return show(pd.read_csv(arguments.results, keep_default_na=False, na_values=[""]))
    files = [*arguments.sentences, arguments.pairs, *arguments.treebanks, *arguments.plain, arguments.text]
    settings = {"files": [fingerprint(file.read_bytes()) for file in files]}
    arguments.output.mkdir(parents=True, exist_ok=True)
    claim(
        arguments.output,
        settings | {name: getattr(arguments, name) for name in ("novels", "number", "longest", "smoke")},
    )
    table = score(build(arguments), arguments)
    table.to_csv(arguments.output / "reversible_swaps.csv", index=False)
    show(table)


if __name__ == "__main__":
    main()
