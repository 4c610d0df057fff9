"""The rows of every probe: the same columns for every perturbation, and the checks that all builders share."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import datasets

from pelocality._checks import are_names
from pelocality.corpora import Pair, Sentence
from pelocality.corpora.pairs import normalised_label

Side = Literal["premise", "hypothesis", "both"]
Spans = Literal["one", "all"]
SENTENCE = "sentence"  # value of the column "side" in probes over single sentences


def features_of(sentences: bool) -> datasets.Features:
    """Return the columns of a probe over pairs or over single sentences, originals beside perturbed texts."""
    texts = ("sentence",) if sentences else ("premise", "hypothesis", "label")
    string, number = datasets.Value("string"), datasets.Value("int32")
    span = {"side": string, "category": string, **dict.fromkeys(("start", "end", "size"), number)}
    span |= {"original": string, "perturbed": string}
    return datasets.Features(
        {
            **dict.fromkeys((*texts, *(f"original_{name}" for name in texts)), string),
            "side": string,
            "spans": [span],
            "size": number,
            "category": string,
            "seed": datasets.Value("int64"),
            "uid": string,
            "provenance": string,
        }
    )


def span_entry(sentence: Sentence, side: str, category: str, start: int, end: int, perturbed: str) -> dict[str, Any]:
    """Return the entry of the column ``spans`` for words ``start`` up to, not including, ``end``."""
    return {
        "side": side,
        "category": category,
        "start": start,
        "end": end,
        "size": sum(start <= first < end for first, _ in sentence.surface_tokens),
        "original": sentence.surface(start, end),
        "perturbed": perturbed,
    }


def row_of(
    item: Pair | Sentence, perturbed: Mapping[str, str], spans: Sequence[dict[str, Any]], label: str | None = None
) -> dict[str, Any]:
    """Return the row of an item; ``perturbed`` holds the new texts of the sides that changed, by name."""
    originals = sides_of(item)
    row: dict[str, Any] = {name: perturbed.get(name, original.text) for name, original in originals.items()}
    row |= {f"original_{name}": original.text for name, original in originals.items()}
    if isinstance(item, Pair):
        row |= {"label": label, "original_label": item.label}
    provenance = dict.fromkeys(original.provenance for name, original in originals.items() if name in perturbed)
    side = "both" if len(perturbed) == 2 else next(iter(perturbed))
    return {**row, "side": side, "spans": list(spans), "provenance": " | ".join(provenance), "uid": uid_of(item)}


def uid_of(item: Pair | Sentence) -> str:
    """Return the uid of an item, or a hash of its text if it has none."""
    if item.uid:
        return item.uid
    return hashlib.blake2b("\0".join(texts_of(item)).encode(), digest_size=8).hexdigest()


def texts_of(item: Pair | Sentence) -> tuple[str, ...]:
    """Return the text of a sentence or the two texts of a pair, which seed the random choices made for it."""
    return tuple(sentence.text for sentence in sides_of(item).values())


def sides_of(item: Pair | Sentence) -> dict[str, Sentence]:
    """Return the sentences of an item by the name of their column."""
    if isinstance(item, Sentence):
        return {SENTENCE: item}
    return {"premise": item.premise, "hypothesis": item.hypothesis}


def has_label(label: str | None, labels: Collection[str] | None) -> bool:
    """Return whether a label is among some, whatever its case, hyphens and underscores; None means all."""
    return labels is None or (label is not None and normalised_label(label) in map(normalised_label, labels))


def check_names(name: str, names: Collection[str] | None) -> tuple[str, ...] | None:
    """Return a collection of strings in order, after refusing anything else but None."""
    if names is None:
        return None
    if not are_names(names):
        raise TypeError(f"{name} must be a collection of names, such as ('entailment',) or ('NP',), got {names!r}")
    return tuple(sorted(names))
