"""Readers of SNLI, MultiNLI and HANS with their parses, and of plain pairs and texts of any origin."""

import functools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from pelocality._checks import are_names, check_choice
from pelocality.corpora._records import TABLES, Record, field, identifier, json_object, rows_of_file, suffix, text_lines
from pelocality.corpora.constituents import SeveralWordsError, parse_bracketed
from pelocality.corpora.corpus import Corpus, check_rows, file_corpus
from pelocality.corpora.sentence import Constituents, Dropped, Pair, Sentence, language_code
from pelocality.corpora.spacing import align, is_mark

logger = logging.getLogger(__name__)
Parser = Callable[[Sequence[str]], Sequence[Sentence]]
NO_GOLD_LABEL = Dropped("no gold label")
MISSING_LABELS = ("", "-")  # SNLI marks pairs without a majority by "-"
NOT_ENTAILMENT = "not entailment"
_MARK = "\u0301"  # replaces every mark in the text that _WORD searches: re has no class for marks
# _WORD finds a word, a dash or an ellipsis of several characters, or another sign
_WORD = re.compile(rf"\w[\w{_MARK}]*(?:[-'’.]\w[\w{_MARK}]*)*|(?:--+|\.\.+|[^\w\s]){_MARK}*")


def read_snli(path: str | Path) -> Corpus[Pair]:
    r"""Read SNLI, MultiNLI or HANS with the parses that their files contain.

    Args:
        path: JSON lines such as ``snli_1.0_test.jsonl``, or a table such as ``snli_1.0_test.txt``,
            ``heuristics_evaluation_set.txt`` (HANS), GLUE's ``.tsv`` or a ``.csv``, also compressed.

    Returns:
        The pairs, read lazily, text spaced as in ``sentence1`` and ``sentence2``. Pairs without a gold label
        (``-``, empty or missing), pairs whose text and parse disagree and pairs with a node of several words in
        their parse (``(NN ice cream)``) are dropped and counted. The constituents are the Stanford parser's, not gold.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: While reading, with file and line: a line is malformed. At the end of the file: no line has the
            field ``gold_label``, so that this is another format.

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
    return file_corpus(path, _snli_records, _read_snli_row)


def _snli_records(path: Path) -> Iterator[Record]:
    """Yield the rows of a file, which is another format if none has the field of SNLI's labels."""
    has_labels = None
    for place, row in rows_of_file(path):
        has_labels = has_labels or ('"gold_label"' if isinstance(row, str) else "gold_label") in row
        yield place, row
    if has_labels is False:
        got = list(json_object(row) if isinstance(row, str) else row)
        raise ValueError(f"{path}: rows must have a field 'gold_label', the last has {got}; use read_pairs")


def _read_snli_row(row: Any, where: str) -> Pair | Dropped:
    row = json_object(row) if isinstance(row, str) else row
    label = row.get("gold_label")
    if label is None or label.strip() in MISSING_LABELS:
        return NO_GOLD_LABEL
    uid = identifier(row, "pairID") if row.get("pairID") not in (None, "") else where
    sides = []
    for name, side in (("sentence1", "premise"), ("sentence2", "hypothesis")):
        try:
            aligned = _parsed(field(row, f"{name}_parse"), field(row, name))
        except SeveralWordsError:
            return Dropped("a node of the parse holds several words")
        if aligned is None:  # a text made from the parse would not be the text of the corpus
            return Dropped("text and parse disagree")
        words, spaces, constituents = aligned
        constituents = replace(constituents, source=f"{name}_parse of {where}")
        sides.append(Sentence(words, spaces, f"{uid}/{side}", "en", constituents=constituents, source=where))
    return Pair(sides[0], sides[1], label.strip(), uid, where)


@functools.lru_cache(maxsize=16)  # three pairs in a row of SNLI have the same premise
def _parsed(bracketed: str, text: str) -> tuple[tuple[str, ...], tuple[str, ...], Constituents] | None:
    """Return words, spaces and phrases of a parse and its text, None if they disagree."""
    words, constituents = parse_bracketed(bracketed, "", automatic=True)
    aligned = align(words, text)
    return None if aligned is None else (*aligned, constituents)


def read_pairs(
    source: str | Path | Iterable[Mapping[str, Any]],
    parser: Parser | None = None,
    *,
    premise: str = "premise",
    hypothesis: str = "hypothesis",
    label: str | None = "label",
    uid: str | None = None,
    label_names: Sequence[str] | None = None,
    language: str = "",
) -> Corpus[Pair]:
    """Read plain pairs, and let a parser add their trees.

    Args:
        source: A ``.jsonl``, ``.tsv``, ``.txt`` or ``.csv`` file (tables with a header; also compressed), a
            ``datasets.Dataset``, a pandas data frame, or any iterable of mappings that can be read again. Cells of
            ``.tsv`` and ``.txt`` are separated by tabs and not quoted, as in GLUE and SICK.
        parser: Function from texts to sentences, such as ``SpacyParser()`` or ``StanzaParser("de")``. None splits
            texts into words at spaces and punctuation, without any structure; random_shuffling needs none.
        premise: Field of the premise.
        hypothesis: Field of the hypothesis.
        label: Field of the label; None for pairs without labels.
        uid: Field of a unique name; None numbers the rows, which does not distinguish two corpora in memory
            (``list:1``).
        label_names: Names of labels that are numbers, in order; labels that are names already must be among
            them. None takes them from a Dataset with a ``ClassLabel``, and keeps texts as they are.
        language: ISO code, where no parser names it.

    Returns:
        The pairs, read lazily. Rows labelled ``-`` or -1, those whose label is empty, and those with a text that is
        null (None or NaN) are dropped and counted.

    Raises:
        FileNotFoundError: The file does not exist.
        TypeError: ``source`` is neither a file nor an iterable that can be read again, or ``label_names`` is not a
            list.
        ValueError: While reading, with file and line: a row is not a mapping, lacks a field, has too many or too few
            cells, or has a label without a name.

    Examples:
        >>> rows = [{"premise": "A cat naps.", "hypothesis": "It's asleep.", "label": 0}]
        >>> [pair] = read_pairs(rows, label_names=["entailment", "neutral", "contradiction"])
        >>> pair.hypothesis.words, pair.hypothesis.text, pair.label
        (("It's", 'asleep', '.'), "It's asleep.", 'entailment')
    """
    features = getattr(source, "features", None)  # a data frame may have a column of this name
    declared = getattr(features.get(label), "names", None) if isinstance(features, Mapping) else None
    if label_names is not None and not are_names_in_order(label_names):
        raise TypeError(f"label_names must be a list of names, got {brief(label_names)}")
    names = declared if label_names is None else list(label_names)  # [0] of a series is the row with the index 0
    if names and declared and names != declared and sorted(names) == sorted(declared):
        logger.warning("label_names= orders the labels %s, the dataset %s; label_names= is used", names, declared)
    fields, code = (premise, hypothesis, label, uid), language_code(language)
    parser = parser or _without_structure
    read = functools.partial(_read_pair, names=fields, parser=parser, labels=names, language=code)
    if isinstance(source, str | Path):
        check_choice("the end of source", suffix(source), (".jsonl", ".json", *TABLES))
        return file_corpus(source, rows_of_file, read)
    rows: Any = source
    rows = rows.to_dict("records") if hasattr(rows, "iterrows") else rows  # a data frame yields its columns
    advice = "make a list of an iterator, take one of several splits, or datasets.Dataset.from_dict of columns"
    check_rows("source", rows, advice)
    return Corpus(type(source).__name__, functools.partial(enumerate, rows, 1), read)


def _read_pair(
    row: Any, where: str, names: Sequence[Any], parser: Parser, labels: Sequence[str] | None, language: str
) -> Pair | Dropped:
    """Return the pair of a row, or of a line of JSON, by the names of four fields; label and uid may be None."""
    row = json_object(row) if isinstance(row, str) else row
    *sides, label_field, uid_field = names
    advice = "; name the fields with premise=, hypothesis= and label=, which is None for pairs without labels"
    label = _label(field(row, label_field, object, advice), labels) if label_field else None
    if label_field and label is None:
        return NO_GOLD_LABEL
    if isinstance(row, Mapping) and any(_is_null(row.get(name, "")) for name in sides):
        return Dropped("a text is null")
    texts = [field(row, name, str, advice) for name in sides]
    uid = identifier(row, uid_field) if uid_field else where
    first, second = parsed(parser, texts, language)
    return Pair(replace(first, uid=f"{uid}/premise"), replace(second, uid=f"{uid}/hypothesis"), label, uid, where)


def read_texts(texts: str | Path | Iterable[str], parser: Parser | None = None, language: str = "") -> Corpus[Sentence]:
    """Read plain texts, each as one sentence, and let a parser add their trees.

    Args:
        texts: A file with a text on each line, also compressed, or a list of texts.
        parser: Function from texts to sentences, such as ``SpacyParser()`` or ``StanzaParser("de")``. None splits
            texts into words at spaces and punctuation; ``random_shuffling`` needs no tree.
        language: ISO code, where no parser names it.

    Returns:
        The sentences, read lazily. Empty texts are dropped and counted.

    Raises:
        FileNotFoundError: The file does not exist.
        TypeError: ``texts`` is neither a file nor a list.
        ValueError: While reading, with the number of the text: it is not a string.

    Examples:
        >>> [sentence.words for sentence in read_texts(["A cat naps.", "It's old."])]
        [('A', 'cat', 'naps', '.'), ("It's", 'old', '.')]
    """
    read = functools.partial(_read_text, parser=parser or _without_structure, language=language_code(language))
    if isinstance(texts, str | Path):
        return file_corpus(texts, text_lines, read)
    check_rows("texts", texts, "make a list of an iterator, or take a column, frame['text']")
    return Corpus(type(texts).__name__, functools.partial(enumerate, texts, 1), read)


def _read_text(text: Any, where: str, parser: Parser, language: str) -> Sentence | Dropped:
    return replace(parsed(parser, [text.strip()], language)[0], uid=where) if text.strip() else Dropped("empty text")


def parsed(parser: Parser, texts: Sequence[str], language: str) -> list[Sentence]:
    """Return the sentence that a parser makes of each text, in this language where the parser names none."""
    sentences = list(parser(texts))
    if len(sentences) != len(texts) or not all(isinstance(sentence, Sentence) for sentence in sentences):
        raise ValueError(f"parser must return one Sentence per text, returned {brief(sentences)} for {len(texts)}")
    return [sentence if sentence.language else replace(sentence, language=language) for sentence in sentences]


def _without_structure(texts: Sequence[str]) -> list[Sentence]:
    return [plain_sentence(text) for text in texts]


def _label(value: Any, names: Sequence[str] | None) -> str | None:
    """Return the name of a label, which may be a name or a number of any type; None if it is missing."""
    import pandas as pd

    if getattr(value, "shape", None) == ():  # a scalar of numpy or torch
        value = value.item()
    text = str(int(value) if isinstance(value, bool) else value).strip()
    if text in (*MISSING_LABELS, "-1", "-1.0") or _is_null(value):
        return None
    if isinstance(value, str) and (names is None or value in names):
        return value
    number = pd.to_numeric(text, errors="coerce")  # "01" and "1.0" are numbers too.
    if names is None or number not in range(len(names)):
        raise ValueError(f"label {text} has no name; pass label_names=, such as ['entailment', ...], not {names}")
    return names[int(number)]


def _is_null(value: Any) -> bool:
    return not isinstance(value, str) and str(value).lower() in ("none", "nan", "<na>", "nat")


def are_names_in_order(value: Any) -> bool:
    """Return whether a value is a collection of strings in an order, which a set, or a dict of numbers, has not."""
    return are_names(value) and not isinstance(value, Mapping | Set)


@functools.cache
def normalised_label(name: str) -> str:
    """Return a label in lower case with single spaces; ``non-entailment`` (HANS) becomes ``not entailment``.

    Examples:
        >>> normalised_label("NOT_ENTAILMENT"), normalised_label("non-entailment"), normalised_label(" Neutral")
        ('not entailment', 'not entailment', 'neutral')
    """
    words = " ".join(re.split(r"[\s_-]+", name.strip().lower()))
    return NOT_ENTAILMENT if words == "non entailment" else words


def plain_sentence(text: str, language: str = "", uid: str = "") -> Sentence:
    """Split a text into words at spaces and punctuation, without any further structure.

    A word is letters and digits with their marks (vowel signs, accents). Scripts without spaces between words
    (Chinese, Japanese, Thai, Lao, Khmer, Burmese) are not segmented: there, everything between two spaces or
    punctuation marks is one word. The period of an abbreviation is a word of its own (``Mrs`` and ``.``), which a
    shuffle may separate from it. Give ``read_pairs`` a parser that segments both.

    Args:
        text: The text.
        language: ISO code, where known.
        uid: A unique name.

    Returns:
        The sentence, whose ``text`` is the one given without white space at its ends.

    Raises:
        ValueError: ``language`` is not an ISO code.

    Examples:
        >>> plain_sentence("Well-known dogs don't bark.").words
        ('Well-known', 'dogs', "don't", 'bark', '.')
        >>> plain_sentence("他来了。").words
        ('他来了', '。')
    """
    pattern_text = text if text.isascii() else "".join(_MARK if is_mark(c) else c for c in text)
    aligned = align([text[match.start() : match.end()] for match in _WORD.finditer(pattern_text)], text)
    words, spaces = aligned or ((), ())
    return Sentence(words, spaces, uid=uid, language=language, source="plain text")
