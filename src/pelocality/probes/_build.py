"""From a corpus to a ``datasets.Dataset``: lazily, with the same rows for any number of processes."""

import functools
import hashlib
import itertools
import logging
import os
import shutil
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import datasets
import multiprocess
import numpy as np
import pyarrow as pa
from tqdm import tqdm

from pelocality._checks import count
from pelocality.corpora import Corpus, Dropped, Pair, Sentence
from pelocality.probes._rows import features_of
from pelocality.probes.info import ProbeInfo, record_info

logger = logging.getLogger(__name__)
Row = dict[str, Any]
Item = Pair | Sentence
Counts = Counter[tuple[str, str]]  # ("items", ""), ("dropped", reason) or ("skipped", reason) -> number
_BATCH = 1000  # records sent to the processes, and rows written, at a time


class Skipped(NamedTuple):
    """A candidate within an item (a constituent, a predicate) that cannot be used, and why."""

    reason: str


class Perturbation(Protocol):
    """A change of word order with its settings: called with an item, it yields rows and unusable candidates."""

    default_side: ClassVar[str]  # the side of a pair to perturb if the caller names none

    def __call__(self, item: Item) -> Iterable[Row | Dropped | Skipped]:
        """Perturb one item."""

    def settings(self) -> Mapping[str, Any]:
        """Return the arguments of the builder, ``side`` and ``labels`` among them."""


def generator_for(seed: int, *names: str) -> np.random.Generator:
    """Return a random generator that depends on the seed and the names alone, on every machine."""
    digest = hashlib.blake2b("\0".join(names).encode(), digest_size=16).digest()
    return np.random.default_rng([seed, int.from_bytes(digest, "big")])


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
    source, item_type = _open(source)
    settings = dict(perturb.settings())
    side, labels = settings["side"], settings["labels"]
    if item_type is Sentence and (side != perturb.default_side or labels is not None):
        got = f"side={side!r} and labels={labels!r}"
        raise ValueError(f"side and labels are for pairs, not for single sentences, got {got}; leave both out")
    worker = _Worker(source.parse if isinstance(source, Corpus) else None, item_type, perturb)
    counts: Counts = Counter()

    def rows() -> Iterator[Row]:
        records = source.records() if isinstance(source, Corpus) else source
        for made, counted in _results(worker, tqdm(records, builder, delay=3, disable=not progress), workers):
            counts.update(counted)
            yield from ({**row, "builder": builder} for row in made)

    columns = {**(features or features_of(item_type is Sentence)), "builder": datasets.Value("string")}
    probe = write_dataset(rows(), datasets.Features(columns), datasets.Split.TEST)
    dropped, skipped = (
        {reason: n for (what, reason), n in counts.most_common() if what == name} for name in ("dropped", "skipped")
    )
    info = ProbeInfo(builder, settings, counts["items", ""], len(probe), dropped, skipped)
    record_info(probe, info)
    logger.log(logging.INFO if info.rows else logging.WARNING, "%s", info)
    return probe


def _open(source: Any) -> tuple[Iterable[Item], type[Pair] | type[Sentence]]:
    """Return the source, whose first item is not lost, and the type of that item."""
    items = iter(source) if isinstance(source, Iterable) else None
    first = next(items, None) if items is not None else source
    if items is None or not isinstance(first, Pair | Sentence | None):
        got = f"a {type(source).__name__} of {type(first).__name__}; put a single item in a list"
        advice = "read_snli reads files, read_pairs rows, and read_texts(texts, parser=...) texts"
        raise TypeError(f"pairs must be a corpus or a list of Pair or Sentence, got {got}; {advice}")
    # The first item of an iterator cannot be read again.
    if not isinstance(source, Corpus | Collection) and first is not None:
        source = itertools.chain([first], items)
    return source, Pair if first is None else type(first)


@dataclass(frozen=True)
class _Worker:
    """What a process needs to turn records into rows."""

    parse: Callable[[Any], Any] | None  # the method of a corpus that makes an item of a record
    item_type: type[Pair] | type[Sentence]
    perturb: Perturbation

    def __call__(self, record: Any) -> tuple[list[Row], Counts]:
        """Return the rows of a record, and counts of the item, its unusable candidates, and why it has no rows."""
        item = record if self.parse is None else self.parse(record)
        if not isinstance(item, Dropped | self.item_type):
            raise TypeError(f"pairs must be of one kind, got {type(item).__name__} after {self.item_type.__name__}")
        counts: Counts = Counter({("items", ""): 1})
        rows: list[Row] = []
        reason = "no candidate"
        for result in [item] if isinstance(item, Dropped) else self.perturb(item):
            if isinstance(result, Skipped):
                counts["skipped", result.reason] += 1
                reason = "no candidate was usable" if reason == "no candidate" else reason
            elif isinstance(result, Dropped):
                reason = result.reason
            else:
                rows.append(result)
        if not rows:
            counts["dropped", reason] += 1
        return rows, counts


def _results(worker: _Worker, records: Iterable[Any], workers: int) -> Iterator[tuple[list[Row], Counts]]:
    """Yield the rows and counts of each record, in order, made by this process or by several."""
    if workers == 1:
        yield from map(worker, records)
        return
    records = iter(records)
    with multiprocess.Pool(workers, _init_process, (worker,)) as pool:
        while batch := list(itertools.islice(records, _BATCH)):
            yield from pool.map(_run_worker, batch)


_worker: _Worker  # set in each process of the pool


def _init_process(worker: _Worker) -> None:
    """Keep the worker in this process, so that it loads a parser once."""
    global _worker
    _worker = worker


def _run_worker(record: Any) -> tuple[list[Row], Counts]:
    return _worker(record)


def write_dataset(rows: Iterator[Row], features: datasets.Features, split: datasets.Split | None) -> datasets.Dataset:
    """Return a dataset of rows, memory-mapped from a file that is removed when the interpreter ends.

    The cache of ``datasets`` would identify results by a hash of a function and its arguments, which does not notice
    that a file has changed; and it is never emptied.
    """
    # If a pickled dataset is read after the file was removed, the error shows this name.
    path = _scratch(os.getpid()) / f"{uuid.uuid4().hex}-temporary-use-save_to_disk.arrow"
    schema = features.arrow_schema
    with pa.ipc.new_stream(path, schema) as file:
        while batch := list(itertools.islice(rows, _BATCH)):
            file.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))
    return datasets.Dataset.from_file(str(path), split=split)


@functools.cache
def _scratch(process: int) -> Path:
    """Return the folder for the files that a process makes; the process itself removes it, not one forked from it."""
    folder = Path(tempfile.mkdtemp(prefix="pelocality-"))
    Finalize(None, shutil.rmtree, (folder, True), exitpriority=0)
    return folder
