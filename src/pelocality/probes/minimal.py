"""Minimal pairs: an original beside its perturbation, for scoring with a language model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import datasets

from pelocality.probes._build import progress_bars, scratch_folder
from pelocality.probes._info import ProbeInfo, probe_info, record_info


def minimal_pairs(probe: datasets.Dataset, *, progress: bool = False) -> datasets.Dataset:
    """Return each original beside its perturbation, as BLiMP does: ``sentence_good`` and ``sentence_bad``.

    Works on the rows of any builder. Only the perturbed side of a pair is used; a pair perturbed on both sides gives a
    row for each. How much worse a perturbation is depends on the builder: a role swap leaves a sentence that is well
    formed but unlikely, a shuffle one that is not well formed.

    Args:
        probe: A dataset made by one of the builders, whole, filtered, concatenated with others or read from a file.
        progress: Whether to show progress bars.

    Returns:
        A dataset with ``sentence_good``, ``sentence_bad``, ``UID`` (the builder's name: BLiMP's name of a
        paradigm), ``pairID`` (the number of the row), and ``side``, ``category``, ``size``, ``seed``, ``uid`` and
        ``provenance`` of the probe. The two sentences always differ. Its files are temporary.

    Raises:
        ValueError: The dataset was not made by a builder.

    Examples:
        >>> from pelocality.corpora import Sentence
        >>> from pelocality.probes import random_shuffling
        >>> pair = minimal_pairs(random_shuffling([Sentence(("up", "you", "go"), uid="1")]))[0]
        >>> pair["sentence_good"], pair["sentence_bad"] != "up you go", pair["UID"]
        ('up you go', True, 'random_shuffling')
    """
    if not isinstance(probe, datasets.Dataset) or not {"builder", "spans", "side"} <= set(probe.column_names):
        raise ValueError(
            "probe must be a dataset made by pelocality.probes, with the columns builder, spans and side; got "
            f"{', '.join(probe.column_names) if isinstance(probe, datasets.Dataset) else type(probe).__name__}"
        )
    folder = scratch_folder()
    numbers = itertools.count()
    with progress_bars(progress):
        pairs = probe.with_format(None).map(
            lambda rows: _columns(rows, numbers),
            batched=True,
            remove_columns=probe.column_names,
            features=_features(),
            cache_file_name=str(folder / "pairs.arrow"),
            new_fingerprint=folder.name,
        )
    try:
        of = probe_info(probe)
        settings = {"of": of.builder, **of.settings}
    except ValueError:  # read from a file without info
        settings = {}
    record_info(pairs, ProbeInfo("minimal_pairs", settings, len(probe), len(pairs), {}, {}))
    return pairs


def _features() -> datasets.Features:
    string, number = datasets.Value("string"), datasets.Value("int64")
    texts = dict.fromkeys(("sentence_good", "sentence_bad", "UID", "pairID", "side", "category"), string)
    return datasets.Features({**texts, "size": number, "seed": number, **dict.fromkeys(("uid", "provenance"), string)})


def _columns(rows: dict[str, list[Any]], numbers: Iterator[int]) -> dict[str, list[Any]]:
    """Return a batch of minimal pairs for a batch of rows."""
    made: dict[str, list[Any]] = {name: [] for name in _features()}
    for k, side in enumerate(rows["side"]):
        for half in ("premise", "hypothesis") if side == "both" else (side,):
            pair = {name: rows[name][k] for name in ("category", "size", "seed", "uid", "provenance")}
            pair |= {"sentence_good": rows[f"original_{half}"][k], "sentence_bad": rows[half][k]}
            pair |= {"UID": rows["builder"][k], "pairID": str(next(numbers)), "side": half}
            for name, value in pair.items():
                made[name].append(value)
    return made
