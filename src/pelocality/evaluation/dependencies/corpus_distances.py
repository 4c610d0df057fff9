"""Distances between dependents and their heads, in words."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from pelocality._checks import check_choice, flag
from pelocality._display import DisplayMixin
from pelocality.corpora import Dependencies, Sentence
from pelocality.evaluation.dependencies._sentences import ALL, checked_sentences, without_subtype


@dataclass(frozen=True, eq=False, repr=False)
class DependencyDistances(DisplayMixin):
    """Distances between dependents and their heads, per language and relation.

    Attributes:
        counts: One row for each ``language``, ``relation`` and signed ``offset`` (position of the head minus
            position of the dependent, in words: positive if the head comes later), with its ``count``.
        sentences: Number of sentences, by language.
        punctuation: Whether punctuation counts as words.
    """

    counts: pd.DataFrame
    sentences: Mapping[str, int]
    punctuation: bool

    def to_frame(self) -> pd.DataFrame:
        """Return mean, median and spread of the distance per language and relation.

        Returns:
            One row for each language and relation (and ``"all"``): ``language``, ``relation``, ``n``, ``mean``,
            ``median``, ``sd``, ``lower_quartile``, ``upper_quartile`` (distances in words, at least 1),
            ``adjacent`` (share at distance 1) and ``head_later`` (share whose head comes later), the most frequent
            relations first.
        """
        counts = pd.concat([self.counts.assign(relation=ALL), self.counts], ignore_index=True)
        arcs = counts.loc[counts.index.repeat(counts["count"])]
        arcs = arcs.assign(distance=arcs["offset"].abs(), head_later=arcs["offset"] > 0)
        groups = arcs.assign(adjacent=arcs["distance"] == 1).groupby(["language", "relation"], sort=False)
        summary = groups["distance"].agg(n="size", mean="mean", median="median", sd="std")
        summary["lower_quartile"] = groups["distance"].quantile(0.25)
        summary["upper_quartile"] = groups["distance"].quantile(0.75)
        frame = summary.join(groups[["adjacent", "head_later"]].mean()).sort_values("n", ascending=False, kind="stable")
        by_language: pd.DataFrame = frame.loc[[name for name in self.sentences if name in frame.index]]
        return by_language.reset_index()

    def histogram(self, relation: str = ALL) -> pd.DataFrame:
        """Return the share of each distance, per language.

        Args:
            relation: A relation, or ``"all"``.

        Returns:
            Rows are distances in words, columns are languages, entries are shares; columns sum to 1.

        Raises:
            ValueError: A relation that no language has.
        """
        check_choice("relation", relation, (*sorted(self.counts["relation"].unique()), ALL))
        counts = self.counts if relation == ALL else self.counts[self.counts["relation"] == relation]
        table = counts.assign(distance=counts["offset"].abs()).pivot_table(
            index="distance", columns="language", values="count", aggfunc="sum", fill_value=0
        )
        table = table[[language for language in self.sentences if language in table]]
        return table.reindex(range(1, int(table.index.max()) + 1), fill_value=0) / table.sum()

    def _table(self) -> pd.DataFrame:
        frame = self.to_frame()
        return frame[frame["relation"] == ALL].drop(columns="relation")

    def _headline(self) -> str:
        punctuation = "counted" if self.punctuation else "not counted"
        return f"{sum(self.sentences.values())} sentences, distances in words, punctuation {punctuation}"


def dependency_distances(
    sentences: Iterable[Sentence] | Mapping[str, Iterable[Sentence]], *, subtypes: bool = True, punctuation: bool = True
) -> DependencyDistances:
    """Return the distances between dependents and their heads, per relation and language.

    The distance is the absolute difference of the two positions, 1 for neighbours. The root has no head and does
    not count. The corpus is read in one pass.

    Args:
        sentences: Sentences with dependencies; or several corpora by name, which replaces the language.
        subtypes: Keep subtypes of relations apart (``nsubj:pass`` from ``nsubj``).
        punctuation: Count punctuation as words, as a model sees them. False leaves out the relation ``punct`` and
            counts only other words between dependent and head, as the literature on dependency length does.

    Returns:
        A `DependencyDistances`.

    Raises:
        TypeError: Items that are not sentences.
        ValueError: A sentence without dependencies, or a corpus without any.

    Examples:
        >>> tree = Dependencies((2, 3, 0, 5, 3), ("det", "nsubj", "root", "det", "obj"), "made up")
        >>> sentence = Sentence(("The", "dog", "saw", "a", "cat"), language="en", dependencies=tree)
        >>> dependency_distances([sentence]).to_frame()[["relation", "n", "mean", "head_later"]]
          relation  n  mean  head_later
        0      all  4  1.25        0.75
        1      det  2  1.00        1.00
        2    nsubj  1  1.00        1.00
        3      obj  1  2.00        0.00
    """
    flag("subtypes", subtypes)
    flag("punctuation", punctuation)
    counts: Counter[tuple[str, str, int]] = Counter()
    read: Counter[str] = Counter()
    named = sentences.items() if isinstance(sentences, Mapping) else [(None, sentences)]
    for name, corpus in named:
        for sentence in checked_sentences(corpus):
            if sentence.dependencies is None:
                raise ValueError(f"sentences must have dependencies, {sentence.uid!r} has none; see read_conllu")
            language = sentence.language if name is None else name
            read[language] += 1
            for relation, offset in _offsets(sentence.dependencies, punctuation):
                counts[language, relation if subtypes else without_subtype(relation), offset] += 1
    if not counts:
        raise ValueError(f"sentences must have a dependency between two words, none of {sum(read.values())} has")
    columns = ["language", "relation", "offset", "count"]
    frame = pd.DataFrame([(*key, count) for key, count in sorted(counts.items())], columns=columns)
    return DependencyDistances(frame, dict(read), punctuation)


def _offsets(layer: Dependencies, punctuation: bool) -> Iterable[tuple[str, int]]:
    """Return relation and signed distance of each word that has a head."""
    words = zip(layer.relations, layer.upos or [""] * len(layer.relations), strict=True)
    kept = [punctuation or not (without_subtype(relation) == "punct" or tag == "PUNCT") for relation, tag in words]
    place = np.cumsum(kept)  # positions among the words that count
    for i, (head, relation) in enumerate(zip(layer.heads, layer.relations, strict=True)):
        if head > 0 and kept[i] and kept[head - 1]:
            yield relation, int(place[head - 1] - place[i])
