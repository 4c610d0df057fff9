"""Minimal pairs: an original beside its perturbation, for scoring with a language model."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import datasets
from tqdm import tqdm

from pelocality._checks import check_dataset
from pelocality.probes._build import write_dataset
from pelocality.probes.info import ProbeInfo, probe_info, record_info

_COPIED = ("side", "category", "size", "seed", "uid", "provenance")
_IF_PRESENT = ("spans", "negated", "mood", "reversible")


def minimal_pairs(probe: datasets.Dataset, *, progress: bool = True) -> datasets.Dataset:
    """Return each original beside its perturbation, as BLiMP does: ``sentence_good`` and ``sentence_bad``.

    The probe may come from any builder. Only the perturbed side of a pair is used. A pair that is perturbed on both
    sides becomes two rows. How much worse a perturbation is depends on the builder. A role swap makes a sentence that
    is well formed but unlikely, and a shuffle makes a sentence that is not well formed.

    Args:
        probe: A dataset made by one of the builders, whole, filtered, concatenated with others or read from a file.
        progress: Whether to show a progress bar, after three seconds.

    Returns:
        A dataset with ``sentence_good``, ``sentence_bad``, ``UID`` (the builder's name: BLiMP's name of a
        paradigm), ``pairID`` (the number of the row), and ``side``, ``category``, ``size``, ``seed``, ``uid`` and
        ``provenance`` of the probe, its ``spans`` (those of this sentence), and of a role swap ``negated``, ``mood``
        and ``reversible``. The two sentences always differ. Its files are temporary.

    Raises:
        TypeError: A probe that is not a ``datasets.Dataset``.
        KeyError: The dataset was not made by a builder, or has lost a column.

    Examples:
        >>> from pelocality.corpora import Sentence
        >>> from pelocality.probes import random_shuffling
        >>> pair = minimal_pairs(random_shuffling([Sentence(("up", "you", "go"), uid="1")]))[0]
        >>> pair["sentence_good"], pair["sentence_bad"] != "up you go", pair["UID"]
        ('up you go', True, 'random_shuffling')
    """
    check_dataset("probe", probe)
    rows = tqdm(probe.with_format(None), "minimal_pairs", delay=3, disable=not progress)
    texts = dict.fromkeys(("sentence_good", "sentence_bad", "UID", "pairID"), datasets.Value("string"))
    copied = [*_COPIED, *(name for name in _IF_PRESENT if name in probe.features)]
    columns = datasets.Features({**texts, **{name: probe.features[name] for name in copied}})
    pairs = write_dataset(_pairs_of(rows, copied), columns, probe.split)
    try:
        of = probe_info(probe)
        settings = {"of": of.builder, **of.settings}
    except ValueError:  # the probe was read from a file that keeps no info
        settings = {}
    record_info(pairs, ProbeInfo("minimal_pairs", settings, len(probe), len(pairs), {}, {}))
    return pairs


def _pairs_of(rows: Iterable[dict[str, Any]], copied: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the minimal pairs of the rows of a probe, with some of its columns."""
    numbers = itertools.count()
    for row in rows:
        both = row["side"] == "both"
        for side in ("premise", "hypothesis") if both else (row["side"],):
            about = {name: row[name] for name in copied} | {"side": side}
            if both:  # size, category and spans of the row are those of both sides together
                about["spans"] = here = [span for span in row["spans"] if span["side"] == side]
                about["size"] = max(span["size"] for span in here)
                about["category"] = " ".join(dict.fromkeys(span["category"] for span in here))
            yield {
                "sentence_good": row[f"original_{side}"],
                "sentence_bad": row[side],
                "UID": row["builder"],
                "pairID": str(next(numbers)),
                **about,
            }
