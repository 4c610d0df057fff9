"""Shuffled words: inside constituents, inside windows that are none, or over the whole sentence."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import datasets
import numpy as np

from pelocality.probes.build import Item, Row, SetAside, build, check_seed, generator_for
from pelocality.probes.rows import (
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
    span,
)
from pelocality.probes.stretches import (
    Choose,
    Spans,
    Stretch,
    choose_constituents,
    choose_sentence,
    choose_windows,
)
from pelocality.trees import Dropped, Pair, Records, Sentence


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
    sentence is not local and is set aside. Words keep their capitals: the multiset of words is exactly that
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
        the edited ``spans``, ``size`` (words of the largest span), ``category``, ``seed``, ``uid`` and
        ``provenance``; over sentences ``sentence`` and ``original_sentence`` instead of the pair. Its files
        are temporary: ``save_to_disk`` keeps it. ``probe_info`` tells what was left out.

    Raises:
        TypeError: Where an argument is of the wrong kind.
        ValueError: Where an argument has a value that makes no sense.

    Examples:
        >>> from pelocality.trees import Sentence, parse_bracketed
        >>> tree = "(S (NP (DT the) (JJ old) (NN cat)) (VP (VBD slept)))"
        >>> words, constituents = parse_bracketed(tree, "made up")
        >>> probe = constituency_shuffling([Sentence(words, uid="1", constituents=constituents)], size=3)
        >>> sorted(probe[0]["sentence"].split()[:3]), probe[0]["sentence"].split()[3:], probe[0]["category"]
        (['cat', 'old', 'the'], ['slept'], 'NP')
    """
    settings = _stretch_settings(size, spans, categories)
    choose = functools.partial(choose_constituents, **settings)
    return _shuffling("constituency_shuffling", pairs, choose, side, labels, seed, settings, num_proc, progress)


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
        >>> from pelocality.trees import Sentence, parse_bracketed
        >>> tree = "(S (NP (DT the) (NN cat)) (VP (VBD slept) (PP (IN on) (NP (PRP$ my) (NN lap)))))"
        >>> words, constituents = parse_bracketed(tree, "made up")
        >>> probe = window_shuffling([Sentence(words, uid="1", constituents=constituents)], size=3)
        >>> span = probe[0]["spans"][0]
        >>> (span["start"], span["end"]) in [(0, 3), (1, 4), (2, 5)]  # not (3, 6), the prepositional phrase
        True
    """
    settings = _stretch_settings(size, spans, categories)
    choose = functools.partial(choose_windows, **settings)
    return _shuffling("window_shuffling", pairs, choose, side, labels, seed, settings, num_proc, progress)


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
    return _shuffling("random_shuffling", pairs, choose_sentence, side, labels, seed, {}, num_proc, progress)


def _stretch_settings(size: int | range, spans: Spans, categories: Collection[str] | None) -> dict[str, Any]:
    """Check and spell out what says which stretches are wanted."""
    if isinstance(size, bool) or not isinstance(size, int | range):
        raise TypeError(f"size must be a number or a range such as range(3, 7), got {size!r}")
    sizes = [size] if isinstance(size, int) else sorted(size)
    if not sizes or min(sizes) < 2:
        raise ValueError(f"size must be at least 2 words, got {size!r}: fewer cannot change places")
    if isinstance(categories, str):
        raise TypeError(f"categories must be a collection of labels, such as ({categories!r},), got a string")
    check_choice("spans", spans, ("one", "all"))
    return {"sizes": sizes, "categories": sorted(categories) if categories is not None else None, "spans": spans}


def _shuffling(
    builder: str,
    pairs: Iterable[Item] | Records[Item],
    choose: Choose,
    side: Side,
    labels: Collection[str] | None,
    seed: int,
    settings: dict[str, Any],
    num_proc: int | None,
    progress: bool,
) -> datasets.Dataset:
    check_choice("side", side, ("premise", "hypothesis", "both"))
    check_seed(seed)
    kept = check_labels(labels)
    return build(
        builder,
        pairs,
        functools.partial(_shuffle, choose=choose, side=side, labels=kept, seed=int(seed)),
        {Pair: pair_features(), Sentence: sentence_features()},
        {**settings, "side": side, "labels": kept, "seed": int(seed)},
        num_proc,
        progress,
    )


def _shuffle(
    item: Item, choose: Choose, side: Side, labels: tuple[str, ...] | None, seed: int
) -> Iterator[Row | Dropped | SetAside]:
    """Edit one item: choose stretches on each side asked for, and permute their words."""
    if isinstance(item, Pair) and labels is not None and item.label not in labels:
        yield Dropped("label not asked for")
        return
    if isinstance(item, Sentence):
        sides = {SENTENCE: item}
    else:
        sides = {name: getattr(item, name) for name in ("premise", "hypothesis") if side in (name, "both")}
    edited: dict[str, str] = {}
    spans: list[dict[str, Any]] = []
    stretches: list[Stretch] = []
    dropped = Dropped("no candidate")
    for name, sentence in sides.items():
        chosen = []
        for choice in choose(sentence, generator_for(seed, *content_of(item), name, "choose")):
            if isinstance(choice, Stretch):
                chosen.append(choice)
            elif isinstance(choice, SetAside):
                yield choice
            else:
                dropped = choice
        if chosen:
            rng = generator_for(seed, *content_of(item), name, "permute")
            chosen.sort(key=lambda stretch: stretch.first)
            text, new_spans = _permuted(sentence, name, chosen, rng)
            if text == sentence.text:
                dropped = Dropped("the text would not change")
                continue
            edited[name] = text
            spans += new_spans
            stretches += chosen
    if not edited:
        yield dropped
        return
    columns = {
        "size": max(stretch.size for stretch in stretches),
        "category": " ".join(dict.fromkeys(stretch.category for stretch in stretches)),
        "seed": seed,
        "uid": name_of(item),
    }
    if isinstance(item, Sentence):
        yield sentence_row(item, edited[SENTENCE], spans, **columns)
    else:
        yield pair_row(item, edited, item.label, spans, **columns)


def _permuted(
    sentence: Sentence, side: str, stretches: Sequence[Stretch], rng: np.random.Generator
) -> tuple[str, list[dict[str, Any]]]:
    """Permute the written words of each stretch so that its string changes; punctuation stays put."""
    slots, spans = [], []
    for stretch in stretches:
        places = sentence.written_words[stretch.first : stretch.last]
        texts = [sentence.written(*place) for place in places]
        start, end = places[0][0], places[-1][1]
        original = changed = sentence.written(start, end)
        while changed == original:  # ends: exchanging some two neighbours changes it, or it had not been chosen
            order = [texts[k] for k in rng.permutation(len(texts))]
            here = [(a, b, text) for (a, b), text in zip(places, order, strict=True)]
            changed = _part(sentence, start, end, [(a - start, b - start, text) for a, b, text in here])
        slots += here
        spans.append(span(sentence, side, stretch.category, start, end, changed))
    return sentence.replaced(slots), spans


def _part(sentence: Sentence, start: int, end: int, slots: Sequence[tuple[int, int, str]]) -> str:
    """Write the edited words of one stretch alone."""
    contractions = tuple((a - start, b - start, form) for a, b, form in sentence.contractions if start <= a < end)
    part = Sentence(sentence.words[start:end], (*sentence.spaces[start : end - 1], ""), contractions=contractions)
    return part.replaced(slots)
