"""Raw records of files with their line numbers, and checks of the fields of a record."""

import bz2
import csv
import gzip
import json
import lzma
import numbers
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from reprlib import repr as brief
from typing import Any

_QUOTED = re.compile(r'"[^"]*(""[^"]*)+"')  # "she said ""go""": a program quoted this cell
_ANNOTATORS = re.compile(r"label\d")  # MultiNLI's tables leave out these last columns if they are empty
_OPENERS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
# A zip archive raises the last two where it needs another method or a password.
_UNREADABLE = (EOFError, OSError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, NotImplementedError, RuntimeError)
COMPRESSED = (".gz", ".bz2", ".xz", ".zip")
Record = tuple[int | str, Any]  # line number (7.2 for the second tree on line 7) and content


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line of a UTF-8 file, with or without a byte order mark, also compressed."""
    number = 0
    with path.open("rb") as file:
        try:
            for number, line in enumerate(_decompressed(file), 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if "\0" in text:  # UTF-8 allows it, but no text has it
                    raise UnicodeDecodeError("utf-8", line, line.index(b"\0"), len(line), "zero byte")
                yield number, text
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}:{number}: must be UTF-8 ({error}); convert it with iconv") from error
        except _UNREADABLE as error:
            raise ValueError(f"{path}:{number + 1}: the file cannot be read: {error}; unpack it first") from error


def _decompressed(file: BufferedReader) -> Any:
    """Return the lines of a file, compressed or not, told by its first bytes: the suffix may be missing."""
    start = file.peek(10)
    for magic, opener in _OPENERS.items():
        if start.startswith(magic):
            return opener(file)
    if not start.startswith(b"PK\x03\x04"):
        return file
    archive = zipfile.ZipFile(file)
    names = [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX/")]
    if len(names) != 1:
        raise zipfile.BadZipFile(f"a .zip must hold one file, got {len(names)}: {brief(names)}")
    return archive.open(names[0])


def json_lines(path: Path) -> Iterator[Record]:
    """Yield number and text of each line that is not empty."""
    return ((number, line) for number, line in text_lines(path) if line.strip())


def table_rows(path: Path, tabs: bool) -> Iterator[Record]:
    """Yield the rows of a table with a header, each with the number of its last line."""
    lines = (line for _, line in text_lines(path))
    # GLUE and SNLI do not quote the cells of their tab-separated files: " is a character like any other
    reader = csv.reader(lines, "excel-tab", quoting=csv.QUOTE_NONE) if tabs else csv.reader(lines, strict=True)
    complete = 0  # number of lines in the rows read so far
    try:
        header = next(reader, [])
        if not header or len(set(header)) != len(header):
            raise ValueError(f"{path}:1: must begin with a header that names each column once, got {header}")
        complete = reader.line_num
        for row in filter(None, reader):
            if tabs and all(map(_ANNOTATORS.fullmatch, header[len(row) :])):
                row += [""] * (len(header) - len(row))
            if len(row) != len(header):
                given = f"{len(row)}: {brief(row)}; {'texts hold no tab' if tabs else 'a text with a comma is quoted'}"
                raise ValueError(f"{path}:{reader.line_num}: a row must have {len(header)} cells, got {given}")
            complete = reader.line_num
            if tabs and any(map(_QUOTED.fullmatch, row)):
                advice = "use quoting=csv.QUOTE_NONE, or pass pandas.read_csv(path, sep='\\t')"
                raise ValueError(f"{path}:{complete}: a .tsv must be written without quoting, got {row}; {advice}")
            yield complete, dict(zip(header, row, strict=True))
    except csv.Error as error:
        advice = "a quotation mark must be closed, and doubled within quotes; write very long texts as .jsonl"
        raise ValueError(f"{path}:{complete + 1}: a row of cells must begin here, got {error}; {advice}") from error


def json_object(line: str) -> Any:
    """Parse a line that must hold one JSON object."""
    if not line.lstrip().startswith("{"):
        advice = "read_pairs(json.load(file)) reads the rows of an array"
        raise ValueError(f"expected one JSON object a line, got {brief(line)}; {advice}")
    return json.loads(line)


def field(row: Mapping[str, Any], name: str, kind: Any = str, advice: str = "") -> Any:
    """Return a field of a row after checking its type; ``advice`` is given if there is no such field."""
    if name not in row:
        raise ValueError(f"no field {name!r}; there are {', '.join(map(repr, row))[:200] or 'none'}{advice}")
    if not isinstance(row[name], kind):
        raise ValueError(f"field {name!r} must be of type {getattr(kind, '__name__', kind)}, got {brief(row[name])}")
    return row[name]


def identifier(row: Mapping[str, Any], name: str) -> str:
    """Return a field that names its row: a text, or a whole number (numpy's, from a data frame) as text."""
    return str(field(row, name, str | numbers.Integral))
