"""Tables as spreadsheet programs write them: the delimiter is found, or given."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from finetune.data.dialect import Dialect, csv_dialect
from finetune.data.readers import read_rows
from finetune.data.rows import check_rows
from finetune.errors import DataError
from finetune.recipe.schema import Data

GERMAN = [["frage", "antwort"], ["Wie groß ist die Säge?", "Zwölf Zentimeter; für Bretter, nicht für Äste."]]
POLISH = [["pytanie", "odpowiedź"], ["Ile kosztuje wiertarka?", "Dwanaście złotych dziennie, kaucja pięćdziesiąt."]]
KOREAN = [["질문", "답변"], ["드릴은 하루에 얼마입니까?", "하루에 십이 유로이고 보증금은 오십 유로입니다."]]
RUSSIAN = [["вопрос", "ответ"], ["Сколько стоит дрель?", "Двенадцать евро в день, залог пятьдесят евро."]]
JAPANESE = [["質問", "回答"], ["ドリルは一日いくらですか。", "一日十二ユーロで、保証金は五十ユーロです。"]]


def table(rows: list[list[str]], delimiter: str = ",", encoding: str = "utf-8") -> bytes:
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter).writerows([rows[0], *rows[1:] * 20])
    return text.getvalue().encode(encoding)


CASES = {
    "utf-8, commas": (GERMAN, ",", "utf-8", ("utf-8",)),
    "utf-8 with a mark": (GERMAN, ";", "utf-8-sig", ("utf-8",)),
    "utf-16": (GERMAN, "\t", "utf-16", ("utf-16",)),
    "pipes": (GERMAN, "|", "utf-8", ("utf-8",)),
    "tabs": (GERMAN, "\t", "utf-8", ("utf-8",)),
    "Korean": (KOREAN, ",", "utf-8", ("utf-8",)),
}


@pytest.mark.sample(4, thorough=10)
@pytest.mark.parametrize("name", CASES)
def test_the_dialect_is_found_and_the_cells_are_right(name: str, tmp_path: Path) -> None:
    rows, delimiter, encoding, found = CASES[name]
    (file := tmp_path / "a.csv").write_bytes(table(rows, delimiter, encoding))
    dialect = csv_dialect(file)
    assert dialect.delimiter == delimiter
    assert dialect.encoding in found
    values = [row.values for row in read_rows(file, "csv")]
    assert values == [dict(zip(rows[0], rows[1], strict=True))] * 20


def test_what_is_given_wins(tmp_path: Path) -> None:
    (file := tmp_path / "a.csv").write_bytes(table(POLISH, ";", "cp1250"))
    assert csv_dialect(file, ",", "cp1250") == Dialect(",", "cp1250")
    assert csv_dialect(file, encoding="cp1250") == Dialect(";", "cp1250")


def test_commas_in_texts_do_not_divide(tmp_path: Path) -> None:
    lines = ["text", "a, b", "c, d, e", "f"]
    (file := tmp_path / "a.csv").write_text("\n".join(lines))
    assert csv_dialect(file).delimiter == ","
    (file := tmp_path / "b.csv").write_text("a;b\n1,5;x, y\n2,5;z\n")
    assert csv_dialect(file).delimiter == ";"


def test_one_wrong_byte_in_utf8_stays_a_mistake_with_its_place(tmp_path: Path) -> None:
    good = "".join(f"Frage {number} mit ä?,Antwort\n" for number in range(50)).encode()
    (file := tmp_path / "a.csv").write_bytes(b"frage,antwort\n" + good + b"Stra\xdfe?,ja\n")
    *rows, bad = read_rows(file, "csv")
    assert len(rows) == 50
    assert (bad.line, bad.values) == (52, None)
    assert "0xdf) is not UTF-8" in str(bad.problem)


def checked(tmp_path: Path, entry: dict[str, Any]) -> tuple[dict[str, int], list[str]]:
    notes: list[str] = []
    counts = check_rows(Data.model_validate({"train": [entry]}), notes.append)
    return counts, notes


def test_the_dialect_is_told(tmp_path: Path) -> None:
    (file := tmp_path / "a.csv").write_bytes(table(GERMAN, ";", "cp1252"))
    columns = {"instruction": "frage", "output": "antwort"}
    counts, notes = checked(
        tmp_path, {"path": "csv", "data_files": str(file), "columns": columns, "encoding": "cp1252"}
    )
    assert counts == {str(file): 20}
    assert notes == [f"{file}: read as cp1252, separated by ;"]


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("delimiter", ";", "delimiter: is for CSV files, these are JSON; remove it"),
        ("encoding", "cp1252", "encoding: is for CSV and text files, these are JSON; remove it"),
    ],
)
def test_keys_for_tables_are_refused_elsewhere(key: str, value: str, problem: str, tmp_path: Path) -> None:
    (file := tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match=problem):
        checked(tmp_path, {"path": "json", "data_files": str(file), key: value})


def test_an_unknown_encoding_is_one_line(tmp_path: Path) -> None:
    (file := tmp_path / "a.csv").write_text("text\na\n")
    with pytest.raises(DataError, match="encoding: 'klingon' is not known"):
        checked(tmp_path, {"path": "csv", "data_files": str(file), "encoding": "klingon"})


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("json", "frage;antwort\na;b\nc;d\n", "this looks like CSV, not JSON; write path: csv"),
        ("csv", '{"text": "a"}\n{"text": "b"}\n', "this looks like JSON, not CSV; write path: json"),
    ],
)
def test_the_other_kind_of_file_is_named_once(kind: str, text: str, problem: str, tmp_path: Path) -> None:
    (file := tmp_path / "rows").write_text(text)
    with pytest.raises(DataError) as raised:
        checked(tmp_path, {"path": kind, "data_files": str(file)})
    assert raised.value.mistakes == (f"{file}:1: {problem}",)


def test_a_folder_of_texts_is_a_row_a_file(tmp_path: Path) -> None:
    (folder := tmp_path / "texts").mkdir()
    (folder / "a.txt").write_bytes("Größe".encode())
    (folder / "b.md").write_text("Zweiter Text")
    for entry in ({"path": "text", "data_files": str(folder)}, {"path": str(folder)}):
        assert checked(tmp_path, entry)[0] == {f"{folder / 'a.txt'}, {folder / 'b.md'}": 2}


def test_excel_cells_become_texts(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    import datetime

    book = openpyxl.Workbook()
    for row in (
        ["frage", "antwort", "nr", "tag", "neu"],
        ["Wie groß?", "Klein", 3.0, datetime.datetime(2026, 11, 26), True],
        [None, "ohne Frage", 4, None, None],
        [None, None, None, None, None],
    ):
        book.active.append(row)
    book.save(file := tmp_path / "a.xlsx")
    rows = [row.values for row in read_rows(file, "excel")]
    assert rows == [
        {"frage": "Wie groß?", "antwort": "Klein", "nr": "3", "tag": "2026-11-26", "neu": "true"},
        {"frage": "", "antwort": "ohne Frage", "nr": "4", "tag": "", "neu": ""},
    ]


def test_a_file_that_is_no_workbook_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("openpyxl")
    (file := tmp_path / "a.xlsx").write_bytes(b"PK\x03\x04 nothing")
    (row,) = read_rows(file, "excel")
    assert row.problem is not None
    assert "save the sheet as CSV" in row.problem
