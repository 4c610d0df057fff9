"""How a probe was built: a record in the dataset's info."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import datasets

from pelocality._checks import check_dataset


@dataclass(frozen=True)
class ProbeInfo:
    """How a probe was built: the builder, its settings, and the number of items read, kept and left out.

    Attributes:
        builder: Name of the builder.
        settings: Its arguments.
        items: Number of sentences or pairs that were read.
        rows: Number of rows of the probe.
        dropped: Number of items without a row, by reason.
        skipped: Number of candidates within items (constituents, predicates) that could not be used, by reason.
    """

    builder: str
    settings: Mapping[str, Any]
    items: int
    rows: int
    dropped: Mapping[str, int]
    skipped: Mapping[str, int]

    def __str__(self) -> str:
        left_out = [
            f"; {what}: " + ", ".join(f"{reason} ({number})" for reason, number in counts.items())
            for what, counts in (("dropped", self.dropped), ("candidates skipped", self.skipped))
            if counts
        ]
        return f"{self.builder}: {self.rows} rows from {self.items} items" + "".join(left_out)


def probe_info(probe: datasets.Dataset) -> ProbeInfo:
    """Return how a probe was built.

    ``save_to_disk`` keeps this record, and ``concatenate_datasets`` adds up the counts. Parquet, CSV and JSON files
    lose the record. `evaluate` and `minimal_pairs` need only the column ``builder``.

    Args:
        probe: A dataset made by one of the builders.

    Returns:
        Counts and settings. Filtering or selecting rows does not change them. For concatenated probes, the names of
        the builders, the settings that are equal in all, and the sums of the counts.

    Raises:
        TypeError: A probe that is not a ``datasets.Dataset``.
        ValueError: The dataset was not made by a builder, or was read from a file that keeps no info.

    Examples:
        >>> from pelocality.corpora import Sentence
        >>> from pelocality.probes import random_shuffling
        >>> info = probe_info(random_shuffling([Sentence(("up", "you", "go")), Sentence(("up",))]))
        >>> info
        ProbeInfo(builder='random_shuffling', settings={'side': 'premise', 'labels': None, 'seed': 0}, items=2, rows=1,
                  dropped={'no order of the words changes the text': 1}, skipped={})
        >>> print(info)
        random_shuffling: 1 rows from 2 items; dropped: no order of the words changes the text (1)
    """
    check_dataset("probe", probe)
    try:
        records = [json.loads(line) for line in probe.info.description.splitlines() if line]
        parts = [ProbeInfo(**{name: record[name] for name in ProbeInfo.__annotations__}) for record in records]
        first = parts[0]
    except (json.JSONDecodeError, TypeError, KeyError, IndexError) as error:
        raise ValueError("probe must be made by pelocality.probes and kept with save_to_disk: no record") from error
    return ProbeInfo(
        ", ".join(dict.fromkeys(part.builder for part in parts)),
        {name: value for name, value in first.settings.items() if all(p.settings.get(name) == value for p in parts)},
        sum(part.items for part in parts),
        sum(part.rows for part in parts),
        dict(sum((Counter(part.dropped) for part in parts), Counter()).most_common()),
        dict(sum((Counter(part.skipped) for part in parts), Counter()).most_common()),
    )


def record_info(probe: datasets.Dataset, info: ProbeInfo) -> None:
    """Write the record into a dataset's info, on one line with a unique id: concatenation drops equal descriptions."""
    probe.info.description = json.dumps({**asdict(info), "id": probe._fingerprint})
