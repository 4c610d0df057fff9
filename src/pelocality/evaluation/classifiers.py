"""Accuracy before and after an edit."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import datasets
import pandas as pd
from torch import nn
from tqdm import tqdm

from pelocality._checks import count
from pelocality.evaluation._labels import normal, right
from pelocality.evaluation._predict import Answering, Classifier, Texts
from pelocality.evaluation.result import Evaluation
from pelocality.models._run import model_name
from pelocality.statistics import check_confidence

logger = logging.getLogger(__name__)
_CHUNK = 2048  # rows in memory at a time; texts are sorted by length within
_TEXTS = (("premise", "hypothesis"), ("sentence",))
_ANSWERS = tuple(f"{side}{name}" for side in ("", "original_") for name in ("prediction", "probability", "correct"))
_OURS = ("original", "group", "agrees", *_ANSWERS)


def evaluate(
    model: nn.Module | Callable[..., Any],
    tokenizer: Any,
    probe: datasets.Dataset,
    *,
    labels: Sequence[str] | None = None,
    groups: str | None = None,
    batch_size: int = 64,
    max_length: int | None = None,
    confidence: float = 0.95,
    resamples: int = 9999,
    seed: int = 0,
    progress: bool = True,
) -> Evaluation:
    """Return a classifier's accuracy on the originals and on the edits of a probe, and the difference.

    The experiment of Chen et al. (2023, section 5.4). Originals are judged by ``original_label``, edits by
    ``label``: for a shuffle the two are the same, for a swap of roles they differ.

    Classes are matched by name, never by number. A model's names come from ``config.id2label``; case, hyphens and
    underscores do not matter; where they say nothing (``LABEL_0``), the model is refused until ``labels`` names them.
    Where one side knows only "not entailment", the other's *neutral* and *contradiction* both count as it; a model
    of three classes is judged by its single best class (as in HANS), not by the sum of the two.

    Args:
        model: a sequence-classification model of transformers, or a callable. A callable is given one list for
            each side (premises, hypotheses), and returns a label name for each pair, or scores (pairs, classes)
            whose classes ``labels`` names.
        tokenizer: the model's tokenizer; not used for a callable.
        probe: a dataset of ``pelocality.probes``, or any with ``premise``, ``hypothesis``, ``label`` (or
            ``sentence``) and the same under ``original_``. Without labels only the agreement is known.
        labels: names of the model's classes in the order of its logits, where its configuration does not say.
        groups: column whose equal values are drawn together by the bootstrap: rows that share a sentence are not
            independent. None draws the edits of one original together. In SNLI three pairs share a premise:
            ``groups="original_premise"``.
        batch_size: texts per forward pass.
        max_length: tokens a text is cut to, special tokens included; None takes what the model can read. Cut texts
            are counted and logged.
        confidence: coverage of the intervals.
        resamples: bootstrap resamples.
        seed: seeds the bootstrap.
        progress: show a progress bar on runs that take longer than a few seconds.

    Returns:
        An `Evaluation`: accuracies and agreement in [0, 1], their difference in [-1, 1], each with an interval, and
        every example.

    Raises:
        TypeError: for a probe that is no ``datasets.Dataset``, or a model that answers something else.
        ValueError: for labels that cannot be matched, scores that are NaN, an empty probe, or one without the
            columns.

    Examples:
        >>> from pelocality.corpora import read_pairs
        >>> from pelocality.probes import random_shuffling
        >>> rows = [{"premise": "two dogs run fast", "hypothesis": "animals move", "label": "entailment"}]
        >>> probe = random_shuffling(read_pairs(rows))
        >>> evaluate(lambda premises, hypotheses: ["entailment"] * len(premises), None, probe)
        Evaluation of lambda on random_shuffling: 1 perturbed examples
        original     1.000 [0.207, 1.000]
        perturbed    1.000 [0.207, 1.000]
        difference       0.000 [nan, nan]
        agreement    1.000 [0.207, 1.000]
        McNemar's p                     1
    """
    check_confidence(confidence, resamples)
    count("batch_size", batch_size)
    texts = _text_columns(probe)
    frame = _evidence(probe, texts, groups)
    wanted = {name for name in {*frame["label"], *frame["original_label"]} if name is not None}
    classifier: Classifier | Answering
    if isinstance(model, nn.Module):
        classifier = Classifier(model, tokenizer, labels, wanted, batch_size, max_length)
        name = model_name(model)
    elif callable(model):
        classifier, name = (
            Answering(model, labels, wanted),
            getattr(model, "__name__", type(model).__name__).strip("<>"),
        )
    else:
        raise TypeError(f"model must be a transformers model or a callable, got {type(model).__name__}")
    answers = _answers(classifier, probe, texts, progress)
    for prefix, side in (("original_", 0), ("", 1)):
        frame[f"{prefix}prediction"] = [pair[side][0] for pair in answers]
        frame[f"{prefix}probability"] = [pair[side][1] for pair in answers]
        gold = zip(frame[f"{prefix}label"], frame[f"{prefix}prediction"], strict=True)
        frame[f"{prefix}correct"] = [right(label, given) if label is not None else None for label, given in gold]
    frame["agrees"] = frame["prediction"] == frame["original_prediction"]
    if classifier.truncated:
        logger.warning("%d texts were cut to the model's length", len(classifier.truncated))
    return Evaluation(
        frame,
        name,
        _builder(probe),
        len(classifier.truncated),
        confidence,
        resamples,
        seed,
    )


def _text_columns(probe: Any) -> tuple[str, ...]:
    """Return the columns of the edited texts, after checking that they and their originals are there."""
    if not isinstance(probe, datasets.Dataset):
        raise TypeError(
            f"probe must be a datasets.Dataset, such as pelocality.probes builds, got {type(probe).__name__}"
        )
    if "sentence_good" in probe.column_names:
        raise ValueError("probe holds minimal pairs, which have no labels; use evaluate_minimal_pairs")
    for texts in _TEXTS:
        if {*texts, *(f"original_{name}" for name in texts)} <= set(probe.column_names):
            if not len(probe):
                raise ValueError(
                    "probe is empty; of a probe that pelocality.probes built, probe_info(probe).dropped says why"
                )
            return texts
    raise ValueError(
        "probe must have premise and hypothesis, or sentence, and the same under original_, got columns "
        f"{', '.join(probe.column_names)}"
    )


def _evidence(probe: datasets.Dataset, texts: Sequence[str], groups: str | None) -> pd.DataFrame:
    """Return the columns of a probe that are no texts, its labels by normal name, its originals and the groups."""
    taken = [name for name in _OURS if name in probe.column_names and name != groups]
    if taken:
        raise ValueError(f"probe has a column {taken[0]!r}, a name that evaluate gives itself; rename the column")
    for one, other in (("label", "original_label"), ("original_label", "label")):
        if one in probe.column_names and other not in probe.column_names:
            raise ValueError(
                f"probe has {one} and no {other}; where both are the same: probe.add_column({other!r}, probe[{one!r}])"
            )
    plain = [
        name
        for name, feature in probe.features.items()
        if isinstance(feature, datasets.Value | datasets.ClassLabel) and not _is_text(name)
    ]
    frame = pd.DataFrame(probe.select_columns(plain).with_format(None)[:], index=range(len(probe)))
    for name in ("label", "original_label"):
        frame[name] = pd.Series(_labels(probe, name), index=frame.index, dtype=object)
    missing = frame[["label", "original_label"]].isna()
    if missing.any(axis=None) and not missing.all(axis=None):
        raise ValueError(
            f"probe has {int(missing.any(axis=1).sum())} rows without a label and others with one; leave them out: "
            "probe.filter(lambda row: not {None, -1} & {row['label'], row['original_label']})"
        )
    if groups is not None and groups not in probe.column_names:
        raise ValueError(
            f"groups must be a column of the probe, one of {', '.join(probe.column_names)}, got {groups!r}"
        )
    originals = zip(*(probe.with_format(None)[f"original_{name}"] for name in texts), strict=True)
    labelled = zip(originals, frame["original_label"], strict=True)
    frame["original"] = [_digest(*sides, label or "") for sides, label in labelled]
    drawn_together = list(frame["original"] if groups is None else probe.with_format(None)[groups])
    if any(value is None or not isinstance(value, Hashable) for value in drawn_together):
        raise ValueError(f"groups must be a column with one value in each row; {groups!r} has rows without, or lists")
    frame["group"] = drawn_together
    return frame


def _digest(*texts: str) -> str:
    """Return a name for an original, the same in every probe; a uid may stand for another text in another corpus."""
    return hashlib.blake2b("\0".join(texts).encode(), digest_size=8).hexdigest()


def _is_text(name: str) -> bool:
    return name.removeprefix("original_") in ("premise", "hypothesis", "sentence", "provenance")


def _labels(probe: datasets.Dataset, column: str) -> list[str | None]:
    """Return the labels of a probe by normal name, None where there is none."""
    if column not in probe.column_names:
        return [None] * len(probe)
    feature, values = probe.features[column], list(probe.with_format(None)[column])
    if isinstance(feature, datasets.ClassLabel):
        values = [None if value is None or value < 0 else feature.int2str(value) for value in values]
    numbers = {value for value in values if value is not None and not isinstance(value, str)}
    if numbers:
        raise ValueError(
            f"labels of the probe must be names, got {sorted(numbers)[:3]} in {column!r}; cast the column: "
            f"probe.cast_column({column!r}, datasets.ClassLabel(names=[...]))"
        )
    return [None if value is None else normal(value) for value in values]


def _answers(
    classifier: Classifier | Answering, probe: datasets.Dataset, texts: Sequence[str], progress: bool
) -> list[tuple[tuple[str, float], tuple[str, float]]]:
    """Return the answers to original and edit of each row; a text that stands in several rows is asked once."""
    both = ([f"original_{name}" for name in texts], list(texts))
    rows = probe.select_columns([name for names in both for name in names]).with_format(None)
    found = []
    bar = tqdm(total=len(rows), desc="evaluate", unit="edit", delay=3, disable=not progress)
    with bar:
        for start in range(0, len(rows), _CHUNK):
            chunk = rows[start : start + _CHUNK]
            sides: list[list[Texts]] = [list(zip(*(chunk[name] for name in names), strict=True)) for names in both]
            unique = list(dict.fromkeys([*sides[0], *sides[1]]))
            wrong = next((text for pair in unique for text in pair if not isinstance(text, str)), "")
            if wrong != "":
                raise TypeError(f"the texts of the probe must be strings, got {wrong!r}; leave such rows out")
            answers = dict(zip(unique, classifier(unique), strict=True))
            found += [(answers[before], answers[after]) for before, after in zip(*sides, strict=True)]
            bar.update(len(sides[0]))
    return found


def _builder(probe: datasets.Dataset) -> str:
    """Return the name of the builder, of several joined probes all names, where the dataset has the column."""
    names = probe.unique("builder") if "builder" in probe.column_names else []
    return ", ".join(names) or "dataset"
