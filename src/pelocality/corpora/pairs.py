"""Readers of sentence pairs: SNLI and MultiNLI with their parses, and plain pairs of any origin."""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pelocality.corpora.corpus import Corpus, Record, existing, indexed, json_lines, json_object
from pelocality.trees import Dropped, Pair, Sentence, align, parse_bracketed
from pelocality.trees.spacing import is_mark

Parser = Callable[[Sequence[str]], Sequence[Sentence]]
NO_GOLD_LABEL = "no gold label"
_MARK = "\u0301"  # stands for every mark: re knows no class of them
_WORD = re.compile(rf"\w[\w{_MARK}]*(?:[-'’.]\w[\w{_MARK}]*)*|[^\w\s]{_MARK}*")


def read_snli(path: str | Path) -> Corpus[Pair]:
    r"""Read SNLI or MultiNLI JSON lines with the parses they come with.

    Args:
        path: A file such as ``snli_1.0_test.jsonl`` or ``multinli_1.0_dev_matched.jsonl``.

    Returns:
        The pairs, read lazily, text spaced as in ``sentence1`` and ``sentence2``. Pairs without a gold label
        (``-``) are dropped and counted. The constituents are the Stanford parser's, not gold.

    Raises:
        FileNotFoundError: Where there is no such file.
        ValueError: While reading, with file and line, where a line is malformed.

    Examples:
        >>> import json, tempfile
        >>> row = {"gold_label": "neutral", "pairID": "7", "sentence1": "A cat naps.", "sentence2": "It dreams."}
        >>> row["sentence1_parse"] = "(ROOT (S (NP (DT A) (NN cat)) (VP (VBZ naps)) (. .)))"
        >>> row["sentence2_parse"] = "(ROOT (S (NP (PRP It)) (VP (VBZ dreams)) (. .)))"
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "toy.jsonl")
        ...     _ = file.write_text(json.dumps(row) + "\n" + json.dumps(row | {"gold_label": "-"}))
        ...     corpus = read_snli(file)
        ...     [(pair.premise.text, pair.hypothesis.text, pair.label) for pair in corpus], dict(corpus.dropped)
        ([('A cat naps.', 'It dreams.', 'neutral')], {'no gold label': 1})
    """
    path = existing(path)
    return Corpus(str(path), functools.partial(json_lines, path), _read_snli_line)


def _read_snli_line(line: str, where: str) -> Pair | Dropped:
    row = json_object(line)
    if row["gold_label"] == "-":
        return Dropped(NO_GOLD_LABEL)
    uid = str(row.get("pairID") or where)
    sides = []
    for name, side in (("sentence1", "premise"), ("sentence2", "hypothesis")):
        words, constituents = parse_bracketed(row[f"{name}_parse"], f"{name}_parse of {where}", automatic=True)
        found = align(words, row[name])
        sides.append(
            Sentence(
                found[0] if found else words,
                found[1] if found else (),
                uid=f"{uid}/{side}",
                language="en",
                constituents=constituents,
                source=where,
            )
        )
    return Pair(sides[0], sides[1], row["gold_label"], uid, where)


def read_pairs(
    source: str | Path | Iterable[Mapping[str, Any]],
    parser: Parser | None = None,
    premise: str = "premise",
    hypothesis: str = "hypothesis",
    label: str | None = "label",
    uid: str | None = None,
    label_names: Sequence[str] | None = None,
    language: str = "",
) -> Corpus[Pair]:
    """Read plain pairs, and let a parser give them their trees.

    Args:
        source: A ``.jsonl``, ``.tsv`` or ``.csv`` file (with a header), a ``datasets.Dataset``, or any
            iterable of mappings that can be read again.
        parser: From texts to sentences, such as ``SpacyParser()`` or ``StanzaParser("de")``. None cuts
            words at spaces and punctuation and knows no structure, which random_shuffling does not need.
        premise: Field of the premise.
        hypothesis: Field of the hypothesis.
        label: Field of the label; None for pairs without labels.
        uid: Field of a unique name; None numbers the rows.
        label_names: Names of integer labels, in order. None takes them from a Dataset that knows them.
        language: ISO code, where no parser says it.

    Returns:
        The pairs, read lazily. Rows labelled ``-`` or -1 are dropped and counted.

    Raises:
        FileNotFoundError: Where there is no such file.
        TypeError: Where ``source`` is neither a file nor made of mappings.
        ValueError: While reading, with file and line, where a row lacks a field or a label has no name.

    Examples:
        >>> rows = [{"premise": "A cat naps.", "hypothesis": "It's asleep.", "label": 0}]
        >>> [pair] = read_pairs(rows, label_names=["entailment", "neutral", "contradiction"])
        >>> pair.hypothesis.words, pair.hypothesis.text, pair.label
        (("It's", 'asleep', '.'), "It's asleep.", 'entailment')
    """
    features = getattr(source, "features", None)
    if label_names is None and label and features and hasattr(features.get(label), "names"):
        label_names = features[label].names
    records: Callable[[], Iterator[Record]]
    if isinstance(source, str | Path):
        path = existing(source)
        name, records = str(path), functools.partial(_rows_of_file, path)
    elif isinstance(source, Iterator):
        raise TypeError(f"source must be something to read again, got a {type(source).__name__}; make it a list")
    elif isinstance(source, Iterable) and not isinstance(source, Mapping):
        name, records = type(source).__name__, functools.partial(indexed, source)
    else:
        raise TypeError(f"source must be a file or an iterable of mappings, got {type(source).__name__}")
    read = functools.partial(
        _read_row,
        fields=(premise, hypothesis, label, uid),
        parser=parser,
        label_names=tuple(label_names) if label_names else None,
        language=language,
    )
    return Corpus(name, records, read)


def _rows_of_file(path: Path) -> Iterator[Record]:
    if path.suffix in (".jsonl", ".json"):
        yield from json_lines(path)
        return
    if path.suffix not in (".tsv", ".csv"):
        raise ValueError(f"path must end in .jsonl, .tsv or .csv, got {path.name!r}; or pass the rows themselves")
    with path.open(encoding="utf-8", newline="") as lines:
        tabs = path.suffix == ".tsv"
        # tab-separated files of this field (GLUE) do not quote: a lone " is a character like any other
        reader = csv.DictReader(
            lines, delimiter="\t" if tabs else ",", quoting=csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL
        )
        for row in reader:
            yield reader.line_num, row


def _read_row(
    row: Any,
    where: str,
    fields: tuple[str, str, str | None, str | None],
    parser: Parser | None,
    label_names: tuple[str, ...] | None,
    language: str,
) -> Pair | Dropped:
    if isinstance(row, str):
        row = json_object(row)
    if not isinstance(row, Mapping):
        raise TypeError(f"source must be made of mappings, {where} is a {type(row).__name__}")
    premise, hypothesis, label_field, uid_field = fields
    label = row[label_field] if label_field else None
    if label_field and label in ("-", "", -1, None):
        return Dropped(NO_GOLD_LABEL)
    if isinstance(label, int):
        if label_names is None or not 0 <= label < len(label_names):
            raise ValueError(f"label {label} has no name; pass label_names=, such as ['entailment', ...]")
        label = label_names[label]
    uid = str(row[uid_field]) if uid_field else where
    texts = (row[premise], row[hypothesis])
    parsed = list(parser(texts)) if parser else [plain_sentence(text, language) for text in texts]
    if len(parsed) != 2:
        raise ValueError(f"parser must give one sentence per text, gave {len(parsed)} for 2")
    return Pair(parsed[0].with_uid(f"{uid}/premise"), parsed[1].with_uid(f"{uid}/hypothesis"), label, uid, where)


def plain_sentence(text: str, language: str = "", uid: str = "") -> Sentence:
    """Cut a text into words at spaces and punctuation, without any further structure.

    A word is letters and digits with their marks (vowel signs, accents). Scripts that put no spaces between words
    (Chinese, Japanese, Thai, Lao, Khmer, Burmese) are not cut into words: there, whatever stands between two
    spaces or marks of punctuation is one word. Give ``read_pairs`` a parser that knows their words.

    Args:
        text: The text.
        language: ISO code, where known.
        uid: A unique name.

    Returns:
        The sentence, whose ``text`` is the one given.

    Examples:
        >>> plain_sentence("Well-known dogs don't bark.").words
        ('Well-known', 'dogs', "don't", 'bark', '.')
        >>> plain_sentence("他来了。").words
        ('他来了', '。')
    """
    shadow = text if text.isascii() else "".join(_MARK if is_mark(c) else c for c in text)
    found = align([text[match.start() : match.end()] for match in _WORD.finditer(shadow)], text)
    words, spaces = found or ((), ())
    return Sentence(words, spaces, uid=uid, language=language, source="plain text")
