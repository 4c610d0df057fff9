"""Shuffled words: inside constituents, inside windows that are not constituents, or over the whole sentence."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import datasets
import numpy as np

from pelocality._checks import count
from pelocality.corpora import Dropped, Pair, Records, Sentence
from pelocality.probes._build import Item, Row, Skipped, build, generator_for
from pelocality.probes._rows import (
    SENTENCE,
    Side,
    check_choice,
    check_labels,
    content_of,
    name_of,
    pair_features,
    pair_row,
    sentence_features,
    sentence_row,
    span_entry,
)
from pelocality.probes._spans import Spans, WordSpan, choose_constituents, choose_sentence, choose_windows


def constituency_shuffling(
    pairs: Iterable[Item] | Records[Item],
    size: int | range,
    side: Side = "premise",
    spans: Spans = "one",
    labels: Collection[str] | None = None,
    seed: int = 0,
    *,
    categories: Collection[str] | None = None,
    num_proc: int | None = None,
    progress: bool = False,
) -> datasets.Dataset:
    """Permute the words inside constituents, and leave everything else where it is.

    Shuffle-x of Chen et al. (2023, section 5.4): the words of a constituent of x words change places; the
    label stays. A word is a written one: ``don't`` counts once and is never cut, punctuation keeps its
    place and does not count. Constituents come from the sentence's phrase structure; where it has none,
    from full subtrees of its dependency tree, and ``provenance`` says so. A constituent that is the whole
    sentence is not local and is skipped. Words keep their capitals: the multiset of words is exactly that
    of the original.

    Args:
        pairs: A corpus (``read_snli(...)``), or any iterable of pairs or sentences.
        size: How many words a constituent must have, a number or a range: ``range(3, 7)`` is 3, 4, 5 or 6.
        side: Which side of a pair is edited; with ``"both"``, each side that has a constituent of the size.
            The paper does not say; premises are longer and have constituents of every size.
        spans: ``"one"`` draws one constituent; ``"all"`` takes all disjoint ones, the longest first.
        labels: Keep only pairs with these gold labels; None keeps all.
        seed: Seeds the choice for each item, together with its text (for a pair, both texts) and nothing else:
            not with its uid, nor with its place in the corpus.
        categories: Keep only constituents with one of these labels, such as ``{"NP", "PP"}``.
        num_proc: How many processes share the work.
        progress: Whether to show progress bars.

    Returns:
        A dataset with the edited ``premise``, ``hypothesis``, ``label``, the originals under ``original_``,
        the edited ``spans``, ``size`` (words of the largest span), ``category``, ``seed``, ``uid``, ``provenance`` and
        ``builder``; over sentences ``sentence`` and ``original_sentence`` instead of the pair. Its files are
        temporary: ``save_to_disk`` keeps it. ``probe_info`` tells what was left out.

    Raises:
        TypeError: Where an argument is of the wrong kind.
        ValueError: Where an argument has a value that makes no sense.

    Examples:
        >>> from pelocality.corpora import Sentence, parse_bracketed
        >>> tree = "(S (NP (DT the) (JJ old) (NN cat)) (VP (VBD slept)))"
        >>> words, constituents = parse_bracketed(tree, "made up")
        >>> probe = constituency_shuffling([Sentence(words, uid="1", constituents=constituents)], size=3)
        >>> sorted(probe[0]["sentence"].split()[:3]), probe[0]["sentence"].split()[3:], probe[0]["category"]
        (['cat', 'old', 'the'], ['slept'], 'NP')
    """
    perturb = _ConstituencyShuffle(side, check_labels(labels), seed, _sizes(size), _categories(categories), spans)
    return build("constituency_shuffling", pairs, perturb, num_proc, progress)


def window_shuffling(
    pairs: Iterable[Item] | Records[Item],
    size: int | range,
    side: Side = "premise",
    spans: Spans = "one",
    labels: Collection[str] | None = None,
    seed: int = 0,
    *,
    categories: Collection[str] | None = None,
    num_proc: int | None = None,
    progress: bool = False,
) -> datasets.Dataset:
    """Permute as many words as ``constituency_shuffling`` would, in windows that are not constituents.

    The control the paper lacks (ours): with the same arguments and seed, each row permutes the same number
    of spans of the same sizes in the same sentence, at random places where no constituent lies. A sentence
    without a fitting constituent gives no row here either; one without room for the windows gives none, and
    is counted: compare the two probes over the ``uid`` they share.

    Args:
        pairs: A corpus, or any iterable of pairs or sentences, with trees.
        size: Words of a window, a number or a range; within a range, the size of the constituent it stands
            for.
        side: Which side of a pair is edited.
        spans: ``"one"`` or ``"all"``, as in ``constituency_shuffling``.
        labels: Keep only pairs with these gold labels; None keeps all.
        seed: As in ``constituency_shuffling``; the same seed matches its rows.
        categories: Labels of the constituents that the windows stand for.
        num_proc: How many processes share the work.
        progress: Whether to show progress bars.

    Returns:
        A dataset with the columns of ``constituency_shuffling``; the category is ``"window"``.

    Raises:
        TypeError: Where an argument is of the wrong kind.
        ValueError: Where an argument has a value that makes no sense.

    Examples:
        >>> from pelocality.corpora import Sentence, parse_bracketed
        >>> tree = "(S (NP (DT the) (NN cat)) (VP (VBD slept) (PP (IN on) (NP (PRP$ my) (NN lap)))))"
        >>> words, constituents = parse_bracketed(tree, "made up")
        >>> probe = window_shuffling([Sentence(words, uid="1", constituents=constituents)], size=3)
        >>> span = probe[0]["spans"][0]
        >>> (span["start"], span["end"]) in [(0, 3), (1, 4), (2, 5)]  # not (3, 6), the prepositional phrase
        True
    """
    perturb = _WindowShuffle(side, check_labels(labels), seed, _sizes(size), _categories(categories), spans)
    return build("window_shuffling", pairs, perturb, num_proc, progress)


def random_shuffling(
    pairs: Iterable[Item] | Records[Item],
    side: Side = "premise",
    labels: Collection[str] | None = None,
    seed: int = 0,
    *,
    num_proc: int | None = None,
    progress: bool = False,
) -> datasets.Dataset:
    """Permute all words of a sentence.

    The paper's Random. Needs no trees: pairs of ``read_pairs`` without a parser will do. Punctuation keeps
    its place, written words stay whole.

    Args:
        pairs: A corpus, or any iterable of pairs or sentences.
        side: Which side of a pair is edited.
        labels: Keep only pairs with these gold labels; None keeps all.
        seed: Seeds the permutation of each item, together with its text (for a pair, both texts) and nothing
            else.
        num_proc: How many processes share the work.
        progress: Whether to show progress bars.

    Returns:
        A dataset with the columns of ``constituency_shuffling``; the category is ``"sentence"``.

    Raises:
        TypeError: Where an argument is of the wrong kind.
        ValueError: Where an argument has a value that makes no sense.

    Examples:
        >>> from pelocality.corpora import plain_sentence
        >>> probe = random_shuffling([plain_sentence("one two three.", uid="1")])
        >>> probe[0]["sentence"] != "one two three.", probe[0]["sentence"][-1], probe[0]["size"]
        (True, '.', 3)
    """
    return build("random_shuffling", pairs, _RandomShuffle(side, check_labels(labels), seed), num_proc, progress)


def _sizes(size: int | range) -> tuple[int, ...]:
    """Return the sizes asked for, in order, after checking them."""
    if isinstance(size, bool) or not isinstance(size, int | range | np.integer):
        raise TypeError(f"size must be a number or a range such as range(3, 7), got {size!r}")
    sizes = tuple(sorted(size)) if isinstance(size, range) else (int(size),)
    if not sizes or min(sizes) < 2:
        raise ValueError(f"size must be at least 2 words, got {size!r}: fewer cannot change places")
    return sizes


def _categories(categories: Collection[str] | None) -> tuple[str, ...] | None:
    """Return the categories asked for, in order, after checking them."""
    if isinstance(categories, str):
        raise TypeError(f"categories must be a collection of labels, such as ({categories!r},), got a string")
    return tuple(sorted(categories)) if categories is not None else None


@dataclass(frozen=True)
class _Shuffle:
    """A shuffle with its settings; a subclass chooses the spans whose words change places."""

    side: Side
    labels: tuple[str, ...] | None
    seed: int

    def __post_init__(self) -> None:
        check_choice("side", self.side, ("premise", "hypothesis", "both"))
        object.__setattr__(self, "seed", count("seed", self.seed, 0))

    def choose(self, sentence: Sentence, rng: np.random.Generator) -> Iterable[WordSpan | Skipped | Dropped]:
        """Choose the spans, in any order, and say which candidates cannot be used."""
        raise NotImplementedError

    def features(self, kind: type) -> datasets.Features:
        """Return the columns of the rows made of one kind of item."""
        return sentence_features() if kind is Sentence else pair_features()

    def settings(self) -> Mapping[str, Any]:
        """Return what the builder was called with."""
        return asdict(self)

    def __call__(self, item: Item) -> Iterator[Row | Dropped | Skipped]:
        """Choose spans on each side asked for, and permute their words."""
        if isinstance(item, Pair) and self.labels is not None and item.label not in self.labels:
            yield Dropped("label not asked for")
            return
        shuffled: dict[str, str] = {}
        spans: list[WordSpan] = []
        entries: list[dict[str, Any]] = []
        dropped = Dropped("no candidate")
        for name, sentence in self._sides(item).items():
            choices = list(self.choose(sentence, generator_for(self.seed, *content_of(item), name, "choose")))
            yield from (choice for choice in choices if isinstance(choice, Skipped))
            dropped = next((choice for choice in choices if isinstance(choice, Dropped)), dropped)
            chosen = sorted((choice for choice in choices if isinstance(choice, WordSpan)), key=lambda c: c.first)
            if chosen:
                rng = generator_for(self.seed, *content_of(item), name, "permute")
                text, new_entries = _permuted(sentence, name, chosen, rng)
                if text == sentence.text:
                    dropped = Dropped("the text would not change")
                    continue
                shuffled[name] = text
                spans += chosen
                entries += new_entries
        if not shuffled:
            yield dropped
            return
        columns = {
            "size": max(span.size for span in spans),
            "category": " ".join(dict.fromkeys(span.category for span in spans)),
            "seed": self.seed,
            "uid": name_of(item),
        }
        if isinstance(item, Sentence):
            yield sentence_row(item, shuffled[SENTENCE], entries, **columns)
        else:
            yield pair_row(item, shuffled, item.label, entries, **columns)

    def _sides(self, item: Item) -> dict[str, Sentence]:
        if isinstance(item, Sentence):
            return {SENTENCE: item}
        return {name: getattr(item, name) for name in ("premise", "hypothesis") if self.side in (name, "both")}


@dataclass(frozen=True)
class _RandomShuffle(_Shuffle):
    def choose(self, sentence: Sentence, rng: np.random.Generator) -> Iterable[WordSpan | Dropped]:
        return choose_sentence(sentence)


@dataclass(frozen=True)
class _ConstituencyShuffle(_Shuffle):
    sizes: tuple[int, ...]
    categories: tuple[str, ...] | None
    spans: Spans

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("spans", self.spans, ("one", "all"))

    def choose(self, sentence: Sentence, rng: np.random.Generator) -> Iterable[WordSpan | Skipped | Dropped]:
        return choose_constituents(sentence, rng, self.sizes, self.categories, self.spans)


@dataclass(frozen=True)
class _WindowShuffle(_ConstituencyShuffle):
    def choose(self, sentence: Sentence, rng: np.random.Generator) -> Iterable[WordSpan | Skipped | Dropped]:
        return choose_windows(sentence, rng, self.sizes, self.categories, self.spans)


def _permuted(
    sentence: Sentence, side: str, spans: Sequence[WordSpan], rng: np.random.Generator
) -> tuple[str, list[dict[str, Any]]]:
    """Permute the surface tokens of each span so that its string changes; punctuation keeps its place."""
    replacements, entries = [], []
    for span in spans:
        places = sentence.written_words[span.first : span.last]
        texts = [sentence.written(*place) for place in places]
        start, end = places[0][0], places[-1][1]
        original = changed = sentence.written(start, end)
        while changed == original:  # ends: exchanging some two neighbours changes it, or it had not been chosen
            order = [texts[k] for k in rng.permutation(len(texts))]
            here = [(a, b, text) for (a, b), text in zip(places, order, strict=True)]
            changed = _text_of(sentence, start, end, here)
        replacements += here
        entries.append(span_entry(sentence, side, span.category, start, end, changed))
    return sentence.replaced(replacements), entries


def _text_of(sentence: Sentence, start: int, end: int, replacements: Sequence[tuple[int, int, str]]) -> str:
    """Return the text of words ``start`` up to ``end`` alone, with the replacements in it."""
    contractions = tuple((a - start, b - start, form) for a, b, form in sentence.contractions if start <= a < end)
    part = Sentence(sentence.words[start:end], (*sentence.spaces[start : end - 1], ""), contractions=contractions)
    return part.replaced([(a - start, b - start, text) for a, b, text in replacements])
