"""Rows with thousands of keys, and files that take long to check: bounded work, and a word while it lasts."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet
import pytest

from finetune.data import chat, rows, sources
from finetune.data.readings import in_quotes
from finetune.data.rows import RowReader, check_rows, notes_of
from finetune.data.sources import resolve
from finetune.errors import DataError
from finetune.recipe.schema import Data

ASKED, ANSWERED = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}


def data_of(folder: Path, *rows: object) -> Data:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Data.model_validate({"train": [{"path": "json", "data_files": str(file)}]})


def numbered(count: int, word: str = "key") -> dict[str, str]:
    return {f"{word}{number}": "x" for number in range(count)}


def named(note: str) -> int:
    return note.count("'") // 2


@pytest.mark.slow
def test_few_of_many_unknown_keys_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def counting(word: str, among: Iterable[str], cutoff: float = 0.7) -> str | None:
        compared.append(word)
        return None

    monkeypatch.setattr(chat, "nearest", counting)
    chat._our_key.cache_clear()
    turns = [ASKED | numbered(20_000), ANSWERED | numbered(20_000, "other")]
    data = data_of(tmp_path, {"messages": turns}, {"messages": turns})
    reader = RowReader(resolve(data.train[0]))
    assert [row.problem for row in reader.rows()] == [None, None]
    chat._our_key.cache_clear()
    assert len(compared) == 2 * chat.COMPARED_KEYS, "the keys of the second row are known"
    (note,) = notes_of("a", reader.facts(lambda key: False))
    assert note.startswith("a: keys of messages that the template does not read: 'key0', 'key1', ")
    assert note.endswith(f" and {1000 - named(note)} more at least")


def test_a_misspelt_key_among_the_first_is_refused(tmp_path: Path) -> None:
    for before in (0, chat.COMPARED_KEYS - 1):
        turn = ASKED | numbered(before) | {"wieght": 0} | numbered(30, "late")
        with pytest.raises(DataError, match=r"unknown key 'wieght'; did you mean 'weight'\?"):
            check_rows(data_of(tmp_path, {"messages": [turn, ANSWERED]}))


def test_columns_beyond_a_thousand_are_not_kept(tmp_path: Path) -> None:
    notes: list[str] = []
    rows = [{"messages": [ASKED, ANSWERED]} | numbered(700, f"c{row}_") for row in range(3)]
    check_rows(data_of(tmp_path, *rows), notes.append)
    assert notes[0].endswith(f" and {1000 - named(notes[0])} more at least")


def test_names_in_quotes_say_how_many_are_left_out() -> None:
    assert in_quotes(["a", "b"]) == "'a', 'b'"
    assert in_quotes(["x" * 50, "y" * 30, "z", "z"]) == f"'{'x' * 50}', '{'y' * 30}' and 2 more"
    assert in_quotes(["x" * 100]) == "1 name"


def test_a_check_that_takes_long_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A clock that a row moves by a second: after two, then every ten."""
    now = iter(range(10_000))
    monkeypatch.setattr(rows.time, "monotonic", lambda: float(next(now)))
    data = data_of(tmp_path, *[{"messages": [ASKED, ANSWERED]}] * 30)
    check_rows(data)
    lines = capsys.readouterr().err.splitlines()
    name = data.train[0].data_files
    assert lines[:2] == [f"checking {name}: 3 rows", f"checking {name}: 14 rows"]


def test_a_short_check_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_rows(data_of(tmp_path, *[{"messages": [ASKED, ANSWERED]}] * 30))
    assert capsys.readouterr().err == ""


@pytest.mark.sample(2, thorough=5)
@pytest.mark.parametrize("kind", ["parquet", "parquet of chats", "jsonl.gz", "csv.gz", "json.gz"])
def test_a_small_file_of_very_many_rows_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The same row again and again takes no room in a compressed file."""
    monkeypatch.setattr(sources, "MOST_REPETITIONS", 20_000)
    rows = 50_000
    file = tmp_path / f"rows.{kind.partition(' ')[0]}"
    match kind:
        case "parquet":
            words = pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), rows), ["hello"])
            pyarrow.parquet.write_table(pa.table({"text": words}), file)
        case "parquet of chats":
            pyarrow.parquet.write_table(pa.table({"messages": [[ASKED, ANSWERED]] * rows}), file)
        case "csv.gz":
            file.write_bytes(gzip.compress(b"text\n" + b"hello\n" * rows))
        case "jsonl.gz":
            file.write_bytes(gzip.compress(b'{"text": "hello"}\n' * rows))
        case _:
            file.write_bytes(gzip.compress(b"[" + b",".join([b'{"text": "hello"}'] * rows) + b"]"))
    assert file.stat().st_size < 20_000
    builder = {"csv.gz": "csv", "parquet": "parquet"}.get(kind.partition(" ")[0], "json")
    data = Data.model_validate({"train": [{"path": builder, "data_files": str(file)}]})
    with pytest.raises(DataError, match="are the same few again and again; write each row once") as caught:
        check_rows(data)
    assert len(caught.value.mistakes) == 1


def test_many_rows_that_differ_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MOST_REPETITIONS", 2_000)
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pa.table({"text": [f"text {number}" for number in range(5_000)]}), file)
    data = Data.model_validate({"train": [{"path": "parquet", "data_files": str(file)}]})
    assert check_rows(data) == {str(file): 5_000}
