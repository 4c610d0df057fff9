"""Readers of treebanks: bracketed trees, CoNLL-U, and PropBank frames joined to both."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pelocality.corpora._corpus import Corpus
from pelocality.corpora._records import (
    Record,
    brief,
    checked,
    existing,
    field,
    json_lines,
    json_object,
    name_in,
    text_lines,
)
from pelocality.corpora.constituents import parse_bracketed
from pelocality.corpora.sentence import Argument, Constituents, Dependencies, Dropped, Frame, Sentence, language_code
from pelocality.corpora.spacing import align

logger = logging.getLogger(__name__)
T = TypeVar("T")


def read_trees(path: str | Path, language: str = "en") -> Corpus[Sentence]:
    r"""Read bracketed trees, Penn Treebank style, one after the other, on one line or over many.

    Args:
        path: The file, UTF-8; ``.gz`` is read too.
        language: ISO code of its language.

    Returns:
        The sentences with their constituents, read lazily. Bracketed files keep no spaces: text comes back by
        the rules of English treebanks (``spacing`` is ``"rule"``). Trees without words are dropped and counted.

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
        functools.partial(_read_bracketed, language=language_code(language)),
    )


def _bracketed_records(path: Path) -> Iterator[Record]:
    depth, first, held = 0, 0, ""
    number = 0
    for number, line in text_lines(path):
        opened = 0
        for part in re.split(r"([()])", line):
            if depth == 0 and not part.strip():
                continue
            if depth == 0 and part != "(":
                raise ValueError(f"{path}:{number}: expected a tree to open with '(', got {part.strip()[:40]!r}")
            if depth == 0:
                first, held, opened = number, "", opened + 1
                place = number if opened == 1 else f"{number}.{opened}"
            held += part
            depth += (part == "(") - (part == ")")
            if depth == 0:
                yield place, held
    if depth:
        raise ValueError(f"{path}:{first}: the tree that opens here is not closed at the end, line {number}")


def _read_bracketed(bracketed: str, where: str, language: str) -> Sentence | Dropped:
    words, constituents = parse_bracketed(bracketed, where)
    if not words:
        return Dropped("tree without words")
    return Sentence(words, uid=where, language=language, constituents=constituents, source=where)


def read_conllu(path: str | Path, language: str | None = None) -> Corpus[Sentence]:
    r"""Read a CoNLL-U treebank (Universal Dependencies) with the conllu package.

    Words are the numbered ones: words written as one (``1-2``) become contractions of the sentence, empty
    nodes (``1.1``) are not words and are left out.

    Args:
        path: The file, UTF-8; ``.gz`` is read too.
        language: ISO code. None takes it from a file name such as ``de_pud-ud-test.conllu`` or
            ``de-ud-test.conllu``, and warns where the name tells none: rules of one language then stay out.

    Returns:
        The sentences with dependencies, tags and features, read lazily, spaced as ``# text`` and
        ``SpaceAfter`` say.

    Raises:
        FileNotFoundError: Where there is no such file.
        ValueError: While reading, with file and line, where a sentence is malformed, or where its heads make no
            tree: no root, or words that are their own heads, directly or in a circle.

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
        prefix = re.match(r"([a-z]{2,3})(?:_|-ud-)", path.name, re.IGNORECASE)
        language = prefix[1] if prefix else ""
        if not prefix:
            logger.warning("%s: the name tells no language, and rules of one language stay out; pass language=", path)
    return Corpus(
        str(path),
        functools.partial(_conllu_records, path),
        functools.partial(_read_conllu_block, language=language_code(language)),
    )


def _conllu_records(path: Path) -> Iterator[Record]:
    first, block = 0, ""
    for number, line in text_lines(path):
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

    if all(line.startswith("#") for line in block.splitlines()):
        raise ValueError("a sentence must have words, here are comments alone")
    try:
        tokens = conllu.parse(block)[0]
    except (ParseException, IndexError) as error:
        raise ValueError(f"not a CoNLL-U sentence: {error}") from error
    for token in tokens:
        if len(token) != 10:
            raise ValueError(f"word {token.get('id')} must have the 10 columns of CoNLL-U, got {len(token)}")
    words = [token for token in tokens if isinstance(token["id"], int)]
    if not words or [word["id"] for word in words] != list(range(1, len(words) + 1)):
        raise ValueError(f"words must be numbered 1, 2, 3 ..., got {brief([word['id'] for word in words])}")
    heads = [checked(word["head"], f"the head of word {word['id']}", int, "a whole number") for word in words]
    _check_heads(heads)
    spaces = ["" if (word["misc"] or {}).get("SpaceAfter") == "No" else " " for word in words]
    contractions = []
    for token in tokens:
        if isinstance(token["id"], tuple) and token["id"][1] == "-":
            first, _, last = token["id"]
            if not 1 <= first < last <= len(words):
                raise ValueError(f"words written as one must be some of the {len(words)} words, got {first}-{last}")
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


def _check_heads(heads: Sequence[int]) -> None:
    """Refuse heads that make no tree: every word must lead to a root."""
    n = len(heads)
    for word, head in enumerate(heads, 1):
        if not 0 <= head <= n:
            raise ValueError(f"the head of word {word} must lie in 0..{n}, got {head}")
        if head == word:
            raise ValueError(f"word {word} must not be its own head; a root has the head 0")
    if 0 not in heads:
        raise ValueError("one word must be the root, with the head 0; none is")
    rooted = {0}
    for word in range(1, n + 1):
        path: list[int] = []
        while word not in rooted and word not in path:
            path.append(word)
            word = heads[word - 1]
        if word not in rooted:
            raise ValueError(f"every word must lead to the root, the heads of word {word} run in a circle")
        rooted.update(path)


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
        path: The file, UTF-8; ``.gz`` is read too.
        language: ISO code of its language.

    Returns:
        The sentences with frames and whatever trees the line has, read lazily. A tree that does not parse,
        or that does not fit the tokens, costs its sentence the constituents, with a warning, not its place.
        Lines whose ``text`` and words disagree are dropped and counted: a text made up from the words would
        not be the corpus's.

    Raises:
        FileNotFoundError: Where there is no such file.
        ValueError: While reading, with file and line, where a line is malformed.
    """
    path = existing(path)
    return Corpus(
        str(path),
        functools.partial(json_lines, path),
        functools.partial(_read_frames_line, language=language_code(language)),
    )


def _read_frames_line(line: str, where: str, language: str) -> Sentence | Dropped:
    row = json_object(line)
    tokens = _listed(row, "tokens", str) if row.get("tokens") is not None else None
    words, constituents = _frames_tree(field(row, "tree", str, "a bracketed tree"), tokens, where)
    found = None
    if row.get("text") is not None:
        found = align(words, field(row, "text", str, "a text"))
        if found is None:
            return Dropped("text and words disagree")
    dependencies = None
    if row.get("head"):
        heads = _listed(row, "head", int)
        _check_heads(heads)
        upos = _listed(row, "upos", str) if row.get("upos") else None
        dependencies = Dependencies(heads, _listed(row, "deprel", str), where, upos)
    frames = field(row, "frames", list, "a list of objects")
    return Sentence(
        found[0] if found else words,
        found[1] if found else (),
        uid=name_in(row, "id"),
        language=language,
        constituents=constituents,
        dependencies=dependencies,
        frames=tuple(_frame(frame, where) for frame in frames),
        source=where,
    )


def _frames_tree(tree: str, tokens: tuple[str, ...] | None, where: str) -> tuple[tuple[str, ...], Constituents | None]:
    """Give the words, and the constituents where the tree has them over the same words."""
    try:
        words, constituents = parse_bracketed(tree, where)
    except ValueError as error:
        if tokens is None:
            raise ValueError(f"field 'tree' does not parse: {error}") from error
        words, constituents = (), None
    if tokens is None or (len(words) == len(tokens) and align(words, "".join(tokens)) is not None):
        return words if tokens is None else tokens, constituents
    logger.warning("%s: the tree does not fit the tokens; the sentence is read without it", where)
    return tokens, None


def _listed(row: Mapping[str, Any], name: str, kind: type[T]) -> tuple[T, ...]:
    plural = "a list of texts" if kind is str else "a list of whole numbers"
    return tuple(checked(item, f"field {name!r}", kind, plural) for item in field(row, name, list, plural))


def _frame(frame: Any, where: str) -> Frame:
    checked(frame, "a frame", dict, "an object with roleset and args")
    roleset = field(frame, "roleset" if "roleset" in frame or "r" not in frame else "r", str, "a text")
    name = "args" if "args" in frame or "a" not in frame else "a"
    arguments = []
    for argument in field(frame, name, list, "a list of [role, start, end]"):
        if [type(part) for part in (argument if isinstance(argument, list) else ())] != [str, int, int]:
            raise ValueError(f"an argument of {roleset} must be [role, start, end], got {brief(argument)}")
        arguments.append(Argument(*argument))
    verbs = [(a.start, a.end) for a in arguments if a.role == "V"]
    if len(verbs) != 1:
        raise ValueError(f"a frame must have one argument with the role V, {roleset} has {len(verbs)}")
    return Frame(roleset, verbs[0], tuple(a for a in arguments if a.role != "V"), f"gold frames of {where}")
