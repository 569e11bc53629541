"""Reads a workbook's sheet as rows of texts, and counts odd cells. Numbers keep simple formats alone."""

from __future__ import annotations

import datetime
import re
import zipfile
from collections import Counter
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal
from itertools import islice
from pathlib import Path
from typing import IO, Any

from finetune.data.dialect import Record, header_at, without_blank_end
from finetune.errors import BadFile, UnclearFile

MOST_COMPRESSED = 128 * 2**20  # bytes of the file
MOST_IN_A_PART = 512 * 2**20  # bytes of one sheet, uncompressed; it is read row by row
MOST_STRINGS = 256 * 2**20  # all sheets' texts, uncompressed; openpyxl holds them, in up to six times as many bytes
_SIMPLE_FORMAT = re.compile(r"(0+)(?:\.(0+))?(%?)")  # 0, 00000, 0.00, 0.0%
ROWS_THAT_DECIDE = 20  # rows that decide whether a sheet is a table, and how wide it is


def sheet_records(file: Path, stream: IO[bytes], sheet_name: str | None, notes: Counter[str]) -> Iterator[Record]:
    """Yield the rows that hold something, without blank cells at their ends.

    Args:
        file: For messages.
        sheet_name: The sheet's name. None: the visible one with a table, or else the first with anything.
        notes: Gets notes for the file's owner, with their counts.

    Raises BadFile for a sheet that is not there, UnclearFile for several tables with different columns, ValueError for
    a workbook that is too large, and what openpyxl raises about a damaged one.
    """
    from openpyxl import load_workbook

    for part in zipfile.ZipFile(stream).infolist():
        most = MOST_STRINGS if part.filename.endswith("sharedStrings.xml") else MOST_IN_A_PART
        if part.file_size > most:
            raise ValueError(f"{part.filename} in it has more than {most // 2**20} MiB")
    book = load_workbook(stream, read_only=True, data_only=True, keep_links=False)
    sheets = {sheet.title: sheet for sheet in book.worksheets}
    heads = {
        title: [cells for _, cells, _ in islice(_records(book, sheet, Counter()), ROWS_THAT_DECIDE)]
        for title, sheet in sheets.items()
    }
    filled = [title for title, head in heads.items() if head]
    if sheet_name is not None and sheet_name not in sheets:
        names = ", ".join(map(repr, sheets))
        raise BadFile(
            str(file), f"it has no sheet {sheet_name!r}, but {names}; choose one of them, sheet: NAME (init: --sheet)"
        )
    visible = [title for title in filled if sheets[title].sheet_state == "visible"]
    headers = {title: header for title in visible if (header := _header(heads[title]))}
    if sheet_name is None and len({*headers.values()}) > 1:
        tables = [(title, ", ".join(header)[:60]) for title, header in headers.items()]
        raise UnclearFile(str(file), "sheet", "has several tables:", tables)
    title = sheet_name or next(iter([*headers, *visible, *filled, *sheets]))
    if others := [other for other in filled if other != title]:
        names = ", ".join(repr(name) + " (hidden)" * (sheets[name].sheet_state != "visible") for name in others[:5])
        more = f" and {len(others) - 5} more" * (len(others) > 5)
        notes[f"the sheet {title!r} is read, and not {names}{more}; choose by sheet: NAME (init: --sheet)"] = 0
    yield from _records(book, sheets[title], notes)


def _header(head: list[list[str]]) -> tuple[str, ...]:
    """The names of a table's columns. Empty for a sheet of texts: no rows below, or most in fewer columns."""
    width = max(map(len, head), default=0)
    start = header_at([cells + [""] * (width - len(cells)) for cells in head]) or 0
    names = [name.strip() for name in head[start]]
    below = [cells for cells in head[start + 1 :] if 2 * sum(map(bool, map(str.strip, cells))) > len(names)]
    is_table = len(names) > 1 and all(names[1:]) and 2 * len(below) > len(head) - start - 1
    return tuple(names) if is_table else ()


def _records(book: Any, sheet: Any, notes: Counter[str]) -> Iterator[Record]:
    from openpyxl.cell.read_only import ReadOnlyCell
    from openpyxl.utils import get_column_letter

    # Private, because the public reader fills every row up to the sheet's last column (a stray cell in XFD makes
    # 16,384 of each), and tells neither hidden rows nor formulas that were never calculated.
    from openpyxl.worksheet._reader import FORMULA_TAG, WorkSheetParser

    with book._archive.open(sheet._worksheet_path) as source:
        parser = WorkSheetParser(
            source,
            sheet._shared_strings,
            data_only=True,
            epoch=book.epoch,
            date_formats=book._date_formats,
            timedelta_formats=book._timedelta_formats,
        )
        must_calculate = bool(book.calculation.fullCalcOnLoad)

        def parse_cell(element: Any) -> dict[str, Any]:
            cell: dict[str, Any] = WorkSheetParser.parse_cell(parser, element)
            # A program that calculates nothing writes no value, or 0 and a wish for calculation.
            is_missing = cell["value"] is None or (must_calculate and cell["value"] == 0)
            if is_missing and element.find(FORMULA_TAG) is not None and element.get("t") != "str":
                cell["data_type"] = "formula"
            return cell

        parser.parse_cell = parse_cell
        width, seen = 0, 0
        for number, cells in parser.parse():
            attributes = parser.row_dimensions.pop(str(number), {})
            texts: dict[int, str] = {}
            problem = None
            for values in cells:
                if values["data_type"] == "formula":
                    cell = ReadOnlyCell(sheet, **values | {"data_type": "n"})
                    problem = problem or (
                        f"{cell.coordinate} is a formula that was never calculated; open the workbook in Excel or "
                        "LibreOffice, and save it"
                    )
                elif values["value"] is not None and (text := _cell_text(ReadOnlyCell(sheet, **values), notes)).strip():
                    texts[values["column"]] = text
            if not texts and problem is None:
                continue
            last = max(texts, default=1)
            seen += 1
            if seen <= ROWS_THAT_DECIDE:
                width = max(width, last)
            elif last > width:
                stray = f"{get_column_letter(last)}{number}"
                remedy = "name that column, or clear the cell"
                problem = f"{stray} holds a value right of the table's {width} columns; {remedy}"
                yield number, [], problem
                continue
            if attributes.get("hidden") in ("1", "true"):
                notes["hidden rows, which are read too"] += 1
            row = [texts.get(column, "") for column in range(1, last + 1)]
            yield number, list(without_blank_end(row)), problem
    if parser.merged_cells is not None and (merged := parser.merged_cells.count):
        notes["merged cells, of which only the first one has the value"] += merged


def _cell_text(cell: Any, notes: Counter[str]) -> str:
    """A cell as text: 3.0 is `3`, 0.5 as a percentage `50%`, a day 2026-11-26, a duration 26:05:00, an error empty."""
    value = cell.value
    if cell.data_type == "e":
        notes[f"cells with the error {value}, read as empty"] += 1
        return ""
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            amount = Decimal(f"{value:.15g}")  # a spreadsheet shows 15 digits at most
            if simple := _SIMPLE_FORMAT.fullmatch(cell.number_format):
                whole, places, percent = simple.groups(default="")
                amount = (amount * (100 if percent else 1)).quantize(Decimal(1).scaleb(-len(places)), ROUND_HALF_UP)
                return f"{amount:f}".zfill(len(whole) + len(places) + bool(places)) + percent
            if cell.number_format not in ("General", "@"):
                notes[f"numbers in the format {cell.number_format!r}, read without it"] += 1
            return f"{amount:f}"
        case datetime.timedelta():
            seconds = round(value.total_seconds())
            sign, seconds = "-" * (seconds < 0), abs(seconds)
            text = f"{sign}{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
            return text if "s" in cell.number_format.lower() or seconds % 60 else text.rpartition(":")[0]
        case datetime.datetime() if value.time() == datetime.time():
            return value.date().isoformat()
        case datetime.date() | datetime.datetime() | datetime.time():
            return value.isoformat()
    return str(value)
