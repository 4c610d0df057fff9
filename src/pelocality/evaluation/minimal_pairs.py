"""Minimal pairs: how often a language model gives the original a higher score than the perturbed text."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from reprlib import repr as brief
from typing import Any

import datasets
import numpy as np
import pandas as pd
from torch import nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED,
)

from pelocality._checks import check_dataset, count
from pelocality._display import DisplayMixin
from pelocality._distributed import failing_together, gathered, part_of_process, undivided_if_sharded, without_ddp
from pelocality.evaluation._callables import array_of, check_callable, name_of
from pelocality.evaluation._columns import by_columns, in_groups, scalar_columns
from pelocality.evaluation._words import Scored, reduced, regions_of, words_of
from pelocality.evaluation.likelihood import LOADERS, has_head, log_likelihood, pseudo_log_likelihood, refuse_two_texts
from pelocality.models.sequence_model import SequenceModel
from pelocality.statistics import Estimate, mean_over_groups, proportion_over_groups

_ADDED = ("good", "bad", "difference", "correct", "group")
_SCORES = (pseudo_log_likelihood, log_likelihood)
Score = Callable[..., Any]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MinimalPairEvaluation(DisplayMixin):
    """How often the original has the higher score, with the scores of every pair.

    Attributes:
        examples: One row for each pair, in order: the dataset's columns that are not sentences, ``good`` and
            ``bad`` (scores), ``difference`` (good minus bad), ``correct`` (good is larger) and ``group`` (pairs
            with the same original have the same number: they are not independent).
        model: Name of the model, and what was attached to it.
        score: Name of the score.
        ties: Pairs whose scores are equal; they count as wrong, as in BLiMP. Many ties, or accuracy near 0.5 with
            tiny differences, suggest a model that does not depend on word order, such as one without positions.
    """

    examples: pd.DataFrame
    model: str
    score: str
    ties: int
    _scored: Sequence[tuple[Any, Any, Any]] = ()  # of each pair: both texts, the tokens of both, and spans

    @functools.cached_property
    def accuracy(self) -> Estimate:
        """Share of pairs whose original has the higher score, in [0, 1], with Wilson's 95 % interval over groups.

        0.5 is chance.
        """
        return proportion_over_groups(self.examples["correct"], self.examples["group"])

    def by(self, *columns: str, confidence: float = 0.95) -> pd.DataFrame:
        """Return the accuracy for each value of a column, such as a size, a category or a paradigm.

        Args:
            columns: Columns of ``examples``, such as ``"size"`` or ``"UID"``.
            confidence: Coverage of the intervals, in (0, 1).

        Returns:
            One row for each value (or combination): ``n``, ``accuracy``, ``low``, ``high``, ``difference`` (mean).

        Raises:
            TypeError: A confidence that is not a number.
            KeyError: An unknown column.
            ValueError: No column, one with the name of a number, or a confidence outside (0, 1).
        """
        return by_columns(self.examples, columns, lambda rows: _numbers(rows, confidence))

    @functools.cached_property
    def words(self) -> pd.DataFrame:
        """The score of each word, where the library's scores and a fast tokenizer gave them.

        One row for each word, which adds up to the score of its sentence (of the library's sums over tokens): ``pair``
        (the row of ``examples``), ``sentence`` (``"good"`` or ``"bad"``), ``word``, ``start``, ``end``, ``tokens`` and
        ``score``, as of `log_likelihood`. If the pairs have the column ``spans`` (those of ``minimal_pairs`` do), there
        is a ``region``, and a word is cut where another region begins within it: ``"before"`` the first phrase that
        moved, ``"phrase 1"``, ``"between"`` two of them, ``"phrase 2"`` and so on, and ``"behind"`` the last. In an
        English role swap, the verb with its auxiliaries, and *by*, is what stands between.

        Raises:
            ValueError: No scores of tokens are known, or the spans are not those of the sentences.
        """
        if not self._scored:
            raise ValueError(f"{self.score} must be one of this library's scores, with a fast tokenizer, to have words")
        rows: list[dict[str, Any]] = []
        for number, (texts, tokens, spans) in enumerate(self._scored):
            regions = ((), ()) if spans is None else regions_of(texts[0], texts[1], spans)
            for name, text, own, region in zip(("good", "bad"), texts, tokens, regions, strict=True):
                rows += ({"pair": number, "sentence": name} | word for word in words_of(text, own, regions=region))
        frame = pd.DataFrame(rows)
        if "region" in frame:
            phrases = sorted(
                {each for each in frame["region"] if each.startswith("phrase")}, key=lambda each: int(each[7:])
            )
            order = ["before", *phrases[:1], "between", *phrases[1:], "behind"]
            frame["region"] = pd.Categorical(frame["region"], order, ordered=True).remove_unused_categories()
        return frame

    def by_region(self, *columns: str, confidence: float = 0.95) -> pd.DataFrame:
        """Return in which region of the sentence the original is likelier, and by how much.

        Args:
            columns: Columns of ``examples`` whose values are told apart, such as ``"reversible"``.
            confidence: Coverage of the intervals, in (0, 1).

        Returns:
            One row for each value and region, as in ``words``: ``n`` pairs with a score there, ``good`` and ``bad``
            (means of the sums over the region), ``difference`` (good minus bad, in nats), ``low`` and ``high``.

        Raises:
            TypeError: A confidence that is not a number.
            KeyError: An unknown column, or pairs without the column ``spans``.
            ValueError: As of ``words``, a column with the name of a number, or a confidence outside (0, 1).
        """
        words = self.words.join(self.examples[[*columns, "group"]], on="pair")
        keys = [*columns, "region", "group", "pair", "sentence"]
        sums = words.groupby(keys, observed=True, dropna=False)["score"].sum(min_count=1).unstack().dropna()

        def numbers(rows: pd.DataFrame) -> dict[str, Any]:
            means = {"n": len(rows), "good": rows["good"].mean(), "bad": rows["bad"].mean()}
            values, infinite = rows["good"] - rows["bad"], float("inf")
            estimate = mean_over_groups(values, rows["group"], confidence, least=-infinite, most=infinite)
            return means | estimate.columns("difference", ends="")

        return by_columns(sums.reset_index(), [*columns, "region"], numbers)

    def to_frame(self, confidence: float = 0.95) -> pd.DataFrame:
        """Return the accuracy as one row.

        Args:
            confidence: Coverage of the interval, in (0, 1).

        Returns:
            ``model``, ``score``, ``n``, ``accuracy``, ``low``, ``high``, ``difference`` (mean).

        Raises:
            TypeError: A confidence that is not a number.
            ValueError: A confidence outside (0, 1).
        """
        return pd.DataFrame([{"model": self.model, "score": self.score} | _numbers(self.examples, confidence)])

    def _headline(self) -> str:
        ties = f", {self.ties} ties" if self.ties else ""
        size = in_groups(self.examples, "pairs")
        return f"{self.model} by {self.score}: accuracy {self.accuracy} on {size}{ties}"


def _numbers(rows: pd.DataFrame, confidence: float) -> dict[str, Any]:
    """Return the number of pairs, the accuracy with its interval and the mean difference by column."""
    accuracy = proportion_over_groups(rows["correct"], rows["group"], confidence).columns("accuracy", ends="")
    return {"n": len(rows)} | accuracy | {"difference": rows["difference"].mean()}


@undivided_if_sharded
def evaluate_minimal_pairs(
    model: nn.Module | Callable[[Sequence[str]], Any],
    tokenizer: Any,
    pairs: datasets.Dataset,
    *,
    score: Score | None = None,
    batch_size: int = 64,
    progress: bool = True,
) -> MinimalPairEvaluation:
    """Return how often a language model gives the original the higher score.

    If ``torch.distributed`` is initialised, each process scores a part of the texts, and all return the result.

    Args:
        model: A masked or causal language model of transformers, or a callable from a list of texts to a number for
            each.
        tokenizer: The model's tokenizer; not used for a callable.
        pairs: A dataset with ``sentence_good`` and ``sentence_bad``, such as ``minimal_pairs`` builds, or BLiMP.
        score: `pseudo_log_likelihood`, `log_likelihood`, or any function of model, tokenizer and texts (with
            ``functools.partial`` for their settings). None: the score that fits the model's head. If a model has a
            causal head but sees later tokens, there is an error.
        batch_size: Sentences, or masked copies of sentences, per forward pass of these two scores. A
            ``functools.partial`` that sets a batch size keeps it.
        progress: Show a progress bar of these two scores on runs that take longer than a few seconds.

    Returns:
        A `MinimalPairEvaluation`, with ``accuracy`` in [0, 1]; 0.5 is chance.

    Raises:
        TypeError: Pairs that are not a ``datasets.Dataset``, or a model that is neither.
        ValueError: A dataset without pairs, or with a column whose name the result uses; scores that are NaN, or a
            wrong number of scores; or a model whose head fits no score.

    Examples:
        >>> rows = {"sentence_good": ["a b", "c d"], "sentence_bad": ["b a", "d c"]}
        >>> evaluate_minimal_pairs(lambda texts: [text.count("a") for text in texts], None,
        ...                        datasets.Dataset.from_dict(rows)).ties
        2
    """
    count("batch_size", batch_size)
    check_dataset("pairs", pairs)
    if not len(pairs) or not {"sentence_good", "sentence_bad"} <= set(pairs.column_names):
        got = f"{len(pairs)} rows of {pairs.column_names}; call minimal_pairs(probe) of a probe"
        raise ValueError(f"pairs must have sentence_good and sentence_bad, got {got}")
    frame = scalar_columns(pairs, "pairs", ("sentence_good", "sentence_bad", "provenance"), _ADDED)
    columns = pairs.with_format(None)
    good, bad = list(columns["sentence_good"]), list(columns["sentence_bad"])
    unique = list(dict.fromkeys([*good, *bad]))
    part = part_of_process(unique)
    with failing_together():
        some = part or unique[:1]  # a callable may not take an empty list
        label, values = _scores(without_ddp(model), tokenizer, some, score, batch_size, progress)
    scores = dict(zip(unique, gathered(values[: len(part)], len(unique)), strict=True))
    frame["good"], frame["bad"] = ([scores[text][0] for text in texts] for texts in (good, bad))
    tied = frame["good"] == frame["bad"]
    frame["difference"] = (frame["good"] - frame["bad"]).mask(tied, 0.0)  # two texts of probability 0 would give NaN
    frame["correct"] = frame["good"] > frame["bad"]
    frame["group"] = pd.factorize(np.array(good, dtype=object))[0]
    spans = columns["spans"] if "spans" in pairs.column_names else itertools.repeat(None)
    scored = [((a, b), (scores[a][1], scores[b][1]), each) for a, b, each in zip(good, bad, spans, strict=False)]
    known = scores[unique[0]][1] is not None
    return MinimalPairEvaluation(frame, name_of(model), label, int(tied.sum()), scored if known else ())


def _scores(
    model: Any, tokenizer: Any, texts: Sequence[str], score: Score | None, batch_size: int, progress: bool
) -> tuple[str, list[tuple[float, list[Scored] | None]]]:
    """Return the name of the score, and the score of each text with those of its tokens, if these are known."""
    tokens: Sequence[list[Scored] | None] = [None] * len(texts)
    if isinstance(model, nn.Module):
        function = score or _score_of_head(model)
        inner = getattr(function, "func", function)  # a functools.partial keeps its own keywords
        settings: dict[str, Any] = {"batch_size": batch_size, "progress": progress}
        settings = settings | getattr(function, "keywords", {}) if inner in _SCORES else {}
        name, by_token = name_of(inner), inner in _SCORES and getattr(tokenizer, "is_fast", False)
        scores = function(model, tokenizer, texts, **settings | ({"by": "token"} if by_token else {}))
        if by_token:
            own: list[list[Scored]] = [[] for _ in texts]
            for number, *token in scores[["text", "start", "end", "score"]].itertuples(index=False):
                own[number].append(tuple(token))
            scores = [reduced([score for *_, score in each], settings.get("reduction", "sum")) for each in own]
            tokens = own
    else:
        check_callable(model, LOADERS)
        if score is not None:
            raise TypeError("score is for transformers models; pass a callable without score=")
        name, scores = name_of(model), model(texts)
    values = array_of(scores)
    if values.shape != (len(texts),) or np.isnan(values).any():
        without = [text for text, value in zip(texts, values.flat, strict=False) if value != value]
        rule = f"one number for each of {len(texts)} texts, got {brief(scores)}"
        raise ValueError(f"the score must give {rule}, NaN for {brief(without)}; remove such pairs")
    return name, list(zip(values.astype(float).tolist(), tokens, strict=True))  # numpy does not subtract booleans


def _score_of_head(model: nn.Module) -> Score:
    """Return the score that fits the language-modelling head of a model."""
    refuse_two_texts(model)
    masked = has_head(model, MASKED)
    if masked == has_head(model, CAUSAL):
        name, advice = type(SequenceModel(model).with_head).__name__, f"load it with {LOADERS}, or pass score="
        raise ValueError(f"{name} has no language-modelling head that fits one score; {advice}")
    return pseudo_log_likelihood if masked else log_likelihood
