"""Reads local files' rows exactly as they are written, one at a time, each with its place.

These are our own readers, because a data library guesses. It changes the type of mixed columns, parses dates and loads
misspelt fields, and a wrong byte appears only when training reads its row. Here each mistake is a row with file and
line. Memory holds one row (JSON, CSV) or one batch with 1,000 rows (Parquet).
"""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import zlib
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from finetune.data.cells import (
    MAX_ROW_DEPTH,
    TOO_DEEP,
    BadRow,
    NotJson,
    explain_json,
    is_blank,
    json_kind,
    not_a_number,
    parse_json,
)
from finetune.errors import BadFile, UnclearFile
from finetune.output_stream import has_controls, one_line
from finetune.paths import BYTE_ORDER_MARK, open_bytes, open_regular
from finetune.untrusted.json_files import not_rows
from finetune.wording import counted, install_command

if TYPE_CHECKING:
    from finetune.data.dialect import Dialect, Record

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


def read_rows(
    file: Path,
    kind: str,
    delimiter: str | None = None,
    encoding: str | None = None,
    sheet: str | None = None,
    notes: Counter[str] | None = None,
) -> Iterator[SourceRow]:
    """Yield a file's rows; `kind` is json, csv, parquet, arrow, excel or text. An unreadable file is one bad row.

    Raises UnclearFile if two sheets are plausible.

    Args:
        delimiter: For CSV. None: found from the first lines.
        encoding: For CSV and text. None: UTF-8, or what a byte order mark says.
        sheet: For Excel. None: the first sheet with a table.
        notes: Gets notes for the file's owner, each with its count: cells read as empty, titles skipped, sheets not
            read. 0: a note without a count.
    """
    count = 0
    notes = Counter() if notes is None else notes
    try:
        match kind:
            case "csv":
                rows = _read_csv(file, delimiter, encoding, notes)
            case "text":
                rows = _read_text(file, encoding)
            case "excel":
                rows = _read_excel(file, sheet, notes)
            case "parquet" | "arrow":
                rows = _read_columns(file, kind)
            case _:
                rows = _read_json(file)
        for row in rows:
            count += 1
            if count == MOST_REPETITIONS and file.stat().st_size < count:
                yield SourceRow(str(file), count, None, _repetitions(count, file))
                return
            yield row
    except OSError as error:
        yield SourceRow(str(file), count + 1, None, f"cannot be read: {error.strerror or error}; check the file")
        return
    except UnclearFile:  # `finetune init` asks
        raise
    except BadFile as error:
        yield SourceRow(str(file), 1, None, error.problem)
        return
    except (EOFError, zlib.error) as error:
        problem = f"the compressed file is damaged or cut off ({one_line(error, 80)}); fetch it again"
        yield SourceRow(str(file), count + 1, None, problem)
        return
    if not count:
        yield SourceRow(str(file), 1, None, "no rows: the file is empty; give it at least one row")


def _repetitions(rows: int, file: Path) -> str:
    """The problem if a small file has very many rows: only equal rows compress to less than a byte each."""
    size = counted(file.stat().st_size, "byte")
    return f"{counted(rows, 'row')} in {size} are the same few again and again; write each row once"


def _read_json(file: Path) -> Iterator[SourceRow]:
    """JSON Lines, or one JSON array of objects, distinguished by the first character."""
    with open_bytes(file) as stream:
        head = stream.read(64)
        if (problem := not_rows(head)) is not None:
            yield SourceRow(str(file), 1, None, problem)
            return
        start = _mark_bytes(head)
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
                    values = parse_object(_decode(raw.rstrip(b"\r\n"), offset))
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


def _mark_bytes(head: bytes) -> int:
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
        text = _decode(raw, offset)
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


def _decode(raw: bytes, offset: int, encoding: str | None = None) -> str:
    """A line's or a file's text, in UTF-8 for JSON (None). Raises BadRow with the byte's place in the file."""
    try:
        if encoding == "utf-8" and b"\x1b$" in raw:
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


# Cells that hold nothing: a spreadsheet's errors, and what programs write for a missing value.
MISSING_VALUES = frozenset(
    r"#N/A #REF! #DIV/0! #VALUE! #NAME? #NULL! #NUM! #SPILL! #CALC! #NA <NA> \N nan NaN -nan &nbsp;".split()
)
# Words that stand for a missing value in some tables, and are an answer in others.
PERHAPS_MISSING = frozenset("NULL null None none N/A n/a NA nil NIL #N/A!".split())


def _table_rows(
    file: Path, records: Iterator[Record], notes: Counter[str], separator: str, is_sheet: bool = False
) -> Iterator[SourceRow]:
    """Yield a table's rows by the names in its header. A title and notes above the header are skipped, and noted."""
    from finetune.data.dialect import RECORDS, header_at, without_blank_end

    head = list(islice(records, RECORDS))
    sound = [cells for _, cells, problem in head if problem is None]
    if is_sheet:  # its rows come without the blank cells at their ends
        width = max(map(len, sound), default=0)
        sound = [cells + [""] * (width - len(cells)) for cells in sound]
    start = header_at(sound) or 0
    names: list[str] | None = None
    place = -1
    for line, cells, problem in chain(head, records):
        if problem is not None:
            yield SourceRow(str(file), line, None, problem)
            continue
        place += 1
        if place < start:
            words = " ".join(filter(None, map(str.strip, cells)))
            notes[f"line {line} is above the header and left out: {one_line(words, 60)!r}"] = 0
        elif names is None:
            if problem := _header_problem(cells, sound[start + 1 :]):
                yield SourceRow(str(file), line, None, problem)
                return
            names = list(without_blank_end(cells))
            if not names[0].strip():
                names[0] = "Unnamed: 0"
        else:
            try:
                yield SourceRow(str(file), line, _named_cells(names, cells, notes, separator, is_sheet), None)
            except BadRow as error:
                yield SourceRow(str(file), line, None, str(error))


def _header_problem(names: list[str], rows: list[list[str]]) -> str | None:
    duplicates = sorted(name for name, count in Counter(names).items() if count > 1 and name.strip())
    if duplicates:
        return f"the column {one_line(repr(duplicates[0]), 60)} appears twice in the header; rename one"
    if (odd := next((name for name in names if has_controls(name)), None)) is not None:
        return f"the column {one_line(repr(odd), 60)} has a control character in its name; rename it"
    for column, name in enumerate(names):
        values = [row[column] for row in rows if len(row) > column and row[column].strip()]
        # A first column of row numbers comes from a data frame's index.
        if not name.strip() and values and (column or not all(map(str.isdigit, values))):
            return (
                f"column {column + 1} of the header has no name, and its first value is "
                f"{one_line(repr(values[0]), 40)}; name it in the first line, or remove a title above the names"
            )
    return None


def _named_cells(
    names: list[str], cells: list[str], notes: Counter[str], separator: str, is_sheet: bool
) -> dict[str, str]:
    """A record's cells by their columns. Raises BadRow."""
    width = len(names)
    if is_sheet:
        cells = cells + [""] * (width - len(cells))
    if len(cells) < width or any(cell.strip() for cell in cells[width:]):
        widths = f"{counted(len(cells), 'value')} for {counted(width, 'column')}"
        delimiters = {",": "commas", ";": "semicolons", "\t": "tabs"}.get(separator, separator)
        if is_sheet:
            raise BadRow(f"{widths}; name every column in the first row")
        if separator == "\t":
            raise BadRow(f"{widths}; write tabs and line breaks inside texts as spaces")
        raise BadRow(f"{widths}; put quotes around texts with {delimiters}, or name every column in the first line")
    cells = cells[:width]
    if cells[0].startswith("\ufeff") or (width > 1 and cells == names):
        raise BadRow("the header again: two files were joined here; remove this line")
    values: dict[str, str] = {}
    for name, cell in zip(names, cells, strict=True):
        if not name.strip():
            if cell.strip():
                raise BadRow(f"{one_line(repr(cell), 40)} is in a column without a name; name it in the header")
            continue
        if "\0" in cell:
            raise BadRow(f"the column {one_line(repr(name), 60)} holds a NUL character; remove it: tr -d '\\000'")
        if separator == "\t" and "\t" in cell and "\n" in cell:
            raise BadRow(
                f"one cell of {one_line(repr(name), 60)} holds tabs and line ends: a quote opens it, and a later line "
                "closes it; remove the quote, or write it twice"
            )
        if len(cell) < 12:
            word = cell.strip()
            is_invisible = not cell.isascii() and is_blank(cell)
            if word in MISSING_VALUES or is_invisible:
                shown = "invisible characters" if is_invisible else repr(word)
                notes[f"cells that hold only {shown}, read as empty"] += 1
                cell = ""
            elif word in PERHAPS_MISSING:
                notes[f"cells that say only {word!r}, read as that text; empty them if nothing is meant"] += 1
        values[name] = cell
    return values


def _read_csv(file: Path, delimiter: str | None, encoding: str | None, notes: Counter[str]) -> Iterator[SourceRow]:
    """Yield a CSV file's rows by the names in its header; every value is text."""
    from finetune.data.dialect import HEAD_OF_TABLE, WIDE_MARKS, csv_dialect, is_binary

    with open_bytes(file) as stream:
        head = stream.read(HEAD_OF_TABLE)
        stream.seek(0)
        problem = not_rows(head)
        if head.startswith(tuple(WIDE_MARKS)):
            problem = None
        elif problem is None and encoding is None and is_binary(head):
            problem = "is a binary file; name the data themselves, as JSON Lines, CSV or Parquet"
        elif problem is None and head.removeprefix(BYTE_ORDER_MARK).lstrip().startswith((b'{"', b"[{")):
            problem = "this looks like JSON, not CSV; write path: json"
        if problem is not None:
            yield SourceRow(str(file), 1, None, problem)
            return
        dialect = csv_dialect(file, delimiter, encoding)
        csv.field_size_limit(MAX_ROW_BYTES)  # Python's default refuses cells above 128 kB
        yield from _table_rows(file, _csv_records(stream, dialect, notes), notes, dialect.delimiter)


def _csv_records(stream: IO[bytes], dialect: Dialect, notes: Counter[str]) -> Iterator[Record]:
    """Yield the records that are not empty. A mistake in the quoting or the bytes is the last one."""
    from finetune.data.dialect import SEPARATOR_LINE, without_blank_end

    lines = _csv_lines(stream, dialect)
    try:
        first = next(lines, "")
    except BadRow as error:
        yield 1, [], str(error)
        return
    skipped = bool(SEPARATOR_LINE.fullmatch(first))
    if skipped:
        notes[f"line 1 names the delimiter and is left out: {first.strip()!r}"] = 0
    else:
        lines = chain([first], lines)
    last: list[str] = [""]  # the line that was read last, for messages

    def watched() -> Iterator[str]:
        for text in lines:
            last[0] = text
            yield text

    reader = dialect.records(watched())
    while True:
        line = reader.line_num + skipped + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except BadRow as error:
            yield line, [], str(error)
            return
        except csv.Error as error:  # quoting is lost: the columns that follow are not known
            if '\\"' in last[0]:
                problem = 'a quote is escaped by a backslash, and CSV writes it twice: sed \'s/\\\\"/""/g\''
            elif "new-line character" in str(error):
                problem = (
                    "a carriage return stands inside a row; put quotes around that text, or remove it: tr -d '\\r'"
                )
            elif "unexpected end of data" in str(error):
                problem = "a quote that opens here is never closed; close it, or write a quote inside a text twice"
            elif "expected after" in str(error):
                problem = "a quote ends inside a text; write quotes inside a quoted text twice"
            elif dialect.delimiter == "\t":
                problem = f"{error}; write tabs and quotes inside texts as other characters"
            else:
                problem = f"{error}; put quotes around texts with {dialect.separator} or line breaks"
            yield line, [], problem
            return
        if without_blank_end(cells):
            yield line, cells, None
        elif len(cells) > 1:
            notes["lines of delimiters alone, left out"] += 1


def _csv_lines(stream: IO[bytes], dialect: Dialect) -> Iterator[str]:
    """The file's lines as text. Raises BadRow for a byte that the encoding does not have."""
    from finetune.data.dialect import HEAD_OF_TABLE, WIDE

    offset = _mark_bytes(stream.read(HEAD_BYTES))
    stream.seek(0)
    head = stream.read(HEAD_OF_TABLE)
    stream.seek(offset)
    # A line's end has two or four bytes in the wide encodings; old Macs ended lines by carriage returns alone.
    if dialect.encoding.startswith(WIDE) or (b"\r" in head and b"\n" not in head):
        texts = io.TextIOWrapper(stream, encoding=dialect.encoding, newline="")
        try:
            while text := texts.readline(MAX_ROW_BYTES + 1):
                if len(text) > MAX_ROW_BYTES:
                    raise BadRow(TOO_LARGE)
                yield text
        except UnicodeDecodeError as error:
            raise BadRow(f"is not {dialect.encoding} at byte {error.start}; save the file as UTF-8") from None
        finally:
            texts.detach()  # the caller closes the stream
        return
    while raw := stream.readline(MAX_ROW_BYTES + 1):
        if len(raw) > MAX_ROW_BYTES:
            raise BadRow(TOO_LARGE)
        yield _decode(raw, offset, dialect.encoding)
        offset += len(raw)


def _read_excel(file: Path, sheet: str | None, notes: Counter[str]) -> Iterator[SourceRow]:
    """Yield the rows of one sheet of a workbook. Every value is text."""
    try:
        import openpyxl  # noqa: F401
    except ImportError:
        missing = f"needs openpyxl: in the checkout {install_command('excel')}; or save the sheet as CSV"
        yield SourceRow(str(file), 1, None, missing)
        return
    from finetune.data.workbook import MOST_COMPRESSED, sheet_records

    if file.stat().st_size > MOST_COMPRESSED:
        yield SourceRow(str(file), 1, None, f"is larger than {MOST_COMPRESSED // 2**20} MiB; save the sheet as CSV")
        return
    number = 0
    try:
        with open_regular(file) as stream:
            for row in _table_rows(file, sheet_records(file, stream, sheet, notes), notes, "", is_sheet=True):
                number = row.line
                yield row
    except BadFile:
        raise
    except Exception as error:  # of the archive or its XML: BadZipFile, KeyError, InvalidFileException and others
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = one_line((str(error).splitlines() or [""])[0], 200) or type(error).__name__
        yield SourceRow(str(file), number + 1, None, f"not readable as Excel: {reason}; save the sheet as CSV")


def _read_text(file: Path, encoding: str | None) -> Iterator[SourceRow]:
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
    offset = _mark_bytes(raw)
    try:
        text = _decode(raw[offset:], offset, chosen)
    except BadRow as error:
        yield SourceRow(str(file), 1, None, str(error))
        return
    if text.strip():
        yield SourceRow(str(file), 1, {"text": text}, None)


def _read_columns(file: Path, kind: str) -> Iterator[SourceRow]:
    """Yield a Parquet file's rows, or those of an Arrow file as `datasets` saves it, one batch in memory.

    Raises OSError if the file cannot be read.
    """
    import pyarrow.ipc  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    number = 0
    try:
        with open_regular(file) as stored:
            if kind == "arrow":
                table = pyarrow.ipc.open_stream(stored)
                problem, batches = _schema_problem(table.schema), table
            else:
                table = pyarrow.parquet.ParquetFile(stored)
                problem, batches = _schema_problem(table.schema_arrow), table.iter_batches(batch_size=1000)
                rows = table.metadata.num_rows
                if problem is None and rows >= MOST_REPETITIONS and rows > file.stat().st_size:
                    problem = _repetitions(rows, file)
            if problem:
                yield SourceRow(str(file), 1, None, problem)
                return
            for batch in batches:
                for values in batch.to_pylist():
                    number += 1
                    yield SourceRow(str(file), number, without_filled_nulls(values), None)
    except Exception as error:  # about the table, or a value that Python cannot hold: text that is not UTF-8, a date
        if isinstance(error, OSError) and error.errno is not None:  # the file itself; pyarrow's errors have no number
            raise
        reason = one_line((str(error).splitlines() or [""])[0]) or type(error).__name__
        problem = f"not readable as {kind.capitalize()}: {reason}; write the file again"
        yield SourceRow(str(file), number + 1, None, problem)


def _schema_problem(schema: Any) -> str | None:
    """Refuse two columns with one name, because a row can hold only one, and values that are nested too deep."""
    duplicates = [name for name, count in Counter(schema.names).items() if count > 1]
    if duplicates:
        return f"the column {one_line(repr(duplicates[0]), 60)} appears twice; rename one"
    level, depth = [field.type for field in schema], 1
    while level := [kind.field(index).type for kind in level for index in range(kind.num_fields)]:
        depth += 1
        if depth > MAX_ROW_DEPTH:
            return TOO_DEEP
    return None


def without_filled_nulls(values: dict[str, Any]) -> dict[str, Any]:
    """Remove the nulls inside a table row's columns.

    In a table all objects in one column share their keys, and missing ones are null. Without this, a call to one tool
    would show the model every other tool's arguments. Intended nulls are lost too; JSON Lines keeps them.
    """

    def without_nulls(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_nulls(item) for key, item in value.items() if item is not None}
        if isinstance(value, list):
            return [without_nulls(item) for item in value]
        return value

    return {key: without_nulls(value) for key, value in values.items()}
