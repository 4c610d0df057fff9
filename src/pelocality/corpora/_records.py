"""Raw records of files with their line numbers, and checks of the fields of a record."""

import csv
import gzip
import json
import numbers
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from reprlib import repr as brief
from typing import Any

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_QUOTED = re.compile(r'"[^"]*(""[^"]*)+"')  # a cell that a writer of tables quoted: "she said ""go"""
Record = tuple[int | str, Any]  # line number (7.2 for the second tree on line 7) and content


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line of a UTF-8 file, with or without a byte order mark, compressed if ``.gz``."""
    number = 0
    with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as lines:
        try:
            for number, line in enumerate(lines, 1):
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            wrong, before = line[error.start], line[: error.start].decode()[-20:]
            given = f"the byte 0x{wrong:02x} after {before!r}"
            raise ValueError(f"{path}:{number}: must be UTF-8, got {given}; convert it with iconv") from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}:{number + 1}: the compressed file is damaged: {error}") from error


def json_lines(path: Path) -> Iterator[Record]:
    """Yield number and text of each line that is not empty."""
    return ((number, line) for number, line in text_lines(path) if line.strip())


def table_rows(path: Path, tabs: bool) -> Iterator[Record]:
    """Yield the rows of a table with a header, each with the number of its last line."""
    lines = (line for _, line in text_lines(path))
    # tab-separated files of this field (GLUE) do not quote: a lone " is a character like any other
    reader = csv.reader(lines, "excel-tab", quoting=csv.QUOTE_NONE) if tabs else csv.reader(lines, strict=True)
    complete = 0  # lines of the rows read
    try:
        header = next(reader, [])
        if not header or len(set(header)) != len(header):
            raise ValueError(f"{path}:1: must begin with a header that names each column once, got {header}")
        complete = reader.line_num
        for row in filter(None, reader):
            if len(row) != len(header):
                advice = "a text in a .tsv holds no tab" if tabs else "a text with a comma must be quoted in a .csv"
                given = f"{len(row)}: {brief(row)}; {advice}"
                raise ValueError(f"{path}:{reader.line_num}: a row must have {len(header)} cells, got {given}")
            complete = reader.line_num
            quoted = next(filter(_QUOTED.fullmatch, row), None) if tabs else None
            if quoted is not None:
                advice = "write it with quoting=csv.QUOTE_NONE, or pass pandas.read_csv(path, sep='\\t')"
                given = f"got {brief(quoted)}; {advice}"
                raise ValueError(f"{path}:{complete}: a cell of a .tsv must be written without quoting, {given}")
            yield complete, dict(zip(header, row, strict=True))
    except csv.Error as error:
        advice = "a quotation mark must be closed, and doubled within quotes"
        if "field limit" in str(error):
            advice = "if no quotation mark is left open, write texts of this length as .jsonl"
        raise ValueError(f"{path}:{complete + 1}: a row of cells must begin here, got {error}; {advice}") from error


def json_object(line: str) -> Mapping[str, Any]:
    """Parse a line that must hold one JSON object."""
    try:
        found = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"expected one JSON object a line, got {brief(line)}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"expected one JSON object a line, got {type(found).__name__}")
    if _SURROGATE.search(line):
        json.dumps(found, ensure_ascii=False).encode()  # raises a ValueError for half of a surrogate pair
    return found


def field(row: Mapping[str, Any], name: str, kind: Any, wanted: str, advice: str = "") -> Any:
    """Return a field of a row; ``wanted`` is its type in words, and ``advice`` where it is missing, for the errors."""
    if name not in row:
        raise ValueError(f"no field {name!r}; there are {', '.join(map(repr, row))[:200] or 'none'}{advice}")
    return checked_field(row[name], f"field {name!r}", kind, wanted)


def checked_field(value: Any, what: str, kind: Any, wanted: str) -> Any:
    """Return a value after checking its type; a bool does not count as a number."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not object):
        raise ValueError(f"{what} must be {wanted}, got {brief(value)}")
    return value


def identifier(row: Mapping[str, Any], name: str) -> str:
    """Return a field that names its row: a text, or a whole number (numpy's, from a data frame) as text."""
    return str(field(row, name, (str, numbers.Integral), "a text or a whole number"))
