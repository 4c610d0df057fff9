"""Join words with PropBank's trees and frames, which lack them: UD English-EWT, or the sample of the WSJ in nltk.

git clone https://github.com/propbank/propbank-release
git clone https://github.com/UniversalDependencies/UD_English-EWT
python experiments/propbank.py propbank-release UD_English-EWT --output ewt
python -m nltk.downloader -d nltk_data treebank
python experiments/propbank.py propbank-release nltk_data/corpora/treebank/combined --parts wsj

Within a document, a sentence of one is the sentence of the other that has the same tags, or stands between two such and
has as many words; others are left out. Writes ewt_train.jsonl, ewt_dev.jsonl, ewt_test.jsonl and wsj.jsonl, which
`read_frames` reads. Of EWT train it takes trees and frames only, and sentences of 4 to 40 words; --words 41 1000 takes
the longer ones instead. The words of the WSJ are split at hyphens, as PropBank's are, and spaced by rule.
"""

import argparse
import json
import re
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import groupby
from pathlib import Path
from typing import Any

from runs import write_atomically

from pelocality.corpora import Sentence, read_trees

Documents = Iterator[tuple[list[dict[str, Any]], list[list[list[str]]]]]  # sentences with words, and without


def rows_of(path: Path) -> Iterator[list[list[str]]]:
    """Yield the sentences of a file with a word a line and an empty line after each, as columns; no comments."""
    lines = (line.split("\t" if path.suffix == ".conllu" else None) for line in path.read_text("utf-8").splitlines())
    for empty, sentence in groupby(lines, key=lambda line: not "".join(line).strip()):
        if not empty:
            yield list(sentence)


def ud_sentence(rows: list[list[str]]) -> dict[str, Any]:
    """Return identifier, text, words, tags and heads of a sentence in CoNLL-U."""
    comments = dict(row[0].removeprefix("# ").split(" = ", 1) for row in rows if " = " in row[0])
    words = [row for row in rows if row[0].isdigit()]
    _, tokens, _, upos, tags, _, head, deprel, *_ = map(list, zip(*words, strict=True))
    told = {"id": comments["sent_id"], "text": comments["text"], "tokens": tokens, "tags": tags}
    return {**told, "head": [int(number) for number in head], "deprel": deprel, "upos": upos}


def wsj_sentence(uid: str, sentence: Sentence) -> dict[str, Any]:
    """Return identifier, text, words and tags of a sentence of the treebank, split at hyphens."""
    tags = sentence.constituents.tags if sentence.constituents else ()
    split = [(re.split("(?<=[^-])(-)(?=[^-])", word), tag) for word, tag in zip(sentence.words, tags, strict=True)]
    pieces = [(piece, tag) for parts, tag in split for piece in parts]
    tokens, tags = map(list, zip(*pieces, strict=True))
    return {"id": uid, "text": sentence.text, "tokens": tokens, "tags": tags}


def spans_of(column: list[str]) -> list[tuple[str, int, int]]:
    """Return the arguments of a column such as ``(ARG0*``, ``*)``, ``(V*)``."""
    spans, opened = [], []
    for place, cell in enumerate(column):
        opened += [(name, place) for name in cell.replace("*", "").rstrip(")").split("(")[1:]]
        for _ in range(cell.count(")")):
            name, start = opened.pop()
            spans.append((name, start, place + 1))
    return sorted(spans, key=lambda span: span[1:])


def joined(sentence: dict[str, Any], rows: list[list[str]]) -> tuple[str, list[dict[str, Any]]]:
    """Return the tree with the words of a UD sentence, and the frames."""
    words = [word.replace("(", "-LRB-").replace(")", "-RRB-") for word in sentence["tokens"]]
    leaves = (row[5].replace("*", f"({row[4]} {word})") for word, row in zip(words, rows, strict=True))
    tree = " ".join(leaves).replace("(", " (").replace(" )", ")")
    rolesets = [row[7] for row in rows if row[7] != "-"]
    columns = [[row[8 + k] for row in rows] for k in range(len(rolesets))]
    frames = [{"roleset": name, "args": spans_of(column)} for name, column in zip(rolesets, columns, strict=True)]
    return " ".join(tree.split()), frames


def ewt_documents(propbank: Path, ewt: Path, part: str) -> Documents:
    """Yield the UD and the PropBank sentences of each document of a part."""
    skeletons = {path.name: path for path in (propbank / "data/google/ewt").rglob("*.gold_skel")}
    for name in sorted((ewt / f"not-to-release/file-lists/files.{part}").read_text("utf-8").split()):
        path = ewt / "not-to-release/sources" / name
        skeleton = skeletons.get(path.name.replace(".conllu", ".gold_skel"))
        if skeleton is not None:
            yield [ud_sentence(rows) for rows in rows_of(path)], list(rows_of(skeleton))


def wsj_documents(propbank: Path, treebank: Path) -> Documents:
    """Yield the treebank's and the PropBank sentences of each document that both have."""
    skeletons = {path.stem: path for path in (propbank / "data").rglob("wsj_*.gold_skel")}
    for path in sorted(treebank.glob("wsj_*.mrg")):
        if path.stem in skeletons:
            sentences = enumerate(read_trees(path), 1)
            yield [wsj_sentence(f"{path.stem}-{k}", each) for k, each in sentences], list(rows_of(skeletons[path.stem]))


def aligned(ours: list[list[str]], theirs: list[list[str]]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of sentences with the same tags, and those between such pairs that have as many words."""
    matcher = SequenceMatcher(None, [*map(tuple, ours)], [*map(tuple, theirs)], autojunk=False)
    for _, start, end, other_start, other_end in matcher.get_opcodes():
        if end - start == other_end - other_start:
            pairs = zip(range(start, end), range(other_start, other_end), strict=True)
            yield from ((a, b) for a, b in pairs if len(ours[a]) == len(theirs[b]))


def records(propbank: Path, corpus: Path, part: str, words: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Yield the sentences of a part that both have; ``words`` is how many those of train may have."""
    documents = wsj_documents(propbank, corpus) if part == "wsj" else ewt_documents(propbank, corpus, part)
    for sentences, skeletons in documents:
        ours = [sentence.pop("tags") for sentence in sentences]
        for a, b in aligned(ours, [[row[4] for row in rows] for rows in skeletons]):
            sentence = sentences[a]
            tree, frames = joined(sentence, skeletons[b])
            if part != "train":
                yield {"id": sentence["id"], "split": part, **sentence, "tree": tree, "frames": frames}
            elif words[0] <= len(ours[a]) <= words[1]:
                short = [{"r": frame["roleset"], "a": frame["args"]} for frame in frames]
                yield {"id": sentence["id"], "tree": tree, "frames": short}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("propbank", type=Path, help="clone of propbank-release")
    parser.add_argument("corpus", type=Path, help="clone of UD_English-EWT, or treebank/combined of nltk")
    parser.add_argument("--output", type=Path, default=Path(), help="folder for the files")
    parser.add_argument("--parts", nargs="+", default=["train", "dev", "test"], choices=("train", "dev", "test", "wsj"))
    parser.add_argument(
        "--words", type=int, nargs=2, default=(4, 40), help="fewest and most words of train's sentences"
    )
    arguments = parser.parse_args()
    for part in arguments.parts:
        found = records(arguments.propbank, arguments.corpus, part, arguments.words)
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in found]
        name = "wsj.jsonl" if part == "wsj" else f"ewt_{part}.jsonl"
        write_atomically(arguments.output / name, "".join(lines))
        print(f"{name}: {len(lines)} sentences")
