"""Which files a data entry names, and their rows."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from finetune.data.sources import Source, resolve
from finetune.errors import DataError
from finetune.recipe.schema import DataSet


def source(**entry: Any) -> Source:
    return resolve(DataSet.model_validate(entry))


def texts(data: Source) -> list[str]:
    rows = list(data.rows())
    assert not [row.problem for row in rows if row.problem]
    return [row.values["text"] for row in rows if row.values]


def write(file: Path, *words: str) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps({"text": word}) + "\n" for word in words))
    return file


def test_every_kind_of_file_says_the_same(tmp_path: Path) -> None:
    words = ["2024-01-01", "1e5", "null", "naïve 😀\nx"]  # what a data library would take for dates and numbers
    write(tmp_path / "a.jsonl", *words)
    (tmp_path / "a.json").write_text(json.dumps([{"text": word} for word in words], indent=1))
    (tmp_path / "a.csv").write_text("text\n" + "".join(f'"{word}"\n' for word in words))
    pyarrow.parquet.write_table(pyarrow.table({"text": words}), tmp_path / "a.parquet")
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as stream:
        stream.write((tmp_path / "a.jsonl").read_text())
    for name in ("a.jsonl", "a.json", "a.csv", "a.parquet", "a.jsonl.gz"):
        assert texts(source(path=str(tmp_path / name))) == words, name
    for builder, name in (("json", "a.jsonl"), ("json", "a.jsonl.gz"), ("csv", "a.csv"), ("parquet", "a.parquet")):
        assert texts(source(path=builder, data_files=str(tmp_path / name))) == words


def test_the_nulls_that_tables_fill_in_are_taken_out(tmp_path: Path) -> None:
    calls = [{"function": {"name": "a", "arguments": {"x": 1}}}, {"function": {"name": "b", "arguments": {"y": "2"}}}]
    pyarrow.parquet.write_table(pyarrow.table({"calls": [calls], "none": [None]}), tmp_path / "a.parquet")
    (row,) = source(path=str(tmp_path / "a.parquet")).rows()
    assert row.values == {"calls": calls, "none": None}


def test_a_json_array_larger_than_the_reading_window(tmp_path: Path) -> None:
    words = [("é" * 70_000) + str(index) for index in range(7)]
    file = tmp_path / "a.json"
    file.write_text(json.dumps([{"text": word} for word in words], indent=2, ensure_ascii=False))
    data = source(path="json", data_files=str(file))
    assert texts(data) == words
    assert [row.line for row in data.rows()] == [2 + 3 * index for index in range(7)]


def test_several_files_and_patterns(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", "b")
    write(tmp_path / "a.jsonl", "a")
    assert texts(source(path="json", data_files=str(tmp_path / "*.jsonl"))) == ["a", "b"]
    both = source(path="json", data_files=[str(tmp_path / "b.jsonl"), str(tmp_path / "a.jsonl")])
    assert texts(both) == ["b", "a"]
    assert [row.place for row in both.rows()] == [f"{tmp_path}/b.jsonl:1", f"{tmp_path}/a.jsonl:1"]


def test_folders(tmp_path: Path) -> None:
    write(tmp_path / "train-0.jsonl", "train")
    write(tmp_path / "test-0.jsonl", "test")
    assert texts(source(path=str(tmp_path))) == ["train"]
    assert texts(source(path=str(tmp_path), split="test")) == ["test"]
    assert texts(source(path=str(tmp_path), data_files="t*.jsonl")) == ["test", "train"]
    write(tmp_path / "other" / "x.jsonl", "x")
    assert texts(source(path=str(tmp_path / "other"))) == ["x"]


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ("train[:2]", "01"), ("train[7:]", "789"), ("train[-2:]", "89"), ("train[:-8]", "01"), ("train[3:3]", ""),
        ("train[20%:50%]", "234"), ("train", "0123456789"), ("train[8:99]", "89"),
    ],
)  # fmt: skip
def test_slices(tmp_path: Path, split: str, words: str) -> None:
    file = write(tmp_path / "a.jsonl", *"0123456789")
    assert "".join(texts(source(path=str(file), split=split))) == words


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"path": "json", "data_files": "nowhere.jsonl"}, "nowhere.jsonl: no such file"),
        ({"path": "json"}, "name the files too"),
        ({"path": "data/nowhere.jsonl"}, "no such file"),
        ({"path": "json", "data_files": "none-*.jsonl"}, "no such file"),
        ({"path": "json", "data_files": "."}, "is a folder"),
    ],
)
def test_files_that_are_not_there(entry: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        source(**entry)


def test_folders_that_do_not_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data files"):
        source(path=str(tmp_path))
    write(tmp_path / "a.jsonl", "a")
    (tmp_path / "a.csv").write_text("text\na\n")
    with pytest.raises(DataError, match="not one known kind of file"):
        source(path=str(tmp_path))
    with pytest.raises(DataError, match="split"):
        list(source(path=str(tmp_path / "a.jsonl"), split="train[a:b]").rows())


def test_data_sets_that_the_library_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hub data set goes through `datasets`; a file:// address takes its place here."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    file = write(tmp_path / "a.jsonl", "a", "b")
    data = source(path="json", data_files=f"file://{file}")
    assert data.kind == "hub"
    assert texts(data) == ["a", "b"]
    assert [row.place for row in data.rows()] == ["json:1", "json:2"]
    key = data.key()
    assert key["fingerprint"], "datasets no longer names the fingerprint of a data set"
    assert source(path="json", data_files=f"file://{file}").key() == key


def test_a_data_set_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub\nand more words")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"^nobody/nothing: cannot be loaded: Couldn't reach the Hub; check the name"):
        list(source(path="nobody/nothing").rows())
