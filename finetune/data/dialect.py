"""Finds a table's delimiter, and the wide encodings by their byte order mark.

A file is UTF-8 unless a mark says UTF-16 or UTF-32. The recipe names any other encoding: `encoding: cp1252`.

The delimiter must divide most of the first lines into as many cells as the header. The largest share wins, then the
most cells:

    name;preis;text            ';' divides both lines into three cells, ',' into one and two
    Säge;12,50;"klein, leicht"
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from finetune.errors import BadFile, DataError
from finetune.paths import BYTE_ORDER_MARK, open_bytes

# UTF-32's mark begins with UTF-16's.
WIDE_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
WIDE = ("utf-16", "utf-32")
DELIMITERS = (",", ";", "\t", "|")
HEAD_OF_TABLE = 256 * 1024  # from which the delimiter is found
RECORDS = 100
MOST_ABOVE = 20  # lines above a header
# Excel's own first line. It names the delimiter and is no row.
SEPARATOR_LINE = re.compile(r'"?sep=(.|\\t)"?\s*', re.IGNORECASE)
COLUMN_NAME = re.compile(r"\s*[^\W\d]([\w ./()-]{0,40}[\w)])?\s*")  # of a column
_NAME = re.compile(r"[^\W\d][^\n]{0,39}|[#№]")  # the same below a title: `Nr.`, `Done?`, `Share %`
_CONTROLS = {*range(32)} - {*b"\t\n\r\x0c\x1a\x1b"}


# A table's record: its line or row, its cells, and what is wrong with it.
Record = tuple[int, list[str], str | None]


class Dialect(NamedTuple):
    """How a table is written: its delimiter, Python's name for its encoding, and how its quotes are read."""

    delimiter: str
    encoding: str
    is_quoted: bool = True  # else a quote is a character like any other, as in many files with tabs
    is_spaced: bool = False  # spaces after a delimiter are not part of the cell: `"question", "answer"`

    @property
    def separator(self) -> str:
        """The delimiter for messages: a tab is called tabs."""
        return self.delimiter.replace("\t", "tabs")

    def in_words(self) -> str:
        """`cp1252, separated by ;`; empty for a table in UTF-8 with commas."""
        parts = []
        if self.encoding != "utf-8":
            parts.append(self.encoding)
        if self.delimiter != ",":
            parts.append(f"separated by {self.separator}")
        return ", ".join([*parts, *self.quotes_in_words()])

    def quotes_in_words(self) -> list[str]:
        """Unusual quoting, in words."""
        spaced = ["without the spaces after a separator"] * self.is_spaced
        return ["quotes as characters"] * (not self.is_quoted) + spaced

    def records(self, lines: Iterable[str]) -> Any:
        """csv's reader: the cells of each record, and `line_num`. It raises csv.Error."""
        quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if self.is_quoted else csv.QUOTE_NONE
        return csv.reader(
            lines, delimiter=self.delimiter, quoting=quoting, skipinitialspace=self.is_spaced, strict=True
        )


def csv_dialect(file: Path, delimiter: str | None = None, encoding: str | None = None) -> Dialect:
    """A table's dialect. A given delimiter or encoding is taken as it is. Raises OSError and BadFile."""
    encoding = encoding or found_encoding(file)
    with open_bytes(file) as stream:
        head = stream.read(HEAD_OF_TABLE)
    text = codecs.getincrementaldecoder(encoding)("replace").decode(head.removeprefix(BYTE_ORDER_MARK))
    lines = io.StringIO(text, newline="").readlines()
    if len(head) == HEAD_OF_TABLE and len(lines) > 1:
        lines.pop()  # it may be cut off
    if lines and (named := SEPARATOR_LINE.fullmatch(lines[0])):
        delimiter, lines = delimiter or named[1].replace("\\t", "\t"), lines[1:]
    best: tuple[float, int] = (0.0, 0)
    chosen = Dialect(delimiter or ",", encoding)
    for candidate in [delimiter] if delimiter else DELIMITERS:
        # Quotes are read as quotes, unless the head is a table only if they are read otherwise.
        dialect = Dialect(candidate, encoding)
        other = dialect._replace(is_spaced=True)
        if candidate == "\t":
            other = dialect._replace(is_quoted=False)
        cells = [cell for record in _first_records(dialect, lines)[0] for cell in record[1:] if cell]
        has_spaces = other.is_spaced and len(cells) > 2 and all(cell.startswith(" ") for cell in cells)
        if has_spaces or _agreement(other, lines)[0] > _agreement(dialect, lines)[0]:
            dialect = other
        agreeing, width = _agreement(dialect, lines)
        if agreeing >= 0.5 and width > 1 and (agreeing, width) > best:
            best, chosen = (agreeing, width), dialect
    if best[1] > 1 or delimiter:
        return chosen
    for candidate in DELIMITERS:
        first, *below = _first_records(chosen._replace(delimiter=candidate), lines)[0] or [[]]
        # A header that is surely divided: the rows that are not are mistakes.
        if len(first) > 1 and all(map(COLUMN_NAME.fullmatch, first)):
            return chosen._replace(delimiter=candidate)
        is_table = len(below) > 1 and len({*map(len, below)}) == 1 < len(below[0]) and len(first) == 1
        if is_table and candidate != "," and _are_names(below[0]):
            problem = f"has one cell, and the lines below have {len(below[0])}, separated by {candidate!r}"
            remedy = 'if it is a title, remove it; if each line is one text, write delimiter: ","'
            raise BadFile(f"{file}:1", f"{problem}; {remedy}")
    return chosen


def _first_records(dialect: Dialect, lines: Sequence[str]) -> tuple[list[list[str]], bool]:
    """The first records that are not empty, and whether the quotes hold as far as that."""
    records: list[list[str]] = []
    try:
        records.extend(islice(filter(without_blank_end, dialect.records(lines)), RECORDS))
    except csv.Error:
        return records, False
    return records, True


def _agreement(dialect: Dialect, lines: Sequence[str]) -> tuple[float, int]:
    """The share of the first records with as many cells as the header, and the header's cells."""
    records, is_sound = _first_records(dialect, lines)
    start = header_at(records)
    if not records or start is None:
        return 0.0, 0
    width = len(without_blank_end(records[start]))
    # A quote that is never closed takes the records that follow into its cell.
    agreeing = sum(
        width <= len(record)
        and len(without_blank_end(record)) <= width
        and not any("\n" in cell and "\t" in cell for cell in record)
        for record in records[start:]
    )
    lost = 0 if is_sound else len(lines) - len(records)
    return agreeing / (len(records) - start + lost), width


def without_blank_end(cells: Sequence[str]) -> Sequence[str]:
    """The cells up to the last one that holds something."""
    end = len(cells)
    while end and not cells[end - 1].strip():
        end -= 1
    return cells[:end]


def header_at(records: Sequence[Sequence[str]]) -> int | None:
    """The place of the header: the first row with a cell in every column. None if a lone first cell is not clear.

    Rows above it are a title, notes, or names over groups of columns, if the row looks like names: short, different
    from the cells below it. Otherwise the first row is the header, and its nameless columns are a mistake.

        Export of May 2026;;           text
        Customer;;Ticket               Yes, of course
        Name;City;Question             No, never
    """
    ends = [len(without_blank_end(record)) for record in records]
    counts = Counter(ends[next((place for place, end in enumerate(ends) if end > 1), 0) :])
    usual = max(counts, key=lambda end: (counts[end], end), default=0)
    wide = [record[:end] for end, record in zip(ends, records, strict=True) if end >= usual]
    begins = [next(place for place, cell in enumerate(cells) if cell.strip()) for cells in wide if cells]
    # The first cell may be empty: a data frame's row numbers have no name.
    left = max(1, min(begins, default=0))
    full = (place for place, end in enumerate(ends) if end >= usual and all(map(str.strip, records[place][left:end])))
    start = next(full, 0)
    # If the first row has a cell where most rows have one, it is the header of a table with an empty column.
    filled = Counter(
        tuple(bool(cell.strip()) for cell in record[:end]) for record, end in zip(records, ends, strict=True)
    )
    is_usual = ends[:1] != [1] and list(filled)[:1] == [cells for cells, _ in filled.most_common(1)]
    if not start or start > MOST_ABOVE or usual < 2 or is_usual:
        return 0
    above, header, below = records[:start], records[start][: ends[start]], records[start + 1 :]
    titles = [cells[0].strip() for cells, end in zip(above, ends, strict=False) if end == 1]
    if len(titles) == start and all(title.startswith(("#", "//", "%")) for title in titles):
        return start
    have_words = len(titles) == start and all(re.search(r"[\s\d]", title) for title in titles)
    is_padded = any(len(cells) > 1 for cells in above)
    if _are_names(header) and (have_words or (is_padded and _differ_from(header, below))):
        return start
    return 0 if all(len(cells) > 1 for cells in above) else None


def _are_names(cells: Sequence[str]) -> bool:
    """Whether these may be columns' names: short, beginning with a letter, all different."""
    names = [cell.strip() for cell in cells if cell.strip()]
    return len({*names}) == len(names) and all(_NAME.fullmatch(name) and len(name.split()) < 6 for name in names)


def _differ_from(names: Sequence[str], below: Sequence[Sequence[str]]) -> bool:
    """Whether a column holds numbers or longer texts below its name, and no column repeats its name."""
    differ = False
    for place, name in enumerate(names):
        values = [record[place].strip() for record in below if len(record) > place and record[place].strip()]
        if name.strip() in values:
            return False
        length = sorted(map(len, values))[len(values) // 2] if values else 0
        are_numbers = bool(values) and not any(any(map(str.isalpha, value)) for value in values)
        differ |= are_numbers or length >= 2 * len(name) + 4
    return differ


def checked_encoding(name: str) -> str:
    """Python's name for a text encoding. Raises DataError for an unknown one."""
    try:
        codec = codecs.lookup(name)
        "a".encode(codec.name)
    except (LookupError, ValueError, TypeError):
        raise DataError([f"data: encoding: {name!r} is not known; write utf-8, cp1252 or cp949"]) from None
    return codec.name


def found_encoding(file: Path) -> str:
    """UTF-8, or the encoding that a byte order mark says. Raises OSError."""
    with open_bytes(file) as stream:
        head = stream.read(HEAD_OF_TABLE)
    return next((name for mark, name in WIDE_MARKS.items() if head.startswith(mark)), "utf-8")


def is_binary(head: bytes) -> bool:
    """Whether a file's head is no text: it has no mark, and controls are 2 % of it."""
    is_odd = 50 * sum(map(_CONTROLS.__contains__, head)) > len(head)
    return is_odd and not head.startswith(tuple(WIDE_MARKS))
