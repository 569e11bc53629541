"""Rows of local files exactly as the files say, one at a time, each with its place.

Our own readers, because a data library guesses: mixed columns change type, dates are parsed, misspelt fields load,
and a wrong byte surfaces when its row is read in the middle of training. Here a mistake is its own row, with file
and line, and memory holds one row (JSON, CSV) or one batch of 1,000 (Parquet).
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from finetune.data.json_array import JsonArray
from finetune.data.parquet_rows import parquet_rows, repetitions
from finetune.output_stream import one_line, without_controls
from finetune.paths import open_regular
from finetune.untrusted.json_files import depth_of
from finetune.untrusted.kinds import not_rows
from finetune.wording import counted

LONGEST_MISTAKE = 800  # characters
MAX_ROW_BYTES = 16 * 2**20  # a chat of 16 MiB is some 4 million tokens: surely a file without line ends
MAX_ROW_DEPTH = 64
MOST_REPETITIONS = 1_000_000  # most rows in a file with fewer bytes than rows; read in seconds
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SourceRow(NamedTuple):
    """A row of a file, or the mistake in it."""

    file: str
    line: int  # from 1; the line where the row begins, for Parquet and Hub data sets the row's number
    values: dict[str, Any] | None
    problem: str | None

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


class BadRow(ValueError):
    """What is wrong with a row; remedy, short and printable whatever it quotes. The reader adds the place."""

    def __init__(self, mistake: str) -> None:
        short = mistake if len(mistake) <= LONGEST_MISTAKE else mistake[:LONGEST_MISTAKE] + "..."
        super().__init__(without_controls(short))


def read_rows(file: Path, kind: str) -> Iterator[SourceRow]:
    """Every row of a file; `kind` is json, csv or parquet. A file that cannot be read at all is one bad row."""
    readers = {"json": _read_json, "csv": _read_csv, "parquet": _read_parquet}
    count = 0
    try:
        for row in readers[kind](file):
            count += 1
            if count == MOST_REPETITIONS and file.stat().st_size < count:
                yield SourceRow(str(file), count, None, repetitions(count, file))
                return
            yield row
    except OSError as error:
        yield SourceRow(str(file), count + 1, None, f"cannot be read: {error.strerror or error}; check the file")
        return
    except (EOFError, zlib.error) as error:
        problem = f"the compressed file is damaged or cut off ({one_line(error, 80)}); fetch it again"
        yield SourceRow(str(file), count + 1, None, problem)
        return
    if not count:
        yield SourceRow(str(file), 1, None, "no rows: the file is empty; give it at least one row")


@contextmanager
def _open_bytes(file: Path) -> Iterator[IO[bytes]]:
    with open_regular(file) as stored, gzip.open(stored, "rb") if file.suffix == ".gz" else stored as stream:
        yield stream  # type: ignore[misc]  # gzip's stream reads bytes like any other


def _read_json(file: Path) -> Iterator[SourceRow]:
    """JSON Lines, or one JSON array of objects, distinguished by the first character."""
    with _open_bytes(file) as stream:
        head = stream.read(64)
        if (problem := not_rows(head)) is not None:
            yield SourceRow(str(file), 1, None, problem)
            return
        start = len(BYTE_ORDER_MARK) if head.startswith(BYTE_ORDER_MARK) else 0
        while head[start:] and not head[start:].strip():
            head += (more := stream.read(4096))
            if not more:
                break
        is_array = head[start:].lstrip()[:1] == b"["
        stream.seek(start)
        yield from (_read_array if is_array else _read_lines)(file, stream, start)


def _read_lines(file: Path, stream: IO[bytes], offset: int) -> Iterator[SourceRow]:
    number = 0
    while raw := stream.readline(MAX_ROW_BYTES + 1):
        number += 1
        if len(raw) > MAX_ROW_BYTES:
            yield SourceRow(str(file), number, None, _too_large())
            while raw and not raw.endswith(b"\n"):  # on to the next line, in constant memory
                offset += len(raw)
                raw = stream.readline(MAX_ROW_BYTES)
        elif raw.strip():
            try:
                yield SourceRow(str(file), number, parse_object(_decode(raw.rstrip(b"\r\n"), offset)), None)
            except BadRow as error:
                yield SourceRow(str(file), number, None, str(error))
        offset += len(raw)


def _too_large() -> str:
    return f"the row is larger than {MAX_ROW_BYTES // 2**20} MiB; write one row a line, and split long texts"


def _decode(raw: bytes, offset: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow(_not_utf8(offset + error.start, error)) from None


def _not_utf8(position: int, error: UnicodeDecodeError) -> str:
    return (
        f"byte {position} of the file (0x{error.object[error.start]:02x}) is not UTF-8; "
        "save the file as UTF-8, or convert it: iconv -f LATIN1 -t UTF-8"
    )


def parse_object(text: str) -> dict[str, Any]:
    """One JSON object, strictly. Raises BadRow."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise BadRow(f'a row must be a JSON object, this is {json_kind(value)}; write {{"messages": [...]}}')
    return value


def parse_json(text: str) -> Any:
    """A JSON value, strictly: no duplicate keys, no NaN, no nesting beyond MAX_DEPTH. Raises BadRow."""
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise BadRow(_explain_json(error)) from None
    except RecursionError:
        raise BadRow(_too_deep()) from None
    except BadRow:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise BadRow(_not_a_number(error)) from None
    if text.count("{") + text.count("[") > MAX_ROW_DEPTH and depth_of(value) > MAX_ROW_DEPTH:
        raise BadRow(_too_deep())
    return value


def _not_a_number(error: ValueError) -> str:
    return f"not readable as JSON: {str(error).split(';')[0]}; correct the number"


def _too_deep() -> str:
    return f"nested deeper than {MAX_ROW_DEPTH} levels; a row needs at most ten"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise BadRow(f"the key {one_line(repr(twice), 60)} appears twice in one object; keep one")
    return values


def _no_constant(name: str) -> NoReturn:
    raise BadRow(f"{name} is not JSON; write null, or remove the key")


def _explain_json(error: json.JSONDecodeError) -> str:
    hints = [
        ("property name enclosed in double quotes", "JSON wants double quotes around keys, and no comma before }"),
        ("Extra data", "write one JSON object a line, nothing after it"),
        ("Unterminated string", "close the string; a line break inside it is written \\n"),
        ("Invalid control character", "write control characters escaped: \\n, \\t, \\u0000"),
        ("Invalid \\escape", "write a backslash as \\\\"),
        ("Expecting value", "a value is missing or is not JSON (None, True, single quotes?)"),
        ("delimiter", "a comma or colon is missing, or a quote inside a string is not escaped"),
    ]
    remedy = next((hint for part, hint in hints if part in error.msg), "correct the line")
    return f"not JSON: {error.msg} at column {error.colno}; {remedy}"


def json_kind(value: Any) -> str:
    """A value's JSON type, with the value where it is short."""
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    kind = kinds.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")
    text = json.dumps(value, ensure_ascii=False, default=str) if not isinstance(value, dict | list) else ""
    return f"{kind} ({text})" if text and len(text) <= 24 and value is not None else kind


def _read_array(file: Path, stream: IO[bytes], offset: int) -> Iterator[SourceRow]:
    """Elements of one JSON array, one at a time. A mistake in the array's own syntax ends the file."""
    array = JsonArray(stream, MAX_ROW_BYTES)
    try:
        for text in array.elements():
            try:
                yield SourceRow(str(file), array.line, parse_object(text), None)
            except BadRow as error:
                yield SourceRow(str(file), array.line, None, str(error))
    except UnicodeDecodeError as error:
        yield SourceRow(str(file), array.line, None, _not_utf8(offset + array.decoded_bytes + error.start, error))
    except RecursionError:
        yield SourceRow(str(file), array.line, None, _too_deep())
    except json.JSONDecodeError as error:
        yield SourceRow(str(file), array.line, None, _explain_json(error))
    except ValueError as error:
        yield SourceRow(str(file), array.line, None, _not_a_number(error))
    except OverflowError:
        yield SourceRow(str(file), array.line, None, _too_large())


def _read_csv(file: Path) -> Iterator[SourceRow]:
    """Rows of a CSV file with a header line; every value is text."""
    with _open_bytes(file) as stream:
        head = stream.read(64)
        if (problem := not_rows(head)) is not None:
            yield SourceRow(str(file), 1, None, problem)
            return
        offset = len(BYTE_ORDER_MARK) if head.startswith(BYTE_ORDER_MARK) else 0
        stream.seek(offset)
        csv.field_size_limit(MAX_ROW_BYTES)
        reader = csv.reader(_csv_lines(stream, offset), strict=True)
        names: list[str] | None = None
        while True:
            line = reader.line_num + 1
            try:
                values = next(reader)
            except StopIteration:
                return
            except (csv.Error, BadRow) as error:
                remedy = "" if isinstance(error, BadRow) else "; put quotes around texts with commas or line breaks"
                yield SourceRow(str(file), line, None, f"{error}{remedy}")
                return  # quoting is lost: the columns that follow are not known
            if not values:
                continue
            problem = _check_header(values) if names is None else _check_width(values, names)
            if problem:
                yield SourceRow(str(file), line, None, problem)
            if names is None:
                if problem:
                    return
                names = values
            elif not problem:
                yield SourceRow(str(file), line, dict(zip(names, values, strict=True)), None)


def _csv_lines(stream: IO[bytes], offset: int) -> Iterator[str]:
    while raw := stream.readline(MAX_ROW_BYTES + 1):
        if len(raw) > MAX_ROW_BYTES:
            raise BadRow(_too_large())
        yield _decode(raw, offset)
        offset += len(raw)


def _check_header(names: list[str]) -> str | None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        return f"the column {one_line(repr(twice[0]), 60)} appears twice in the header; rename one"
    if len(names) == 1 and (separator := next((mark for mark in ";\t|" if mark in names[0]), None)):
        return f"the columns are separated by {separator!r}; save the file with commas"
    if not all(name.strip() for name in names):
        return "a column of the header has no name; the first line of a CSV file names the columns"
    return None


def _check_width(values: list[str], names: list[str]) -> str | None:
    if len(values) == len(names):
        return None
    return f"{counted(len(values), 'value')} for {counted(len(names), 'column')}; put quotes around texts with commas"


def without_filled_nulls(values: dict[str, Any]) -> dict[str, Any]:
    """The row of a table without the nulls inside of its columns.

    Tables give every object of a column the keys of all of them and fill up with null: a call of one tool would show
    the model the arguments of every other. Nulls that were meant are lost too; JSON Lines keeps them.
    """
    return {key: _strip_nulls(value) for key, value in values.items()}


def _strip_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strip_nulls(item) for key, item in value.items() if item is not None}
    return [_strip_nulls(item) for item in value] if isinstance(value, list) else value


def _read_parquet(file: Path) -> Iterator[SourceRow]:
    for number, values, problem in parquet_rows(file, MAX_ROW_DEPTH, MOST_REPETITIONS):
        yield SourceRow(str(file), number, None if values is None else without_filled_nulls(values), problem)
