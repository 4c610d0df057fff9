"""From sentences or pairs to a ``datasets.Dataset``: lazily, the same in any number of processes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import pickle
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import datasets
import numpy as np

from pelocality._checks import count
from pelocality.corpora import Dropped, Pair, Records, Sentence
from pelocality.probes._info import ProbeInfo, record_info

logger = logging.getLogger(__name__)
Row = dict[str, Any]
Item = Pair | Sentence
_REPORT = "_report"  # column of the row that ends a shard: its counts, or the error that stopped it


@dataclass(frozen=True, slots=True)
class Skipped:
    """A candidate within an item (a constituent, a predicate) that cannot be used, and why."""

    reason: str


class Perturbation(Protocol):
    """A change of word order with its settings: called with an item, it yields rows and what could not be used."""

    def __call__(self, item: Item) -> Iterable[Row | Dropped | Skipped]:
        """Perturb one item."""

    def features(self, kind: type) -> datasets.Features:
        """Return the columns of the rows made of one kind of item."""

    def settings(self) -> Mapping[str, Any]:
        """Return what the builder was called with."""


def generator_for(seed: int, *names: str) -> np.random.Generator:
    """Return a random generator that depends on the seed and the names alone, on every machine."""
    digest = hashlib.blake2b("\0".join(names).encode(), digest_size=16).digest()
    return np.random.default_rng([seed, int.from_bytes(digest)])


def build(
    builder: str,
    source: Iterable[Item] | Records[Item],
    perturb: Perturbation,
    num_proc: int | None = None,
    progress: bool = False,
) -> datasets.Dataset:
    """Perturb every item of a source and collect the rows in a memory-mapped dataset.

    Args:
        builder: Name of the builder, for the column ``builder``, the info and the log.
        source: Pairs or sentences: a corpus, a list, a generator.
        perturb: The perturbation.
        num_proc: Number of processes that share the work; None works in this one.
        progress: Whether to show the progress bars of ``datasets``.

    Returns:
        The dataset, in the order of the source whatever ``num_proc`` is; `probe_info` reads its counts.

    Raises:
        TypeError: The source does not hold pairs or sentences.
        ValueError: Several processes are to share a generator, which only one can read.
    """
    workers = count("num_proc", num_proc) if num_proc is not None else 1
    records, kind = _open(source)
    if workers > 1 and isinstance(records, _InMemory) and isinstance(records.items, Iterator):
        raise ValueError(f"num_proc={num_proc} needs a source that can be read again; make a list of the generator")
    columns = {**perturb.features(kind), "builder": datasets.Value("string"), _REPORT: datasets.Value("binary")}
    folder = scratch_folder()
    with progress_bars(progress):
        table = datasets.Dataset.from_generator(
            _shard_rows,
            features=datasets.Features(columns),
            cache_dir=str(folder),
            gen_kwargs={
                "shards": _shards(records, workers),
                "records": records,
                "kind": kind,
                "perturb": perturb,
                "empty": {**dict.fromkeys(columns), "builder": builder},
            },
            num_proc=workers if workers > 1 else None,
            split=datasets.Split.TEST,
            fingerprint=folder.name,  # given, so that nothing is hashed
        )
    probe, counts = _without_reports(table)
    info = ProbeInfo(
        builder,
        dict(perturb.settings()),
        counts.items,
        len(probe),
        dict(counts.dropped.most_common()),
        dict(counts.skipped.most_common()),
    )
    record_info(probe, info)
    logger.info(
        "%s: %d rows of %d items; items dropped: %s; candidates skipped: %s",
        builder,
        info.rows,
        info.items,
        *(", ".join(f"{why}: {n}" for why, n in reasons.items()) or "none" for reasons in (info.dropped, info.skipped)),
    )
    return probe


class _InMemory:
    """Items that are in memory already, as a source of records."""

    def __init__(self, items: Iterable[Item]) -> None:
        self.name = type(items).__name__
        self.items = items

    def records(self) -> Iterator[Item]:
        return iter(self.items)

    def parse(self, record: Item) -> Item:
        return record


def _open(source: Iterable[Item] | Records[Item]) -> tuple[Records[Item], type]:
    """Return the source as records, and the kind of its first item, which is not lost."""
    if isinstance(source, Records):
        parsed = (source.parse(record) for record in source.records())
        first = next((item for item in parsed if not isinstance(item, Dropped)), None)
        return source, type(first) if isinstance(first, Pair | Sentence) else Pair
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
            f"pairs must hold pelocality.corpora.Pair or Sentence, got {type(first).__name__}; "
            "read_pairs makes pairs of rows"
        )
    return _InMemory(source), Pair if first is None else type(first)


def _shards(source: Records[Item], workers: int) -> list[tuple[int, int | None]]:
    """Cut the records into ranges of equal length, in order, one per process."""
    if workers == 1:
        return [(0, None)]
    total = sum(1 for _ in source.records())
    edges = [total * k // workers for k in range(workers + 1)]
    return [(a, b) for a, b in itertools.pairwise(edges) if a < b] or [(0, None)]


@dataclass
class _Counts:
    """What became of the items of a shard."""

    items: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)

    def rows(self, item: Item | Dropped, kind: type, perturb: Perturbation) -> Iterator[Row]:
        """Yield the rows of one item, and count what gave none."""
        self.items += 1
        if isinstance(item, Dropped):
            self.dropped[item.reason] += 1
            return
        if not isinstance(item, kind):
            raise TypeError(f"pairs must all be of one kind, got a {type(item).__name__} after a {kind.__name__}")
        reason, any_rows = "no candidate", False
        for result in perturb(item):
            if isinstance(result, Skipped):
                self.skipped[result.reason] += 1
                reason = "no candidate was usable" if reason == "no candidate" else reason
            elif isinstance(result, Dropped):
                reason = result.reason
            else:
                any_rows = True
                yield result
        if not any_rows:
            self.dropped[reason] += 1


def _shard_rows(
    shards: list[tuple[int, int | None]], records: Records[Item], kind: type, perturb: Perturbation, empty: Row
) -> Iterator[Row]:
    """Yield the rows of some shards, each shard ended by a row that reports its counts or the error that stopped it."""
    for start, stop in shards:
        counts = _Counts()
        report: _Counts | Exception = counts
        try:
            for record in itertools.islice(records.records(), start, stop):
                for row in counts.rows(records.parse(record), kind, perturb):
                    yield {**empty, **row}
        except Exception as error:  # a pool of processes would lose its type and its cause
            report = error
        yield {**empty, _REPORT: pickle.dumps(report)}


def _without_reports(table: datasets.Dataset) -> tuple[datasets.Dataset, _Counts]:
    """Take the reports out of a table; return the rows and the sums, or raise the error that a report holds."""
    column = table.data.column(_REPORT)
    ends = np.flatnonzero(column.is_valid().to_numpy()).tolist()
    counts, parts, start = _Counts(), [], 0
    for end in ends:
        report = pickle.loads(column[end].as_py())
        if isinstance(report, Exception):
            raise report
        counts.items += report.items
        counts.dropped += report.dropped
        counts.skipped += report.skipped
        parts.append(table.select(range(start, end)))
        start = end + 1
    probe = datasets.concatenate_datasets(parts, split=table.split) if len(parts) > 1 else parts[0]
    return probe.remove_columns(_REPORT), counts


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="pelocality-")


def scratch_folder() -> Path:
    """Make a folder for the files of one dataset, removed when the interpreter ends.

    The cache of ``datasets`` finds results again by a hash of a function and its arguments, which does not see that a
    file has changed; and it is never emptied.
    """
    folder = Path(_scratch().name, uuid.uuid4().hex)
    folder.mkdir()
    return folder


@contextlib.contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Show the progress bars of ``datasets``, or hide them, for a while."""
    were_off = datasets.are_progress_bars_disabled()
    (datasets.enable_progress_bars if shown else datasets.disable_progress_bars)()
    try:
        yield
    finally:
        (datasets.disable_progress_bars if were_off else datasets.enable_progress_bars)()
