"""A corpus: something read from the start at every pass, with a count of what was left out."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from pelocality.corpora._records import Record
from pelocality.corpora.sentence import Dropped

logger = logging.getLogger(__name__)
T = TypeVar("T")


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
        # a base name alone ("dev.jsonl") would name the sentences of two corpora alike
        self._short = "/".join(Path(name).resolve().parts[-2:]) if Path(name).is_file() else name
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
            return self._read(content, f"{self._short}:{line}")
        except ValueError as error:
            raise ValueError(f"{self.name}:{line}: {' '.join(str(error).split())}") from error

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
