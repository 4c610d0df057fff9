"""Raw records of files with their line numbers, and checks of the fields of a record."""

from __future__ import annotations

import csv
import gzip
import json
import numbers
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

Record = tuple[int | str, Any]  # line number (7.2 for the second tree on line 7) and content
T = TypeVar("T")


def text_lines(path: Path, newline: str | None = None) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line of a UTF-8 file, with or without a byte order mark, compressed if ``.gz``."""
    number = 0
    # surrogateescape: a strict decoder reads ahead in blocks and does not know the line of an invalid byte
    options: dict[str, Any] = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": newline}
    with gzip.open(path, "rt", **options) if path.suffix == ".gz" else path.open(**options) as lines:
        try:
            for number, line in enumerate(lines, 1):
                if not line.isascii():
                    _check_decoded(line, f"{path}:{number}")
                yield number, line
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}:{number + 1}: the compressed file is damaged: {error}") from error


def _check_decoded(line: str, where: str) -> None:
    try:
        line.encode()
    except UnicodeEncodeError as error:
        byte = ord(line[error.start]) & 0xFF
        raise ValueError(
            f"{where}: must be UTF-8, got the byte 0x{byte:02x} after {line[: error.start][-20:]!r}; convert the file, "
            "such as with iconv -f latin1 -t utf-8"
        ) from None


def json_lines(path: Path) -> Iterator[Record]:
    """Yield number and text of each line that is not empty."""
    return ((number, line) for number, line in text_lines(path) if line.strip())


def table_rows(path: Path, tabs: bool) -> Iterator[Record]:
    """Yield the rows of a table with a header, each with the number of its last line."""
    reader = csv.reader(
        (line for _, line in text_lines(path, newline="")),
        delimiter="\t" if tabs else ",",
        # tab-separated files of this field (GLUE) do not quote: a lone " is a character like any other
        quoting=csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL,
    )
    try:
        header = next(reader, None)
        if header is None:
            raise ValueError(f"{path}:1: must begin with a header that names the columns, the file is empty")
        if len(set(header)) != len(header):
            raise ValueError(f"{path}:1: the header must name each column once, got {header}")
        for row in filter(None, reader):
            if len(row) != len(header):
                hint = "" if tabs else "; a text with a comma must be quoted"
                raise ValueError(
                    f"{path}:{reader.line_num}: a row must have as many cells as the header ({len(header)}), got "
                    f"{len(row)}: {brief(row)}{hint}"
                )
            yield reader.line_num, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise ValueError(f"{path}:{reader.line_num}: not a row of cells: {error}") from error


def json_object(line: str) -> Mapping[str, Any]:
    """Parse a line that must hold one JSON object."""
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"expected one JSON object a line, got {brief(line.strip())} ({error.msg}, column {error.colno})"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f"expected one JSON object a line, got {type(found).__name__}")
    return found


def field(row: Mapping[str, Any], name: str, kind: type[T], wanted: str) -> T:
    """Return a field of a row; ``wanted`` is its type in words, for the error."""
    if name not in row:
        raise ValueError(f"no field {name!r}; there are {', '.join(map(repr, row))[:200] or 'none'}")
    return checked(row[name], f"field {name!r}", kind, wanted)


def checked(value: Any, what: str, kind: type[T], wanted: str) -> T:
    """Return a value after checking its type; a bool does not count as an int."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise ValueError(f"{what} must be {wanted}, got {brief(value)}")
    return value


def identifier(row: Mapping[str, Any], name: str) -> str:
    """Return a field that names its row: a text that is not empty, or a whole number as text."""
    value = row.get(name)
    # Integral: a data frame may give numpy's integers
    if not isinstance(value, bool) and isinstance(value, numbers.Integral):
        return str(int(value))
    found = field(row, name, str, "a text or a whole number")
    if not found:
        raise ValueError(f"field {name!r} must be a text or a whole number, got ''")
    return found


def brief(value: Any) -> str:
    """Return the ``repr`` of a value, cut off where it is long."""
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
