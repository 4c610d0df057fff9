"""Raw records of files, with their line numbers, and the checks that name a field which is not what it should be."""

from __future__ import annotations

import csv
import gzip
import json
import numbers
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

Record = tuple[int | str, Any]  # line number (or index, or 7.2: the second on line 7) and what stands there
T = TypeVar("T")


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


def suffix(path: Path) -> str:
    """Give the suffix that tells the format of a file, compressed or not.

    Args:
        path: The file.

    Returns:
        The suffix in small letters, that of ``a.TSV.gz`` being ``.tsv``.
    """
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def text_lines(path: Path, newline: str | None = None) -> Iterator[tuple[int, str]]:
    """Read a text file line by line.

    Args:
        path: The file, UTF-8 with or without a byte order mark, compressed where it ends in ``.gz``.
        newline: As for ``open``.

    Yields:
        Line number and line.

    Raises:
        ValueError: With file and line, where bytes are not UTF-8 or the compressed file is damaged.
    """
    number = 0
    # surrogateescape: a strict decoder works ahead in blocks, and would not know the line of a bad byte
    how: dict[str, Any] = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": newline}
    with gzip.open(path, "rt", **how) if path.suffix == ".gz" else path.open(**how) as lines:
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
    """Read a file of one JSON object a line.

    Args:
        path: The file.

    Yields:
        Line number and line, empty lines left out.
    """
    for number, line in text_lines(path):
        if line.strip():
            yield number, line


def table_rows(path: Path) -> Iterator[Record]:
    """Read a table with a header.

    Args:
        path: A ``.csv`` or ``.tsv`` file.

    Yields:
        Line number, that of the row's first line, and row.

    Raises:
        ValueError: With file and line, where the header is missing or names a column twice, or where a row has
            more cells than the header, or fewer.
    """
    tabs = suffix(path) == ".tsv"
    # tab-separated files of this field (GLUE) do not quote: a lone " is a character like any other
    reader = csv.reader(
        (line for _, line in text_lines(path, newline="")),
        delimiter="\t" if tabs else ",",
        quoting=csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL,
    )
    header: list[str] | None = None
    first = 1
    try:
        for row in reader:
            if header is None:
                header = row
                if len(set(header)) != len(header):
                    raise ValueError(f"{path}:1: the header must name each column once, got {header}")
            elif row:
                if len(row) != len(header):
                    hint = "" if tabs else "; a text with a comma must stand in quotes"
                    raise ValueError(
                        f"{path}:{first}: a row must have as many cells as the header ({len(header)}), got "
                        f"{len(row)}: {brief(row)}{hint}"
                    )
                yield first, dict(zip(header, row, strict=True))
            first = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}:{first}: not a row of cells: {error}") from error
    if header is None:
        raise ValueError(f"{path}:1: must begin with a header that names the columns, the file is empty")


def json_object(line: str) -> Mapping[str, Any]:
    """Parse a line that must hold one JSON object.

    Args:
        line: The line.

    Returns:
        The object.

    Raises:
        ValueError: Where it is something else.
    """
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
    """Take a field out of a row, if it is what it should be.

    Args:
        row: The row.
        name: The field.
        kind: Its type; a bool is no int.
        wanted: Its type in words, for the error.

    Returns:
        What the field holds.

    Raises:
        ValueError: Where the row has no such field, or where it holds something else.
    """
    if name not in row:
        raise ValueError(f"no field {name!r}; there are {', '.join(map(repr, row))[:200] or 'none'}")
    return checked(row[name], f"field {name!r}", kind, wanted)


def checked(value: Any, what: str, kind: type[T], wanted: str) -> T:
    """Check the type of a value that came with a record.

    Args:
        value: The value.
        what: What the value is, for the error.
        kind: Its type; a bool is no int.
        wanted: Its type in words, for the error.

    Returns:
        The value.

    Raises:
        ValueError: Where it is something else.
    """
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise ValueError(f"{what} must be {wanted}, got {brief(value)}")
    return value


def name_in(row: Mapping[str, Any], name: str) -> str:
    """Take a field that names its row.

    Args:
        row: The row.
        name: The field.

    Returns:
        The name; a number is written out.

    Raises:
        ValueError: Where the row has no such field, or where it is neither a text nor a whole number.
    """
    value = row.get(name)
    # Integral: a data frame may give numpy's integers
    if not isinstance(value, bool) and isinstance(value, numbers.Integral):
        return str(int(value))
    found = field(row, name, str, "a text or a whole number")
    if not found:
        raise ValueError(f"field {name!r} must be a text or a whole number, got ''")
    return found


def brief(value: Any) -> str:
    """Show a value in an error.

    Args:
        value: The value.

    Returns:
        What ``repr`` says of it, cut off where it is long.
    """
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
