"""A corpus: items read lazily from a source, with a count of those left out; and the files of the example corpus."""

import functools
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pelocality._checks import check_choice
from pelocality.corpora._records import Record
from pelocality.corpora.sentence import Dropped

logger = logging.getLogger(__name__)
T = TypeVar("T")
Read = Callable[[Any, str], T | Dropped]  # reads the content of a record, and its place ("snli/dev.jsonl:7")


@dataclass(eq=False, repr=False)
class Corpus(Generic[T]):
    """Sentences or pairs, read lazily, anew at each pass.

    Iterating yields the items. Those left out are counted by reason when a pass is complete, and logged, as a warning
    if there are no others. Reading takes two steps, so that the builders of ``pelocality.probes`` can share the slow
    second one among processes: ``records`` yields raw records, ``parse`` makes an item of one.

    Attributes:
        name: Name of the source, such as the path of its file; errors begin with it.
        records: Function that returns a new iterator over the raw records, each a line number and its content.
        read: Function from the content of a record and its place (``"snli/dev.jsonl:7"``) to an item, or to `Dropped`.
        dropped: Number of items left out in the last complete pass, by reason; a builder counts its own pass in
            ``probe_info(probe).dropped``.
    """

    name: str
    records: Callable[[], Iterator[Record]]
    read: Read[T]
    dropped: Counter[str] = field(default_factory=Counter, init=False)

    @functools.cached_property
    def _short_name(self) -> str:
        """The name with its folder: a file name alone ("dev.jsonl") does not distinguish two corpora."""
        return "/".join(Path(self.name).resolve().parts[-2:]) if Path(self.name).is_file() else self.name

    def parse(self, record: Record) -> T | Dropped:
        """Parse one record.

        Args:
            record: One of ``records()``.

        Returns:
            The item, or the reason why it is left out.

        Raises:
            ValueError: The record is malformed; the message names file and line.
        """
        line, content = record
        try:
            return self.read(content, f"{self._short_name}:{line}")
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{self.name}:{line}: {' '.join(str(error).split())}") from error

    def __iter__(self) -> Iterator[T]:
        dropped: Counter[str] = Counter()
        total = 0
        for record in self.records():
            total += 1
            item = self.parse(record)
            if isinstance(item, Dropped):
                dropped[item.reason] += 1
            else:
                yield item
        self.dropped = dropped
        if not total:
            logger.warning("%s: nothing to read in it", self.name)
        if dropped:
            level, reasons = logging.INFO if dropped.total() < total else logging.WARNING, dropped.items()
            logger.log(level, "%s: left out %s", self.name, ", ".join(f"{n} ({why})" for why, n in reasons))

    def __getitem__(self, index: int) -> T:
        """Return the item of a number from 0 on, reading up to it."""
        for item in itertools.islice(self, index, None):
            return item
        raise IndexError(f"corpus {self.name!r} has no item {index}")

    def __repr__(self) -> str:
        return f"Corpus({self.name!r})"


def file_corpus(path: Any, records: Callable[[Path], Iterator[Record]], read: Read[T]) -> Corpus[T]:
    """Return the corpus of a file, which must exist."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"path must name a file to read, got {str(path)!r}; read_texts takes texts in a list")
    return Corpus(str(path), functools.partial(records, Path(path)), read)


def check_rows(name: str, rows: Any, advice: str) -> None:
    """Raise a TypeError unless rows can be read again, and are rows: not an iterator, several splits or columns."""
    columns = isinstance(rows, Mapping) or hasattr(rows, "columns")
    if columns or not isinstance(rows, Iterable) or iter(rows) is iter(rows):
        raise TypeError(f"{name} must be a file, or rows that can be read again, got a {type(rows).__name__}; {advice}")


def example_data(name: str) -> Path:
    """Return a file of the small corpus that was written for this library, to try readers and probes.

    The corpus is far too small to measure a model.

    Args:
        name: The name of the file, such as ``"nli_pairs.jsonl"``; the folder ``examples/data`` of the repository has a
            README that describes each of them.

    Returns:
        Where the file lies: in the installed package, or in the clone that an editable installation uses.

    Raises:
        ValueError: There is no file of this name.

    Examples:
        >>> from pelocality import read_snli
        >>> next(iter(read_snli(example_data("nli_pairs.jsonl")))).premise.text
        'A girl is pushing her little brother on a swing.'
    """
    package = Path(__file__).parents[1]
    folder = package / "example_data"
    if not folder.exists():
        folder = package.parents[1] / "examples" / "data"
    check_choice("name", name, sorted(path.name for path in folder.iterdir() if path.suffix != ".md"))
    return folder / name
