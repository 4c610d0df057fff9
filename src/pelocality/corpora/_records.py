"""Raw records of files with their line numbers, and checks of the fields of a record."""

import bz2
import csv
import gzip
import io
import json
import lzma
import numbers
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from reprlib import repr as brief
from typing import Any

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_QUOTED = re.compile(r'"[^"]*(""[^"]*)+"')  # "she said ""go""": a program quoted this cell
_ANNOTATORS = re.compile(r"label\d")  # MultiNLI's tables leave out these last columns if they are empty
_BZ2 = re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P)")
# The standard library cannot read files that begin so.
_UNREADABLE = {b"\x28\xb5\x2f\xfd": "zstd", b"7z\xbc\xaf": "7z", b"Rar!": "rar"}
_ARRAY = "the rows of a JSON array are read by read_pairs(json.load(file)), the other readers need an object a line"
_DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)
COMPRESSED = (".gz", ".bz2", ".xz", ".zip")
Record = tuple[int | str, Any]  # line number (7.2 for the second tree on line 7) and content


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line of a UTF-8 file, with or without a byte order mark, also compressed."""
    number = 0
    with _opened(path) as lines:
        plain = isinstance(lines, io.BufferedReader)
        try:
            for number, line in enumerate(lines, 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if "\0" in text:  # UTF-8 allows it, but no text has it
                    raise UnicodeDecodeError("utf-8", line, line.index(b"\0"), len(line), "zero byte")
                yield number, text
        except UnicodeDecodeError as error:
            if plain and path.suffix.lower() in COMPRESSED:
                damaged = "the compressed file is damaged: it does not begin as such a file does"
                raise ValueError(f"{path}:{number}: {damaged}") from error
            wrong, before = line[error.start], line[: error.start].decode()[-20:]
            given = f"the byte 0x{wrong:02x} after {before!r}"
            advice = "unpack an archive, and convert other encodings with iconv"
            raise ValueError(f"{path}:{number}: must be UTF-8, got {given}; {advice}") from error
        except _DAMAGE as error:
            if plain:
                raise
            raise ValueError(f"{path}:{number + 1}: the compressed file is damaged: {error}") from error


def _opened(path: Path) -> Any:
    """Open a file, compressed or not, by its first bytes: the suffix may be missing."""
    with path.open("rb") as file:
        start = file.read(10)
    unreadable = next((name for magic, name in _UNREADABLE.items() if start.startswith(magic)), None)
    if unreadable:
        raise ValueError(f"{path}: must be text, or text in {', '.join(COMPRESSED)}, got {unreadable}; unpack it first")
    if start.startswith(b"\x1f\x8b"):
        return gzip.open(path)
    if _BZ2.match(start):
        return bz2.open(path)
    if start.startswith(b"\xfd7zXZ\0"):
        return lzma.open(path)
    return _only_file(path) if start.startswith(b"PK\x03\x04") else path.open("rb")


def _only_file(path: Path) -> Any:
    """Open the file in a zip archive."""
    try:
        archive = zipfile.ZipFile(path)
        names = [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX/")]
        if len(names) == 1:
            return archive.open(names[0])
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:  # the last: it needs a password
        raise ValueError(f"{path}: the compressed file cannot be read: {error}; unpack it first") from error
    raise ValueError(f"{path}: a .zip must hold one file, got {len(names)}: {brief(names)}; unpack it first")


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
        advice = f"; {_ARRAY}" if line.lstrip().startswith("[") else ""
        raise ValueError(f"expected one JSON object a line, got {brief(line)}: {error}{advice}") from error
    if not isinstance(found, dict):
        advice = f"; {_ARRAY}" if isinstance(found, list) else ""
        raise ValueError(f"expected one JSON object a line, got {type(found).__name__}{advice}")
    if _SURROGATE.search(line):
        json.dumps(found, ensure_ascii=False).encode()  # raises a ValueError for half of a surrogate pair
    return found


def field(row: Mapping[str, Any], name: str, kind: Any, wanted: str, advice: str = "") -> Any:
    """Return a field of a row. Errors name the type ``wanted``, and give ``advice`` if there is no such field."""
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
