"""Join words with PropBank's trees and frames, which lack them: UD English-EWT, or nltk's samples of the WSJ and MASC.

git clone https://github.com/propbank/propbank-release
git clone https://github.com/UniversalDependencies/UD_English-EWT
python experiments/propbank.py propbank-release UD_English-EWT --output ewt
python -m nltk.downloader -d nltk_data treebank
python experiments/propbank.py propbank-release nltk_data/corpora/treebank/combined --parts wsj
python -m nltk.downloader -d nltk_data masc_tagged
unzip nltk_data/corpora/masc_tagged.zip -d nltk_data/corpora
python experiments/propbank.py propbank-release nltk_data/corpora/masc_tagged --parts masc

Within a document, a sentence of one is the sentence of the other that has the same tags, or stands between two such and
has as many words; others are left out. MASC is divided into other sentences, so that its words are joined in this way
and divided as PropBank's are. Writes ewt_train.jsonl, ewt_dev.jsonl, ewt_test.jsonl, wsj.jsonl and masc.jsonl, which
`read_frames` reads. Of EWT train it takes trees and frames only, and sentences of 4 to 40 words; --words 41 1000 takes
the longer ones instead. Words of the WSJ, split at hyphens as PropBank's are, and of MASC are spaced by rule.
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
from pelocality.corpora.spacing import spaces_by_rule

Rows = list[list[str]]  # a sentence, a row a word
Pairs = Iterator[tuple[dict[str, Any] | None, Rows]]  # PropBank's sentences, with the same one with words if found


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


def aligned(ours: list[list[str]], theirs: list[list[str]]) -> dict[int, int]:
    """Return for theirs the place of the one of ours with the same tags, or between two such with as many words."""
    matcher = SequenceMatcher(None, [*map(tuple, ours)], [*map(tuple, theirs)], autojunk=False)
    found = {}
    for _, start, end, other_start, other_end in matcher.get_opcodes():
        if end - start == other_end - other_start:
            pairs = zip(range(start, end), range(other_start, other_end), strict=True)
            found.update((b, a) for a, b in pairs if len(ours[a]) == len(theirs[b]))
    return found


def same_sentences(sentences: list[dict[str, Any]], skeletons: list[Rows]) -> Pairs:
    """Yield the sentences of a document of PropBank, each with the one of ours that is the same."""
    ours = [sentence.pop("tags") for sentence in sentences]
    places = aligned(ours, [[row[4] for row in rows] for rows in skeletons])
    yield from ((sentences[places[b]] if b in places else None, rows) for b, rows in enumerate(skeletons))


def ewt_pairs(propbank: Path, ewt: Path, part: str) -> Pairs:
    """Yield the sentences of the documents of a part."""
    skeletons = {path.name: path for path in (propbank / "data/google/ewt").rglob("*.gold_skel")}
    for name in sorted((ewt / f"not-to-release/file-lists/files.{part}").read_text("utf-8").split()):
        path = ewt / "not-to-release/sources" / name
        skeleton = skeletons.get(path.name.replace(".conllu", ".gold_skel"))
        if skeleton is not None:
            yield from same_sentences([ud_sentence(rows) for rows in rows_of(path)], list(rows_of(skeleton)))


def wsj_pairs(propbank: Path, treebank: Path) -> Pairs:
    """Yield the sentences of the documents that both have."""
    skeletons = {path.stem: path for path in (propbank / "data").rglob("wsj_*.gold_skel")}
    for path in sorted(treebank.glob("wsj_*.mrg")):
        if path.stem in skeletons:
            sentences = [wsj_sentence(f"{path.stem}-{k}", each) for k, each in enumerate(read_trees(path), 1)]
            yield from same_sentences(sentences, list(rows_of(skeletons[path.stem])))


def masc_pairs(propbank: Path, masc: Path) -> Pairs:
    """Yield the sentences of the documents that both have, but for those of the WSJ."""
    skeletons = {path.stem: path for path in (propbank / "data/oanc").rglob("*.gold_skel")}
    for path in sorted(masc.rglob("*.txt")):
        if path.stem not in skeletons or path.stem.startswith("wsj_"):
            continue
        words = [word.rpartition("_") for word in path.read_text("utf-8").split()]
        sentences = list(rows_of(skeletons[path.stem]))
        places = aligned([[tag] for _, _, tag in words], [[row[4]] for rows in sentences for row in rows])
        end = 0
        for k, rows in enumerate(sentences, 1):
            found = [places.get(place) for place in range(end, end + len(rows))]
            end += len(rows)
            start = found[0]
            if start is None or found != [*range(start, start + len(rows))]:
                yield None, rows
                continue
            tokens = [word for word, _, _ in words[start : start + len(rows)]]
            spaces = spaces_by_rule(tokens, [row[4] for row in rows])
            text = "".join(map("".join, zip(tokens, spaces, strict=True)))
            yield {"id": f"{path.stem}-{k}", "text": text, "tokens": tokens}, rows


def records(pairs: Pairs, part: str, words: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Yield the sentences that both have; ``words`` is how many those of train may have."""
    for sentence, rows in pairs:
        if sentence is None or sum(row[5].count("(") - row[5].count(")") for row in rows):  # a tree lacks a bracket
            continue
        tree, frames = joined(sentence, rows)
        if part != "train":
            yield {"id": sentence["id"], "split": part, **sentence, "tree": tree, "frames": frames}
        elif words[0] <= len(rows) <= words[1]:
            short = [{"r": frame["roleset"], "a": frame["args"]} for frame in frames]
            yield {"id": sentence["id"], "tree": tree, "frames": short}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("propbank", type=Path, help="clone of propbank-release")
    parser.add_argument(
        "corpus", type=Path, help="clone of UD_English-EWT, or treebank/combined or masc_tagged of nltk"
    )
    parser.add_argument("--output", type=Path, default=Path(), help="folder for the files")
    parts = ("train", "dev", "test", "wsj", "masc")
    parser.add_argument("--parts", nargs="+", default=parts[:3], choices=parts)
    parser.add_argument(
        "--words", type=int, nargs=2, default=(4, 40), help="fewest and most words of train's sentences"
    )
    arguments = parser.parse_args()
    propbank, corpus = arguments.propbank, arguments.corpus
    others = {"wsj": wsj_pairs, "masc": masc_pairs}
    for part in arguments.parts:
        pairs = list(others[part](propbank, corpus) if part in others else ewt_pairs(propbank, corpus, part))
        found = records(iter(pairs), part, arguments.words)
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in found]
        name = f"{part}.jsonl" if part in others else f"ewt_{part}.jsonl"
        write_atomically(arguments.output / name, "".join(lines))
        print(f"{name}: {len(lines)} of {len(pairs)} sentences")
