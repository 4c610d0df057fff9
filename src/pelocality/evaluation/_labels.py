"""The names of classes: matched between model and probe by name, never by number."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

logger = logging.getLogger(__name__)

ENTAILMENT, NOT_ENTAILMENT = "entailment", "not entailment"
OTHERS = ("neutral", "contradiction")  # what "not entailment" is made of
_PLACEHOLDER = re.compile(r"label[ _]?\d+", re.IGNORECASE)


def normal(name: str) -> str:
    """Return a label without the differences of spelling that carry no meaning.

    Args:
        name: a label such as ``"NOT_ENTAILMENT"``.

    Returns:
        Lower case, words apart by one space; ``non-entailment`` (HANS) reads ``not entailment``.

    Examples:
        >>> normal("NOT_ENTAILMENT"), normal("non-entailment"), normal(" Neutral")
        ('not entailment', 'not entailment', 'neutral')
    """
    words = " ".join(re.split(r"[\s_-]+", name.strip().lower()))
    return NOT_ENTAILMENT if words == "non entailment" else words


def class_names(config: Any, labels: Sequence[str] | None, wanted: Collection[str]) -> list[str]:
    """Return the names of a model's classes in the order of its logits.

    Args:
        config: the model's configuration, with ``id2label``.
        labels: names given by the caller, in the order of the logits; None takes those of the configuration.
        wanted: the labels of the probe, for the message.

    Returns:
        One normal name for each class.

    Raises:
        ValueError: where the model's classes have no names, or names that cannot be told apart.
    """
    own = [str(config.id2label[i]) for i in range(config.num_labels)]
    if labels is None:
        if any(_PLACEHOLDER.fullmatch(name) for name in own):
            raise ValueError(
                f"the model's config calls its classes {', '.join(own)}, which cannot be matched with the probe's "
                f"labels {_listed(wanted)}; set config.id2label, or pass labels= in the order of the logits"
            )
        return distinct(own)
    names = distinct(check_labels(labels))
    if len(names) != len(own):
        raise ValueError(f"labels must name the model's {len(own)} classes, got {len(names)}: {', '.join(names)}")
    theirs = [normal(name) for name in own]
    if sorted(theirs) == sorted(names) and theirs != names:
        logger.warning("labels= orders the classes %s, the model's config %s; labels= is taken", names, theirs)
    return names


def check_labels(labels: Sequence[str]) -> Sequence[str]:
    """Refuse what is no list of names.

    Args:
        labels: names of classes.

    Returns:
        The names.

    Raises:
        TypeError: for a single string, or things that are no strings.
    """
    if isinstance(labels, str) or not isinstance(labels, Iterable) or not all(isinstance(name, str) for name in labels):
        raise TypeError(f"labels must be a list of class names in the order of the logits, got {labels!r}")
    return labels


def check_match(classes: Collection[str], wanted: Collection[str]) -> None:
    """Refuse classes that cannot say what the probe asks.

    Args:
        classes: normal names of the model's classes.
        wanted: normal labels of the probe.

    Raises:
        ValueError: where a label of the probe has no class, nor a class it is part of, nor classes that are its
            parts.
    """
    missing = [name for name in wanted if not any(right(name, given) for given in classes)]
    if missing:
        raise ValueError(
            f"the probe's labels {_listed(missing)} match none of the model's classes {_listed(classes)}; pass labels= "
            "with the probe's names in the order of the logits, or change the labels of the probe"
        )


def right(gold: str, given: str) -> bool:
    """Return whether an answer is right, where one of the two may lump neutral and contradiction together.

    Args:
        gold: the normal label.
        given: the normal answer.

    Returns:
        True for equal names, and for ``not entailment`` against one of its parts either way.

    Examples:
        >>> right("not entailment", "neutral"), right("contradiction", "not entailment"), right("neutral", "entailment")
        (True, True, False)
    """
    lumped = {gold, given}
    return gold == given or (NOT_ENTAILMENT in lumped and bool(lumped & set(OTHERS)))


def distinct(names: Sequence[str]) -> list[str]:
    """Return names of classes as they are compared, refusing two that are the same.

    Args:
        names: names of classes.

    Returns:
        One normal name for each.

    Raises:
        ValueError: where two cannot be told apart.
    """
    plain = [normal(name) for name in names]
    if len(set(plain)) < len(plain):
        raise ValueError(
            f"class names must differ, got {', '.join(names)}; pass labels= that differ, in the order of the logits"
        )
    return plain


def _listed(names: Collection[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))
