"""Which words change places: constituents of a size, windows that are not constituents, or the whole sentence."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pelocality.corpora import Dropped, Sentence, phrases
from pelocality.probes._build import Skipped

Spans = Literal["one", "all"]


@dataclass(frozen=True, slots=True)
class WordSpan:
    """Surface tokens ``first`` up to, not including, ``last`` of a sentence."""

    first: int
    last: int
    category: str

    @property
    def size(self) -> int:
        """Number of surface tokens."""
        return self.last - self.first


def choose_sentence(sentence: Sentence) -> Iterator[WordSpan | Dropped]:
    """Choose the whole sentence, if some order of its words changes the text."""
    size = len(sentence.written_words)
    if _same_in_any_order(sentence, 0, size):
        yield Dropped("no order of the words changes the text")
    else:
        yield WordSpan(0, size, "sentence")


def choose_constituents(
    sentence: Sentence,
    rng: np.random.Generator,
    sizes: Collection[int],
    categories: Collection[str] | None,
    spans: Spans,
) -> Iterator[WordSpan | Skipped | Dropped]:
    """Choose one constituent, or all disjoint ones, whose words can change places."""
    if sentence.constituents is None and sentence.dependencies is None:
        yield Dropped("no tree")
        return
    candidates = []
    for first, last, whole, labels in _constituents(sentence):
        if last - first not in sizes or (categories is not None and not set(labels) & set(categories)):
            continue
        if not whole:
            yield Skipped("the constituent cuts a surface token")
        elif last - first == len(sentence.written_words):
            yield Skipped("the constituent is the whole sentence")
        elif _same_in_any_order(sentence, first, last):
            yield Skipped("no order of the constituent's words changes the text")
        else:
            candidates.append(WordSpan(first, last, "+".join(dict.fromkeys(labels))))
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
) -> Iterator[WordSpan | Skipped | Dropped]:
    """Choose one window that is not a constituent for each constituent that would be chosen."""
    replaced = []
    for choice in choose_constituents(sentence, rng, sizes, categories, spans):
        if isinstance(choice, WordSpan):
            replaced.append(choice)
        else:
            yield choice
    constituents = {(first, last) for first, last, _, _ in _constituents(sentence)}
    count = len(sentence.written_words)
    taken: set[int] = set()
    windows = []
    for constituent in replaced:
        starts = [
            first
            for first in range(count - constituent.size + 1)
            if (first, first + constituent.size) not in constituents
            and not taken & set(range(first, first + constituent.size))
            and not _same_in_any_order(sentence, first, first + constituent.size)
        ]
        if not starts:
            yield Dropped("no room for a window that is not a constituent")
            return
        first = starts[rng.integers(len(starts))]
        taken |= set(range(first, first + constituent.size))
        windows.append(WordSpan(first, first + constituent.size, "window"))
    yield from windows


def _constituents(sentence: Sentence) -> Iterator[tuple[int, int, bool, tuple[str, ...]]]:
    """Map constituents to surface tokens: first, last (exclusive), whether the edges cut none, labels."""
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


def _same_in_any_order(sentence: Sentence, first: int, last: int) -> bool:
    """Return whether no exchange of two neighbours changes the string, and so no order of the words does.

    Different words may still make one string: where no spaces stand between them, 人 and 人人 do.
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
