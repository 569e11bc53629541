"""Tables as people save them: lines above the header, odd quotes, cells that hold nothing, files joined together."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest

from finetune.data.rows import check_rows
from finetune.data.sources import read_rows, resolve
from finetune.errors import DataError
from finetune.new_recipe import propose
from finetune.recipe.schema import Data, DataSet

ROWS = [("Where is it?", "It is in the old house."), ("Who has it?", "Nobody, as far as I know."), ("Why?", "Because.")]
WANTED = [{"question": question, "answer": answer} for question, answer in ROWS]


def semicolons(*first: str) -> bytes:
    return "\n".join([*first, "question;answer", *(f"{question};{answer}" for question, answer in ROWS), ""]).encode()


def quoted(between: str, end: str = "\n") -> bytes:
    rows = [("question", "answer"), *ROWS]
    return "".join(f'"{question}"{between}"{answer}"{end}' for question, answer in rows).encode()


# What each file says to its owner beside the rows; the rows are always WANTED.
READ: dict[str, tuple[bytes, str]] = {
    "a comment": (semicolons("# made by a tool"), "line 1 is above the header and left out: '# made by a tool'"),
    "a title": (semicolons("Export of May 2026"), "line 1 is above the header and left out: 'Export of May 2026'"),
    "a title and an empty line": (semicolons("Export of May 2026", ""), "'Export of May 2026'"),
    "two notes": (semicolons("Shop questions", "Version 2"), "line 2 is above the header and left out: 'Version 2'"),
    "a title from a spreadsheet": (semicolons("Shop questions;"), "'Shop questions'"),
    "Excel's line": (semicolons("sep=;"), "line 1 names the delimiter and is left out: 'sep=;'"),
    "Excel's line in quotes": (semicolons('"sep=;"'), "line 1 names the delimiter"),
    "spaces after commas": (quoted(", "), ""),
    "old Mac lines": (quoted(",", "\r"), ""),
    "a delimiter at each end": (semicolons().replace(b"\n", b";\n"), ""),
    "a delimiter at each row's end": (semicolons().replace(b"\n", b";\n").replace(b"answer;\n", b"answer\n"), ""),
    "a mark in front": (b"\xef\xbb\xbf" + semicolons(), ""),
}


@pytest.mark.parametrize("name", READ)
def test_rows_are_read_and_the_rest_is_told(name: str, tmp_path: Path) -> None:
    content, said = READ[name]
    (file := tmp_path / "a.csv").write_bytes(content)
    told: Counter[str] = Counter()
    assert [row.values for row in read_rows(file, "csv", notes=told)] == WANTED
    assert said in " ".join(told)
    assert bool(said) == bool(told)
    if name == "a title":
        assert any(said in line for line in propose(str(file)).lines)


@pytest.mark.parametrize(
    ("above", "names"),
    [
        (["Tickets of 31.03.2025"], "Nr.;Customer;Question;Answer"),
        (["Tickets;;;"], "#;Customer;Question;Answer"),
        (["Tickets of 31.03.2025;;;", ";;;"], "Ticket no.;Share %;Done?;Answer"),
        (["Tickets", "Customer;;Ticket;"], "No;Name;Question;Answer"),
        (["Made on;31.03.2025;;", "By;Meier;;"], "No;Name;Question;Answer"),
    ],
)
def test_the_header_is_the_first_full_row(above: list[str], names: str, tmp_path: Path) -> None:
    rows = [f"{n};Customer {n};How do I do {n}?;Open the settings and choose {n}." for n in range(6)]
    (file := tmp_path / "a.csv").write_text("\n".join([*above, names, *rows[:3], ";;;", *rows[3:]]))
    told: Counter[str] = Counter()
    read = [row.values for row in read_rows(file, "csv", notes=told)]
    assert read == [dict(zip(names.split(";"), row.split(";"), strict=True)) for row in rows]
    assert sum("is above the header and left out" in note for note in told) == len(above) - (";;;" in above)
    assert told["lines of delimiters alone, left out"] == 1 + (";;;" in above)


def test_rows_are_no_titles_because_a_column_is_nearly_empty(tmp_path: Path) -> None:
    rows = [f"Q{n}?,,It is number {n} of the list." for n in range(9)]
    (file := tmp_path / "a.csv").write_text("\n".join(["question,,answer", *rows, "Why,Ann,So", *rows]))
    (bad,) = read_rows(file, "csv")
    assert str(bad.problem).startswith("column 2 of the header has no name, and its first value is 'Ann'")


def test_row_numbers_of_a_data_frame_are_a_column(tmp_path: Path) -> None:
    lines = [",question,answer", *(f'{n},{question},"{answer}"' for n, (question, answer) in enumerate(ROWS))]
    (file := tmp_path / "a.csv").write_text("\n".join(lines))
    assert [row.values for row in read_rows(file, "csv")] == [
        {"Unnamed: 0": str(n)} | row for n, row in enumerate(WANTED)
    ]


@pytest.mark.parametrize(
    ("cells", "read"),
    [
        ('a\t"Quoted" word\nb\tplain', ['"Quoted" word', "plain"]),
        ('a\t"opens\nb\tmiddle\nc\tcloses"', ['"opens', "middle", 'closes"']),
        ('a\t"whole cell"\nb\t"a tab\tinside"', ["whole cell", "a tab\tinside"]),
        ('a\tno quotes\nb\t5" pipe', ["no quotes", '5" pipe']),
    ],
)
def test_quotes_in_files_with_tabs(cells: str, read: list[str], tmp_path: Path) -> None:
    (file := tmp_path / "a.tsv").write_text(f"question\tanswer\n{cells}\n")
    assert [(row.values or {}).get("answer") for row in read_rows(file, "csv")] == read


REFUSED: dict[str, tuple[str, str, int]] = {
    "backslashes": ('question,answer\n"a","He said \\"no\\", twice"\n', "escaped by a backslash, and CSV writes", 2),
    "one word above": ("Export\nquestion;answer\na;b\nc;d\n", "has one cell, and the lines below have 2", 1),
    "a delimiter in each text": ("question;answer\na;;b\nc;;d\ne;;f\n", "3 values for 2 columns; put quotes around", 2),
    "a nameless column": ("question,\nwho,me\nwhat,that\n", "no name, and its first value is 'me'", 1),
    "a name over a column too few": ("name,,text\nBob,5,Hi you\nEve,6,Yes\n", "column 2 of the header has no name", 1),
    "a nameless first column": (",answer\nwho,me\nwhat,that\n", "column 1 of the header has no name", 1),
    "a late value without a name": ("question,answer,\n" + "a,b,\n" * 120 + "c,d,e\n", "3 values for 2 columns", 122),
    "an open quote": ('question,answer\na,"b\nc,d\n', "a quote that opens here is never closed", 2),
    "two files": ("question,answer\na,b\nquestion,answer\nc,d\n", "the header again: two files were joined", 3),
    "two files with marks": ("\ufeffquestion,answer\na,b\n\ufeffquestion,answer\nc,d\n", "the header again", 3),
    "a NUL": ("question,answer\n" + "a,b\n" * 20 + "c,d\0\n", "holds a NUL character; remove it: tr -d '\\000'", 22),
    "C1 controls in a name": ("question\x9b31m,answer\na,b\n", "has a control character in its name", 1),
    "a quote closed too late": (
        "question\tanswer\n" + "a\tb\n" * 300 + 'c\t"d\ne\tf\ng\th"\n', "tabs and line ends: a quote opens it", 302
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_table_that_is_not_clear_is_refused_with_its_line(name: str, tmp_path: Path) -> None:
    text, problem, line = REFUSED[name]
    (file := tmp_path / "a.csv").write_text(text, encoding="utf-8")
    bad = next(row for row in read_rows(file, "csv") if row.values is None)
    assert problem in str(bad.problem)
    assert bad.line == line


def test_a_header_with_controls_is_one_line_for_init(tmp_path: Path) -> None:
    (file := tmp_path / "a.csv").write_bytes("question\x9b31m,answer\nWho?,me\n".encode())
    with pytest.raises(DataError, match="control character in its name"):
        propose(str(file))


def test_cells_that_hold_nothing_are_empty_and_counted(tmp_path: Path) -> None:
    nothing = ["nan", "NaN", r"\N", "#N/A", "#REF!", "<NA>", "\u200b", "\ufeff\u200b", "\u00a0", "&nbsp;"]
    perhaps = ["NULL", "None", "n/a", "none"]
    lines = [f"What is {n}?,{cell}" for n, cell in enumerate([*nothing, *perhaps, "nan is a float", "0"])]
    (file := tmp_path / "a.csv").write_text("\n".join(["question,answer", *lines, ""]), encoding="utf-8")
    told: Counter[str] = Counter()
    answers = [(row.values or {})["answer"] for row in read_rows(file, "csv", notes=told)]
    assert answers == [""] * len(nothing) + [*perhaps, "nan is a float", "0"]
    assert sum(count for line, count in told.items() if "read as empty" in line) == len(nothing)
    assert sum(count for line, count in told.items() if "read as that text" in line) == len(perhaps)
    notes: list[str] = []
    columns = {"instruction": "question", "output": "answer"}
    entry = {"path": "csv", "data_files": str(file), "drop": ["empty"], "columns": columns}
    assert check_rows(Data.model_validate({"train": [entry]}), notes.append) == {str(file): len(perhaps) + 2}
    assert f"{file}: cells that hold only invisible characters, read as empty: 3" in notes
    assert f"{file}: left out: {len(nothing)} rows with an empty cell" in notes


def test_an_invisible_answer_in_json_is_empty(tmp_path: Path) -> None:
    (file := tmp_path / "a.jsonl").write_text(json.dumps({"instruction": "Who?", "output": "\u200b\ufeff"}) + "\n")
    with pytest.raises(DataError, match="output is empty"):
        check_rows(Data.model_validate({"train": [{"path": "json", "data_files": str(file)}]}))


FRAMES: dict[str, tuple[object, str]] = {
    "columns": ({"question": {"0": "a", "1": "b"}, "answer": {"0": "c", "1": "d"}}, 'orient="records"'),
    "split": ({"columns": ["question", "answer"], "index": [0], "data": [["a", "b"]]}, 'orient="records"'),
    "list": ({"question": ["a", "b"], "answer": ["c", "d"]}, 'orient="records"'),
    "rows in a key": ({"version": "1", "data": [{"question": "a", "answer": "b"}]}, "jq -c '.[\"data\"][]'"),
}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", FRAMES)
def test_a_table_in_one_object_is_explained(name: str, indent: int | None, tmp_path: Path) -> None:
    value, remedy = FRAMES[name]
    (file := tmp_path / "a.json").write_text(json.dumps(value, indent=indent))
    rows = list(read_rows(file, "json"))
    if name == "rows in a key" and indent is None:  # one line may be one row
        assert rows[0].values == value
        return
    assert [row.line for row in rows] == [1]
    assert remedy in str(rows[0].problem)


def saved(folder: Path, split: str | None) -> None:
    data = datasets.Dataset.from_list([*WANTED])
    if split:
        datasets.DatasetDict({"train": data, split: data.select([2, 0])}).save_to_disk(folder)
    else:
        data.save_to_disk(folder, num_shards=2)


def test_a_folder_of_save_to_disk_is_read(tmp_path: Path) -> None:
    saved(folder := tmp_path / "one", None)
    source = resolve(DataSet(path=str(folder)))
    assert [row.values for row in source.rows()] == WANTED == list(datasets.load_from_disk(folder))
    assert propose(str(folder)).counts.rows == 3
    saved(several := tmp_path / "several", "validation")
    rows = resolve(DataSet(path=str(several), split="validation")).rows()
    assert [row.values for row in rows] == [WANTED[2], WANTED[0]]
    with pytest.raises(DataError, match="no split 'test', but train, validation"):
        resolve(DataSet(path=str(several), split="test"))
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match="no such file, and state"):
        resolve(DataSet(path=str(folder)))


@pytest.mark.parametrize("suffix", [".zip", ".bz2", ".xz", ".zst"])
def test_other_compressed_files_are_named_with_their_remedy(suffix: str, tmp_path: Path) -> None:
    (file := tmp_path / f"a.jsonl{suffix}").write_bytes(b"\0\1\2" * 40)
    ways: list[Callable[[], object]] = [lambda: propose(str(file)), lambda: resolve(DataSet(path=str(file)))]
    for way in ways:
        with pytest.raises(DataError, match=rf"{suffix} is not read; unpack it: "):
            way()


def test_json_of_powershell_is_named(tmp_path: Path) -> None:
    (file := tmp_path / "a.jsonl").write_text('{"question": "Who?", "answer": "me"}\n', encoding="utf-16")
    with pytest.raises(DataError, match="the file is UTF-16, not UTF-8; save it as UTF-8"):
        propose(str(file))


def test_a_folder_that_may_not_be_entered_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (inner := tmp_path / "inner").mkdir()
    (inner / "b.jsonl").write_text('{"text": "b"}\n')
    may = os.access
    # Root may enter every folder, so the answer is pretended.
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(inner) and may(path, mode))
    with pytest.raises(DataError, match="inner: cannot be read: the folder may not be entered"):
        resolve(DataSet(path=str(tmp_path)))
