"""Tables and texts in other encodings than UTF-8: a mark is read, a name is taken, and everything else is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.data.dialect import csv_dialect
from finetune.data.rows import check_rows
from finetune.data.sources import read_rows
from finetune.errors import DataError
from finetune.new_recipe import propose
from finetune.recipe.schema import Data

GERMAN = [("Wo liegt Köln?", "Am Rhein."), ("Was ist groß?", "Düsseldorf; und größer: Köln.")]
JAPANESE = [("何?", "図書館"), ("どこ?", "駅")]
PAGES = [
    (GERMAN, "cp1252"),
    (GERMAN, "mac_roman"),
    (JAPANESE, "cp932"),
    (JAPANESE, "iso2022_jp"),
    (GERMAN, "utf-16-le"),
    (GERMAN, "utf-16"),
    (GERMAN, "utf-32"),
    (GERMAN, "utf-8-sig"),
]
MARKED = ("utf-16", "utf-32", "utf-8-sig")


def written(rows: list[tuple[str, str]], page: str, folder: Path) -> Path:
    text = "question,answer\n" + "".join(f'"{question}","{answer}"\n' for question, answer in rows)
    (file := folder / "a.csv").write_bytes(text.encode(page))
    return file


@pytest.mark.parametrize(("rows", "page"), PAGES)
def test_an_encoding_is_marked_or_named_or_refused(rows: list[tuple[str, str]], page: str, tmp_path: Path) -> None:
    file = written(rows, page, tmp_path)
    right = [{"question": question, "answer": answer} for question, answer in rows]
    assert [row.values for row in read_rows(file, "csv", encoding=None if page in MARKED else page)] == right
    if page in MARKED:
        return
    with pytest.raises(DataError) as raised:
        check_rows(Data.model_validate({"train": [{"path": "csv", "data_files": str(file)}]}))
    (line,) = raised.value.mistakes
    assert any(word in line for word in ("is not UTF-8", "not UTF-8; ", "is a binary file"))


def test_the_refusal_shows_the_word_and_both_remedies(tmp_path: Path) -> None:
    file = written(GERMAN, "cp1252", tmp_path)
    with pytest.raises(DataError) as raised:
        propose(str(file))
    # 16 bytes of header, a quote and `Wo liegt K` before the byte.
    assert raised.value.mistakes == (
        f"{file}:2: byte 27 of the file (0xf6) is not UTF-8; save the file as UTF-8, or name its encoding; cp1252 "
        "would read this word as 'Köln?\"': encoding: cp1252 (init: --encoding)",
    )
    proposal = propose(str(file), encoding="cp1252")
    assert "encoding: cp1252" in proposal.text


def test_a_text_is_refused_in_the_same_way(tmp_path: Path) -> None:
    (file := tmp_path / "a.txt").write_bytes("Köln am Rhein".encode("cp1252"))
    (bad,) = read_rows(file, "text")
    assert "byte 1 of the file (0xf6) is not UTF-8" in str(bad.problem)
    assert "'Köln'" in str(bad.problem)
    (row,) = read_rows(file, "text", encoding="cp1252")
    assert row.values == {"text": "Köln am Rhein"}


def test_init_reads_utf16_without_a_mark_by_its_name(tmp_path: Path) -> None:
    file = written(GERMAN * 10, "utf-16-le", tmp_path)
    with pytest.raises(DataError, match=r"binary file, not rows of text; .* --encoding utf-16-le"):
        propose(str(file))
    assert "encoding: utf-16-le" in propose(str(file), encoding="utf-16-le").text


def test_a_terminals_codes_in_utf8_are_no_japanese(tmp_path: Path) -> None:
    file = written([("Was?", "\x1b$ grün"), ("Wie?", "so")], "utf-8", tmp_path)
    assert next(row.values for row in read_rows(file, "csv")) == {"question": "Was?", "answer": "\x1b$ grün"}


def test_a_letter_across_the_edge_of_the_head_is_utf8(tmp_path: Path) -> None:
    (file := tmp_path / "a.csv").write_bytes(b"text\n" + b"a" * (2**18 - 6) + "ä\n".encode())
    assert file.read_bytes()[2**18 - 1 : 2**18 + 1] == "ä".encode()
    assert csv_dialect(file).encoding == "utf-8"
    assert [str(row.values)[-3] for row in read_rows(file, "csv")] == ["ä"]


def read_twice(text: str) -> str:
    """UTF-8 that was read as cp1252; the five bytes without a letter stay as control characters."""
    letters = (bytes([each]).decode("cp1252", "ignore") or chr(each) for each in text.encode("utf-8"))
    return "".join(letters)


@pytest.mark.parametrize(
    "text",
    [
        "München",
        "it’s “so”",
        "Привет",
        "café",
        "北京是首都",
        "日本語です",
        "서울",
        "Ελλάδα",
        "ไทย",
        "שלום",
        "مرحبا",
        "½",
        "🙂 ok",
    ],
)
def test_utf8_of_utf8_is_a_note(tmp_path: Path, text: str) -> None:
    for written, count in ((text, 0), (read_twice(text), 1)):
        file = tmp_path / "rows.jsonl"
        rows = [{"instruction": "Which one?", "output": each} for each in ("plain", written, "CAFÉ–BAR", "l’été…»")]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        notes: list[str] = []
        check_rows(Data.model_validate({"train": [{"path": str(file)}]}), notes.append)
        found = [note for note in notes if "a program read UTF-8 as cp1252" in note]
        assert len(found) == count
        assert all(": 1; if so, " in note for note in found)
