"""Write PropBank's trees and frames with words as JSON lines: UD English-EWT, or nltk's samples of the WSJ and MASC.

git clone https://github.com/propbank/propbank-release
git clone https://github.com/UniversalDependencies/UD_English-EWT
python -m experiments.beyond.propbank propbank-release UD_English-EWT --output ewt
python -m nltk.downloader -d nltk_data treebank
python -m experiments.beyond.propbank propbank-release nltk_data/corpora/treebank/combined --parts wsj
python -m nltk.downloader -d nltk_data masc_tagged
unzip nltk_data/corpora/masc_tagged.zip -d nltk_data/corpora
python -m experiments.beyond.propbank propbank-release nltk_data/corpora/masc_tagged --parts masc

`read_propbank` joins each document with its words; sentences whose words it does not find are left out. Writes
ewt_train.jsonl, ewt_dev.jsonl, ewt_test.jsonl, wsj.jsonl and masc.jsonl, which `read_frames` reads. Of EWT train it
takes trees and frames only, and sentences of 4 to 40 words; --words 41 1000 takes the longer ones instead. Words of the
WSJ, split at hyphens as PropBank's are, and of MASC are spaced by rule.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.runs import write_atomically
from pelocality.corpora import Constituents, Corpus, Sentence, read_conllu, read_propbank, read_trees

Documents = Iterator[tuple[str, Corpus[Sentence]]]  # the name of each document, and its sentences


def split_at_hyphens(sentence: Sentence, uid: str) -> Sentence:
    """Return a sentence of the Penn Treebank whose hyphens are words, as in PropBank."""
    tags = sentence.constituents.tags if sentence.constituents else None
    pieces = []
    for word, space, tag in zip(sentence.words, sentence.spaces, tags or (), strict=True):
        *before, last = re.split("(?<=[^-])(-)(?=[^-])", word)
        pieces += [(piece, "", tag) for piece in before] + [(last, space, tag)]
    words, spaces, tags = map(tuple, zip(*pieces, strict=True))
    return Sentence(words, spaces, uid, constituents=Constituents((), sentence.source, tags))


def tagged(path: Path) -> Sentence:
    """Return the words of a document of MASC, each written as ``word_TAG``."""
    pairs = [word.rpartition("_") for word in path.read_text("utf-8").split()]
    words, tags = zip(*((word or tag, tag) for word, _, tag in pairs), strict=True)
    return Sentence(words, constituents=Constituents((), path.name, tags))


def ewt_documents(propbank: Path, ewt: Path, part: str) -> Documents:
    """Yield the documents of a part."""
    skeletons = {path.name: path for path in (propbank / "data/google/ewt").rglob("*.gold_skel")}
    for name in sorted((ewt / f"not-to-release/file-lists/files.{part}").read_text("utf-8").split()):
        path = ewt / "not-to-release/sources" / name
        skeleton = skeletons.get(path.name.replace(".conllu", ".gold_skel"))
        if skeleton is not None:
            yield skeleton.stem, read_propbank(skeleton, read_conllu(path, "en"))


def other_documents(propbank: Path, corpus: Path, part: str) -> Documents:
    """Yield the documents of nltk's samples that PropBank has, those of the WSJ only once."""
    skeletons = {path.stem: path for path in (propbank / "data").rglob("*.gold_skel")}
    for path in sorted(corpus.rglob("wsj_*.mrg" if part == "wsj" else "*.txt")):
        if path.stem in skeletons and (part == "wsj" or not path.stem.startswith("wsj_")):
            words = [tagged(path)]
            if part == "wsj":
                words = [split_at_hyphens(each, f"{path.stem}-{k}") for k, each in enumerate(read_trees(path), 1)]
            yield path.stem, read_propbank(skeletons[path.stem], words)


def record(sentence: Sentence, uid: str, part: str) -> dict[str, Any]:
    """Return a sentence as a row that `read_frames` reads."""
    frames = []
    for frame in sentence.frames or ():
        spans = sorted([("V", *frame.verb), *frame.arguments], key=lambda span: span[1:])
        frames.append((frame.roleset, spans))
    tree = sentence.constituents.bracketed if sentence.constituents else None
    if part == "train":
        return {"id": uid, "tree": tree, "frames": [{"r": roleset, "a": spans} for roleset, spans in frames]}
    row: dict[str, Any] = {"id": uid, "split": part, "text": sentence.text, "tokens": sentence.words}
    if sentence.dependencies is not None:
        row |= {"head": sentence.dependencies.heads, "deprel": sentence.dependencies.relations}
        row |= {"upos": sentence.dependencies.upos}
    return {**row, "tree": tree, "frames": [{"roleset": roleset, "args": spans} for roleset, spans in frames]}


def records(documents: Documents, part: str, words: tuple[int, int]) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of the documents, and the number of all sentences; ``words`` limits those of train."""
    rows, total = [], 0
    for name, corpus in documents:
        for number, raw in enumerate(corpus.records(), 1):
            sentence = corpus.parse(raw)
            total += 1
            if isinstance(sentence, Sentence) and (part != "train" or words[0] <= len(sentence.words) <= words[1]):
                rows.append(record(sentence, f"{name}-{number}" if part == "masc" else sentence.uid, part))
    return rows, total


def main() -> None:
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
    for part in arguments.parts:
        documents = other_documents if part in ("wsj", "masc") else ewt_documents
        rows, total = records(documents(arguments.propbank, arguments.corpus, part), part, arguments.words)
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        name = f"{part}.jsonl" if part in ("wsj", "masc") else f"ewt_{part}.jsonl"
        write_atomically(arguments.output / name, "".join(lines))
        print(f"{name}: {len(lines)} of {total} sentences")


if __name__ == "__main__":
    main()
