"""Rows that are left out, and rows that are put together from a template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from finetune.data.chat import Chat, Passage
from finetune.data.rows import RowReader, check_rows
from finetune.data.sources import resolve
from finetune.errors import DataError
from finetune.recipe.schema import Data, DataSet

COLUMNS = {"instruction": "frage", "output": "antwort"}
ROWS: list[dict[str, Any]] = [
    {"frage": "Was?", "antwort": "Das."},
    {"frage": "", "antwort": "Ohne Frage."},
    {"frage": "Wer?", "antwort": "  "},
    {"frage": "Was?", "antwort": "Das.", "nr": "4"},
    {"frage": "Wo?", "antwort": None},
    {"frage": "Was?", "antwort": "Etwas anderes."},
]


def entry(tmp_path: Path, rows: list[dict[str, Any]] = ROWS, **keys: Any) -> DataSet:
    (file := tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataSet.model_validate({"path": "json", "data_files": str(file), **keys})


def read(data_set: DataSet) -> tuple[list[Chat | Passage], dict[str, Any]]:
    reader = RowReader(resolve(data_set))
    rows = list(reader.rows())
    assert [row.problem for row in rows if row.problem] == []
    return [row.read for row in rows if row.read], reader.facts()


def test_empty_and_equal_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    found, facts = read(entry(tmp_path, columns=COLUMNS, drop=["empty", "duplicate"]))
    assert [row.messages[1]["content"] for row in found if isinstance(row, Chat)] == ["Das.", "Etwas anderes."]
    assert facts["dropped"] == {"empty": 3, "duplicate": 1}


def test_the_owner_is_told(tmp_path: Path) -> None:
    data_set, notes = entry(tmp_path, columns=COLUMNS, drop=["empty", "duplicate"]), list[str]()
    check_rows(Data(train=[data_set]), notes.append)
    assert notes[0].endswith("left out: 3 rows with an empty cell and 1 row equal to an earlier one")


def test_without_drop_the_users_column_is_named_once_with_all_places(tmp_path: Path) -> None:
    data_set = entry(tmp_path, columns=COLUMNS)
    with pytest.raises(DataError) as raised:
        check_rows(Data(train=[data_set]))
    remedy = "give it a {}, or leave such rows out: drop: [empty]"
    assert raised.value.mistakes == (
        f"{data_set.data_files}:2: 'frage' is empty; {remedy.format('text')}",
        f"{data_set.data_files}:3: 'antwort' is empty; {remedy.format('text')}",
        f"{data_set.data_files}:5: 'antwort' is null; {remedy.format('value')}",
    )


def test_equal_rows_are_equal_in_what_is_read(tmp_path: Path) -> None:
    rows = [{"text": "a", "id": number} for number in range(3)]
    found, facts = read(entry(tmp_path, rows, drop=["duplicate"]))
    assert (len(found), facts["dropped"]) == (1, {"duplicate": 2})


TEMPLATE = {"instruction": "Frage: {frage}\nDenke nach. {{kurz}}", "output": "{antwort} ({nr})"}


def test_a_template_fills_the_columns_in(tmp_path: Path) -> None:
    rows = [{"frage": "Was?", "antwort": "Das.", "nr": 4}, {"frage": "Wer?", "antwort": "Ich.", "nr": None}]
    found, facts = read(entry(tmp_path, rows, template=TEMPLATE))
    assert [[message["content"] for message in row.messages] for row in found if isinstance(row, Chat)] == [
        ["Frage: Was?\nDenke nach. {kurz}", "Das. (4)"],
        ["Frage: Wer?\nDenke nach. {kurz}", "Ich. ()"],
    ]
    assert facts["unused_columns"] == []


def test_columns_and_template_stand_together(tmp_path: Path) -> None:
    template, columns = {"instruction": "{a}, {b}"}, {"output": "c"}
    found, _ = read(entry(tmp_path, [{"a": "1", "b": "2", "c": "3"}], template=template, columns=columns))
    assert [message["content"] for message in found[0].messages] == ["1, 2", "3"]  # type: ignore[union-attr]


def test_a_templates_row_is_empty_if_all_its_cells_are(tmp_path: Path) -> None:
    rows = [{"frage": "Was?", "antwort": "Das."}, {"frage": " ", "antwort": "Das."}]
    template = {"instruction": "Frage: {frage}", "output": "{antwort}"}
    found, facts = read(entry(tmp_path, rows, template=template, drop=["empty"]))
    assert (len(found), facts["dropped"]) == (1, {"empty": 1})
    with pytest.raises(DataError, match="template: instruction is empty"):
        check_rows(Data(train=[entry(tmp_path, rows, template=template)]))


def test_a_misspelt_field_is_one_line(tmp_path: Path) -> None:
    template = {"instruction": "{frgae}", "output": "{antwort}"}
    with pytest.raises(DataError, match=r"has no column 'frgae', but 'frage', 'antwort', 'nr'; did you mean {frage}\?"):
        check_rows(Data(train=[entry(tmp_path, template=template)]))


def test_a_cell_that_is_a_list_is_refused(tmp_path: Path) -> None:
    rows = [{"frage": ["a"], "antwort": "b"}]
    with pytest.raises(DataError, match="the column 'frage' is a list; fields take texts and numbers"):
        check_rows(Data(train=[entry(tmp_path, rows, template={"instruction": "{frage}", "output": "{antwort}"})]))


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ({"instruction": "{frage.__class__}", "output": "{a}"}, "is not a plain column"),
        ({"instruction": "{frage[0]}", "output": "{a}"}, "is not a plain column"),
        ({"instruction": "{}", "output": "{a}"}, "is not a plain column"),
        ({"instruction": "{frage!r}", "output": "{a}"}, "has a format"),
        ({"instruction": "{frage:>10}", "output": "{a}"}, "has a format"),
        ({"instruction": "{frage", "output": "{a}"}, "expected '}'"),
        ({"messages": "{frage}"}, "is not a text column of any layout"),
        ({"text": "{a}", "output": "{b}"}, "belong to no one layout"),
    ],
)
def test_fields_are_plain_columns(template: dict[str, str], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        DataSet.model_validate({"path": "json", "template": template})


def test_a_column_is_mapped_once() -> None:
    with pytest.raises(ValidationError, match="is in columns too"):
        DataSet.model_validate({"path": "json", "columns": COLUMNS, "template": {"output": "{a}"}})
