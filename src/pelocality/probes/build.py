"""From sentences or pairs to a ``datasets.Dataset``: lazily, the same in any number of processes."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from pelocality.probes.generate import generate, scratch_folder
from pelocality.trees import Dropped, Pair, Records, Sentence

logger = logging.getLogger(__name__)
Row = dict[str, Any]
Item = Pair | Sentence


@dataclass(frozen=True, slots=True)
class SetAside:
    """A candidate within an item (a span, a frame) that is not used, and why; the item goes on."""

    reason: str


Edit = Callable[[Item], Iterable[Row | Dropped | SetAside]]


@dataclass(frozen=True)
class ProbeInfo:
    """How a probe was built: the builder, its settings, and what became of every sentence or pair it read.

    ``items`` counts what was read; ``dropped`` those of them that gave no row, by reason; ``set_aside``
    counts candidates within items (spans, frames) that were not usable, by reason; ``rows`` is what is
    left.
    """

    builder: str
    settings: Mapping[str, Any]
    items: int
    rows: int
    dropped: Mapping[str, int]
    set_aside: Mapping[str, int]


def probe_info(probe: datasets.Dataset) -> ProbeInfo:
    """Read how a probe was built from the info it carries, also after ``save_to_disk``.

    Args:
        probe: A dataset made by one of the builders.

    Returns:
        The counts and settings of its making; rows filtered or selected later do not change them.

    Raises:
        ValueError: Where the dataset was not made by a builder.
    """
    try:
        return ProbeInfo(**json.loads(probe.info.description))
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError("probe must be a dataset made by pelocality.probes, its info says nothing of it") from error


def generator_for(seed: int, *names: str) -> np.random.Generator:
    """Start a random stream that depends on the seed and the names alone.

    Args:
        seed: The caller's seed.
        names: What the choice is made for, such as a sentence's text.

    Returns:
        The same stream in every process, on every machine, in whatever order sentences come.

    Examples:
        >>> int(generator_for(0, "a").integers(1000)) == int(generator_for(0, "a").integers(1000))
        True
    """
    digest = hashlib.blake2b("\0".join(names).encode(), digest_size=16).digest()
    return np.random.default_rng([seed, int.from_bytes(digest)])


def check_seed(seed: int) -> None:
    """Refuse what is no seed.

    Args:
        seed: The caller's seed.

    Returns:
        Nothing.

    Raises:
        TypeError: Where it is not an integer.
        ValueError: Where it is negative.
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise TypeError(f"seed must be an integer, got {type(seed).__name__}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")


class _InMemory:
    """Items that are there already, as a source of records."""

    def __init__(self, items: Iterable[Item]) -> None:
        self.name = type(items).__name__
        self.items = items

    def records(self) -> Iterator[Item]:
        return iter(self.items)

    def parse(self, record: Item) -> Item:
        return record


def build(
    builder: str,
    source: Iterable[Item] | Records[Item],
    edit: Edit,
    features: Mapping[type, datasets.Features],
    settings: Mapping[str, Any],
    num_proc: int | None = None,
    progress: bool = False,
) -> datasets.Dataset:
    """Run an edit over a source and collect its rows in a memory-mapped dataset.

    Args:
        builder: Name of the builder, for info and log.
        source: Pairs or sentences: a corpus, a list, a generator.
        edit: From an item to rows, and to what was dropped or set aside.
        features: Columns of the rows for each kind of item.
        settings: What the builder was called with, for the info.
        num_proc: How many processes share the work; None works in this one.
        progress: Whether to show the progress bars of ``datasets``.

    Returns:
        The dataset, in the order of the source whatever ``num_proc`` is, its counts in
        ``info.description``.

    Raises:
        TypeError: Where the source is not made of pairs and sentences.
        ValueError: Where a generator, which only one process can read, is to be shared.
    """
    if num_proc is not None and num_proc < 1:
        raise ValueError(f"num_proc must be at least 1, got {num_proc}")
    records, first = _open(source)
    kind = type(first) if isinstance(first, Pair | Sentence) else Pair
    if kind not in features:
        wanted = " or ".join(f"pelocality.trees.{k.__name__}" for k in features)
        raise TypeError(f"{builder} edits items of type {wanted}, got {kind.__name__}")
    shared = num_proc is not None and num_proc > 1
    if shared and isinstance(records, _InMemory) and isinstance(records.items, Iterator):
        raise ValueError(f"num_proc={num_proc} needs a source that can be read again; make a list of the generator")
    folder = scratch_folder()
    probe = generate(
        _rows,
        features[kind],
        {
            "ranges": _ranges(records, num_proc) if shared else [(0, None)],
            "source": records,
            "edit": edit,
            "kind": kind,
            "folder": folder,
        },
        folder,
        num_proc if shared else None,
        progress,
    )
    info = _count(builder, settings, folder)
    probe.info.description = json.dumps(asdict(info))
    _log(info)
    return probe


def _open(source: Iterable[Item] | Records[Item]) -> tuple[Records[Item], Item | None]:
    """Make a source of records of whatever came, and look at its first item without losing it."""
    if isinstance(source, Records):
        parsed = (source.parse(record) for record in source.records())
        return source, next((item for item in parsed if not isinstance(item, Dropped)), None)
    if isinstance(source, Pair | Sentence):
        raise TypeError(f"pairs must be a corpus or a list, got one {type(source).__name__}; put it in a list")
    if isinstance(source, str | Path) or not isinstance(source, Iterable):
        raise TypeError(
            f"pairs must be read first, got {type(source).__name__}; see read_snli, read_pairs, read_frames"
        )
    if isinstance(source, Iterator):
        first = next(source, None)
        source = itertools.chain([] if first is None else [first], source)
    else:
        first = next(iter(source), None)
    if first is not None and not isinstance(first, Pair | Sentence):
        raise TypeError(
            f"pairs must hold pelocality.trees.Pair or Sentence, got {type(first).__name__}; "
            "read_pairs makes pairs of rows"
        )
    return _InMemory(source), first


def _ranges(source: Records[Item], num_proc: int | None) -> list[tuple[int, int | None]]:
    """Cut the records into stretches of equal length, in order, one per process."""
    total = sum(1 for _ in source.records())
    edges = [total * k // (num_proc or 1) for k in range((num_proc or 1) + 1)]
    return [(a, b) for a, b in itertools.pairwise(edges) if a < b] or [(0, None)]


def _rows(
    ranges: list[tuple[int, int | None]], source: Records[Item], edit: Edit, kind: type, folder: Path
) -> Iterator[Row]:
    """Edit the records of some stretches, and leave the counts in a file, which a process can hand back."""
    for start, stop in ranges:
        counts: dict[str, Counter[str]] = {"totals": Counter(), "dropped": Counter(), "set_aside": Counter()}
        for record in itertools.islice(source.records(), start, stop):
            yield from _edited(source.parse(record), edit, kind, counts)
        (folder / f"{start}.counts").write_text(json.dumps(counts))


def _edited(item: Item | Dropped, edit: Edit, kind: type, counts: Mapping[str, Counter[str]]) -> Iterator[Row]:
    counts["totals"]["items"] += 1
    if isinstance(item, Dropped):
        counts["dropped"][item.reason] += 1
        return
    if not isinstance(item, kind):
        raise TypeError(f"pairs must all be of one kind, got a {type(item).__name__} after a {kind.__name__}")
    rows, aside, dropped = 0, 0, None
    for result in edit(item):
        if isinstance(result, SetAside):
            aside += 1
            counts["set_aside"][result.reason] += 1
        elif isinstance(result, Dropped):
            dropped = result.reason
        else:
            rows += 1
            yield result
    counts["totals"]["rows"] += rows
    if not rows:
        counts["dropped"][dropped or ("no candidate was usable" if aside else "no candidate")] += 1


def _count(builder: str, settings: Mapping[str, Any], folder: Path) -> ProbeInfo:
    sums: dict[str, Counter[str]] = {"totals": Counter(), "dropped": Counter(), "set_aside": Counter()}
    for path in folder.glob("*.counts"):
        for name, counter in json.loads(path.read_text()).items():
            sums[name].update(counter)
    return ProbeInfo(
        builder,
        dict(settings),
        sums["totals"]["items"],
        sums["totals"]["rows"],
        dict(sums["dropped"].most_common()),
        dict(sums["set_aside"].most_common()),
    )


def _log(info: ProbeInfo) -> None:
    def listed(counts: Mapping[str, int]) -> str:
        return ", ".join(f"{reason}: {count}" for reason, count in counts.items()) or "none"

    logger.info(
        "%s: %d rows of %d items; items dropped: %s; candidates set aside: %s",
        info.builder,
        info.rows,
        info.items,
        listed(info.dropped),
        listed(info.set_aside),
    )
