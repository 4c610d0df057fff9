"""The rows of every probe: the same columns, whatever the edit."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Sequence
from typing import Any, Literal

import datasets

from pelocality.corpora import Pair, Sentence

Side = Literal["premise", "hypothesis", "both"]
SENTENCE = "sentence"  # what stands in the column "side" where there is no pair


@functools.cache
def _spans() -> Any:
    return [
        {
            "side": datasets.Value("string"),
            "category": datasets.Value("string"),
            "start": datasets.Value("int32"),
            "end": datasets.Value("int32"),
            "original": datasets.Value("string"),
            "edited": datasets.Value("string"),
        }
    ]


def _columns(*texts: str) -> datasets.Features:
    string = datasets.Value("string")
    return datasets.Features(
        {
            **dict.fromkeys(texts, string),
            "side": string,
            "spans": _spans(),
            "size": datasets.Value("int32"),
            "category": string,
            "seed": datasets.Value("int64"),
            "uid": string,
            "provenance": string,
        }
    )


@functools.cache
def pair_features() -> datasets.Features:
    """Give the columns of a probe over pairs.

    Returns:
        The columns: edited ``premise``, ``hypothesis`` and ``label``, the same three as they were under
        ``original_``, and what was done.
    """
    return _columns("premise", "hypothesis", "label", "original_premise", "original_hypothesis", "original_label")


@functools.cache
def sentence_features() -> datasets.Features:
    """Give the columns of a probe over single sentences.

    Returns:
        The columns: edited ``sentence``, ``original_sentence``, and what was done.
    """
    return _columns("sentence", "original_sentence")


def span_entry(sentence: Sentence, side: str, category: str, start: int, end: int, edited: str) -> dict[str, Any]:
    """Describe one edited span.

    Args:
        sentence: The original.
        side: Premise, hypothesis or sentence.
        category: Constituent label, or semantic role.
        start: Its first word.
        end: The word after its last.
        edited: What stands there now.

    Returns:
        The entry of the column ``spans``.
    """
    original = sentence.written(start, end)
    return {
        "side": side,
        "category": category,
        "start": start,
        "end": end,
        "original": original,
        "edited": edited,
    }


def pair_row(
    pair: Pair, edited: dict[str, str], label: str | None, spans: Sequence[dict[str, Any]], **columns: Any
) -> dict[str, Any]:
    """Put together the row of an edited pair.

    Args:
        pair: The original.
        edited: New text for the sides that changed.
        label: The label of the edited pair.
        spans: What was edited.
        columns: The columns ``size``, ``category``, ``seed``, ``uid``.

    Returns:
        The row.
    """
    sides = [side for side in ("premise", "hypothesis") if side in edited]
    provenance = " | ".join(dict.fromkeys(getattr(pair, side).provenance for side in sides))
    return {
        "premise": edited.get("premise", pair.premise.text),
        "hypothesis": edited.get("hypothesis", pair.hypothesis.text),
        "label": label,
        "original_premise": pair.premise.text,
        "original_hypothesis": pair.hypothesis.text,
        "original_label": pair.label,
        "side": "both" if len(sides) == 2 else sides[0],
        "spans": list(spans),
        "provenance": provenance,
        **columns,
    }


def sentence_row(sentence: Sentence, edited: str, spans: Sequence[dict[str, Any]], **columns: Any) -> dict[str, Any]:
    """Put together the row of an edited sentence.

    Args:
        sentence: The original.
        edited: Its new text.
        spans: What was edited.
        columns: The columns ``size``, ``category``, ``seed``, ``uid``.

    Returns:
        The row.
    """
    return {
        "sentence": edited,
        "original_sentence": sentence.text,
        "side": SENTENCE,
        "spans": list(spans),
        "provenance": sentence.provenance,
        **columns,
    }


def name_of(item: Pair | Sentence) -> str:
    """Name an item: by its uid, or by its text where it has none.

    Args:
        item: A pair or a sentence.

    Returns:
        The name.
    """
    if item.uid:
        return item.uid
    return hashlib.blake2b("\0".join(content_of(item)).encode(), digest_size=8).hexdigest()


def content_of(item: Pair | Sentence) -> tuple[str, ...]:
    """Give what seeds the random choices made for an item: its text, for a pair both texts.

    Args:
        item: A pair or a sentence.

    Returns:
        The texts. Two pairs that share a premise differ in them; where an item stands does not matter.
    """
    return (item.text,) if isinstance(item, Sentence) else (item.premise.text, item.hypothesis.text)


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Refuse a value that is not among the choices.

    Args:
        name: The argument.
        value: What came.
        choices: What is wanted.

    Returns:
        Nothing.

    Raises:
        ValueError: Where the value is none of them.
    """
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_labels(labels: Collection[str] | None) -> tuple[str, ...] | None:
    """Check which labels to keep.

    Args:
        labels: Names of labels, or None for all.

    Returns:
        The names.

    Raises:
        TypeError: Where it is a single string, whose letters would be taken for labels, or holds other
            things.
    """
    if labels is None:
        return None
    if isinstance(labels, str) or not all(isinstance(label, str) for label in labels):
        raise TypeError(f"labels must be a collection of label names, such as ('entailment',), got {labels!r}")
    return tuple(labels)
