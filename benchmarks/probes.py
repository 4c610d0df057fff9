"""Speed of readers and builders beside nltk's bare parsing of the same trees, and memory as pairs grow.

    python benchmarks/probes.py                              # made-up pairs
    python benchmarks/probes.py --snli snli_1.0_dev.jsonl    # real ones
    python benchmarks/probes.py --memory 1000 1000000        # peak memory of two builders at each size

Speeds are sentences per second in one process. Each job runs seven times, each time right after bare parsing; the
ratios are their medians, with the lowest and the highest. A ratio below 1 is slower than bare parsing.
"""

import argparse
import contextlib
import functools
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from nltk import Tree

from pelocality.corpora import Corpus, Pair, Sentence, parse_bracketed, read_snli, read_trees
from pelocality.probes import (
    constituency_shuffling,
    minimal_pairs,
    random_shuffling,
    semantic_role_swap,
    window_shuffling,
)

PAIRS = 7
NOUNS = ["sailor", "nun", "judge", "owl", "fox", "clerk", "poet", "baker"]
VERBS = ["saw", "chased", "helped", "blamed", "painted"]


def made_up_tree(rng: random.Random) -> str:
    """One clause of nine words and a full stop, never the same for long."""
    subject, patient, place = rng.sample(NOUNS, 3)
    return (
        f"(ROOT (S (NP (DT The) (JJ old) (NN {subject})) (VP (VBD {rng.choice(VERBS)}) (NP (NP (DT a) (NN {patient}))"
        f" (PP (IN behind) (NP (DT the) (NN {place}))))) (. .)))"
    )


def made_up_file(path: Path, count: int) -> Path:
    rng = random.Random(0)
    with path.open("w") as lines:
        for k in range(count):
            trees = [made_up_tree(rng) for _ in range(2)]
            texts = [" ".join(Tree.fromstring(tree).leaves()[:-1]) + "." for tree in trees]
            row = {"gold_label": "neutral", "pairID": str(k)}
            for side, (tree, text) in enumerate(zip(trees, texts, strict=True), 1):
                row |= {f"sentence{side}": text, f"sentence{side}_parse": tree}
            lines.write(json.dumps(row) + "\n")
    return path


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def speeds(path: Path) -> None:
    trees = [
        row[f"sentence{side}_parse"]
        for row in map(json.loads, path.read_text().splitlines())
        for side in (1, 2)
        if row["gold_label"] != "-"
    ]
    with tempfile.TemporaryDirectory() as folder:
        bracketed = Path(folder, "trees.mrg")
        bracketed.write_text("\n".join(trees))
        pairs = list(read_snli(path))
        probe = random_shuffling(pairs)
        both = {"side": "both", "spans": "all"}
        jobs = {
            "nltk Tree.fromstring": lambda: [Tree.fromstring(tree) for tree in trees],
            "read_trees": lambda: list(read_trees(bracketed)),
            "read_snli": lambda: list(read_snli(path)),
            "random_shuffling": lambda: random_shuffling(pairs, side="both"),
            "constituency_shuffling": lambda: constituency_shuffling(pairs, range(3, 7), **both),
            "window_shuffling": lambda: window_shuffling(pairs, range(3, 7), **both),
            "semantic_role_swap": lambda: semantic_role_swap(pairs, source="constituents", label_policy="neutral"),
            "minimal_pairs": lambda: minimal_pairs(probe),
            "read_snli + constituency_shuffling": lambda: constituency_shuffling(read_snli(path), range(3, 7), **both),
        }
        gc.collect()
        gc.freeze()  # the pairs above would be searched for garbage again and again
        print(f"{len(trees)} sentences\n{'':36}{'sentences/s':>12}{'to nltk':>9}{'lowest':>9}{'highest':>9}")
        parse = jobs.pop("nltk Tree.fromstring")
        print(f"{'nltk Tree.fromstring':36}{len(trees) / min(seconds(parse) for _ in range(3)):12,.0f}{1:9.2f}")
        for name, job in jobs.items():
            share = 0.5 if name in ("semantic_role_swap", "minimal_pairs") else 1  # of one side of each pair
            rates, ratios = [], []
            for _ in range(PAIRS):
                bare, own = seconds(parse), seconds(job)
                rates.append(share * len(trees) / own)
                ratios.append(share * bare / own)
            ratio = f"{statistics.median(ratios):9.2f}{min(ratios):9.2f}{max(ratios):9.2f}"
            print(f"{name:36}{statistics.median(rates):12,.0f}{ratio}")


def made_up_pair(number: int, where: str, with_trees: bool) -> Pair:
    """Return the pair of a number, with trees if wanted."""
    rng = random.Random(number)
    sides = []
    for _ in range(2):
        words, constituents = parse_bracketed(made_up_tree(rng), "made up")
        spaces = (*[" "] * (len(words) - 2), "", "")
        sides.append(Sentence(words, spaces, constituents=constituents if with_trees else None))
    return Pair(sides[0], sides[1], "neutral", where)


def made_up_pairs(count: int, with_trees: bool) -> Corpus[Pair]:
    """Return a corpus of made-up pairs, one at a time."""
    read = functools.partial(made_up_pair, with_trees=with_trees)
    return Corpus("made up", functools.partial(enumerate, range(count)), read)


def peak(builder: str, count: int) -> None:
    """Build one probe; print the peak of this process's own memory, what it maps from files in the end, the seconds."""
    start = time.perf_counter()
    with highest_of(lambda: resident("RssAnon")) as own:
        if builder == "random_shuffling":
            probe = random_shuffling(made_up_pairs(count, with_trees=False))
        else:
            probe = constituency_shuffling(made_up_pairs(count, with_trees=True), 3)
    print(
        f"{builder:28}{len(probe):10,} rows{own[0]:9.0f} MiB of its own{resident('RssFile'):9.0f} MiB mapped from files"
        f"{time.perf_counter() - start:9.0f} s",
        flush=True,
    )


@contextlib.contextmanager
def highest_of(read: Callable[[], float]) -> Iterator[list[float]]:
    """Keep the highest of what was read twenty times a second."""
    highest = [read()]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            highest[0] = max(highest[0], read())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield highest
    finally:
        done.set()
        watcher.join()


def resident(field: str) -> float:
    """MiB of this process in memory (Linux): RssAnon is its own, RssFile can be dropped and read again."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--snli", type=Path, help="SNLI or MultiNLI JSON lines with parses")
    parser.add_argument("--memory", type=int, nargs="+", help="numbers of pairs")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        peak(arguments.peak[0], int(arguments.peak[1]))
    elif arguments.memory:
        for builder in ("random_shuffling", "constituency_shuffling"):
            for count in arguments.memory:  # each in a process of its own, or the peaks would add up
                subprocess.run([sys.executable, __file__, "--peak", builder, str(count)], check=True)
    elif arguments.snli:
        speeds(arguments.snli)
    else:
        with tempfile.TemporaryDirectory() as folder:
            speeds(made_up_file(Path(folder, "pairs.jsonl"), 2000))
