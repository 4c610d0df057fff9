"""Which words change places: constituents of a size, windows that are none, or the whole sentence."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pelocality.probes.build import SetAside
from pelocality.trees import Dropped, Sentence, phrases

Spans = Literal["one", "all"]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of written words, ``first`` up to ``last`` (exclusive) among a sentence's written words."""

    first: int
    last: int
    category: str

    @property
    def size(self) -> int:
        """How many written words it holds."""
        return self.last - self.first


# from a sentence and the random stream of its choices to stretches, candidates set aside, or neither
Choose = Callable[[Sentence, np.random.Generator], Iterable[Stretch | SetAside | Dropped]]


def _alike(sentence: Sentence, first: int, last: int) -> bool:
    """Say whether no exchange of two neighbours changes the string, and so no order of the words does.

    Different words may make one string all the same: where no spaces stand between them, 人 and 人人 do.
    """
    for left, right in itertools.pairwise(sentence.written_words[first:last]):
        a, b = sentence.written(*left), sentence.written(*right)
        between = "".join(
            word + space
            for word, space in zip(
                ("", *sentence.words[left[1] : right[0]]), sentence.spaces[left[1] - 1 : right[0]], strict=True
            )
        )
        if a + between + b != b + between + a:
            return False
    return True


def choose_sentence(sentence: Sentence, rng: np.random.Generator) -> Iterator[Stretch | Dropped]:
    """Choose the whole sentence.

    Args:
        sentence: The sentence.
        rng: Not needed: there is nothing to draw.

    Returns:
        One stretch, or why there is none.
    """
    count = len(sentence.written_words)
    if _alike(sentence, 0, count):
        yield Dropped("no order of the words changes the text")
    else:
        yield Stretch(0, count, "sentence")


def _stretches(sentence: Sentence) -> Iterator[tuple[int, int, bool, tuple[str, ...]]]:
    """Map constituents to written words: first, last (exclusive), whether the edges cut none, labels."""
    found = phrases(sentence)
    merged: dict[tuple[int, int, bool], tuple[str, ...]] = {}
    words = sentence.written_words
    for phrase in found.spans if found else ():
        touched = [k for k, (start, end) in enumerate(words) if start < phrase.end and phrase.start < end]
        if touched:
            first, last = touched[0], touched[-1] + 1
            whole = phrase.start <= words[first][0] and words[last - 1][1] <= phrase.end
            merged[first, last, whole] = merged.get((first, last, whole), ()) + phrase.labels
    for (first, last, whole), labels in merged.items():
        yield first, last, whole, labels


def choose_constituents(
    sentence: Sentence,
    rng: np.random.Generator,
    sizes: Collection[int],
    categories: Collection[str] | None,
    spans: Spans,
) -> Iterator[Stretch | SetAside | Dropped]:
    """Choose constituents whose words can change places.

    Args:
        sentence: The sentence.
        rng: Draws the one constituent.
        sizes: Sizes wanted, in written words.
        categories: Labels wanted; None for any.
        spans: One of them, or all disjoint ones.

    Returns:
        The stretches chosen, candidates set aside, or why there is none.
    """
    if sentence.constituents is None and sentence.dependencies is None:
        yield Dropped("no tree")
        return
    candidates = []
    for first, last, whole, labels in _stretches(sentence):
        if last - first not in sizes or (categories is not None and not set(labels) & set(categories)):
            continue
        if not whole:
            yield SetAside("the constituent cuts a written word")
        elif last - first == len(sentence.written_words):
            yield SetAside("the constituent is the whole sentence")
        elif _alike(sentence, first, last):
            yield SetAside("the words of the constituent are all alike")
        else:
            candidates.append(Stretch(first, last, "+".join(dict.fromkeys(labels))))
    if not candidates:
        yield Dropped("no constituent of that size")
    elif spans == "one":
        yield candidates[rng.integers(len(candidates))]
    else:
        taken: set[int] = set()
        for candidate in sorted(candidates, key=lambda c: (-c.size, c.first)):
            words = set(range(candidate.first, candidate.last))
            if not taken & words:
                taken |= words
                yield candidate


def choose_windows(
    sentence: Sentence,
    rng: np.random.Generator,
    sizes: Collection[int],
    categories: Collection[str] | None,
    spans: Spans,
) -> Iterator[Stretch | SetAside | Dropped]:
    """Choose windows that are not constituents, one for each constituent that would be chosen.

    Args:
        sentence: The sentence.
        rng: Draws the constituents first, then the windows.
        sizes: Sizes of the constituents.
        categories: Labels of the constituents; None for any.
        spans: One of them, or all disjoint ones.

    Returns:
        The windows, or why there is none.
    """
    stand_for = []
    for choice in choose_constituents(sentence, rng, sizes, categories, spans):
        if isinstance(choice, Stretch):
            stand_for.append(choice)
        else:
            yield choice
    constituents = {(first, last) for first, last, _, _ in _stretches(sentence)}
    count = len(sentence.written_words)
    taken: set[int] = set()
    windows = []
    for constituent in stand_for:
        places = [
            first
            for first in range(count - constituent.size + 1)
            if (first, first + constituent.size) not in constituents
            and not taken & set(range(first, first + constituent.size))
            and not _alike(sentence, first, first + constituent.size)
        ]
        if not places:
            yield Dropped("no room for a window that is not a constituent")
            return
        first = places[rng.integers(len(places))]
        taken |= set(range(first, first + constituent.size))
        windows.append(Stretch(first, first + constituent.size, "window"))
    yield from windows
