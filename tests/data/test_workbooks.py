"""Workbooks as spreadsheet programs show them: several sheets, formats, errors, formulas, stray cells."""

from __future__ import annotations

import datetime
import time
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from finetune.data import workbook
from finetune.data.rows import check_rows
from finetune.data.sources import read_rows, resolve
from finetune.errors import DataError
from finetune.new_recipe import propose
from finetune.recipe.schema import Data, DataSet

openpyxl = pytest.importorskip("openpyxl")
HEADER = ["question", "answer"]
ROWS = [["Where is it?", "In the old house."], ["Who has it?", "Nobody knows."], ["Why is it so?", "Because."]]
WANTED = [{"question": question, "answer": answer} for question, answer in ROWS]


def book(*rows: list[Any]) -> Any:
    made = openpyxl.Workbook()
    for row in rows:
        made.active.append(row)
    return made


def read(made: Any, folder: Path, sheet: str | None = None) -> tuple[list[Any], Counter[str]]:
    made.save(file := folder / "a.xlsx")
    told: Counter[str] = Counter()
    return [row.values or row.problem for row in read_rows(file, "excel", sheet=sheet, notes=told)], told


def test_the_sheet_that_is_read_is_named_with_the_others(tmp_path: Path) -> None:
    made = book(["These questions were exported by the shop"], ["See the next sheet"])
    made.active.title = "Readme"
    for title in ("data", "more", "secret"):
        sheet = made.create_sheet(title)
        for row in [HEADER, *ROWS[: 1 + (title == "data") * 2]]:
            sheet.append(row)
    made["secret"].sheet_state = "hidden"
    made.create_sheet("empty")
    rows, told = read(made, tmp_path)
    assert rows == WANTED
    said = (
        "the sheet 'data' is read, and not 'Readme', 'more', 'secret' (hidden); choose by sheet: NAME (init: --sheet)"
    )
    assert told == {said: 0}
    file = tmp_path / "a.xlsx"
    assert said in propose(str(file)).lines
    chosen = propose(str(file), sheet="more")
    assert chosen.counts.rows == 1
    assert "sheet: more" in chosen.text
    notes: list[str] = []
    columns = {"instruction": "question", "output": "answer"}
    entry = {"path": "excel", "data_files": str(file), "columns": columns}
    assert check_rows(Data.model_validate({"train": [entry]}), notes.append) == {str(file): 3}
    assert f"{file}: {said}" in notes
    with pytest.raises(DataError, match="it has no sheet 'x', but 'Readme', 'data', 'more', 'secret', 'empty'"):
        check_rows(Data.model_validate({"train": [entry | {"sheet": "x"}]}))
    (tmp_path / "a.csv").write_text("text\na\n")
    with pytest.raises(DataError, match="sheet: is for Excel files, these are CSV; remove it"):
        resolve(DataSet(path=str(tmp_path / "a.csv"), sheet="x"))


def test_a_title_above_the_header_is_told(tmp_path: Path) -> None:
    rows, told = read(book(["Shop questions"], [], ["Version 2"], [None], HEADER, *ROWS), tmp_path)
    assert rows == WANTED
    assert [*told] == [
        "line 1 is above the header and left out: 'Shop questions'",
        "line 3 is above the header and left out: 'Version 2'",
    ]


def test_group_names_above_the_header_are_told(tmp_path: Path) -> None:
    rows, told = read(
        book(["Shop"], ["Visitor", None, "Shop"], [*HEADER, "Nr."], *[[*row, 7] for row in ROWS]), tmp_path
    )
    assert rows == [row | {"Nr.": "7"} for row in WANTED]
    assert [*told] == [
        f"line {line} is above the header and left out: {text!r}" for line, text in ((1, "Shop"), (2, "Visitor Shop"))
    ]


def test_a_table_may_begin_in_another_column(tmp_path: Path) -> None:
    rows, told = read(book(["Our FAQ"], [], [None, None, *HEADER], *[[None, None, *row] for row in ROWS]), tmp_path)
    assert rows == [{"Unnamed: 0": "", **row} for row in WANTED]
    assert [*told] == ["line 1 is above the header and left out: 'Our FAQ'"]


def test_a_cover_is_no_table_and_two_tables_are_asked_about(tmp_path: Path) -> None:
    made = book(["All our questions"], ["By", "Ann"], ["For the shop"], ["Ask Ann"], ["Thanks"])
    data = made.create_sheet("data")
    for row in [HEADER, *ROWS]:
        data.append(row)
    assert read(made, tmp_path)[0] == WANTED
    made["Sheet"].delete_rows(1, 5)
    for row in ("Version", "two"), ("Date", "May"), ("Owner", "Ann"):
        made["Sheet"].append(row)
    said = r"a.xlsx: has several tables: 'Version, two' \(Sheet\) or 'question, answer' \(data\); name"
    with pytest.raises(DataError, match=said):
        read(made, tmp_path)
    file = str(tmp_path / "a.xlsx")
    with pytest.raises(DataError, match=said):
        propose(file)
    assert "sheet: data" in propose(file, choose=lambda ways: ["data)" in way for way in ways].index(True)).text


# Values and formats, with the text that LibreOffice and Excel (English) show; days and times as ISO writes them.
SHOWN = [
    (0.5, "0%", "50%"),
    (0.125, "0.0%", "12.5%"),
    (0.1 + 0.2, "0.00", "0.30"),
    (0.1 + 0.2, "General", "0.3"),
    (2.5, "0", "3"),
    (42, "00000", "00042"),
    (1e21, "General", "1000000000000000000000"),
    (3.0, "General", "3"),
    (datetime.datetime(2026, 3, 4), "dd.mm.yyyy", "2026-03-04"),
    (datetime.datetime(2026, 3, 4, 15, 30), "dd.mm.yyyy hh:mm", "2026-03-04T15:30:00"),
    (datetime.time(9, 5), "hh:mm", "09:05:00"),
    (datetime.timedelta(hours=26, minutes=5), "[h]:mm", "26:05"),
    (datetime.timedelta(hours=26, minutes=5), "[h]:mm:ss", "26:05:00"),
    (True, "General", "true"),
    ("0042", "@", "0042"),
]


def test_cells_are_read_as_they_are_shown(tmp_path: Path) -> None:
    made = book(HEADER)
    for place, (value, pattern, _) in enumerate(SHOWN, start=2):
        made.active.append([f"What is {place}?", value])
        made.active.cell(place, 2).number_format = pattern
    rows, told = read(made, tmp_path)
    assert [row["answer"] for row in rows] == [shown for _, _, shown in SHOWN]
    assert not told
    made.active.append(["What is it?", 12345.0])
    made.active.cell(len(SHOWN) + 2, 2).number_format = "0.00E+00"
    rows, told = read(made, tmp_path)
    assert rows[-1]["answer"] == "12345"
    assert told == {"numbers in the format '0.00E+00', read without it": 1}


def test_errors_merged_cells_and_hidden_rows_are_counted(tmp_path: Path) -> None:
    made = book(HEADER, *ROWS, ["What?", "#N/A"], ["How?", "#DIV/0!"])
    for row in (5, 6):
        made.active.cell(row, 2).data_type = "e"
    made.active["B3"] = None
    made.active.merge_cells("B2:B3")
    made.active.row_dimensions[4].hidden = True
    rows, told = read(made, tmp_path)
    assert [row["answer"] for row in rows] == ["In the old house.", "", "Because.", "", ""]
    assert told == {
        "cells with the error #N/A, read as empty": 1,
        "cells with the error #DIV/0!, read as empty": 1,
        "hidden rows, which are read too": 1,
        "merged cells, of which only the first one has the value": 1,
    }


def test_formulas_that_were_never_calculated_are_refused(tmp_path: Path) -> None:
    made = book(HEADER, *[[question, f'="{answer}"'] for question, answer in ROWS])
    rows, _ = read(made, tmp_path)
    problems = [f"B{n} is a formula that was never calculated" for n in (2, 3, 4)]
    assert [str(row).partition(";")[0] for row in rows] == problems
    with pytest.raises(DataError, match="B2 is a formula that was never calculated"):
        propose(str(tmp_path / "a.xlsx"))
    # Some programs store 0 beside a formula, and ask for calculation.
    part = "xl/worksheets/sheet1.xml"
    change(tmp_path / "a.xlsx", part, b"<v></v>", b"<v>0</v>", b"<v />", b"<v>0</v>")
    assert all(row.values is None for row in read_rows(tmp_path / "a.xlsx", "excel"))
    # A stored text is the answer.
    texts = [each for n in (2, 3, 4) for each in (f'<c r="B{n}"'.encode(), f'<c t="str" r="B{n}"'.encode())]
    change(tmp_path / "a.xlsx", part, b"<v>0</v>", b"<v>Because.</v>", *texts)
    assert [(row.values or {})["answer"] for row in read_rows(tmp_path / "a.xlsx", "excel")] == ["Because."] * 3


def change(file: Path, part: str, *pairs: bytes) -> None:
    with zipfile.ZipFile(file) as stored:
        parts = {name: stored.read(name) for name in stored.namelist()}
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        parts[part] = parts[part].replace(old, new)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as written:
        for name, content in parts.items():
            written.writestr(name, content)


@pytest.mark.parametrize("stray", [" ", "x"])
def test_a_stray_cell_far_away_takes_no_time(stray: str, tmp_path: Path) -> None:
    made = book(HEADER, *ROWS * 10)
    made.active.cell(100_000, 16_384, stray)
    begin = time.process_time()
    rows, _ = read(made, tmp_path)
    assert time.process_time() - begin < 3
    assert rows[:30] == WANTED * 10
    assert rows[30:] == [] if stray == " " else "XFD100000 holds a value right of the table's 2 columns" in rows[30]


def test_a_workbook_that_grows_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workbook, "MOST_IN_A_PART", 100_000)
    made = book(HEADER, *[["Who?", "a" * 30_000]] * 10)
    rows, _ = read(made, tmp_path)
    assert (tmp_path / "a.xlsx").stat().st_size < 20_000
    assert rows == ["not readable as Excel: xl/worksheets/sheet1.xml in it has more than 0 MiB; save the sheet as CSV"]
    monkeypatch.undo()
    assert len(read(made, tmp_path)[0]) == 10
