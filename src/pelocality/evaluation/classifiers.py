"""Accuracy of a classifier before and after a perturbation."""

import hashlib
import itertools
import logging
from collections.abc import Callable, Hashable, Sequence
from reprlib import repr as brief
from typing import Any

import datasets
import pandas as pd
from torch import nn
from tqdm import tqdm

from pelocality._checks import check_dataset, count
from pelocality._distributed import failing_together, gathered, part_of_process, undivided_if_sharded, without_ddp
from pelocality.corpora.pairs import MISSING_LABELS, normalised_label
from pelocality.evaluation._callables import check_callable, name_of
from pelocality.evaluation._columns import joined_groups, scalar_columns
from pelocality.evaluation._labels import check_match, is_correct
from pelocality.evaluation._predict import CallableClassifier, Classifier, Prediction
from pelocality.evaluation.result import Evaluation

logger = logging.getLogger(__name__)
_CHUNK = 1024  # texts given to a model at a time, sorted by length within
_TEXTS = (("premise", "hypothesis"), ("sentence",))
_VERSIONS = ("original_", "")  # prefixes of the columns before and after the perturbation
_NOT_COPIED = {f"{prefix}{name}" for prefix in _VERSIONS for name in (*_TEXTS[0], *_TEXTS[1], "provenance")}
_PREDICTED = [f"{prefix}{name}" for prefix in _VERSIONS for name in ("prediction", "probability", "correct")]
_ADDED = ("original", "group", "agrees", *_PREDICTED)


@undivided_if_sharded
def evaluate(
    model: nn.Module | Callable[..., Any],
    tokenizer: Any,
    probe: datasets.Dataset,
    *,
    label_names: Sequence[str] | None = None,
    groups: str | None = None,
    batch_size: int = 64,
    max_length: int | None = None,
    progress: bool = True,
) -> Evaluation:
    """Return a classifier's accuracy on the original and on the perturbed texts of a probe, and the difference.

    This is the experiment of Chen et al. (2023). The correct class of an original is ``original_label``, and that of a
    perturbed text is ``label``. After a shuffle both are the same, and after a swap of roles they differ.

    Classes are matched by name, never by number. The names come from ``config.id2label``; case, hyphens and
    underscores do not matter. Placeholders (``LABEL_0``) raise an error unless ``label_names`` names the classes. If
    the labels or the model have only "not entailment", *neutral* and *contradiction* of the other side both count as
    this class. The prediction of a model with three classes is its most probable class (as in HANS), not the sum of the
    two.

    If ``torch.distributed`` is initialised, each process predicts a part of the texts, and all return the result.

    Args:
        model: A sequence-classification model of transformers, or a callable. A callable receives one list for
            each side (premises, hypotheses), and returns a label name for each pair, or scores (pairs, classes)
            whose classes ``label_names`` names.
        tokenizer: The model's tokenizer; not used for a callable.
        probe: A dataset of ``pelocality.probes``, or any with ``premise``, ``hypothesis``, ``label`` (or
            ``sentence``) and the same under ``original_``. Without labels only the agreement is computed.
        label_names: Names of the model's classes in the order of its logits, if its configuration has none.
        groups: Column whose equal values make a group for all intervals and the p-value, because rows that share a
            sentence are not independent. In SNLI three pairs share a premise: ``groups="original_premise"``. Rows with
            the same original are always in one group. None makes no larger groups.
        batch_size: The largest number of texts per forward pass. Texts of one pass have the same number of tokens,
            without padding.
        max_length: Number of tokens to truncate texts to, special tokens included; None uses the model's limit.
            Truncated texts are counted and logged.
        progress: Show a progress bar on runs that take longer than a few seconds.

    Returns:
        An `Evaluation`: accuracies and agreement in [0, 1], their difference in [-1, 1], each with an interval of any
        coverage, and every example.

    Raises:
        TypeError: A probe that is not a ``datasets.Dataset``, or a model that is neither.
        ValueError: A transformers model without a classification head, labels that cannot be matched, fewer than two
            classes, a function that returns neither names nor scores, scores that are NaN or infinite, an empty probe,
            or one without the columns.

    Examples:
        >>> from pelocality.corpora import read_pairs
        >>> from pelocality.probes import random_shuffling
        >>> rows = [{"premise": "two dogs run fast", "hypothesis": "animals move", "label": "entailment"}]
        >>> probe = random_shuffling(read_pairs(rows))
        >>> evaluate(lambda premises, hypotheses: ["entailment"] * len(premises), None, probe)
        Evaluation of lambda on random_shuffling: 1 perturbed examples
                                         estimate
        original             1.000 [0.207, 1.000]
        perturbed            1.000 [0.207, 1.000]
        difference          0.000 [-0.924, 0.924]
        agreement            1.000 [0.207, 1.000]
        p of the difference                     1
    """
    count("batch_size", batch_size)
    texts = _text_columns(probe)
    frame = _examples(probe, texts, groups)
    probe_labels = {name for name in {*frame["label"], *frame["original_label"]} if name is not None}
    classifier: Classifier | CallableClassifier
    if isinstance(model, nn.Module):
        classifier = Classifier(without_ddp(model), tokenizer, label_names, batch_size, max_length)
    else:
        check_callable(model, "AutoModelForSequenceClassification")
        classifier = CallableClassifier(model, label_names, probe_labels)
    if classifier.classes is not None:
        check_match(classifier.classes, probe_labels)
    for prefix, predictions in zip(_VERSIONS, _predictions(classifier, probe, texts, progress), strict=True):
        frame[f"{prefix}prediction"], frame[f"{prefix}probability"] = zip(*predictions, strict=True)
        both = zip(frame[f"{prefix}label"], frame[f"{prefix}prediction"], strict=True)
        frame[f"{prefix}correct"] = [None if label is None else is_correct(label, name) for label, name in both]
    frame["agrees"] = frame["prediction"] == frame["original_prediction"]
    truncated = sum(gathered([len(classifier.truncated)]))
    if truncated:
        logger.warning("%d texts were truncated to the model's length", truncated)
    builders = ", ".join(probe.unique("builder")) if "builder" in probe.column_names else "dataset"
    return Evaluation(frame, name_of(model), builders, truncated)


def _text_columns(probe: Any) -> tuple[str, ...]:
    """Return the columns of the perturbed texts, after checking that these and the originals exist."""
    check_dataset("probe", probe)
    texts = _TEXTS[0] if "premise" in probe.column_names else _TEXTS[1]
    missing = {f"{prefix}{name}" for prefix in _VERSIONS for name in texts} - set(probe.column_names)
    if missing or not len(probe):
        advice = "evaluate_minimal_pairs takes pairs, and probe_info(probe).dropped says why a probe is empty"
        raise ValueError(f"probe must have texts and originals, got {len(probe)} rows, no {sorted(missing)}; {advice}")
    return texts


def _examples(probe: datasets.Dataset, texts: Sequence[str], groups: str | None) -> pd.DataFrame:
    """Return the columns of a probe that are not texts, with normalised labels, digests of originals and groups."""
    frame = scalar_columns(probe, "probe", _NOT_COPIED, [name for name in _ADDED if name != groups])
    for one, other in (("label", "original_label"), ("original_label", "label")):
        if one in probe.column_names and other not in probe.column_names:
            raise ValueError(f"no {other}; where both are the same: probe.add_column({other!r}, probe[{one!r}])")
    for name in ("label", "original_label"):
        frame[name] = pd.Series(_normalised_labels(probe, name), index=frame.index, dtype=object)
    missing = frame[["label", "original_label"]].isna()
    if missing.any(axis=None) and not missing.all(axis=None):
        rule = "probe.filter(lambda row: not {None, -1, '-', ''} & {row['label'], row['original_label']})"
        raise ValueError(f"probe has {missing.any(axis=1).sum()} rows without a label; remove them: {rule}")
    originals = list(zip(*(probe.with_format(None)[f"original_{name}"] for name in texts), strict=True))
    # The digest is equal in every probe; the same uid may denote another text in another corpus
    pairs = zip(originals, frame["original_label"], strict=True)
    joined = ("\0".join((*sides, label or "")) for sides, label in pairs)
    frame["original"] = [hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for text in joined]
    values = list(frame["original"] if groups is None else probe.with_format(None)[groups])
    if any(value is None or value != value or not isinstance(value, Hashable) for value in values):  # NaN != NaN
        raise ValueError(f"groups must be a column with one value in each row; {groups!r} has empty rows, or lists")
    frame["group"] = joined_groups(values, originals)
    return frame


def _normalised_labels(probe: datasets.Dataset, column: str) -> list[str | None]:
    """Return the normalised labels of a probe, None for rows without a label."""
    if column not in probe.column_names:
        return [None] * len(probe)
    feature, values = probe.features[column], list(probe.with_format(None)[column])
    if isinstance(feature, datasets.ClassLabel):
        values = [None if value is None or value < 0 else feature.int2str(value) for value in values]
    others = [value for value in values if value is not None and not isinstance(value, str)]
    if others:
        advice = f"probe.cast_column({column!r}, datasets.ClassLabel(names=[...]))"
        raise ValueError(f"labels of the probe must be names, got {brief(others)}; cast the column: {advice}")
    return [None if value is None or value.strip() in MISSING_LABELS else normalised_label(value) for value in values]


def _predictions(
    classifier: Classifier | CallableClassifier, probe: datasets.Dataset, texts: Sequence[str], progress: bool
) -> list[list[Prediction]]:
    """Return the predictions for the originals and for the perturbed texts; repeated texts are predicted once."""
    columns = probe.with_format(None)
    versions = [list(zip(*(columns[f"{prefix}{name}"] for name in texts), strict=True)) for prefix in _VERSIONS]
    unique = list(dict.fromkeys(itertools.chain(*versions)))
    part, predictions = part_of_process(unique), []
    with failing_together():
        for start in tqdm(range(0, len(part), _CHUNK), desc="evaluate", delay=3, disable=not progress):
            predictions += classifier(part[start : start + _CHUNK])
    by_text = dict(zip(unique, gathered(predictions, len(unique)), strict=True))
    return [[by_text[text] for text in version] for version in versions]
