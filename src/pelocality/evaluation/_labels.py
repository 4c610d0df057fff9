"""Names of classes: those of the model and those of the probe are matched by name, never by number."""

import logging
import re
from collections.abc import Collection, Sequence
from typing import Any

from pelocality.corpora.pairs import NOT_ENTAILMENT, are_names_in_order, normalised_label

logger = logging.getLogger(__name__)

ENTAILMENT = "entailment"
OTHERS = ("neutral", "contradiction")  # the classes that "not entailment" covers
_PLACEHOLDER = re.compile(r"label[ _]?\d+", re.IGNORECASE)


def class_names(config: Any, label_names: Sequence[str] | None) -> list[str]:
    """Return the normalised names of a model's classes in the order of its logits, the caller's or of its config."""
    configured = [str(config.id2label[i]) for i in range(config.num_labels)]
    if len(configured) < 2 or (label_names is None and any(map(_PLACEHOLDER.fullmatch, configured))):
        advice = "pass label_names= in their order, or load the model with AutoModelForSequenceClassification"
        raise ValueError(f"model must have at least 2 classes with names, got {configured}; {advice}")
    names = different_names(configured if label_names is None else label_names)
    if len(names) != len(configured):
        raise ValueError(f"label_names must name the model's {len(configured)} classes, got {len(names)}: {names}")
    expected = [normalised_label(name) for name in configured]
    if sorted(expected) == sorted(names) and expected != names:
        logger.warning("label_names= orders the classes %s, the config %s; label_names= is used", names, expected)
    return names


def different_names(label_names: Sequence[str]) -> list[str]:
    """Return the normalised names of classes, after refusing all but a list of different names."""
    plain = [normalised_label(name) for name in label_names] if are_names_in_order(label_names) else []
    if not plain or len(set(plain)) < len(plain):
        rule = "a list of different class names in the order of the logits"
        raise ValueError(f"label_names must be {rule}, got {label_names!r}")
    return plain


def check_match(classes: Collection[str], probe_labels: Collection[str]) -> None:
    """Refuse a model none of whose classes is a correct prediction for some label of the probe."""
    missing = [name for name in probe_labels if not any(is_correct(name, prediction) for prediction in classes)]
    if missing:
        raise ValueError(f"the labels {sorted(missing)} match none of the classes {sorted(classes)}; pass label_names=")


def is_correct(label: str, prediction: str) -> bool:
    """Return whether a prediction is correct; ``not entailment`` on either side covers neutral and contradiction.

    Examples:
        >>> is_correct("not entailment", "neutral"), is_correct("contradiction", "not entailment")
        (True, True)
        >>> is_correct("neutral", "entailment")
        False
    """
    both = {label, prediction}
    return label == prediction or (NOT_ENTAILMENT in both and bool(both & set(OTHERS)))
