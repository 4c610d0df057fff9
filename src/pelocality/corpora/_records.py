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
_LINES = re.compile(rb"[^\r\n]*(?:\r*\n|\r)|[^\r\n]+")  # \r alone ended a line on old Macs
_OPENERS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
# A zip archive raises a RuntimeError where it needs another method or a password.
_UNREADABLE = (EOFError, OSError, UnicodeDecodeError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, RuntimeError)
_COMPRESSED = (".gz", ".bz2", ".xz", ".zip")
TABLES = (".tsv", ".txt", ".csv")
Record = tuple[int | str, Any]  # line number (7.2 for the second tree on line 7) and content


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line of a UTF-8 file, with or without a byte order mark, also compressed."""
    number = 1
    with path.open("rb") as file:
        try:
            for lines in _decompressed(file):
                for line in _LINES.findall(lines) if b"\r" in lines.rstrip() else (lines,):
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                    if "\0" in text:  # UTF-8 allows it, but no text has it
                        raise UnicodeDecodeError("utf-8", line, line.index(b"\0"), len(line), "zero byte")
                    yield number, text
                    number += 1
        except _UNREADABLE as error:
            advice = "unpack it first, or convert it with iconv"
            raise ValueError(f"{path}:{number}: must be text in UTF-8: {error}; {advice}") from error


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


def suffix(path: str | Path) -> str:
    """Return the suffix of a file name in lower case, without that of a compressed file."""
    path = Path(str(path).lower())
    return (path.with_suffix("") if path.suffix in _COMPRESSED else path).suffix


def rows_of_file(path: Path) -> Iterator[Record]:
    """Yield the rows of a table, or the lines of a file of any other suffix, which are JSON objects."""
    return table_rows(path, tabs=suffix(path) != ".csv") if suffix(path) in TABLES else json_lines(path)


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
            complete = reader.line_num
            if len(row) != len(header) or row == header or (tabs and any(map(_QUOTED.fullmatch, row))):
                advice = "no cell is quoted; or pass pandas.read_csv(path, sep='\\t')" if tabs else "quote commas"
                got = f"{len(row)}: {brief(row)}; the header stands once, {advice}"
                raise ValueError(f"{path}:{complete}: a row must have {len(header)} cells, got {got}")
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


def field(row: Any, name: str, types: Any = str, advice: str = "") -> Any:
    """Return a field of a row after checking its type; ``advice`` is the end of the error."""
    if not isinstance(row, Mapping) or name not in row or not isinstance(row[name], types):
        fields = ", ".join(f"{each!r}: {brief(row[each])}" for each in row) if isinstance(row, Mapping) else brief(row)
        of_type = getattr(types, "__name__", types)
        raise ValueError(f"a row must have a field {name!r} of type {of_type}, got {fields[:400]}{advice}")
    return row[name]


def identifier(row: Mapping[str, Any], name: str) -> str:
    """Return a field that names its row: a text, or a whole number (numpy's, from a data frame) as text."""
    return str(field(row, name, str | numbers.Integral))
