"""Shuffled words: inside constituents, inside windows that are not constituents, or over the whole sentence."""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import datasets
import numpy as np

from pelocality._checks import check_choice, count
from pelocality.corpora import Dropped, Pair, Sentence
from pelocality.probes._build import Item, Row, Skipped, build, generator_for
from pelocality.probes._rows import Side, Spans, check_names, has_label, row_of, sides_of, span_entry, texts_of
from pelocality.probes._spans import NO_ROOM, Selection, WordSpan, choose_constituents, choose_sentence, choose_windows


def constituency_shuffling(
    pairs: Iterable[Item],
    size: int | range,
    *,
    side: Side = "premise",
    spans: Spans = "one",
    labels: Collection[str] | None = None,
    seed: int = 0,
    categories: Collection[str] | None = None,
    num_proc: int | None = None,
    progress: bool = True,
) -> datasets.Dataset:
    """Permute the words inside constituents, and leave everything else unchanged.

    This is Shuffle-x of Chen et al. (2023): the words of a constituent of x words change places, and the label does not
    change. A word is a surface token: ``don't`` counts as one word and is never split. Punctuation keeps its place and
    does not count. Constituents come from the sentence's phrase structure. Without one, they come from full subtrees of
    the dependency tree, and ``provenance`` says so. A constituent that is the whole sentence is skipped. Words keep
    their capitals, so that a shuffle has exactly the words of the original.

    Args:
        pairs: A corpus (``read_snli(...)``), or any iterable of pairs or sentences. ``side`` and ``labels`` are for
            pairs only.
        size: Number of words of a constituent, a number or a range: ``range(3, 7)`` is 3, 4, 5 or 6.
        side: The side of a pair to perturb; with ``"both"``, each side that has a constituent of the size.
            The paper does not specify it; premises are longer and have constituents of every size.
        spans: ``"one"`` draws one constituent; ``"all"`` takes all disjoint constituents, the longest first.
        labels: Keep only pairs with these gold labels; None keeps all.
        seed: Seed of the choice for each item, together with its text (for a pair, both texts) and nothing else:
            neither its uid nor its place in the corpus.
        categories: Keep only constituents with one of these labels, such as ``{"NP", "PP"}``.
        num_proc: Number of processes that share the work.
        progress: Whether to show a progress bar, after three seconds.

    Returns:
        A dataset with the perturbed ``premise``, ``hypothesis``, ``label``, the originals under ``original_``,
        the perturbed ``spans``, ``size`` (words of the largest span), ``category``, ``seed``, ``uid``, ``provenance``
        and ``builder``; over sentences ``sentence`` and ``original_sentence`` instead of the pair. Its files are
        temporary: ``save_to_disk`` keeps it. ``probe_info`` returns the counts of what was left out.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: ``size`` below 2, an unknown ``side`` or ``spans``, or ``side`` or ``labels`` with sentences.

    Examples:
        >>> from pelocality.corpora import Sentence, parse_bracketed
        >>> tree = "(S (NP (DT the) (JJ old) (NN cat)) (VP (VBD slept)))"
        >>> words, constituents = parse_bracketed(tree, "made up")
        >>> probe = constituency_shuffling([Sentence(words, uid="1", constituents=constituents)], size=3)
        >>> sorted(probe[0]["sentence"].split()[:3]), probe[0]["sentence"].split()[3:], probe[0]["category"]
        (['cat', 'old', 'the'], ['slept'], 'NP')
    """
    selection = _selection(size, categories, spans)
    perturb = _Shuffle(side, check_names("labels", labels), seed, choose_constituents, selection)
    return build("constituency_shuffling", pairs, perturb, num_proc, progress)


def window_shuffling(
    pairs: Iterable[Item],
    size: int | range,
    *,
    side: Side = "premise",
    spans: Spans = "one",
    labels: Collection[str] | None = None,
    seed: int = 0,
    categories: Collection[str] | None = None,
    num_proc: int | None = None,
    progress: bool = True,
) -> datasets.Dataset:
    """Permute as many words as ``constituency_shuffling`` would, in windows that are not constituents.

    This is a control for `constituency_shuffling`, which the paper does not have. With the same arguments and seed,
    each row permutes the same number of spans of the same sizes in the same sentence, at random places that are not
    constituents. A sentence without a suitable constituent has no row here either. If twenty random placements find no
    room for the windows of a sentence, the item is dropped and counted. Compare the two probes over the ``uid`` that
    they share.

    Args:
        pairs: A corpus, or any iterable of pairs or sentences, with trees. ``side`` and ``labels`` are for pairs only.
        size: Number of words of a window, a number or a range; within a range, the size of the constituent that it
            corresponds to.
        side: The side of a pair to perturb.
        spans: ``"one"`` or ``"all"``, as in ``constituency_shuffling``.
        labels: Keep only pairs with these gold labels; None keeps all.
        seed: As in ``constituency_shuffling``; the same seed matches its rows.
        categories: Labels of the constituents that the windows correspond to.
        num_proc: Number of processes that share the work.
        progress: Whether to show a progress bar, after three seconds.

    Returns:
        A dataset with the columns of ``constituency_shuffling``; the category is ``"window"``.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: ``size`` below 2, an unknown ``side`` or ``spans``, or ``side`` or ``labels`` with sentences.

    Examples:
        >>> from pelocality.corpora import Sentence, parse_bracketed
        >>> tree = "(S (NP (DT the) (NN cat)) (VP (VBD slept) (PP (IN on) (NP (PRP$ my) (NN lap)))))"
        >>> words, constituents = parse_bracketed(tree, "made up")
        >>> probe = window_shuffling([Sentence(words, uid="1", constituents=constituents)], size=3)
        >>> span = probe[0]["spans"][0]
        >>> (span["start"], span["end"]) in [(0, 3), (1, 4), (2, 5)]  # not (3, 6), the prepositional phrase
        True
    """
    selection = _selection(size, categories, spans)
    perturb = _Shuffle(side, check_names("labels", labels), seed, choose_windows, selection)
    return build("window_shuffling", pairs, perturb, num_proc, progress)


def random_shuffling(
    pairs: Iterable[Item],
    *,
    side: Side = "premise",
    labels: Collection[str] | None = None,
    seed: int = 0,
    num_proc: int | None = None,
    progress: bool = True,
) -> datasets.Dataset:
    """Permute all words of a sentence.

    This is Random of Chen et al. (2023). It needs no trees, so pairs of ``read_pairs`` without a parser are enough.
    Punctuation keeps its place, and surface tokens are not split.

    Args:
        pairs: A corpus, or any iterable of pairs or sentences. ``side`` and ``labels`` are for pairs only.
        side: The side of a pair to perturb.
        labels: Keep only pairs with these gold labels; None keeps all.
        seed: Seed of the permutation of each item, together with its text (for a pair, both texts) and nothing else.
        num_proc: Number of processes that share the work.
        progress: Whether to show a progress bar, after three seconds.

    Returns:
        A dataset with the columns of ``constituency_shuffling``; the category is ``"sentence"``.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An unknown ``side``, or ``side`` or ``labels`` with sentences.

    Examples:
        >>> from pelocality.corpora import plain_sentence
        >>> probe = random_shuffling([plain_sentence("one two three.", uid="1")])
        >>> probe[0]["sentence"] != "one two three.", probe[0]["sentence"][-1], probe[0]["size"]
        (True, '.', 3)
    """
    perturb = _Shuffle(side, check_names("labels", labels), seed, choose_sentence)
    return build("random_shuffling", pairs, perturb, num_proc, progress)


def _selection(size: int | range, categories: Collection[str] | None, spans: Spans) -> Selection:
    """Return which constituents to choose, after checking the arguments."""
    sizes = tuple(sorted(size)) if isinstance(size, range) else (size,)
    if not sizes or not all(isinstance(each, int | np.integer) and each > 1 for each in sizes):
        raise ValueError(f"size must be at least 2 words, or a range such as range(3, 7), got {size!r}")
    check_choice("spans", spans, ("one", "all"))
    return Selection(tuple(map(int, sizes)), check_names("categories", categories), spans)


@dataclass(frozen=True)
class _Shuffle:
    """A shuffle with its settings; ``choose`` yields the spans whose words change places, in any order."""

    default_side: ClassVar[str] = "premise"
    side: Side
    labels: tuple[str, ...] | None
    seed: int
    choose: Callable[..., Iterator[WordSpan | Skipped | Dropped]]
    selection: Selection | None = None

    def __post_init__(self) -> None:
        check_choice("side", self.side, ("premise", "hypothesis", "both"))
        object.__setattr__(self, "seed", count("seed", self.seed, 0, most=2**63 - 1))

    def settings(self) -> Mapping[str, Any]:
        """Return the arguments of the builder."""
        selection = self.selection._asdict() if self.selection else {}
        return {"side": self.side, "labels": self.labels, "seed": self.seed, **selection}

    def __call__(self, item: Item) -> Iterator[Row | Dropped | Skipped]:
        """Yield the row of an item: choose spans on each side of ``side``, and permute the words of each."""
        if isinstance(item, Pair) and not has_label(item.label, self.labels):
            yield Dropped("label not in labels")
            return
        perturbed: dict[str, str] = {}
        spans: list[WordSpan] = []
        entries: list[dict[str, Any]] = []
        texts = texts_of(item)
        for name, sentence in sides_of(item).items():
            if isinstance(item, Pair) and self.side not in (name, "both"):
                continue
            chosen: list[WordSpan] = []
            rng = functools.partial(generator_for, self.seed, *texts, name)
            for choice in self.choose(sentence, functools.partial(rng, "choose"), self.selection):
                if isinstance(choice, WordSpan):
                    chosen.append(choice)
                else:
                    yield choice
                    if choice == NO_ROOM:  # a row for the other side alone would differ from the constituency shuffle
                        return
            if not chosen:
                continue
            chosen.sort()
            text, changes = _permuted(sentence, name, chosen, rng("permute"))
            if text == sentence.text:
                yield Dropped("the text would not change")
            else:
                perturbed[name] = text
                spans += chosen
                entries += changes
        if perturbed:
            row = row_of(item, perturbed, entries, item.label if isinstance(item, Pair) else None)
            categories = dict.fromkeys(span.category for span in spans)
            yield {**row, "size": max(s.size for s in spans), "category": " ".join(categories), "seed": self.seed}


def _permuted(
    sentence: Sentence, side: str, spans: Sequence[WordSpan], rng: np.random.Generator
) -> tuple[str, list[dict[str, Any]]]:
    """Permute the surface tokens of each span so that its string changes; punctuation keeps its place."""
    replacements, entries = [], []
    for span in spans:
        places = sentence.surface_tokens[span.first : span.last]
        texts = [sentence.surface(*place) for place in places]
        start, end = places[0][0], places[-1][1]
        original = changed = sentence.surface(start, end)
        while changed == original:  # the loop ends: a chosen span has two neighbours whose exchange changes it
            order = [texts[k] for k in rng.permutation(len(texts))]
            here = [(*place, text) for place, text in zip(places, order, strict=True)]
            changed = sentence.replaced(here, start, end)
        replacements.append((start, end, changed))
        entries.append(span_entry(sentence, side, span.category, start, end, changed))
    return sentence.replaced(replacements), entries
