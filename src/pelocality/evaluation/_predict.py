"""Predictions of a classifier: a transformers model, or any callable."""

import sys
from collections.abc import Callable, Mapping, Sequence
from reprlib import repr as brief
from typing import Any

import numpy as np
import torch
from torch import nn

from pelocality._batches import batches_of_equal_length
from pelocality._checks import check_tokenizer, count, on_float64_device
from pelocality.corpora.pairs import NOT_ENTAILMENT, normalised_label
from pelocality.evaluation import _labels
from pelocality.evaluation._callables import array_of
from pelocality.models.sequence_model import SequenceModel

Texts = tuple[str, ...]  # (premise, hypothesis), or one sentence
Prediction = tuple[str, float]  # the class, and its probability where known


class Classifier:
    """A sequence-classification model with its tokenizer, which predicts the names of classes."""

    def __init__(
        self, model: nn.Module, tokenizer: Any, names: Sequence[str] | None, batch_size: int, max_length: int | None
    ) -> None:
        self.sequence_model = SequenceModel(model)
        self.classes = _labels.class_names(self.sequence_model.with_head.config, names)
        check_tokenizer(tokenizer)
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        if max_length is not None:
            count("max_length", max_length, least=tokenizer.num_special_tokens_to_add(pair=True) + 2)
        # The tokenizer's limit is the number of positions that the model was trained with.
        trained = None if self.sequence_model.positions_disabled else tokenizer.model_max_length
        limits = [limit for limit in (max_length, trained, self.sequence_model.longest) if limit]
        self.limit = min(limits, default=sys.maxsize)
        self.truncated: set[Texts] = set()

    def __call__(self, texts: Sequence[Texts]) -> list[Prediction]:
        """Return the class of each text and its probability, in order."""
        encoded = self._encoded(texts)
        lengths = [len(ids) for ids in encoded["input_ids"]]
        predictions: list[Prediction] = [("", 0.0)] * len(texts)
        with self.sequence_model.inference():
            for chosen in batches_of_equal_length(lengths, self.batch_size):
                batch = {name: torch.tensor([column[i] for i in chosen]) for name, column in encoded.items()}
                best = on_float64_device(self._logits(batch)).double().softmax(-1).max(-1)  # from (batch, classes)
                for i, value, index in zip(chosen, best.values.tolist(), best.indices.tolist(), strict=True):
                    predictions[i] = self.classes[index], value
        return predictions

    def _encoded(self, texts: Sequence[Texts]) -> Mapping[str, Sequence[list[int]]]:
        """Return the model's inputs for each text, without padding, after truncating texts that are too long."""
        columns = [list(column) for column in zip(*texts, strict=True)]
        encoded: Mapping[str, Sequence[list[int]]] = self.tokenizer(*columns, padding=False)
        over = [text for text, ids in zip(texts, encoded["input_ids"], strict=True) if len(ids) > self.limit]
        if over:
            self.truncated.update(over)
            encoded = self.tokenizer(*columns, padding=False, truncation=True, max_length=self.limit)
        return encoded

    def _logits(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the logits (batch, classes) on the CPU."""
        self.sequence_model.check_ids(inputs["input_ids"])
        outputs = self.model(**{name: tensor.to(self.sequence_model.device) for name, tensor in inputs.items()})
        logits: torch.Tensor | None = getattr(outputs, "logits", None)
        shape = (len(inputs["input_ids"]), len(self.classes))
        if logits is None or logits.shape != shape:
            name = type(self.sequence_model.with_head).__name__
            raise ValueError(f"{name} must return logits {shape}, as AutoModelForSequenceClassification does")
        _check_finite(logits.amax(-1).cpu().double().numpy())
        return logits.cpu()


class CallableClassifier:
    """A callable that returns the names of classes, or their scores, for columns of texts."""

    def __init__(self, function: Callable[..., Any], label_names: Sequence[str] | None, probe_labels: set[str]) -> None:
        self.function = function
        self.classes = None if label_names is None else _labels.different_names(label_names)
        names = {_labels.ENTAILMENT, NOT_ENTAILMENT, *_labels.OTHERS}
        # Without labels there are no names, and every name is accepted.
        self.names = set(self.classes or (names if probe_labels and probe_labels <= names else probe_labels))
        self.truncated: set[Texts] = set()

    def __call__(self, texts: Sequence[Texts]) -> list[Prediction]:
        """Return the class of each text, in order; the probability is unknown."""
        returned = self.function(*(list(column) for column in zip(*texts, strict=True)))
        # Iterating over a table would give the names of columns.
        is_table = isinstance(returned, Mapping) or hasattr(returned, "iterrows")
        one_each = not is_table and hasattr(returned, "__len__") and len(returned) == len(texts)
        if one_each and all(isinstance(name, str) for name in returned):
            names = [normalised_label(name) for name in returned]
            unknown = set(names) - self.names if self.names else set()
            if unknown:
                raise ValueError(f"model predicted {unknown}, not among {sorted(self.names)}; pass label_names=")
            return [(name, float("nan")) for name in names]
        scores = array_of(returned) if one_each else np.empty(0)
        if self.classes is None or scores.shape != (len(texts), len(self.classes)):
            rule = f"{len(texts)} label names, or scores, whose classes are the label_names= ({self.classes})"
            advice = "of a data frame return .to_numpy(), of a pipeline [result['label'] for result in results]"
            raise ValueError(f"model must return {rule}, got {brief(returned)}; {advice}")
        _check_finite(scores.max(1))
        return [(self.classes[row.argmax()], float("nan")) for row in scores]


def _check_finite(largest: np.ndarray) -> None:
    """Refuse logits whose largest is not finite; a class that cannot be predicted may have -inf."""
    if not np.isfinite(largest).all():
        raise ValueError("model returned logits that are NaN or infinite; check its weights and precision")
