"""A corpus: something read from the start at every pass, with a count of what was left out."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from pelocality.trees import Dropped

logger = logging.getLogger(__name__)
T = TypeVar("T")
Record = tuple[int, Any]  # line number (or index) and what stands there


class Corpus(Generic[T]):
    """Sentences or pairs of a file, read lazily, again from the start at each pass.

    Iterating yields the items. What was left out is counted by reason in ``dropped`` once a pass is complete,
    and logged. The builders of ``pelocality.probes`` read records and parse them in several processes.
    """

    def __init__(
        self,
        name: str,
        open_records: Callable[[], Iterator[Record]],
        read: Callable[[Any, str], T | Dropped],
    ) -> None:
        self.name = name
        self.dropped: Counter[str] = Counter()
        self._open_records = open_records
        self._read = read

    def records(self) -> Iterator[Record]:
        """Go over the raw records from the start.

        Returns:
            Line number and content of each record, unparsed.
        """
        return self._open_records()

    def parse(self, record: Record) -> T | Dropped:
        """Read one record.

        Args:
            record: A record of ``records()``.

        Returns:
            The item, or why it is left out.

        Raises:
            ValueError: Where the record is malformed, with file and line.
        """
        line, content = record
        try:
            return self._read(content, f"{Path(self.name).name}:{line}")
        except (ValueError, KeyError) as error:
            what = f"no field {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{self.name}:{line}: {what}") from error

    def __iter__(self) -> Iterator[T]:
        dropped: Counter[str] = Counter()
        for record in self.records():
            item = self.parse(record)
            if isinstance(item, Dropped):
                dropped[item.reason] += 1
            else:
                yield item
        self.dropped = dropped
        if dropped:
            logger.info("%s: left out %s", self.name, ", ".join(f"{n} ({why})" for why, n in dropped.items()))

    def __repr__(self) -> str:
        return f"Corpus({self.name!r})"


def existing(path: str | Path) -> Path:
    """Check that a corpus file is there before anything is built on it.

    Args:
        path: The file.

    Returns:
        The file as a path.

    Raises:
        FileNotFoundError: Where there is no such file.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"path must name a file to read, got {str(path)!r}")
    return Path(path)


def json_lines(path: Path) -> Iterator[Record]:
    """Read a file of one JSON object a line.

    Args:
        path: The file, UTF-8.

    Returns:
        Line number and line, empty lines left out.
    """
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, line


def json_object(line: str) -> Mapping[str, Any]:
    """Parse a line that must hold one JSON object.

    Args:
        line: The line.

    Returns:
        The object.

    Raises:
        ValueError: Where it is something else.
    """
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError(f"expected one JSON object a line, got {type(found).__name__}")
    return found


def indexed(rows: Iterable[Any]) -> Iterator[Record]:
    """Number the rows of something in memory.

    Args:
        rows: The rows.

    Returns:
        Number, from 1, and row.
    """
    return enumerate(rows, 1)
