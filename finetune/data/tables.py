"""Rows of tables: CSV, Excel's sheets, Parquet and Arrow."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from finetune.data.cells import MAX_ROW_DEPTH, TOO_DEEP, BadRow, is_blank, without_filled_nulls
from finetune.data.dialect import (
    HEAD_OF_TABLE,
    RECORDS,
    SEPARATOR_LINE,
    WIDE,
    WIDE_MARKS,
    Dialect,
    Record,
    csv_dialect,
    header_at,
    is_binary,
    without_blank_end,
)
from finetune.data.readers import (
    HEAD_BYTES,
    MAX_ROW_BYTES,
    MOST_REPETITIONS,
    TOO_LARGE,
    SourceRow,
    decode_text,
    mark_bytes,
    repetitions,
)
from finetune.errors import BadFile
from finetune.output_stream import has_controls, one_line
from finetune.paths import BYTE_ORDER_MARK, open_bytes, open_regular
from finetune.untrusted.json_files import not_rows
from finetune.wording import counted, install_command

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


def read_csv(file: Path, delimiter: str | None, encoding: str | None, notes: Counter[str]) -> Iterator[SourceRow]:
    """Yield a CSV file's rows by the names in its header; every value is text."""
    with open_bytes(file) as stream:
        head = stream.read(HEAD_OF_TABLE)
        stream.seek(0)
        problem = not_rows(head)
        if head.startswith(tuple(WIDE_MARKS)):
            problem = None
        elif problem is None and encoding is None and is_binary(head):
            problem = "is a binary file; name the data themselves, as JSON Lines, CSV or Parquet"
            if head.count(b"\0") * 3 > len(head):
                problem += ", or name the encoding of a text: encoding: utf-16-le"
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
    offset = mark_bytes(stream.read(HEAD_BYTES))
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
        yield decode_text(raw, offset, dialect.encoding)
        offset += len(raw)


def read_excel(file: Path, sheet: str | None, notes: Counter[str]) -> Iterator[SourceRow]:
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


def read_arrow(file: Path, kind: str) -> Iterator[SourceRow]:
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
                    problem = repetitions(rows, file)
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
