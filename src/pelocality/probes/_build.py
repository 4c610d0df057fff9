"""From a corpus to a ``datasets.Dataset``: lazily, with the same rows for any number of processes."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import datasets
import numpy as np

from pelocality._checks import count
from pelocality.corpora import Corpus, Dropped, Pair, Sentence
from pelocality.probes._info import ProbeInfo, record_info
from pelocality.probes._rows import features_of

logger = logging.getLogger(__name__)
Row = dict[str, Any]
Item = Pair | Sentence
Counts = Counter[tuple[str, str]]  # ("items", ""), ("dropped", reason) or ("skipped", reason) -> number
_REPORT = "_report"  # column of the last row of a shard: its counts, or the error that stopped it


@dataclass(frozen=True, slots=True)
class Skipped:
    """A candidate within an item (a constituent, a predicate) that cannot be used, and why."""

    reason: str


class Perturbation(Protocol):
    """A change of word order with its settings: called with an item, it yields rows and unusable candidates."""

    def __call__(self, item: Item) -> Iterable[Row | Dropped | Skipped]:
        """Perturb one item."""

    def settings(self) -> Mapping[str, Any]:
        """Return the arguments of the builder."""


def generator_for(seed: int, *names: str) -> np.random.Generator:
    """Return a random generator that depends on the seed and the names alone, on every machine."""
    digest = hashlib.blake2b("\0".join(names).encode(), digest_size=16).digest()
    return np.random.default_rng([seed, int.from_bytes(digest)])


def build(
    builder: str,
    source: Iterable[Item],
    perturb: Perturbation,
    num_proc: int | None,
    progress: bool,
    features: datasets.Features | None = None,
) -> datasets.Dataset:
    """Perturb every item of a source and collect the rows in a memory-mapped dataset, in the order of the source.

    ``features`` are the columns of the rows, by default those of the kind of item that the source holds.
    """
    workers = count("num_proc", num_proc) if num_proc is not None else 1
    corpus, kind = _open(source, workers)
    features = features or features_of(kind)
    columns = {**features, "builder": datasets.Value("string"), _REPORT: datasets.Value("binary")}
    folder = scratch_folder()
    with progress_bars(progress):
        table = datasets.Dataset.from_generator(
            _shard_rows,
            features=datasets.Features(columns),
            cache_dir=str(folder),
            gen_kwargs={
                "shards": _shards(corpus, workers),
                "corpus": corpus,
                "kind": kind,
                "perturb": perturb,
                "empty": {**dict.fromkeys(columns), "builder": builder},
            },
            num_proc=workers if workers > 1 else None,
            split=datasets.Split.TEST,
            fingerprint=folder.name,  # explicit, so that nothing is hashed
        )
    probe, counts = _without_reports(table)
    dropped, skipped = (
        {reason: n for (what, reason), n in counts.most_common() if what == name} for name in ("dropped", "skipped")
    )
    info = ProbeInfo(builder, dict(perturb.settings()), counts["items", ""], len(probe), dropped, skipped)
    record_info(probe, info)
    logger.info(
        "%s: %d rows of %d items; items dropped: %s; candidates skipped: %s",
        builder,
        info.rows,
        info.items,
        *(", ".join(f"{why}: {n}" for why, n in reasons.items()) or "none" for reasons in (info.dropped, info.skipped)),
    )
    return probe


def _open(source: Iterable[Item], workers: int) -> tuple[Corpus[Item], type]:
    """Return the source as a corpus, and the type of its first item, which is not lost."""
    if isinstance(source, Pair | Sentence):
        raise TypeError(f"pairs must be a corpus or a list, got one {type(source).__name__}; put it in a list")
    if isinstance(source, str | Path) or not isinstance(source, Iterable):
        raise TypeError(
            f"pairs must be read first, got {type(source).__name__}; see read_snli, read_pairs, read_frames"
        )
    if isinstance(source, Iterator) and workers > 1:
        raise ValueError(f"num_proc={workers} needs a source that can be read again; make a list of the generator")
    name, first = type(source).__name__, next(iter(source), None)
    if first is not None and not isinstance(first, Pair | Sentence):
        raise TypeError(
            f"pairs must hold pelocality.corpora.Pair or Sentence, got {type(first).__name__}; "
            "read_pairs makes pairs of rows"
        )
    if isinstance(source, Iterator) and first is not None:
        source = itertools.chain([first], source)
    if not isinstance(source, Corpus):
        source = Corpus(name, functools.partial(enumerate, source, 1), _unchanged)
    return source, Pair if first is None else type(first)


def _unchanged(item: Item, where: str) -> Item:
    return item


def _shards(corpus: Corpus[Item], workers: int) -> list[tuple[int, int | None]]:
    """Split the records into ranges of equal length, in order, one per process."""
    if workers == 1:
        return [(0, None)]
    total = sum(1 for _ in corpus.records())
    edges = [total * k // workers for k in range(workers + 1)]
    return [(a, b) for a, b in itertools.pairwise(edges) if a < b] or [(0, None)]


def _shard_rows(
    shards: list[tuple[int, int | None]], corpus: Corpus[Item], kind: type, perturb: Perturbation, empty: Row
) -> Iterator[Row]:
    """Yield the rows of some shards, and after each a row with its counts or the error that stopped it."""
    for start, stop in shards:
        counts: Counts = Counter()
        report: Counts | Exception = counts
        try:
            for record in itertools.islice(corpus.records(), start, stop):
                for row in _item_rows(corpus.parse(record), kind, perturb, counts):
                    yield {**empty, **row}
        except Exception as error:  # a pool of processes would lose its type and cause
            report = error
        yield {**empty, _REPORT: pickle.dumps(report)}


def _item_rows(item: Item | Dropped, kind: type, perturb: Perturbation, counts: Counts) -> Iterator[Row]:
    """Yield the rows of one item, and count the item, its unusable candidates, and why it has no rows."""
    counts["items", ""] += 1
    if not isinstance(item, Dropped | kind):
        raise TypeError(f"pairs must all be of one kind, got a {type(item).__name__} after a {kind.__name__}")
    reason: str | None = "no candidate"
    for result in [item] if isinstance(item, Dropped) else perturb(item):
        if isinstance(result, Skipped):
            counts["skipped", result.reason] += 1
            reason = "no candidate was usable" if reason == "no candidate" else reason
        elif isinstance(result, Dropped):
            reason = reason and result.reason
        else:
            reason = None
            yield result
    if reason:
        counts["dropped", reason] += 1


def _without_reports(table: datasets.Dataset) -> tuple[datasets.Dataset, Counts]:
    """Return the rows of a table without the reports, and the sum of these, or raise the error that a report holds."""
    column = table.data.column(_REPORT)
    counts: Counts = Counter()
    parts, start = [], 0
    for end in np.flatnonzero(column.is_valid().to_numpy()).tolist():
        report = pickle.loads(column[end].as_py())
        if isinstance(report, Exception):
            raise report
        counts += report
        parts.append(table.select(range(start, end)))
        start = end + 1
    probe = datasets.concatenate_datasets(parts, split=table.split) if len(parts) > 1 else parts[0]
    return probe.remove_columns(_REPORT), counts


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="pelocality-")


def scratch_folder() -> Path:
    """Return a new folder for the files of one dataset, removed when the interpreter ends.

    The cache of ``datasets`` would identify results by a hash of a function and its arguments, which does not notice
    that a file has changed; and it is never emptied.
    """
    folder = Path(_scratch().name, uuid.uuid4().hex)
    folder.mkdir()
    return folder


@contextlib.contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Show or hide the progress bars of ``datasets`` inside a ``with`` block."""
    were_off = datasets.are_progress_bars_disabled()
    (datasets.enable_progress_bars if shown else datasets.disable_progress_bars)()
    try:
        yield
    finally:
        (datasets.disable_progress_bars if were_off else datasets.enable_progress_bars)()
