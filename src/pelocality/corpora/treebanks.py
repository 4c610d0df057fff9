"""Readers of treebanks: bracketed trees, CoNLL-U, and JSON lines with frames and trees."""

import itertools
import logging
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from pelocality.corpora._records import Record, field, identifier, json_lines, json_object, text_lines
from pelocality.corpora.constituents import parse_bracketed
from pelocality.corpora.corpus import Corpus, file_corpus
from pelocality.corpora.sentence import (
    Argument,
    Constituents,
    Dependencies,
    Dropped,
    Frame,
    Sentence,
    check_apart,
    language_code,
    surface_forms,
)
from pelocality.corpora.spacing import align

logger = logging.getLogger(__name__)
_TEN = "ID FORM LEMMA UPOS XPOS FEATS HEAD DEPREL DEPS MISC"
_OF_FILE = re.compile(r"# *(?:global\.columns|udpipe_model) *=.*")  # comments that hold for all that follows
_NAMES = re.compile(r"# *global\.columns *=(.*)")
_TEXT = re.compile(r"(?m)^# *(?:sentence-)?text *[=:](.*)")
_SENSE = re.compile(r"_|[^\d\s]\S*\.\w+")


def read_trees(path: str | Path, language: str = "en") -> Corpus[Sentence]:
    r"""Read bracketed trees, Penn Treebank style, one after the other, on one line or over many.

    Args:
        path: The file, UTF-8, also compressed.
        language: ISO code of its language.

    Returns:
        The sentences with their constituents, read lazily. Bracketed files do not store spaces: the text is guessed
        by rules for English treebanks (``spacing`` is ``"rule"``). Trees without words are dropped and counted. Words
        of IcePaHC lose their lemmas (``og-og``), and their halves are joined (``tungur$ $nar``).

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: While reading, with file and line: brackets do not match.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "toy.mrg")
        ...     _ = file.write_text("( (S (NP (DT A) (NN cat))\n     (VP (VBZ sleeps)) (. .)) )")
        ...     [sentence.text for sentence in read_trees(file)]
        ['A cat sleeps.']
    """
    return file_corpus(path, _bracketed_records, partial(_read_bracketed, language=language_code(language)))


def _bracketed_records(path: Path) -> Iterator[Record]:
    depth = 0
    for number, line in text_lines(path):
        opened = 0
        for part in re.split(r"([()])", line):
            if depth == 0:
                if not part.strip():
                    continue
                opened += 1
                place, tree = (number if opened == 1 else f"{number}.{opened}"), ""
            tree += part
            depth += (part == "(") - (part == ")")
            if depth == 0:
                yield place, tree
    if depth:
        yield place, tree  # which is refused where it is read, as is text outside of brackets


def _read_bracketed(bracketed: str, where: str, language: str) -> Sentence | Dropped:
    words, constituents = parse_bracketed(bracketed, where)
    if not words:
        return Dropped("tree without words")
    return Sentence(words, uid=where, language=language, constituents=constituents, source=where)


def read_conllu(path: str | Path, language: str | None = None) -> Corpus[Sentence]:
    r"""Read a CoNLL-U treebank (Universal Dependencies) with the conllu package.

    Words are the numbered lines; ranges (``1-2``) become multiword tokens of the sentence, and empty nodes (``1.1``)
    are left out. In CoNLL-U Plus (``.conllup``, ``.cupt``), ``# global.columns = ID FORM ...`` names the columns of all
    sentences that follow, in any order. ID and FORM must be among them, and DEPREL if HEAD is; columns of other
    projects are not read.

    Universal Propositions become frames: ``UP:PRED`` with ``UP:ARGSPANS`` or ``UP:ARGHEADS`` of version 2 (whose files
    must be merged with their treebanks), and the columns after the tenth, or after DEPREL, of version 1. Roles have the
    names of PropBank (``ARG0`` for ``A0``). An argument of which only the head is known is the phrase of this word
    without the clause of the predicate.

    Args:
        path: The file, UTF-8, also compressed.
        language: ISO code. None takes it from a file name in the form of Universal Dependencies, such as
            ``de_pud-ud-test.conllu`` or ``de-up-test.conllu``, and warns of any other name: rules of one language
            then do not apply.

    Returns:
        The sentences with dependencies, tags and features, read lazily, spaced according to ``# text`` and
        ``SpaceAfter``, or by rules for English where there is neither a text nor the column MISC. A sentence in which
        no word has a head (a file with tags only) has no dependencies. Those of a file with ``# udpipe_model`` are
        automatic. Sentences whose ``# text`` is not that of their words, comments without words, and sentences whose
        columns of arguments are not those of their predicates are dropped and counted.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: While reading, with file and line: a sentence is malformed, a column is missing, its heads do not
            make a tree (no root, or a cycle), or the treebank withholds its words (each is ``_``).

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "de_toy-ud-test.conllu")
        ...     rows = ["1-2 am _ _ _ _ _ _ _ _", "1 an _ ADP _ _ 3 case _ _", "2 dem _ DET _ _ 3 det _ _"]
        ...     rows += ["3 See _ NOUN _ _ 0 root _ SpaceAfter=No", "4 . _ PUNCT _ _ 3 punct _ _"]
        ...     _ = file.write_text("\n".join(row.replace(" ", "\t") for row in rows) + "\n\n")
        ...     [(s.language, s.words, s.text) for s in read_conllu(file)]
        [('de', ('an', 'dem', 'See', '.'), 'am See.')]
    """
    if language is None:
        # Other names may begin with a code by chance: "no_labels.conllu", "it_works.conllu".
        prefix = re.match(r"([a-z]{2,3})(?:_[a-z0-9]+)?-u[dp]-", Path(str(path)).name, re.IGNORECASE)
        language = prefix[1] if prefix else ""
        if not language:
            logger.warning("%s: no language in the name, so rules of one language do not apply; pass language=", path)
    return file_corpus(path, _conllu_records, partial(_read_conllu_block, language=language_code(language)))


def _conllu_records(path: Path) -> Iterator[Record]:
    header = ""
    for has_text, lines in itertools.groupby(text_lines(path), key=lambda line: bool(line[1].strip())):
        if has_text:
            numbers, texts = zip(*lines, strict=True)
            block = "\n".join(map(str.rstrip, texts))
            header = "\n".join(_OF_FILE.findall(block)) or header
            yield numbers[0], f"{header}\n{block}"


def _read_conllu_block(block: str, where: str, language: str) -> Sentence | Dropped:
    tokens = _checked_tokens(block)
    if isinstance(tokens, Dropped):
        return tokens
    words = [token for token in tokens if isinstance(token["id"], int)]
    ranges = [token for token in tokens if isinstance(token["id"], tuple) and token["id"][1] == "-"]
    forms = tuple(word["form"] for word in words)
    upos = tuple(word.get("upos") or "_" for word in words)
    # A text may contain a line of underscores: it is tagged as a sign, or is the only word of its sentence.
    if not "".join(forms).strip("_") and not {"PUNCT", "SYM"}.issuperset(upos) and upos != ("X",):
        advice = "get its text as the README of the treebank says"
        raise ValueError(f"words must be those of a text, each of the {len(forms)} is withheld ('_'); {advice}")
    dependencies = None
    if any(word.get("head") is not None for word in words):
        heads, relations = zip(*((word["head"], word["deprel"] or "_") for word in words), strict=True)
        features = tuple(dict(word.get("feats") or {}) for word in words)
        xpos = tuple(word.get("xpos") or "_" for word in words)
        automatic = "udpipe_model" in tokens.metadata
        dependencies = Dependencies(heads, relations, where, upos, features, automatic, xpos)
    multiword_tokens = tuple((token["id"][0] - 1, token["id"][2], token["form"]) for token in ranges)
    check_apart(multiword_tokens)
    surface = list(surface_forms(forms, multiword_tokens, 0, len(words)))
    spaces = _spaces(surface, words, ranges, "".join(_TEXT.findall(block)[:1]))
    if spaces is None:
        return Dropped("text and words disagree")
    uid, frames = tokens.metadata.get("sent_id") or where, _propositions(words, dependencies, where)
    return Sentence(forms, spaces, uid, language, multiword_tokens, None, dependencies, frames, where)


def _checked_tokens(block: str) -> Any:
    """Return the lines of a sentence as conllu reads them, with its comments, or why it is left out."""
    import conllu
    from conllu.exceptions import ParseException

    lines = [line for line in block.split("\n") if line and not line.startswith("#")]
    if not lines:
        return Dropped("comments without words")
    rows = [re.split(r"\t|  +", line) for line in lines]
    columns = _columns(block, rows)
    if columns is None:
        return Dropped("columns of arguments are not those of the predicates")
    for line, row in zip(lines, rows, strict=True):
        if "  " in line.rpartition("\t")[0] or len(row) != len(columns):  # the conllu package reads two spaces as a tab
            raise ValueError(f"a row must have {len(columns)} columns, and no two spaces in a cell, got {brief(line)}")
    try:
        tokens = conllu.parse(block, columns)[0]
    except (ParseException, IndexError) as error:
        raise ValueError(f"not a CoNLL-U sentence: {error}") from error
    numbers = [token["id"] for token in tokens if isinstance(token["id"], int)]
    if not numbers or numbers != list(range(1, len(numbers) + 1)):
        raise ValueError(f"words must be numbered 1, 2, 3 ..., got {brief(numbers)}")
    return tokens


def _columns(block: str, rows: list[list[str]]) -> list[str] | None:
    """Return the names of the columns, None where those of frames do not fit their predicates."""
    named = _NAMES.search(block)
    columns = (named[1] if named else _TEN).lower().split()
    several = len(set(columns)) < len(columns)
    if several or not {"id", "form"} <= set(columns) or ("head" in columns) != ("deprel" in columns):
        rule = "ID and FORM, and HEAD with DEPREL or neither, each once"
        raise ValueError(f"columns must have {rule}, got {columns}; merge a file of frames with its treebank")
    lengths = set(map(len, rows))
    if named or min(lengths) < 10 or max(lengths) == 10:
        return columns
    # Universal Propositions 1: a mark and the sense replace DEPS and MISC; in English, the sense follows MISC.
    more = [*columns[:8], "mark", "sense"] if "Y" in {row[8] for row in rows} else [*columns, "sense"]
    senses = [row[len(more) - 1] for row in rows if len(row) >= len(more)]
    if not all(map(_SENSE.fullmatch, senses)):
        return columns
    more += map(str, range(len(senses) - senses.count("_")))  # a column of arguments for each predicate
    return more if lengths == {len(more)} else None


def _propositions(words: list[Any], dependencies: Dependencies | None, where: str) -> tuple[Frame, ...] | None:
    """Return the frames of Universal Propositions, None where there is no column of predicates."""
    name = next((name for name in ("sense", "up:pred") if name in words[0]), None)
    frames: list[Frame] = []
    for verb, word in enumerate(words if name else ()):
        if word[name] == "_":
            continue
        places = [(each.get(str(len(frames))), str(each["id"])) for each in words]  # of the first version
        if name == "up:pred":  # A0:1-3|A1:5-9, or A0:2|A1:7 by heads
            cells = (word.get(each, "_") for each in ("up:argspans", "up:argheads"))
            cell = next((cell for cell in cells if cell != "_"), "_")
            places = [each.rpartition(":")[::2] for each in cell.split("|") if each != "_"]
        roles = [(re.sub(r"\bA(?=[\dM])", "ARG", role), place) for role, place in places if role not in ("_", "V")]
        arguments = tuple(Argument(role, *_span(place, verb, dependencies)) for role, place in roles)
        frames.append(Frame(word[name], (verb, verb + 1), arguments, f"frames of {where}"))
    return tuple(frames) if name else None


def _span(place: str, verb: int, dependencies: Any) -> tuple[int, int]:
    """Return the span of words 5-9, or the phrase of a head, without the verb's clause (the man who sleeps)."""
    first, _, last = place.partition("-")
    if last:
        return int(first) - 1, int(last)
    head = int(first) - 1
    inside = dependencies.subtree(head)
    if head != verb and verb in inside:
        inside -= dependencies.subtree(verb)
    before = next(k for k in range(head, -2, -1) if k not in inside)
    return before + 1, next(k for k in itertools.count(head) if k not in inside)


def _spaces(surface: list[Any], words: list[Any], ranges: list[Any], text: str) -> tuple[str, ...] | None:
    """Return the white space after each word, () if unknown; None where the words are not those of the text."""
    aligned = align([form for _, _, form in surface], text)
    if aligned is None and (text or "misc" not in words[0]):
        return None if text else ()
    of_range = {token["id"][0] - 1: token for token in ranges}
    spaces = [""] * len(words)
    for k, (first, last, _) in enumerate(surface):
        misc = of_range.get(first, words[first]).get("misc") or {}
        # "# text" has the exact white space, SpaceAfter only whether there is any
        spaces[last - 1] = aligned[1][k] if aligned else "" if misc.get("SpaceAfter") == "No" else " "
    spaces[-1] = ""
    return tuple(spaces)


def read_frames(path: str | Path, language: str = "en") -> Corpus[Sentence]:
    """Read PropBank frames with trees, one JSON object a line.

    Fields: ``id``; ``tree`` (bracketed) or ``tokens``, or both; ``frames``, each with ``roleset`` and ``args`` (or
    ``r`` and ``a``), arguments as ``[role, start, end]`` over words, end-exclusive, the predicate's own words under the
    role ``V``; and, where known, ``text``, ``head``, ``deprel``, ``upos``.

    Args:
        path: The file, UTF-8, also compressed.
        language: ISO code of its language.

    Returns:
        The sentences with their frames and trees, read lazily. A sentence whose tree does not parse or does not fit
        the tokens is read without constituents, with a warning. Lines whose ``text`` and words disagree are dropped
        and counted: a text made from the words would not be that of the corpus.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: While reading, with file and line: a line is malformed.

    Examples:
        >>> import json, tempfile
        >>> frame = {"roleset": "chase.01", "args": [["ARG0", 0, 1], ["V", 1, 2], ["ARG1", 2, 3]]}
        >>> row = {"id": "1", "tree": "(S (NP (NNS Dogs)) (VP (VBP chase) (NP (NNS cats))))", "frames": [frame]}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "toy.jsonl")
        ...     _ = file.write_text(json.dumps(row))
        ...     [sentence.frames[0].arguments[0] for sentence in read_frames(file)]
        [Argument(role='ARG0', start=0, end=1)]
    """
    return file_corpus(path, json_lines, partial(_read_frames_line, language=language_code(language)))


def _read_frames_line(line: str, where: str, language: str) -> Sentence | Dropped:
    row = json_object(line)
    tokens = tuple(row["tokens"]) if row.get("tokens") is not None else None
    words, constituents = _frames_tree(row, tokens, where)
    spaces: tuple[str, ...] = ()
    if row.get("text") is not None:
        aligned = align(words, field(row, "text"))
        if aligned is None:
            return Dropped("text and words disagree")
        words, spaces = aligned
    dependencies = None
    if row.get("head"):
        upos = tuple(row["upos"]) if row.get("upos") else None
        dependencies = Dependencies(tuple(row["head"]), tuple(field(row, "deprel", list)), where, upos)
    frames = tuple(_frame_of_fields(frame, where) for frame in field(row, "frames", list))
    return Sentence(words, spaces, identifier(row, "id"), language, (), constituents, dependencies, frames, where)


def _frames_tree(row: Any, tokens: tuple[str, ...] | None, where: str) -> tuple[tuple[str, ...], Constituents | None]:
    """Return the words, and the constituents if there is a tree whose words are the tokens."""
    try:
        words, constituents = parse_bracketed(field(row, "tree"), where)
    except ValueError:
        if tokens is None:
            raise
    else:
        if tokens is None or (len(words) == len(tokens) and align(words, "".join(tokens)) is not None):
            return tokens or words, constituents
    if row.get("tree") is not None:
        logger.warning("%s: the tree does not fit the tokens; the sentence is read without it", where)
    return tokens, None


def _frame_of_fields(frame: Any, where: str) -> Frame:
    frame = {"roleset": frame.get("r"), "args": frame.get("a"), **frame}
    roleset = field(frame, "roleset")
    arguments = [Argument(*argument) for argument in field(frame, "args", list)]
    verbs = [(a.start, a.end) for a in arguments if a.role == "V"]
    if len(verbs) != 1:
        raise ValueError(f"a frame must have one argument with the role V, {roleset} has {len(verbs)}")
    return Frame(roleset, verbs[0], tuple(a for a in arguments if a.role != "V"), f"gold frames of {where}")
