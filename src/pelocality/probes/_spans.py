"""The choice of what to shuffle: constituents of a size, windows that are not constituents, or the whole sentence."""

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pelocality.corpora import Dropped, Sentence, phrases
from pelocality.probes._build import Skipped
from pelocality.probes._rows import Spans


class WordSpan(NamedTuple):
    """Surface tokens ``first`` up to, not including, ``last`` of a sentence."""

    first: int
    last: int
    category: str

    @property
    def size(self) -> int:
        """Number of surface tokens."""
        return self.last - self.first


class Selection(NamedTuple):
    """Which constituents to choose: sizes in surface tokens, labels (None: any), and whether one or all of them."""

    sizes: tuple[int, ...]
    categories: tuple[str, ...] | None
    spans: Spans


Choices = Iterator[WordSpan | Skipped | Dropped]
Phrases = dict[tuple[int, int, bool], tuple[str, ...]]  # first, last, whether the edges split no token -> labels
Rng = Callable[[], np.random.Generator]
NO_ROOM = Dropped("no room was found for windows that are not constituents")
_PLACEMENTS = 20  # number of random placements of all windows of a sentence that are tried


def phrases_in_tokens(sentence: Sentence) -> Phrases:
    """Return the labels of a sentence's phrases by their surface tokens."""
    tree = phrases(sentence)
    labels: Phrases = {}
    tokens = sentence.surface_tokens
    starts, ends = [start for start, _ in tokens], [end for _, end in tokens]
    for phrase in tree.spans if tree else ():
        first, last = bisect.bisect_right(ends, phrase.start), bisect.bisect_left(starts, phrase.end)
        if first < last:
            whole = phrase.start <= starts[first] and ends[last - 1] <= phrase.end
            labels[first, last, whole] = labels.get((first, last, whole), ()) + phrase.labels
    return labels


def choose_sentence(sentence: Sentence, rng: Rng, selection: None) -> Choices:
    """Choose the whole sentence, if some order of its words changes the text; nothing is random."""
    size = len(sentence.surface_tokens)
    if _same_in_any_order(sentence, 0, size):
        yield Dropped("no order of the words changes the text")
    else:
        yield WordSpan(0, size, "sentence")


def choose_constituents(
    sentence: Sentence, rng: Rng, selection: Selection, by_tokens: Phrases | None = None
) -> Choices:
    """Choose one constituent, or all disjoint ones, some order of whose words changes the text.

    ``by_tokens`` are the phrases of the sentence in surface tokens, where they are known.
    """
    if sentence.constituents is None and sentence.dependencies is None:
        yield Dropped("no tree")
        return
    candidates = []
    for (first, last, whole), labels in (by_tokens or phrases_in_tokens(sentence)).items():
        of_category = selection.categories is None or not set(labels).isdisjoint(selection.categories)
        if last - first not in selection.sizes or not of_category:
            continue
        if not whole:
            yield Skipped("the constituent cuts a surface token")
        elif last - first == len(sentence.surface_tokens):
            yield Skipped("the constituent is the whole sentence")
        elif _same_in_any_order(sentence, first, last):
            yield Skipped("no order of the constituent's words changes the text")
        else:
            candidates.append(WordSpan(first, last, "+".join(dict.fromkeys(labels))))
    if not candidates:
        yield Dropped(f"no constituent of that size{'' if selection.categories is None else ' and category'}")
    elif selection.spans == "one":
        yield candidates[rng().integers(len(candidates))]
    else:
        taken: set[int] = set()
        for candidate in sorted(candidates, key=lambda c: (-c.size, c.first)):
            if taken.isdisjoint(range(candidate.first, candidate.last)):
                taken.update(range(candidate.first, candidate.last))
                yield candidate


def choose_windows(sentence: Sentence, rng: Rng, selection: Selection) -> Choices:
    """Choose one window that is not a constituent for each constituent that would be chosen."""
    sizes_needed = []
    generator = rng()
    by_tokens = phrases_in_tokens(sentence)
    for choice in choose_constituents(sentence, lambda: generator, selection, by_tokens):
        if isinstance(choice, WordSpan):
            sizes_needed.append(choice.size)
        else:
            yield choice
    if not sizes_needed:
        return
    constituents = {(first, last) for first, last, _ in by_tokens}
    places = {
        size: [
            WordSpan(first, first + size, "window")
            for first in range(len(sentence.surface_tokens) - size + 1)
            if (first, first + size) not in constituents and not _same_in_any_order(sentence, first, first + size)
        ]
        for size in set(sizes_needed)
    }
    for _ in range(_PLACEMENTS):
        windows = _placed([places[size] for size in sizes_needed], generator)
        if windows is not None:
            yield from windows
            return
    yield NO_ROOM


def _placed(places: Sequence[Sequence[WordSpan]], generator: np.random.Generator) -> list[WordSpan] | None:
    """Draw one place after the other among those that are free; None if none is left for some window."""
    taken: set[int] = set()
    windows = []
    for possible in places:
        free = [window for window in possible if taken.isdisjoint(range(window.first, window.last))]
        if not free:
            return None
        windows.append(free[generator.integers(len(free))])
        taken.update(range(windows[-1].first, windows[-1].last))
    return windows


def _same_in_any_order(sentence: Sentence, first: int, last: int) -> bool:
    """Return whether no exchange of two neighbours changes the string, and so no order of the words does.

    Different words may still make the same string: without spaces between them, 人 and 人人 do.
    """
    for left, right in itertools.pairwise(sentence.surface_tokens[first:last]):
        a, b = sentence.surface(*left), sentence.surface(*right)
        if a[0] != b[0]:
            return False
        between = sentence.surface(left[0], right[1])[len(a) : -len(b)]
        if a + between + b != b + between + a:
            return False
    return True
