"""Readers of sentence pairs: SNLI and MultiNLI with their parses, and plain pairs of any origin."""

from __future__ import annotations

import functools
import math
import numbers
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pelocality.corpora._corpus import Corpus
from pelocality.corpora._records import (
    Record,
    brief,
    existing,
    field,
    json_lines,
    json_object,
    name_in,
    suffix,
    table_rows,
)
from pelocality.corpora.constituents import parse_bracketed
from pelocality.corpora.sentence import Dropped, Pair, Sentence, language_code
from pelocality.corpora.spacing import align, is_mark

Parser = Callable[[Sequence[str]], Sequence[Sentence]]
NO_GOLD_LABEL = "no gold label"
TEXT_IS_NOT_PARSED = "text and parse disagree"  # a text made up from the parse would not be the corpus's
_MARK = "\u0301"  # stands for every mark: re knows no class of them
_WORD = re.compile(rf"\w[\w{_MARK}]*(?:[-'’.]\w[\w{_MARK}]*)*|[^\w\s]{_MARK}*")


def read_snli(path: str | Path) -> Corpus[Pair]:
    r"""Read SNLI or MultiNLI JSON lines with the parses they come with.

    Args:
        path: A file such as ``snli_1.0_test.jsonl`` or ``multinli_1.0_dev_matched.jsonl``; ``.gz`` is read too.

    Returns:
        The pairs, read lazily, text spaced as in ``sentence1`` and ``sentence2``. Pairs without a gold label
        (``-``, empty or missing) and pairs whose text and parse disagree are dropped and counted. The
        constituents are the Stanford parser's, not gold.

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
    texts = {name: field(row, name, str, "a text") for name in ("sentence1", "sentence2")}
    parses = {name: field(row, f"{name}_parse", str, "a bracketed tree") for name in texts}
    if row.get("gold_label") in (None, "", "-"):
        return Dropped(NO_GOLD_LABEL)
    label = field(row, "gold_label", str, "a text, '-' where there is none")
    uid = name_in(row, "pairID") if row.get("pairID") not in (None, "") else where
    sides = []
    for name, side in (("sentence1", "premise"), ("sentence2", "hypothesis")):
        try:
            words, constituents = parse_bracketed(parses[name], f"{name}_parse of {where}", automatic=True)
        except ValueError as error:
            raise ValueError(f"field '{name}_parse' does not parse: {error}") from error
        found = align(words, texts[name])
        if found is None:
            return Dropped(TEXT_IS_NOT_PARSED)
        sides.append(Sentence(*found, uid=f"{uid}/{side}", language="en", constituents=constituents, source=where))
    return Pair(sides[0], sides[1], label, uid, where)


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
        source: A ``.jsonl``, ``.tsv`` or ``.csv`` file (with a header; ``.gz`` is read too), a
            ``datasets.Dataset``, a pandas data frame, or any iterable of mappings that can be read again.
        parser: From texts to sentences, such as ``SpacyParser()`` or ``StanzaParser("de")``. None cuts
            words at spaces and punctuation and knows no structure, which random_shuffling does not need.
        premise: Field of the premise.
        hypothesis: Field of the hypothesis.
        label: Field of the label; None for pairs without labels.
        uid: Field of a unique name; None numbers the rows, which for rows in memory (``list:1``) tells two
            corpora not apart.
        label_names: Names of labels that are numbers, in order; labels that are names already must be among
            them. None takes them from a Dataset that knows them, and keeps texts as they stand.
        language: ISO code, where no parser says it.

    Returns:
        The pairs, read lazily. Rows labelled ``-`` or -1, and those whose label is empty, are dropped and
        counted.

    Raises:
        FileNotFoundError: Where there is no such file.
        TypeError: Where ``source`` is neither a file nor an iterable to read again, or ``label_names`` no list.
        ValueError: While reading, with file and line, where a row is no mapping, lacks a field, has cells too
            many or too few, or where a label has no name.

    Examples:
        >>> rows = [{"premise": "A cat naps.", "hypothesis": "It's asleep.", "label": 0}]
        >>> [pair] = read_pairs(rows, label_names=["entailment", "neutral", "contradiction"])
        >>> pair.hypothesis.words, pair.hypothesis.text, pair.label
        (("It's", 'asleep', '.'), "It's asleep.", 'entailment')
    """
    features = getattr(source, "features", None)
    if label_names is None and label and features and hasattr(features.get(label), "names"):
        label_names = features[label].names
    if label_names is not None:
        if isinstance(label_names, str | Mapping) or not all(isinstance(name, str) for name in label_names):
            raise TypeError(
                f"label_names must be a list of names such as ['entailment', 'neutral'], got {brief(label_names)}"
            )
        label_names = tuple(label_names)
    if parser is not None and not callable(parser):
        raise TypeError(f"parser must be callable, such as SpacyParser(), got {brief(parser)}")
    name, records, in_lines = _open(source)
    read = functools.partial(
        _read_row,
        in_lines=in_lines,
        fields=(premise, hypothesis, label, uid),
        parser=parser,
        label_names=label_names,
        language=language_code(language),
    )
    return Corpus(name, records, read)


def _open(source: Any) -> tuple[str, Callable[[], Iterator[Record]], bool]:
    """Give the name of a source, a way to go over its records, and whether they are lines of JSON."""
    if isinstance(source, str | Path):
        path = existing(source)
        if suffix(path) not in (".jsonl", ".json", ".tsv", ".csv"):
            raise ValueError(f"source must end in .jsonl, .tsv or .csv, got {path.name!r}; or pass the rows themselves")
        in_lines = suffix(path).startswith(".json")
        return str(path), functools.partial(json_lines if in_lines else table_rows, path), in_lines
    name = type(source).__name__
    if isinstance(source, Iterator):
        raise TypeError(f"source must be something to read again, got a {name}; make it a list")
    if isinstance(source, Mapping):
        raise TypeError(f"source must be a file or rows, got a {name} of {brief(list(source))}; choose one of them?")
    if not isinstance(source, Iterable):
        raise TypeError(f"source must be a file or an iterable of mappings, got {name}")
    return name, functools.partial(_numbered, source), False


def _numbered(source: Any) -> Iterator[Record]:
    # a data frame goes over its columns, not its rows
    return enumerate(source.to_dict("records") if hasattr(source, "iterrows") else source, 1)


def _read_row(
    row: Any,
    where: str,
    in_lines: bool,
    fields: tuple[str, str, str | None, str | None],
    parser: Parser | None,
    label_names: tuple[str, ...] | None,
    language: str,
) -> Pair | Dropped:
    if in_lines:
        row = json_object(row)
    if not isinstance(row, Mapping):
        raise ValueError(f"a row must be a mapping of fields, got {brief(row)}")
    premise, hypothesis, label_field, uid_field = fields
    label = _label(field(row, label_field, object, "a label"), label_names) if label_field else None
    if label_field and label is None:
        return Dropped(NO_GOLD_LABEL)
    texts = [field(row, name, str, "a text") for name in (premise, hypothesis)]
    uid = name_in(row, uid_field) if uid_field else where
    parsed = list(parser(texts)) if parser else [plain_sentence(text, language) for text in texts]
    if len(parsed) != 2 or not all(isinstance(sentence, Sentence) for sentence in parsed):
        raise ValueError(f"parser must give one Sentence per text, gave {brief(parsed)} for 2")
    return Pair(parsed[0].with_uid(f"{uid}/premise"), parsed[1].with_uid(f"{uid}/hypothesis"), label, uid, where)


def _label(value: Any, names: tuple[str, ...] | None) -> str | None:
    """Give the name of a label that may be a name or a number of any kind; None where there is none."""
    if getattr(value, "shape", None) == ():  # a scalar of numpy or torch
        value = value.item()
    if isinstance(value, str):
        if value.strip() in ("", "-", "-1"):
            return None
        if names is None or value in names:
            return value
        if not re.fullmatch(r"\d+(\.0+)?", value.strip()):
            raise ValueError(f"label {value!r} must be one of label_names= {list(names)}, or its number")
        value = float(value)
    if value is None or type(value).__name__ in ("NAType", "NaTType"):  # pandas has three marks of what is missing
        return None
    if not isinstance(value, numbers.Real):
        raise ValueError(f"a label must be a name or a whole number, got {brief(value)}")
    if math.isnan(value):
        return None
    if not float(value).is_integer():
        raise ValueError(f"a label must be a name or a whole number, got {brief(value)}")
    number = int(float(value))
    if number == -1:
        return None
    if names is None or not 0 <= number < len(names):
        known = "pass label_names=, such as ['entailment', ...]" if names is None else f"label_names= has {list(names)}"
        raise ValueError(f"label {number} has no name; {known}")
    return names[number]


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
