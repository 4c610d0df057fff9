"""Readers of treebanks: bracketed trees, CoNLL-U, and PropBank frames joined to both."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pelocality.corpora.corpus import Corpus, Record, existing, json_lines, json_object
from pelocality.trees import Argument, Dependencies, Frame, Sentence, align, parse_bracketed

logger = logging.getLogger(__name__)


def read_trees(path: str | Path, language: str = "en") -> Corpus[Sentence]:
    r"""Read bracketed trees, Penn Treebank style, one after the other, on one line or over many.

    Args:
        path: The file, UTF-8.
        language: ISO code of its language.

    Returns:
        The sentences with their constituents, read lazily. Bracketed files keep no spaces: text comes back by
        the rules of English treebanks (``spacing`` is ``"rule"``).

    Raises:
        FileNotFoundError: Where there is no such file.
        ValueError: While reading, with file and line, where brackets do not match.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "toy.mrg")
        ...     _ = file.write_text("( (S (NP (DT A) (NN cat))\n     (VP (VBZ sleeps)) (. .)) )")
        ...     [sentence.text for sentence in read_trees(file)]
        ['A cat sleeps.']
    """
    path = existing(path)
    return Corpus(
        str(path),
        functools.partial(_bracketed_records, path),
        functools.partial(_read_bracketed, language=language),
    )


def _bracketed_records(path: Path) -> Iterator[Record]:
    depth, first, held = 0, 0, ""
    number = 0
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            for part in re.split(r"([()])", line):
                if depth == 0 and not part.strip():
                    continue
                if depth == 0 and part != "(":
                    raise ValueError(f"{path}:{number}: expected a tree to open with '(', got {part.strip()[:40]!r}")
                if depth == 0:
                    first, held = number, ""
                held += part
                depth += (part == "(") - (part == ")")
                if depth == 0:
                    yield first, held
    if depth:
        raise ValueError(f"{path}:{first}: the tree that opens here is not closed at the end, line {number}")


def _read_bracketed(bracketed: str, where: str, language: str) -> Sentence:
    words, constituents = parse_bracketed(bracketed, where)
    return Sentence(words, uid=where, language=language, constituents=constituents, source=where)


def read_conllu(path: str | Path, language: str | None = None) -> Corpus[Sentence]:
    r"""Read a CoNLL-U treebank (Universal Dependencies) with the conllu package.

    Words are the numbered ones: words written as one (``1-2``) become contractions of the sentence, empty
    nodes (``1.1``) are not words and are left out.

    Args:
        path: The file, UTF-8.
        language: ISO code. None takes it from a file name such as ``de_pud-ud-test.conllu``.

    Returns:
        The sentences with dependencies, tags and features, read lazily, spaced as ``# text`` and
        ``SpaceAfter`` say.

    Raises:
        FileNotFoundError: Where there is no such file.
        ValueError: While reading, with file and line, where a sentence is malformed.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "de_toy.conllu")
        ...     rows = ["1-2 am _ _ _ _ _ _ _ _", "1 an _ ADP _ _ 3 case _ _", "2 dem _ DET _ _ 3 det _ _"]
        ...     rows += ["3 See _ NOUN _ _ 0 root _ SpaceAfter=No", "4 . _ PUNCT _ _ 3 punct _ _"]
        ...     _ = file.write_text("\n".join(row.replace(" ", "\t") for row in rows) + "\n\n")
        ...     [(s.language, s.words, s.text) for s in read_conllu(file)]
        [('de', ('an', 'dem', 'See', '.'), 'am See.')]
    """
    path = existing(path)
    if language is None:
        prefix = re.match(r"([a-z]{2,3})_", path.name)
        language = prefix[1] if prefix else ""
    return Corpus(
        str(path),
        functools.partial(_conllu_records, path),
        functools.partial(_read_conllu_block, language=language),
    )


def _conllu_records(path: Path) -> Iterator[Record]:
    first, block = 0, ""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                first = first if block else number
                block += line
            elif block:
                yield first, block
                block = ""
    if block:
        yield first, block


def _read_conllu_block(block: str, where: str, language: str) -> Sentence:
    import conllu
    from conllu.exceptions import ParseException

    try:
        tokens = conllu.parse(block)[0]
    except (ParseException, IndexError) as error:
        raise ValueError(f"not a CoNLL-U sentence: {error}") from error
    words = [token for token in tokens if isinstance(token["id"], int)]
    heads = [word["head"] for word in words]
    if [word["id"] for word in words] != list(range(1, len(words) + 1)) or None in heads:
        raise ValueError("words must be numbered 1, 2, 3 ... and each must have a head")
    spaces = ["" if (word["misc"] or {}).get("SpaceAfter") == "No" else " " for word in words]
    contractions = []
    for token in tokens:
        if isinstance(token["id"], tuple) and token["id"][1] == "-":
            first, _, last = token["id"]
            contractions.append((first - 1, last, token["form"]))
            spaces[first - 1 : last] = [""] * (last - first) + [
                "" if (token["misc"] or {}).get("SpaceAfter") == "No" else " "
            ]
    spaces[-1] = ""
    text = tokens.metadata.get("text")
    if text:
        spaces = _spaces_from_text([word["form"] for word in words], contractions, text) or spaces
    return Sentence(
        tuple(word["form"] for word in words),
        tuple(spaces),
        uid=tokens.metadata.get("sent_id") or where,
        language=language,
        contractions=tuple(contractions),
        dependencies=Dependencies(
            tuple(heads),
            tuple(word["deprel"] or "_" for word in words),
            where,
            tuple(word["upos"] or "_" for word in words),
            tuple(dict(word["feats"] or {}) for word in words),
        ),
        source=where,
    )


def _spaces_from_text(
    forms: Sequence[str], contractions: Sequence[tuple[int, int, str]], text: str
) -> list[str] | None:
    """Read the exact white space off the text (SpaceAfter tells less); None where they disagree."""
    opening = {start: (end, form) for start, end, form in contractions}
    written, ends, i = [], [], 0
    while i < len(forms):
        end, form = opening.get(i, (i + 1, forms[i]))
        written.append(form)
        ends.append(end)
        i = end
    found = align(written, text)
    if found is None:
        return None
    spaces = [""] * len(forms)
    for end, space in zip(ends, found[1], strict=True):
        spaces[end - 1] = space
    return spaces


def read_frames(path: str | Path, language: str = "en") -> Corpus[Sentence]:
    """Read PropBank frames joined to trees, one JSON object a line.

    Fields: ``id``; ``tree`` (bracketed); ``frames``, each with ``roleset`` and ``args`` (or ``r`` and ``a``),
    arguments as ``[role, start, end]`` over words, end-exclusive, the predicate's own words under the role
    ``V``; and, where known, ``text``, ``tokens``, ``head``, ``deprel``, ``upos``.

    Args:
        path: The file, UTF-8.
        language: ISO code of its language.

    Returns:
        The sentences with frames and whatever trees the line has, read lazily. A tree that does not parse,
        or that does not fit the tokens, costs its sentence the constituents, with a warning, not its place.

    Raises:
        FileNotFoundError: Where there is no such file.
        ValueError: While reading, with file and line, where a line is malformed.
    """
    path = existing(path)
    return Corpus(
        str(path),
        functools.partial(json_lines, path),
        functools.partial(_read_frames_line, language=language),
    )


def _read_frames_line(line: str, where: str, language: str) -> Sentence:
    row = json_object(line)
    constituents, tokens = None, row.get("tokens")
    try:
        words, constituents = parse_bracketed(row["tree"], where)
    except ValueError as error:
        if tokens is None:
            raise ValueError(f"the tree does not parse ({error})") from error
        words = ()
    if tokens is not None and len(words) != len(tokens):
        logger.warning("%s: the tree does not fit the tokens; the sentence is read without it", where)
        constituents = None
    words = tuple(tokens) if tokens is not None else words
    found = align(words, row["text"]) if row.get("text") else None
    dependencies = None
    if row.get("head"):
        upos = tuple(row["upos"]) if row.get("upos") else None
        dependencies = Dependencies(tuple(row["head"]), tuple(row["deprel"]), where, upos)
    return Sentence(
        found[0] if found else words,
        found[1] if found else (),
        uid=row["id"],
        language=language,
        constituents=constituents,
        dependencies=dependencies,
        frames=tuple(_frame(frame, where) for frame in row["frames"]),
        source=where,
    )


def _frame(frame: Mapping[str, Any], where: str) -> Frame:
    roleset = frame["roleset"] if "roleset" in frame else frame["r"]
    arguments = [Argument(*argument) for argument in (frame["args"] if "args" in frame else frame["a"])]
    verbs = [(a.start, a.end) for a in arguments if a.role == "V"]
    if len(verbs) != 1:
        raise ValueError(f"a frame must have one argument with the role V, {roleset} has {len(verbs)}")
    return Frame(roleset, verbs[0], tuple(a for a in arguments if a.role != "V"), f"gold frames of {where}")
