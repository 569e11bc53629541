"""Reads rows of JSON and texts exactly as they are written, one at a time, each with its place.

These are our own readers, because a data library guesses. It changes the type of mixed columns, parses dates and loads
misspelt fields, and a wrong byte appears only when training reads its row. Here each mistake is a row with file and
line. Memory holds one row (JSON, CSV) or one batch with 1,000 rows (Parquet). tables.py reads tables.
"""

from __future__ import annotations

import json
import re
import shlex
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from finetune.data.cells import TOO_DEEP, BadRow, NotJson, explain_json, json_kind, not_a_number, parse_json
from finetune.output_stream import one_line
from finetune.paths import BYTE_ORDER_MARK, open_bytes
from finetune.untrusted.json_files import not_rows
from finetune.wording import counted

MAX_ROW_BYTES = 16 * 2**20  # a chat of 16 MiB would have 4 million tokens: surely a file without line ends
MOST_BYTES_OF_OBJECT = 64 * 2**20
MOST_BYTES_OF_ARRAY = 512 * 2**20  # it is held as text while its rows are read
MOST_REPETITIONS = 1_000_000  # most rows of a file that has fewer bytes than rows; they are read in seconds
TOO_LARGE = f"the row is larger than {MAX_ROW_BYTES // 2**20} MiB; write one row a line, and split long texts"
HEAD_BYTES = 64  # bytes that tell a file's kind


class SourceRow(NamedTuple):
    """A file's row, or the mistake in it."""

    file: str
    line: int  # from 1; the line where the row begins; for Parquet and Hub data sets the row's number
    values: dict[str, Any] | None
    problem: str | None

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def repetitions(rows: int, file: Path) -> str:
    """The problem if a small file has very many rows: only equal rows compress to less than a byte each."""
    size = counted(file.stat().st_size, "byte")
    return f"{counted(rows, 'row')} in {size} are the same few again and again; write each row once"


def read_json(file: Path) -> Iterator[SourceRow]:
    """JSON Lines, or one JSON array of objects, distinguished by the first character."""
    with open_bytes(file) as stream:
        head = stream.read(64)
        if (problem := not_rows(head)) is not None:
            yield SourceRow(str(file), 1, None, problem)
            return
        start = mark_bytes(head)
        # White space before the first row may be longer than the head.
        while head[start:] and not head[start:].strip():
            more = stream.read(4096)
            if not more:
                break
            head += more
        stream.seek(start)
        begins = head[start:].lstrip()
        if begins.startswith(b"["):
            yield from _read_array(file, stream, start)
            return
        # A CSV header begins with a letter, and has a delimiter in a line without braces.
        line = begins.split(b"\n")[0]
        is_word = begins[:1].isalpha() or begins[:1] > b"\x7f"
        is_word = is_word and line.strip() not in (b"true", b"false", b"null")
        if is_word and b"{" not in line and any(sign in line for sign in (b",", b";", b"\t", b"|")):
            yield SourceRow(str(file), 1, None, "this looks like CSV, not JSON; write path: csv")
            return
        number, offset = 0, start
        while raw := stream.readline(MAX_ROW_BYTES + 1):
            number += 1
            if len(raw) > MAX_ROW_BYTES:
                yield SourceRow(str(file), number, None, TOO_LARGE)
                while raw and not raw.endswith(b"\n"):  # on to the next line, in constant memory
                    offset += len(raw)
                    raw = stream.readline(MAX_ROW_BYTES)
            elif raw.strip():
                try:
                    values = parse_object(decode_text(raw.rstrip(b"\r\n"), offset))
                    # Every stream of `open_bytes` can peek.
                    is_last = number == 1 and not stream.peek(1)  # type: ignore[attr-defined]
                    if number == 1 and (problem := _whole_table(values, is_last)):
                        raise BadRow(problem)
                    yield SourceRow(str(file), number, values, None)
                except BadRow as error:
                    if number == 1 and isinstance(error, NotJson) and (problem := _one_object(file)):
                        yield SourceRow(str(file), 1, None, problem)
                        return
                    yield SourceRow(str(file), number, None, str(error))
            offset += len(raw)


def mark_bytes(head: bytes) -> int:
    """The size of the UTF-8 byte order mark at a file's start, or 0."""
    return len(BYTE_ORDER_MARK) * head.startswith(BYTE_ORDER_MARK)


def _one_object(file: Path) -> str | None:
    """The problem of a file that is one JSON object, in one line or several; None for any other file."""
    try:
        with open_bytes(file) as stream:
            value = json.loads(stream.read(MOST_BYTES_OF_OBJECT).decode("utf-8-sig"))
    except (OSError, EOFError, zlib.error, ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    if problem := _whole_table(value, is_alone=True):
        return problem
    for key, inner in value.items():
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            command = f"jq -c {shlex.quote(f'.[{json.dumps(key)}][]')} {shlex.quote(str(file))} > rows.jsonl"
            return (
                f"is one object whose {one_line(repr(key), 60)} holds {len(inner):,} rows; write one a line: {command}"
            )
    return 'is one JSON object, so one row at most; write one object a line: {"question": ..., ...}'


def _whole_table(values: dict[str, Any], is_alone: bool) -> str | None:
    """The problem if a file's first object holds a whole table, as data frames write it; `is_alone`: it is the last."""
    columns = list(values.values())
    if {*values} >= {"columns", "data"} and isinstance(values["data"], list) and isinstance(values["columns"], list):
        shape = "the columns' names and the rows apart"
    elif columns and all(isinstance(column, dict) and column and all(map(str.isdigit, column)) for column in columns):
        shape = "columns, each with its rows by number"
    elif (
        len(columns) > 1
        and all(
            isinstance(column, list) and len(column) > 1 and isinstance(column[0], str | int | float)
            for column in columns
        )
        and len({len(column) for column in columns}) == 1
        and is_alone
    ):
        shape = "columns, each a list of its rows"
    else:
        return None
    remedy = 'df.to_json("rows.jsonl", orient="records", lines=True)'
    return f"is one object with {shape}; write rows, with pandas: {remedy}"


def _read_array(file: Path, stream: IO[bytes], offset: int) -> Iterator[SourceRow]:
    """Yield a JSON array's elements, one at a time. A mistake in the array's own syntax ends the file."""
    raw = stream.read(MOST_BYTES_OF_ARRAY + 1)
    if len(raw) > MOST_BYTES_OF_ARRAY:
        problem = f"the array is larger than {MOST_BYTES_OF_ARRAY // 2**20} MiB; write one object a line: jq -c '.[]'"
        yield SourceRow(str(file), 1, None, problem)
        return
    decoder, position, line, counted_to = json.JSONDecoder(), 0, 1, 0
    try:
        text = decode_text(raw, offset)
        del raw
        position = _after("[", text, 0)
        is_empty = text.startswith("]", position)
        while not is_empty:
            start = position
            line, counted_to = line + text.count("\n", counted_to, start), start
            _, end = decoder.raw_decode(text, start)
            if end - start > MAX_ROW_BYTES:
                raise BadRow(TOO_LARGE)
            try:
                yield SourceRow(str(file), line, parse_object(text[start:end]), None)
            except BadRow as error:
                yield SourceRow(str(file), line, None, str(error))
            position = _SPACES.match(text, end).end()  # type: ignore[union-attr]  # it always matches
            if text.startswith("]", position):
                break
            position = _after(",", text, position)
        rest = _SPACES.match(text, position + 1).end()  # type: ignore[union-attr]
        if rest < len(text):
            raise json.JSONDecodeError("Extra data", text, rest)
        return
    except RecursionError:
        problem = TOO_DEEP
    except json.JSONDecodeError as error:
        line, problem = error.lineno, explain_json(error)
    except BadRow as error:
        problem = str(error)
    except ValueError as error:
        problem = not_a_number(error)
    yield SourceRow(str(file), line, None, problem)


_SPACES = re.compile(r"[ \t\n\r]*")


def _after(sign: str, text: str, position: int) -> int:
    """The place after this sign and the white space around it. Raises JSONDecodeError for another sign."""
    position = _SPACES.match(text, position).end()  # type: ignore[union-attr]
    if not text.startswith(sign, position):
        raise json.JSONDecodeError(f"Expecting '{sign}' delimiter", text, position)
    return _SPACES.match(text, position + 1).end()  # type: ignore[union-attr]


def decode_text(raw: bytes, offset: int, encoding: str | None = None) -> str:
    """A line's or a file's text, in UTF-8 for JSON (None). Raises BadRow with the byte's place in the file."""
    try:
        if encoding == "utf-8" and b"\x1b$" in raw and raw.isascii():
            raise BadRow("is ISO-2022-JP, not UTF-8; save the file as UTF-8, or write encoding: iso2022_jp")
        return raw.decode(encoding or "utf-8")
    except UnicodeDecodeError as error:
        place = f"byte {offset + error.start} of the file (0x{raw[error.start]:02x})"
        if encoding is None:
            raise BadRow(
                f"{place} is not UTF-8; save the file as UTF-8, or convert it: iconv -f LATIN1 -t UTF-8"
            ) from None
        if encoding != "utf-8":
            raise BadRow(f"{place} is not {encoding}; name the file's own: encoding: cp1252") from None
        before = re.split(rb"[\s,;|]", raw[: error.start][-40:])[-1]
        word = before + re.split(rb"[\s,;|]", raw[error.start :][:40])[0]
        raise BadRow(
            f"{place} is not UTF-8; save the file as UTF-8, or name its encoding; cp1252 would read this word as "
            f"{one_line(repr(word.decode('cp1252', 'replace')), 60)}: encoding: cp1252 (init: --encoding)"
        ) from None


def parse_object(text: str) -> dict[str, Any]:
    """One JSON object, strictly. Raises BadRow."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise BadRow(f'a row must be a JSON object, this is {json_kind(value)}; write {{"messages": [...]}}')
    return value


def read_text(file: Path, encoding: str | None) -> Iterator[SourceRow]:
    """A text file as one row with the column `text`."""
    from finetune.data.dialect import WIDE_MARKS, found_encoding

    with open_bytes(file) as stream:
        raw = stream.read(MAX_ROW_BYTES + 1)
    problem = None
    if not raw.startswith(tuple(WIDE_MARKS)):
        problem = not_rows(raw[:HEAD_BYTES])
    if problem is None and len(raw) > MAX_ROW_BYTES:
        problem = f"the text is larger than {MAX_ROW_BYTES // 2**20} MiB; split it into files"
    if problem is not None:
        yield SourceRow(str(file), 1, None, problem)
        return
    chosen = encoding or found_encoding(file)
    offset = mark_bytes(raw)
    try:
        text = decode_text(raw[offset:], offset, chosen)
    except BadRow as error:
        yield SourceRow(str(file), 1, None, str(error))
        return
    if text.strip():
        yield SourceRow(str(file), 1, {"text": text}, None)
