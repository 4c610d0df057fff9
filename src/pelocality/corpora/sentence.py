"""Sentences and pairs of sentences: the one data model of the probes."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from pelocality.corpora.spacing import is_glued, is_punctuation, join, spaces_by_rule

if TYPE_CHECKING:
    import nltk

T_co = TypeVar("T_co", covariant=True)


# three-letter codes of the languages that some rule knows
_TWO_LETTERS = {"eng": "en", "deu": "de", "ger": "de", "tur": "tr", "aze": "az"}


@functools.lru_cache(maxsize=1024)
def language_code(language: str) -> str:
    """Cut a language tag down to the code that rules go by.

    Args:
        language: A tag such as ``en``, ``EN``, ``en-US``, ``en_GB`` or ``eng``; empty where unknown.

    Returns:
        The language alone, in small letters; of two letters where a rule knows it.

    Raises:
        TypeError: Where it is no string.
        ValueError: Where it is not a tag.

    Examples:
        >>> [language_code(tag) for tag in ("en-US", "eng", "zh-hans", "")]
        ['en', 'en', 'zh', '']
    """
    if not isinstance(language, str):
        raise TypeError(f"language must be an ISO code such as 'en', or '' where unknown, got {language!r}")
    code = re.split("[-_]", language.strip().lower(), maxsplit=1)[0]
    if language and not re.fullmatch("[a-z]{2,3}", code):
        raise ValueError(f"language must be an ISO code such as 'en', or '' where unknown, got {language!r}")
    return _TWO_LETTERS.get(code, code)


@dataclass(frozen=True, slots=True)
class Constituent:
    """A phrase: words ``start`` up to, not including, ``end``, and its labels from the outermost in.

    More than one label means that one phrase wraps another over the same words (``("S", "VP")``).
    """

    start: int
    end: int
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Constituents:
    """The phrases of one sentence, the part-of-speech tags of its words, and who says so.

    ``automatic`` is True where a parser says so: rules then trust it less.
    """

    spans: tuple[Constituent, ...]
    source: str
    tags: tuple[str, ...] | None = None
    bracketed: str | None = None
    automatic: bool = False

    @functools.cached_property
    def tree(self) -> nltk.Tree | None:
        """The bracketed tree as an ``nltk.Tree``, None where the phrases came as spans."""
        from nltk import Tree

        return None if self.bracketed is None else Tree.fromstring(self.bracketed)


@dataclass(frozen=True)
class Dependencies:
    """Head (1-based, 0 for the root), relation, part of speech and features of each word, and who says so.

    ``automatic`` is True where a parser says so: rules then trust it less.
    """

    heads: tuple[int, ...]
    relations: tuple[str, ...]
    source: str
    upos: tuple[str, ...] | None = None
    features: tuple[Mapping[str, str], ...] | None = None
    automatic: bool = False


@dataclass(frozen=True, slots=True)
class Argument:
    """The argument in one semantic role: words ``start`` up to, not including, ``end``."""

    role: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Frame:
    """A predicate (roleset such as ``bite.01``), its own words, its arguments, and where they came from."""

    roleset: str
    verb: tuple[int, int]
    arguments: tuple[Argument, ...]
    source: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """What a reader or a builder hands on instead of an item it leaves out: the reason, to be counted."""

    reason: str


@dataclass(frozen=True)
class Sentence:
    """A sentence: its words and spacing, and whatever is known of its structure.

    Words are syntactic words, as treebanks cut them; every offset of the other layers counts words from 0.
    Each layer is optional and says where it came from.

    Args:
        words: The words, in order, as written (no treebank escapes).
        spaces: The white space after each word. Empty guesses it by English rule, and ``spacing`` says so.
        uid: A name no other sentence of the corpus has; what is made of the sentence carries it.
        language: ISO code, such as ``en``. Empty where unknown: English rules then stay out. Tags such as
            ``en-US`` or ``eng`` are cut down to the code.
        contractions: Words written as one, ``(start, end, form)``: German *am*, two words, is ``(3, 5,
            "am")``.
        constituents: Its phrases.
        dependencies: Its dependency tree.
        frames: Its semantic frames; an empty tuple says that it has none, None that nobody looked.
        source: File and line, or whatever names the origin of the words.
        spacing: Where the spaces came from, ``"corpus"`` or ``"rule"``.

    Raises:
        ValueError: Where layers do not fit the words, or where ``language`` is no ISO code.

    Examples:
        >>> s = Sentence(("Dogs", "do", "n't", "bark", "."), language="en")
        >>> s.text, s.spacing, s.written_words
        ("Dogs don't bark.", 'rule', ((0, 1), (1, 3), (3, 4)))
    """

    words: tuple[str, ...]
    spaces: tuple[str, ...] = ()
    uid: str = ""
    language: str = ""
    contractions: tuple[tuple[int, int, str], ...] = ()
    constituents: Constituents | None = None
    dependencies: Dependencies | None = None
    frames: tuple[Frame, ...] | None = None
    source: str = ""
    spacing: str = "corpus"

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", tuple(self.words))
        object.__setattr__(self, "language", language_code(self.language))
        if not all(self.words):
            raise ValueError(f"words must not be empty strings, sentence {self.uid!r} has {self.words}")
        if not self.spaces:
            tags = self.constituents.tags if self.constituents else None
            object.__setattr__(self, "spaces", spaces_by_rule(self.words, tags))
            object.__setattr__(self, "spacing", "rule")
        n = len(self.words)
        layers: dict[str, Sequence[Any] | None] = {"spaces": self.spaces}
        if self.constituents:
            layers["constituents.tags"] = self.constituents.tags
        if self.dependencies:
            layers["dependencies.heads"] = self.dependencies.heads
            layers["dependencies.relations"] = self.dependencies.relations
            layers["dependencies.upos"] = self.dependencies.upos
            layers["dependencies.features"] = self.dependencies.features
            if not all(0 <= head <= n for head in self.dependencies.heads):
                raise ValueError(f"dependencies.heads must lie in 0..{n}, sentence {self.uid!r} breaks it")
        for name, layer in layers.items():
            if layer is not None and len(layer) != n:
                raise ValueError(f"{name} must have one entry per word ({n}), got {len(layer)} in {self.uid!r}")
        spans: list[tuple[int, int]] = [(start, end) for start, end, _ in self.contractions]
        spans += [(c.start, c.end) for c in (self.constituents.spans if self.constituents else ())]
        for frame in self.frames or ():
            spans += [frame.verb, *((a.start, a.end) for a in frame.arguments)]
        for start, end in spans:
            if not 0 <= start < end <= n:
                raise ValueError(f"spans must hold words of the {n} there are, got [{start}, {end}) in {self.uid!r}")

    @functools.cached_property
    def written_words(self) -> tuple[tuple[int, int], ...]:
        """The written words, ``(start, end)`` over ``words``: what edits move, never cut; not punctuation."""
        bound = {i for start, end, _ in self.contractions for i in range(start, end - 1)}
        found, start = [], 0
        for i in range(len(self.words)):
            last = i + 1 == len(self.words)
            if not last and (i in bound or is_glued(self.words[i], self.spaces[i], self.words[i + 1])):
                continue
            first, end, start = start, i + 1, i + 1
            while first < end and first not in bound and is_punctuation(self.words[first]):
                first += 1
            while first < end and end - 2 not in bound and is_punctuation(self.words[end - 1]):
                end -= 1
            if first < end:
                found.append((first, end))
        return tuple(found)

    def written(self, start: int, end: int) -> str:
        """Write words ``start`` up to ``end`` as they stand in the text.

        Args:
            start: The first word.
            end: The word after the last.

        Returns:
            The words with the spaces between them, contractions written as one.
        """
        forms = {first: (last, form) for first, last, form in self.contractions if start <= first and last <= end}
        pieces, i = [], start
        while i < end:
            after, form = forms[i] if i in forms else (i + 1, self.words[i])
            pieces.append(form)
            if after < end:
                pieces.append(self.spaces[after - 1])
            i = after
        return "".join(pieces)

    @functools.cached_property
    def text(self) -> str:
        """The sentence as people write it."""
        return self.written(0, len(self.words))

    @property
    def automatic(self) -> bool:
        """Whether the tags of its words come from a parser."""
        layer = self.constituents if self.constituents is not None else self.dependencies
        return layer is not None and layer.automatic

    @property
    def provenance(self) -> str:
        """One line that says where words, spaces and structure came from."""
        parts = [self.source or "unknown source", f"spacing: {self.spacing}"]
        if self.constituents:
            parts.append(f"constituents: {self.constituents.source}")
        if self.dependencies:
            parts.append(f"dependencies: {self.dependencies.source}")
        if self.frames:
            parts.append(f"frames: {self.frames[0].source}")
        return "; ".join(parts)

    def replaced(self, slots: Sequence[tuple[int, int, str]]) -> str:
        """Write the sentence with other text in some places.

        Args:
            slots: ``(start, end, text)``, disjoint spans of words in order and what to write there instead;
                what stands around them, spaces too, stays.

        Returns:
            The edited text.

        Examples:
            >>> Sentence(("A", "cat", "saw", "me", ".")).replaced([(0, 2, "The dogs"), (3, 4, "us")])
            'The dogs saw us.'
        """
        pieces, gaps, i = [], [], 0
        for start, end, text in [*slots, (len(self.words), len(self.words), "")]:
            if i < start:
                pieces.append(self.written(i, start))
                gaps.append(self.spaces[start - 1])
            if start < end:
                pieces.append(text)
                gaps.append(self.spaces[end - 1])
            i = end
        return join(pieces, gaps)

    def with_uid(self, uid: str) -> Sentence:
        """Copy the sentence under another name.

        Args:
            uid: The new name.

        Returns:
            The copy.
        """
        return dataclasses.replace(self, uid=uid)


@dataclass(frozen=True)
class Pair:
    """A premise, a hypothesis and the label between them (None where unknown)."""

    premise: Sentence
    hypothesis: Sentence
    label: str | None = None
    uid: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        for side in ("premise", "hypothesis"):
            if not isinstance(getattr(self, side), Sentence):
                raise TypeError(
                    f"{side} must be a pelocality.corpora.Sentence, got {type(getattr(self, side)).__name__}; "
                    "read_pairs makes them from plain text"
                )


@runtime_checkable
class Records(Protocol[T_co]):
    """A source read in two steps, so that processes can share the slow one: records, and what they say."""

    name: str

    def records(self) -> Iterator[Any]:
        """Go over the raw records from the start."""

    def parse(self, record: Any) -> T_co | Dropped:
        """Read one record, or say why it is left out."""
