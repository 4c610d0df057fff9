"""Minimal pairs: an original beside its edit, for scoring with a language model."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import datasets

from pelocality.probes.build import ProbeInfo, probe_info
from pelocality.probes.generate import generate, scratch_folder


@functools.cache
def _features() -> datasets.Features:
    string, number = datasets.Value("string"), datasets.Value("int64")
    return datasets.Features(
        {
            **dict.fromkeys(("sentence_good", "sentence_bad", "UID"), string),
            "pairID": string,
            **dict.fromkeys(("side", "category"), string),
            **dict.fromkeys(("size", "seed"), number),
            **dict.fromkeys(("uid", "provenance"), string),
        }
    )


def minimal_pairs(probe: datasets.Dataset, *, progress: bool = False) -> datasets.Dataset:
    """Set each original beside its edit, as BLiMP does: ``sentence_good`` and ``sentence_bad``.

    Works on the rows of any builder. Of a pair only the edited side counts; one edited on both sides gives a
    row for each. Whether an edit is really worse is up to the edit: a swap of roles leaves a sentence that is
    well formed and unlikely, a shuffle one that is not well formed.

    Args:
        probe: A dataset made by one of the builders, whole or filtered.
        progress: Whether to show progress bars.

    Returns:
        A dataset with ``sentence_good``, ``sentence_bad``, ``UID`` (the builder's name: BLiMP's name of a
        paradigm), ``pairID`` (the number of the row), and ``side``, ``category``, ``size``, ``seed``, ``uid`` and
        ``provenance`` of the probe. The two sentences always differ. Its files are temporary.

    Raises:
        ValueError: Where the dataset was not made by a builder.

    Examples:
        >>> from pelocality.trees import Sentence
        >>> from pelocality.probes import random_shuffling
        >>> pair = minimal_pairs(random_shuffling([Sentence(("up", "you", "go"), uid="1")]))[0]
        >>> pair["sentence_good"], pair["sentence_bad"] != "up you go", pair["UID"]
        ('up you go', True, 'random_shuffling')
    """
    made = probe_info(probe)
    arguments = {"probe": probe, "paradigm": made.builder}
    pairs = generate(_pairs, _features(), arguments, scratch_folder(), progress=progress)
    settings = {"of": made.builder, **made.settings}
    info = ProbeInfo("minimal_pairs", settings, len(probe), len(pairs), {}, {})
    pairs.info.description = json.dumps(asdict(info))
    return pairs


def _pairs(probe: datasets.Dataset, paradigm: str) -> Iterator[dict[str, Any]]:
    number = 0
    for row in probe:
        for side in ("premise", "hypothesis") if row["side"] == "both" else (row["side"],):
            yield {
                "sentence_good": row[f"original_{side}"],
                "sentence_bad": row[side],
                "UID": paradigm,
                "pairID": str(number),
                "side": side,
                **{name: row[name] for name in ("category", "size", "seed", "uid", "provenance")},
            }
            number += 1
