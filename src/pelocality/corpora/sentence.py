"""Sentences and pairs of sentences: the data model of the probes."""

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pelocality.corpora.spacing import is_glued, is_punctuation, join, possessives, spaces_by_rule

# A word of a bracketed tree may have a no-break space inside: only ASCII white space divides words.
LEAF = r"[^\s()](?a:[^\s()]*)(?<!\s)"
# The rules of a language look for its two-letter code.
_TWO_LETTERS = {"eng": "en", "deu": "de", "ger": "de", "tur": "tr", "aze": "az"}


@functools.lru_cache(maxsize=1024)
def language_code(language: str) -> str:
    """Return the language code of a tag in lower case, as `Sentence` has it.

    Examples:
        >>> [language_code(tag) for tag in ("en-US", "eng", "zh-hans", "fra", "")]
        ['en', 'en', 'zh', 'fra', '']
    """
    code = re.split("[-_]", language.strip().lower(), maxsplit=1)[0]
    if language and not re.fullmatch("[a-z]{2,3}", code):
        raise ValueError(f"language must be an ISO code such as 'en', or '' where unknown, got {language!r}")
    return _TWO_LETTERS.get(code, code)


class Constituent(NamedTuple):
    """A phrase and its labels.

    Attributes:
        start: Its first word.
        end: The word after its last.
        labels: From the outermost in; several where one phrase contains another over the same words (``("S", "VP")``).
    """

    start: int
    end: int
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Constituents:
    """The phrases of one sentence.

    Attributes:
        spans: The phrases.
        source: Where they come from.
        tags: The part-of-speech tag of each word, None where unknown.
        bracketed: The tree as it was written, None if the phrases are known as spans only.
        automatic: Whether the source is a parser: rules then trust the tree less.
    """

    spans: tuple[Constituent, ...]
    source: str
    tags: tuple[str, ...] | None = None
    bracketed: str | None = None
    automatic: bool = False

    @functools.cached_property
    def tree(self) -> Any:
        """The bracketed tree as an ``nltk.Tree``, None if the phrases are known as spans only."""
        from nltk import Tree

        return None if self.bracketed is None else Tree.fromstring(self.bracketed, leaf_pattern=LEAF)


@dataclass(frozen=True)
class Dependencies:
    """The dependency tree of one sentence.

    Attributes:
        heads: The head of each word, counted from 1; 0 for the root.
        relations: The relation of each word to its head.
        source: Where they come from.
        upos: The part of speech of each word, None where unknown.
        features: The morphological features of each word, None where unknown.
        automatic: Whether the source is a parser: rules then trust the tree less.
        xpos: The language's own tag of each word (Penn Treebank tags in English), None where unknown.

    Raises:
        ValueError: The heads do not make a tree: every word must lead to a root.
    """

    heads: tuple[int, ...]
    relations: tuple[str, ...]
    source: str
    upos: tuple[str, ...] | None = None
    features: tuple[Mapping[str, str], ...] | None = None
    automatic: bool = False
    xpos: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        n = len(self.heads)
        lost = [word for word, head in enumerate(self.heads) if head not in range(n + 1)]
        roots = [] if lost else [word for word, head in enumerate(self.heads) if head == 0]
        lost = lost or sorted(set(range(n)).difference(*map(self.subtree, roots)))
        if lost:
            rule = f"heads must be whole numbers in 0..{n} from which every word leads to a root"
            raise ValueError(f"{rule}; the head of word {lost[0] + 1} is {self.heads[lost[0]]}")

    @functools.cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The dependents of each word, in order; words count from 0."""
        below: list[list[int]] = [[] for _ in self.heads]
        for word, head in enumerate(self.heads):
            if head:
                below[head - 1].append(word)
        return tuple(map(tuple, below))

    def subtree(self, word: int) -> set[int]:
        """Return a word with all its descendants.

        Args:
            word: The word, counted from 0.

        Returns:
            These words, counted from 0.
        """
        words = [word]
        for each in words:  # the list grows during the loop
            words += self.children[each]
        return set(words)


class Argument(NamedTuple):
    """The argument with one semantic role.

    Attributes:
        role: The role, such as ``ARG0``.
        start: Its first word.
        end: The word after its last.
    """

    role: str
    start: int
    end: int


class Frame(NamedTuple):
    """A predicate with its arguments.

    Attributes:
        roleset: The sense of the predicate, such as ``bite.01``.
        verb: The first word of the predicate, and the word after its last.
        arguments: Its arguments.
        source: Where they come from.
    """

    roleset: str
    verb: tuple[int, int]
    arguments: tuple[Argument, ...]
    source: str


class Dropped(NamedTuple):
    """An item that a reader or a builder leaves out.

    Attributes:
        reason: Why it is left out; reasons are counted.
    """

    reason: str


@dataclass(frozen=True)
class Sentence:
    """A sentence: its words and spacing, and layers of structure.

    Words are syntactic words, as in treebanks; the offsets of all layers count words from 0. Each layer is optional
    and names its source.

    Attributes:
        words: The words, in order, as in the text (no treebank escapes).
        spaces: The white space after each word. If empty, it is guessed by English rules
            (``spacing`` is then ``"rule"``).
        uid: A name that is unique in the corpus; rows made of the sentence carry it.
        language: ISO code, such as ``en``. Tags lose their region (``en-US`` is ``en``), and the three-letter codes of
            English, German, Turkish and Azerbaijani become two letters (``eng`` is ``en``); others stay (``fra``).
            Empty if unknown: English rules then do not apply.
        multiword_tokens: Words that are one token in the text, ``(start, end, form)``: German *am*, two words, is
            ``(3, 5, "am")``.
        constituents: Its phrases.
        dependencies: Its dependency tree.
        frames: Its semantic frames; an empty tuple means that it has none, None that they are unknown.
        source: File and line, or another name of the origin of the words.
        spacing: The source of the spaces, ``"corpus"`` or ``"rule"``.

    Raises:
        TypeError: Labels of a constituent are a string.
        ValueError: ``words`` is a string, a word is no text or empty, a layer does not fit the words, or ``language``
            is not an ISO code.

    Examples:
        >>> s = Sentence(("Dogs", "do", "n't", "bark", "."), language="en")
        >>> s.text, s.spacing, s.surface_tokens
        ("Dogs don't bark.", 'rule', ((0, 1), (1, 3), (3, 4)))
    """

    words: tuple[str, ...]
    spaces: tuple[str, ...] = ()
    uid: str = ""
    language: str = ""
    multiword_tokens: tuple[tuple[int, int, str], ...] = ()
    constituents: Constituents | None = None
    dependencies: Dependencies | None = None
    frames: tuple[Frame, ...] | None = None
    source: str = ""
    spacing: str = "corpus"

    def __post_init__(self) -> None:
        words: Any = self.words
        if isinstance(words, str) or not all(isinstance(word, str) and word for word in words):
            advice = "plain_sentence splits a text"
            raise ValueError(f"words must be a list of words that are not empty, got {words!r}; {advice}")
        object.__setattr__(self, "words", tuple(words))
        object.__setattr__(self, "language", language_code(self.language))
        self._check_layers()
        if not self.spaces:  # the rules use the tags, whose number was checked above
            object.__setattr__(self, "spaces", spaces_by_rule(self.words, self._tags))
            object.__setattr__(self, "spacing", "rule")

    def _check_layers(self) -> None:
        """Refuse layers that do not fit the words."""
        n = len(self.words)
        layers = {"spaces": self.spaces or None, "constituents.tags": getattr(self.constituents, "tags", None)}
        for name in ("heads", "relations", "upos", "features", "xpos"):
            layers[f"dependencies.{name}"] = getattr(self.dependencies, name, None)
        for name, layer in layers.items():
            if layer is not None and len(layer) != n:
                raise ValueError(f"{name} must have one entry per word ({n}), got {len(layer)} in {self.uid!r}")
        check_apart(self.multiword_tokens)
        phrases = self.constituents.spans if self.constituents else ()
        if any(isinstance(phrase.labels, str) for phrase in phrases):
            raise TypeError(f"labels of a constituent must be a tuple, such as ('NP',), got text in {self.uid!r}")
        spans = [(start, end) for start, end, _ in self.multiword_tokens]
        spans += [(phrase.start, phrase.end) for phrase in phrases]
        for frame in self.frames or ():
            spans += [frame.verb, *((argument.start, argument.end) for argument in frame.arguments)]
        for start, end in spans:
            if not 0 <= start < end <= n:
                raise ValueError(f"spans must lie within the {n} words, got [{start}, {end}) in {self.uid!r}")

    @property
    def _tags(self) -> Sequence[str] | None:
        """Penn Treebank tags, as far as they tell what a quote is."""
        if self.constituents is not None and self.constituents.tags is not None:
            return self.constituents.tags
        upos = self.dependencies.upos if self.dependencies else None
        return upos and ["POS" if tag == "PART" else "" for tag in upos]

    @functools.cached_property
    def surface_tokens(self) -> tuple[tuple[int, int], ...]:
        """The surface tokens, ``(start, end)`` over ``words``: the units that perturbations move; no punctuation."""
        bound = {i for start, end, _ in self.multiword_tokens for i in range(start, end - 1)}
        gaps = zip(self.words, self.spaces, self.words[1:], strict=False)
        inner = (i + 1 for i, gap in enumerate(gaps) if i not in bound and not is_glued(*gap))
        moved = [not is_punctuation(word) for word in self.words]
        for i in possessives(self.words, self._tags):
            moved[i] = i > 0 and not self.spaces[i - 1]
        tokens = []
        for start, end in itertools.pairwise([0, *inner, len(self.words)]):
            while start < end and start not in bound and not moved[start]:
                start += 1
            while start < end and end - 2 not in bound and not moved[end - 1]:
                end -= 1
            if start < end:
                tokens.append((start, end))
        return tuple(tokens)

    def surface(self, start: int, end: int) -> str:
        """Return some words as they are in the text.

        Args:
            start: The first word.
            end: The word after the last.

        Returns:
            The words with the spaces between them; a multiword token within is written as one token.
        """
        pieces = []
        for _, last, form in surface_forms(self.words, self.multiword_tokens, start, end):
            pieces += [form, self.spaces[last - 1]]
        return "".join(pieces[:-1])

    @functools.cached_property
    def text(self) -> str:
        """The sentence as plain text."""
        return self.surface(0, len(self.words))

    @property
    def automatic(self) -> bool:
        """Whether the tags of its words come from a parser."""
        layer = self.constituents if self.constituents is not None else self.dependencies
        return layer is not None and layer.automatic

    @property
    def provenance(self) -> str:
        """One line that names the sources of words, spaces and structure."""
        frame = self.frames[0] if self.frames else None
        layers = (("constituents", self.constituents), ("dependencies", self.dependencies), ("frames", frame))
        named = [f"{name}: {layer.source}" for name, layer in layers if layer]
        return "; ".join([self.source or "unknown source", f"spacing: {self.spacing}", *named])

    def replaced(self, replacements: Sequence[tuple[int, int, str]], start: int = 0, end: int | None = None) -> str:
        """Return the text with some spans replaced; everything around them, spaces too, stays.

        Args:
            replacements: ``(start, end, text)``, disjoint spans of words in order, and the new text of each.
            start: The first word of the text to return.
            end: The word after its last; None for the end of the sentence.

        Returns:
            The new text.

        Examples:
            >>> Sentence(("A", "cat", "saw", "me", ".")).replaced([(0, 2, "The dogs"), (3, 4, "us")])
            'The dogs saw us.'
        """
        end = len(self.words) if end is None else end
        pieces, gaps = [], []
        for first, last, text in [*replacements, (end, end, "")]:
            if start < first:
                pieces.append(self.surface(start, first))
                gaps.append(self.spaces[first - 1])
            if first < last:
                pieces.append(text)
                gaps.append(self.spaces[last - 1])
            start = last
        return join(pieces, gaps)


def check_apart(multiword_tokens: Sequence[tuple[int, int, str]]) -> None:
    """Raise a ValueError where two multiword tokens share a word."""
    for one, other in itertools.pairwise(sorted(multiword_tokens)):
        if other[0] < one[1]:
            raise ValueError(f"multiword_tokens must not overlap, got {one} and {other}, words counted from 0")


def surface_forms(
    words: Sequence[str], multiword_tokens: Sequence[tuple[int, int, str]], start: int, end: int
) -> Iterator[tuple[int, int, str]]:
    """Yield ``(start, end, form)`` of the tokens in a span of words, where a multiword token is one token."""
    forms = {first: (last, form) for first, last, form in multiword_tokens if start <= first and last <= end}
    while start < end:
        last, form = forms.get(start) or (start + 1, words[start])
        yield start, last, form
        start = last


@dataclass(frozen=True)
class Pair:
    """A premise, a hypothesis and the label between them.

    Attributes:
        premise: The premise.
        hypothesis: The hypothesis.
        label: Name of the label, None where unknown.
        uid: A name that is unique in the corpus; rows made of the pair carry it.
        source: File and line, or another name of the origin.
    """

    premise: Sentence
    hypothesis: Sentence
    label: str | None = None
    uid: str = ""
    source: str = ""
