"""The reader of PropBank's own files, and of those of CoNLL-2012: a word a line, trees and frames in columns."""

import functools
import itertools
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from pelocality.corpora._records import Record, text_lines
from pelocality.corpora.constituents import parse_bracketed
from pelocality.corpora.corpus import Corpus, check_rows, file_corpus
from pelocality.corpora.sentence import Argument, Dropped, Frame, Sentence, language_code

Rows = list[list[str]]  # the cells of each word of a sentence
Block = tuple[Rows, slice, Sentence | None]  # its rows, which columns are frames, and the sentence with its words
_WORD, _TAG, _TREE, _LEMMA, _ROLESET, _FRAMES = 3, 4, 5, 6, 7, 8  # columns of PropBank
_CONLL_FRAMES = 11  # the first of CoNLL-2012's columns of frames, whose last column is coreference
_WITHHELD = "[WORD]"
_CELL = re.compile(r"(?:\([^()*\s]+)*\*\)*")
_COLUMNS = "8 columns of PropBank, or 12 of CoNLL-2012 after '#begin document', and one for each frame"


def read_propbank(path: str | Path, words: Iterable[Sentence] | None = None, language: str = "en") -> Corpus[Sentence]:
    r"""Read one document of PropBank (``.gold_skel``, ``.gold_conll``) or of CoNLL-2012 (``.v4_gold_conll``).

    The files of https://github.com/propbank/propbank-release have trees and frames without words (``[WORD]``). The
    words then come from a treebank of the same document: ``words`` are its sentences, aligned by their Penn Treebank
    tags, also where the treebank divides the text into other sentences.

    Args:
        path: The file, UTF-8, also compressed.
        words: The sentences of the document with their tags, from ``read_conllu`` or ``read_trees``. None for a file
            that has words.
        language: ISO code of its language.

    Returns:
        The sentences with frames and trees, read lazily. Trees and frames of a file such as ``.v4_auto_conll`` are
        automatic. A sentence without a tree (``*`` in each row, or under TOP alone) has no constituents. A sentence
        that is one of ``words`` keeps its text, dependencies and uid. Sentences whose words are not found, whose rows
        differ in length, or whose brackets make no tree are dropped and counted.

    Raises:
        FileNotFoundError: The file does not exist.
        TypeError: ``words`` can be read only once.
        ValueError: While reading, with file and line: a row has too few columns or an unknown cell, the words are
            withheld and ``words`` is None, or a sentence of ``words`` has no tags.

    Examples:
        >>> import tempfile
        >>> rows = ["NNS (TOP(S(NP*) - - (ARG0*)", "VBP (VP* chase chase.01 (V*)", "NNS (NP*)))) - - (ARG1*)"]
        >>> _, tree = parse_bracketed("(S (NP (NNS Dogs)) (VP (VBP chase) (NP (NNS cats))))", "made up")
        >>> words = [Sentence(("Dogs", "chase", "cats"), constituents=tree)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "toy.gold_skel")
        ...     _ = file.write_text("".join(f"toy 0 {i} [WORD] {row}\n" for i, row in enumerate(rows)))
        ...     [(s.text, s.frames[0].arguments[0]) for s in read_propbank(file, words)]
        [('Dogs chase cats', Argument(role='ARG0', start=0, end=1))]
    """
    if words is not None:
        check_rows("words", words, "give a corpus or a list of sentences")
    blocks = functools.partial(_sentence_blocks, words=words)
    automatic = re.search(r"(?:^|[._])auto_", Path(path).name) is not None  # such as .v4_auto_conll
    read = functools.partial(_read_block, language=language_code(language), automatic=automatic)
    return file_corpus(path, blocks, read)


def _sentence_blocks(path: Path, words: Iterable[Sentence] | None) -> Iterator[Record]:
    """Yield the number of the first line of each sentence, and the sentence."""
    read: list[tuple[int, Rows, slice]] = []
    frames = slice(_FRAMES, None)
    for comment, group in itertools.groupby(text_lines(path), key=lambda line: (line[1].strip() or "\n")[0] in "#\n"):
        numbers, texts = zip(*group, strict=True)
        if comment:
            frames = slice(_CONLL_FRAMES, -1) if any(text.startswith("#begin") for text in texts) else frames
        else:
            read.append((numbers[0], [text.split() for text in texts], frames))
    sentences: list[Sentence | None] = [None] * len(read)
    if words is not None:
        sentences = [each or Sentence(()) for each in _aligned(words, [rows for _, rows, _ in read])]
    yield from ((line, (*block, sentence)) for (line, *block), sentence in zip(read, sentences, strict=True))


def _aligned(words: Iterable[Sentence], sentences: list[Rows]) -> list[Sentence | None]:
    """Return the words of each sentence, None where they match none: whole sentences first, then words in a row."""
    ours = list(words)
    tags = [_penn_tags(sentence) for sentence in ours]
    theirs = [tuple(row[_TAG] if len(row) > _TAG else "" for row in rows) for rows in sentences]
    aligned: list[Sentence | None] = [None] * len(sentences)
    for other, place in _matched_places(tags, theirs).items():
        if len(tags[place]) == len(theirs[other]):
            aligned[other] = ours[place]
    if None in aligned:
        forms = [form for sentence in ours for form in sentence.words]
        edges = {0, *itertools.accumulate(map(len, tags))}
        places = _matched_places([*itertools.chain(*tags)], [*itertools.chain(*theirs)])
        last = 0
        for number, rows in enumerate(sentences):
            first, last = last, last + len(rows)
            start = places.get(first, -1)
            end = start + len(rows)
            whole = [places.get(place) for place in range(first, last)] == [*range(start, end)]
            # One of the two may divide a word at an edge ("single-crystal"): then the neighbours are not aligned.
            left = start in edges or places.get(first - 1) == start - 1
            if aligned[number] is None and whole and left and (end in edges or places.get(last) == end):
                aligned[number] = Sentence(tuple(forms[start:end]))
    return aligned


def _penn_tags(sentence: Sentence) -> tuple[str, ...]:
    """Return the Penn Treebank tags of a sentence."""
    tags = sentence.constituents.tags if sentence.constituents else getattr(sentence.dependencies, "xpos", None)
    if tags is None:
        raise ValueError(f"words must have Penn Treebank tags, sentence {sentence.uid!r} has none; see read_conllu")
    return tags


def _matched_places(ours: Sequence[Hashable], theirs: Sequence[Hashable]) -> dict[int, int]:
    """Return the place of each of theirs among ours: equal ones, or as many others between two equal ones."""
    places: dict[int, int] = {}
    for _, start, end, other, last in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        if end - start == last - other:
            places.update(zip(range(other, last), range(start, end), strict=True))
    return places


def _read_block(block: Block, where: str, language: str, automatic: bool) -> Sentence | Dropped:
    rows, columns, of_treebank = block
    if len({len(row) for row in rows}) > 1:
        return Dropped("rows of different lengths")
    least = _CONLL_FRAMES + 1 if columns.stop else _FRAMES
    has_tree = len(rows[0]) >= least and not {row[_TREE] for row in rows} <= {"*", "-", "_"}
    if len(rows[0]) < least or (has_tree and not all(row[_TREE].count("*") == 1 for row in rows)):
        raise ValueError(f"rows must have {_COLUMNS}, got {' '.join(rows[0])!r}")
    if of_treebank is not None and not of_treebank.words:
        return Dropped("words not found")
    # OntoNotes writes some marks as "/.", "/?" and "/-"
    forms = of_treebank.words if of_treebank else tuple(re.sub(r"^/(?=[.?-]$)", "", row[_WORD]) for row in rows)
    if set(forms) == {_WITHHELD}:
        raise ValueError(f"words are withheld ({_WITHHELD}); pass words=, the sentences of this document in a treebank")
    tree = ""
    for form, row in zip(forms, rows, strict=True):
        leaf = f" ({row[_TAG]} {form.replace('(', '-LRB-').replace(')', '-RRB-')})"
        tree += row[_TREE].replace("(", " (").replace("*", leaf) if has_tree else leaf
    try:
        leaves, constituents = parse_bracketed(tree.strip() if has_tree else f"(TOP{tree})", where, automatic)
    except ValueError:
        leaves = ()
    if len(leaves) != len(rows):
        return Dropped("brackets that make no tree")
    cells, made = zip(*(row[columns] for row in rows), strict=True), "automatic" if automatic else "gold"
    frames = [_frame_of_column(k, column, rows, f"{made} frames of {where}") for k, column in enumerate(cells)]
    sentence = of_treebank or Sentence(leaves)
    spaces = () if sentence.spacing == "rule" else sentence.spaces  # guessed again, from the tags of this tree
    phrases = constituents if constituents.spans else sentence.constituents
    layers: dict[str, Any] = {"spaces": spaces, "spacing": "corpus", "constituents": phrases, "frames": tuple(frames)}
    layers |= {"uid": sentence.uid or where, "source": sentence.source or where}
    return replace(sentence, **layers, language=sentence.language or language)


def _frame_of_column(number: int, column: tuple[str, ...], rows: Rows, source: str) -> Frame:
    """Return the frame of a column such as ``(ARG0*``, ``*)``, ``(V*)``, the first of which is number 0."""
    spans: list[Argument] = []
    opened: list[tuple[str, int]] = []
    for place, cell in enumerate(column):
        opened += [(role, place) for role in re.findall(r"\(([^(*]+)", cell)]
        for _ in range(min(cell.count(")"), len(opened))):
            role, start = opened.pop()
            spans.append(Argument(role, start, place + 1))
    verbs = [(span.start, span.end) for span in spans if span.role == "V"]
    closed = sum(cell.count(")") for cell in column)
    if opened or closed != len(spans) or len(verbs) != 1 or not all(map(_CELL.fullmatch, column)):
        raise ValueError(f"a column of a frame must have cells (ARG0*, * or *), and one V, got {' '.join(column)!r}")
    # The roleset is in the row of a word of the verb. If no such row has one, columns have the order of rolesets.
    own = [row for row in rows[slice(*verbs[0])] if row[_ROLESET] != "-"]
    named = own[:1] or [row for row in rows if row[_ROLESET] != "-"][number : number + 1]
    named = named or [row for row in rows[slice(*verbs[0])] if row[_LEMMA] != "-"]  # files without senses
    if not named:
        raise ValueError(f"a frame must have a roleset, its column is {' '.join(column)!r}")
    lemma, roleset = named[0][_LEMMA], named[0][_ROLESET].replace("-", "") or named[0][_LEMMA]
    roleset = f"{lemma}.{roleset}" if roleset.isdigit() else roleset  # "bite" and "01" in CoNLL-2012
    spans.sort(key=lambda span: (span.start, span.end))
    return Frame(roleset, verbs[0], tuple(span for span in spans if span.role != "V"), source)
