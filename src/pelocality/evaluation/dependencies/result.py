"""The result of ``dependency_accuracy``: the most attended word of each word, and the tables computed from it."""

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from pelocality._checks import check_choice, count
from pelocality._display import DisplayMixin
from pelocality.evaluation.dependencies._sentences import ALL, NO_TOKENS
from pelocality.statistics import mean_over_groups, proportion_over_groups, sign_flip, wilson_over_groups

Direction = Literal["dependent to head", "head to dependent"]
DIRECTIONS: tuple[Direction, Direction] = ("dependent to head", "head to dependent")
CHOSEN, SCORED = 0, 1  # the half on which heads are chosen, and the half on which they are scored


@dataclass(frozen=True, eq=False)
class Items:
    """The items of one relation in one direction: m words, and the words that are correct for each of them.

    Attributes:
        hits: (m, layer * head), whether the most attended word is correct.
        offsets: Two arrays with an entry for each correct word: the item, and the distance in words from its word.
        half: (m,), the half of the split.
        sentence: (m,), number of the sentence.
    """

    hits: NDArray[np.bool_]
    offsets: tuple[NDArray[np.int64], NDArray[np.int64]]
    half: NDArray[np.int64]
    sentence: NDArray[np.int64]

    @property
    def distance(self) -> float:
        """The mean distance of the correct words, in words."""
        return float(np.abs(self.offsets[1]).mean())

    def best_head(self, among: NDArray[np.bool_] | bool = True) -> int:
        """Return the head among some, (layer * head) or all, that is correct most often on the first half."""
        return int(np.where(among, self.hits[self.half == CHOSEN].mean(0), -1).argmax())

    def offset_hits(self, offset: int) -> NDArray[np.bool_]:
        """Return whether the word at a fixed offset is correct: (m,)."""
        item, distance = self.offsets
        hits = np.zeros(len(self.half), dtype=bool)
        hits[item[distance == offset]] = True
        return hits

    def best_offset(self) -> int:
        """Return the offset that is correct most often on the first half; the shortest in a tie."""
        item, distance = self.offsets
        values, counts = np.unique(distance[self.half[item] == CHOSEN], return_counts=True)
        best = values[counts == counts.max()]
        return int(best[np.abs(best).argmin()])


def by_sentence(values: NDArray[np.int64], sentences: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sums of (items, ...) values over the items of each sentence, which are consecutive."""
    return np.add.reduceat(values, np.unique(sentences, return_index=True)[1])


@dataclass(frozen=True, eq=False, repr=False)
class DependencyAccuracy(DisplayMixin):
    """How often each head attends to the syntactic head or dependent of a word, with the most attended words.

    Attributes:
        words: One row for each word: ``sentence`` (number), ``uid``, ``word`` and ``head`` (from 0 within the
            sentence, -1 for the root), ``relation``, ``half`` (0 where heads are chosen, 1 where they are scored).
        attended: (words, layer, head), the word that each word attends to most, from 0 within the sentence; -1
            if no other word is visible (the first word of a causal model); -2 for a word without a token (such as
            U+200B), whose arcs are not scored.
        layers: The layers of the model along the layer axis; layers without attention are left out.
        model: Name of the model, and what was attached to it.
        sentences: Number of sentences used.
        dropped: Number of sentences that could not be used, by reason.
        seed: Seed of the split.
        causal: Whether no word sees a later one; arcs are then scored only from the later word to the earlier.
    """

    words: pd.DataFrame
    attended: NDArray[np.int16]
    layers: tuple[int, ...]
    model: str
    sentences: int
    dropped: Mapping[str, int]
    seed: int
    causal: bool = False

    @functools.cached_property
    def relations(self) -> tuple[str, ...]:
        """The relations that occur, the most frequent first."""
        occurring = self.words["relation"][self.words["head"] >= 0]
        return tuple(occurring.value_counts().index)

    def accuracy(self, relation: str = ALL, direction: Direction = "dependent to head") -> NDArray[np.float64]:
        """Return the accuracy of every head for one relation, over all sentences.

        Args:
            relation: A relation, or ``"all"``.
            direction: ``"dependent to head"`` or ``"head to dependent"``.

        Returns:
            (layer, head), in [0, 1]; NaN where no arc of the relation is scored.

        Raises:
            ValueError: A relation that does not occur, or an unknown direction.
        """
        hits = self._items(relation, direction).hits
        accuracy: NDArray[np.float64] = hits.mean(0) if len(hits) else np.full(hits.shape[1], np.nan)
        return accuracy.reshape(self.attended.shape[1:])

    def _items(self, relation: str, direction: Direction) -> Items:
        """Return the items of one relation in one direction, and which heads are correct on them."""
        check_choice("direction", direction, DIRECTIONS)
        check_choice("relation", relation, (*self.relations, ALL))
        head = self.words["head"].to_numpy()
        chosen = (head >= 0) & ((self.words["relation"] == relation).to_numpy() | (relation == ALL))
        if self.causal:
            chosen &= ~self._answer_is_later(direction)
        chosen &= ~self._lacks_tokens
        arcs = np.flatnonzero(chosen)
        dependent = self.words["word"].to_numpy()[arcs]
        # The rows of a sentence are consecutive: head and dependent are as far apart in rows as in words.
        row_of_head = arcs + head[arcs] - dependent
        if direction == "dependent to head":
            rows, item, target = arcs, np.arange(len(arcs)), head[arcs]
        else:
            rows, item = np.unique(row_of_head, return_inverse=True)
            target = dependent
        word, half, sentence = (self.words[name].to_numpy()[rows] for name in ("word", "half", "sentence"))
        flat = self.attended.reshape(len(self.attended), -1)
        hits = np.zeros((len(rows), flat.shape[1]), dtype=bool)
        np.logical_or.at(hits, item, flat[rows[item]] == target[:, None])
        return Items(hits, (item, target - word[item]), half, sentence)

    @functools.cached_property
    def _lacks_tokens(self) -> NDArray[np.bool_]:
        """Whether a word, or its head, has no token: such an arc would be a miss for every head."""
        empty = (self.attended == NO_TOKENS).all((1, 2))
        head, word = self.words["head"].to_numpy(), self.words["word"].to_numpy()
        row_of_head = np.arange(len(empty)) + np.where(head < 0, 0, head - word)
        return (head >= 0) & (empty | empty[row_of_head])

    def _answer_is_later(self, direction: Direction) -> NDArray[np.bool_]:
        """Return for each word, as a dependent, whether the answer to its arc comes after the query word."""
        head, word = self.words["head"].to_numpy(), self.words["word"].to_numpy()
        return (head >= 0) & (head > word if direction == "dependent to head" else head < word)

    def best(self, minimum: int = 20, confidence: float = 0.95) -> pd.DataFrame:
        """Return the best head of each relation and direction, compared with the best fixed offset.

        Both are chosen on one half of the sentences and scored on the other half. All intervals are over sentences.
        Those of accuracies are Wilson's. ``q`` is the Benjamini-Hochberg adjusted p-value of the head against the
        offset; the family is every head, relation and direction (`to_frame`).

        Args:
            minimum: Leave out relations with fewer items in either half.
            confidence: Coverage of the intervals, in (0, 1).

        Returns:
            One row for each relation (and ``"all"``) and direction: ``relation``, ``direction``, ``n`` (items
            scored), ``distance`` (mean, in words), ``layer``, ``head``, ``accuracy``, ``low``, ``high``,
            ``offset``, ``baseline``, ``baseline_low``, ``baseline_high``, ``difference``, ``difference_low``,
            ``difference_high``, ``q``.

        Raises:
            TypeError: A minimum or a confidence that is not a number.
            ValueError: No relation has enough items, or a confidence outside (0, 1).
        """
        adjusted = self.to_frame(minimum, confidence).set_index(["relation", "direction", "layer", "head"])["q"]
        rows = []
        for relation, direction, items in frequent_items(self, minimum):
            head, offset, scored = items.best_head(), items.best_offset(), items.half == SCORED
            layer, number = place_of(self, head)
            hits, baseline = items.hits[scored, head], items.offset_hits(offset)[scored]
            sentence, change = items.sentence[scored], hits.astype(int) - baseline
            difference = mean_over_groups(change, sentence, confidence)
            rows.append(
                {"relation": relation, "direction": direction, "n": len(hits), "distance": items.distance}
                | {"layer": layer, "head": number}
                | proportion_over_groups(hits, sentence, confidence).columns("accuracy", ends="")
                | {"offset": offset}
                | proportion_over_groups(baseline, sentence, confidence).columns("baseline")
                | difference.columns("difference")
                | {"q": float(adjusted.loc[relation, direction, layer, number])}
            )
        return pd.DataFrame(rows)

    def to_frame(self, minimum: int = 20, confidence: float = 0.95) -> pd.DataFrame:
        """Return the accuracy of every head for every relation and direction.

        Args:
            minimum: Leave out relations with fewer items in either half.
            confidence: Coverage of the intervals, in (0, 1).

        Returns:
            One row for each relation (and ``"all"``), direction, layer and head: ``n`` items over all
            sentences, ``accuracy`` with Wilson's interval over sentences, ``low`` and ``high``, ``p``, the p-value of
            the head against the best fixed offset on the scored half (one-sided, exchanging whole sentences:
            `sign_flip`), and ``q``, the same adjusted over all rows (Benjamini and Hochberg, 1995).

        Raises:
            TypeError: A minimum or a confidence that is not a number.
            ValueError: No relation has enough items, or a confidence outside (0, 1).
        """
        layers, heads = zip(*(place_of(self, index) for index in range(self.attended[0].size)), strict=True)
        frames = []
        for relation, direction, items in frequent_items(self, minimum):
            correct = by_sentence(items.hits.astype(int), items.sentence)
            n = np.unique(items.sentence, return_counts=True)[1]
            scored = items.half == SCORED
            baseline = items.offset_hits(items.best_offset())[scored, None]
            difference = items.hits[scored].astype(int) - baseline
            frame = pd.DataFrame({"relation": relation, "direction": direction, "layer": layers, "head": heads})
            frame["n"] = len(items.hits)
            frame["accuracy"] = items.hits.mean(0)
            frame["low"], frame["high"] = wilson_over_groups(correct, n, confidence)
            frame["p"] = sign_flip(by_sentence(difference, items.sentence[scored]))
            frames.append(frame)
        frame = pd.concat(frames, ignore_index=True)
        return frame.assign(q=stats.false_discovery_control(frame["p"]))

    def _headline(self) -> str:
        layers, heads = self.attended.shape[1:]
        dropped = "".join(f", {count} dropped ({reason})" for reason, count in self.dropped.items())
        size = f"{layers} layers x {heads} heads, {self.sentences} sentences{dropped}"
        return f"{self.model}: {size}; the most accurate heads:"

    @property
    def notes(self) -> tuple[str, ...]:
        """The arcs that are not scored and why, in a sentence for each reason."""
        notes = []
        arcs, later = (self.words["head"] >= 0).sum(), self._answer_is_later("dependent to head").sum()
        if self.causal:
            where = f"{later} of {arcs} from dependent to head, {arcs - later} from head to dependent"
            notes.append(f"causal: no word sees a later one, and arcs to later words are not scored ({where})")
        if self._lacks_tokens.any():
            where = f"{self._lacks_tokens.sum()} of {arcs}"
            notes.append(f"arcs of words of which the tokenizer keeps no token are not scored ({where})")
        return tuple(notes)

    def _table(self) -> pd.DataFrame:
        rows = []
        for relation, direction in itertools.product((ALL, *self.relations[:9]), DIRECTIONS):
            accuracy = self.accuracy(relation, direction)
            if np.isnan(accuracy).all():
                continue
            layer, head = place_of(self, int(accuracy.argmax()))
            row = {"relation": relation, "direction": direction, "layer": layer, "head": head}
            rows.append(row | {"accuracy": accuracy.max()})
        return pd.DataFrame(rows)


def place_of(accuracy: DependencyAccuracy, index: int) -> tuple[int, int]:
    """Return the layer of the model and the head within it, of an index over all heads."""
    row, head = divmod(index, accuracy.attended.shape[2])
    return accuracy.layers[row], head


def frequent_items(
    accuracy: DependencyAccuracy, minimum: int, first: tuple[str, ...] = (ALL,)
) -> list[tuple[str, Direction, Items]]:
    """Return ``first``, the relations by frequency, and directions, those with enough items in each half."""
    count("minimum", minimum, least=0)
    frequent = []
    for relation, direction in itertools.product((*first, *accuracy.relations), DIRECTIONS):
        items = accuracy._items(relation, direction)
        if np.bincount(items.half, minlength=2).min() >= max(minimum, 1):
            frequent.append((relation, direction, items))
    if not frequent:
        raise ValueError(f"no relation has {minimum} items in each half; read more sentences, or lower minimum")
    return frequent
