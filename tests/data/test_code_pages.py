"""Tables in forty code pages and languages: each is read right, or a question shows the right reading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.data.dialect import csv_dialect
from finetune.data.readers import read_rows
from finetune.data.rows import check_rows
from finetune.errors import DataError, UnclearFile
from finetune.new_recipe import propose
from finetune.recipe.schema import Data

# Four questions and answers in each language, and the code pages that programs of its countries write.
TABLES: dict[str, tuple[str, list[tuple[str, str]]]] = {}
for line in Path(__file__).with_name("code_pages.tsv").read_text("utf-8").splitlines():
    language, pages, *pair = line.split("\t")
    TABLES.setdefault(language, (pages, []))[1].append((pair[0], pair[1]))
PAIRS = [(language, page) for language, (pages, _) in TABLES.items() for page in pages.split()]
FEW = [("tr", "cp1254"), ("fr", "mac_roman"), ("ru", "koi8_r"), ("ja", "euc_jp"), ("sq", "cp1252"), ("kk", "kz1048")]
SILENT = [(language, page) for language, page in PAIRS if page == "cp1252" and language != "sq"]


def written(language: str, page: str, folder: Path) -> Path:
    rows = "".join(f"{question};{answer}\n" for question, answer in TABLES[language][1])
    (file := folder / f"{language}_{page}.csv").write_bytes(f"question;answer\n{rows}".encode(page))
    return file


def outcome(language: str, page: str, folder: Path) -> str:
    """right, asked (with the right reading among the answers), or wrong: by the text that was encoded."""
    file = written(language, page, folder)
    try:
        readings = [(csv_dialect(file).encoding, "")]
    except UnclearFile as error:
        readings = list(error.readings)
    encodings = [name for name, _ in readings]
    assert len({word for _, word in readings}) == len(readings)  # the words show the difference
    for encoding in encodings:
        rows = [row.values for row in read_rows(file, "csv", encoding=encoding)]
        if rows == [{"question": question, "answer": answer} for question, answer in TABLES[language][1]]:
            return "right" if len(encodings) == 1 else "asked"
    return "wrong"


@pytest.mark.parametrize(("language", "page"), FEW)
def test_a_code_page_is_right_or_asked(language: str, page: str, tmp_path: Path) -> None:
    assert outcome(language, page, tmp_path) in ("right", "asked")


def test_ukrainian_beside_russian_is_not_asked_about(tmp_path: Path) -> None:
    rows = "question;answer\nДе стоїть музей?;Он стоит на площади, и вход открыт.\nЧи є їдальня?;Да, вы рядом.\n"
    (file := tmp_path / "a.csv").write_bytes(rows.encode("cp1251"))
    assert csv_dialect(file).encoding == "cp1251"


@pytest.mark.slow
def test_no_code_page_is_guessed_wrongly(tmp_path: Path) -> None:
    outcomes = {pair: outcome(*pair, tmp_path) for pair in PAIRS}
    assert len(outcomes) >= 40
    assert [pair for pair, found in outcomes.items() if found == "wrong"] == []
    assert {outcomes[pair] for pair in SILENT} == {"right"}
    assert sum(found == "asked" for found in outcomes.values()) <= 6, outcomes


def test_two_plausible_readings_are_refused_by_check_and_asked_by_init(tmp_path: Path) -> None:
    file = written("sq", "cp1252", tmp_path)
    with pytest.raises(DataError) as raised:
        check_rows(Data.model_validate({"train": [{"path": "csv", "data_files": str(file)}]}))
    (line,) = raised.value.mistakes
    assert line.startswith(f"{file}: is not UTF-8, and may say 'bashkisė' (cp1257) or 'bashkisë' (cp1252)")
    with pytest.raises(UnclearFile):
        propose(str(file))
    asked: list[list[str]] = []

    def choose(lines: list[str]) -> int:
        asked.append(list(lines))
        return next(place for place, each in enumerate(lines) if "cp1252" in each)

    proposal = propose(str(file), choose=choose)  # type: ignore[arg-type]
    assert len(asked) == 1
    assert proposal.entry.encoding == "cp1252"
    assert "encoding: cp1252" in proposal.text
    assert propose(str(file), encoding="cp1252").entry.encoding == "cp1252"


ODD = {
    "curly quotes": ("question,answer\nWho?,“Me” – it’s fine…\nWhy?,No\n", "cp1252", "cp1252"),
    "degrees": ("question,answer\nHow warm?,20 °C ±2\n", "cp1252", "cp1252"),
    "one name": ("question,answer\nWho?,José\nWhy?,No\n", "cp1252", "cp1252"),
    "UTF-16 without a mark": ("question,answer\nWho?,José\n", "utf-16-le", "utf-16-le"),
    "UTF-16, big end first": ("質問,答\n何?,図書館\n", "utf-16-be", "utf-16-be"),
    "UTF-32": ("question,answer\nWho?,José\n", "utf-32", "utf-32"),
    "ISO-2022-JP": ("question,answer\n何?,図書館\n", "iso2022_jp", "iso2022_jp"),
}


@pytest.mark.parametrize("name", ODD)
def test_texts_that_need_no_question(name: str, tmp_path: Path) -> None:
    text, page, found = ODD[name]
    (file := tmp_path / "a.csv").write_bytes(text.encode(page))
    assert csv_dialect(file).encoding == found
    header, *rows = [line.split(",") for line in text.splitlines()]
    assert [row.values for row in read_rows(file, "csv")] == [dict(zip(header, row, strict=True)) for row in rows]


def test_a_letter_across_the_edge_of_two_chunks_is_utf8(tmp_path: Path) -> None:
    for edge in (2**18, 2**20, 2**21):  # the head, a chunk, and a chunk with the rest of its line
        (file := tmp_path / f"{edge}.csv").write_bytes(b"text\n" + b"a" * (edge - 6) + "ä\n".encode())
        assert file.read_bytes()[edge - 1 : edge + 1] == "ä".encode()
        assert csv_dialect(file).encoding == "utf-8"
        assert [str(row.values)[-3] for row in read_rows(file, "csv")] == ["ä"]


def test_a_late_row_counts(tmp_path: Path) -> None:
    """The sample holds every byte value of the file: here the Polish letters stand in the last line alone."""
    rows = "Where is it?;In the big house near the river\n" * 30_000
    (file := tmp_path / "a.csv").write_bytes(
        f"question;answer\nWho?;José\n{rows}Ile to kosztuje?;Pięćdziesiąt złotych, również w święta.\n".encode("cp1250")
    )
    assert csv_dialect(file).encoding == "cp1250"


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
