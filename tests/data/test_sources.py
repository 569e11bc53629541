"""Which files a data entry names, and their rows."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from datasets import ReadInstruction
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.sources import Source, read_split, resolve
from finetune.errors import DataError
from finetune.recipe.schema import DataSet


def source(**entry: Any) -> Source:
    return resolve(DataSet.model_validate(entry))


def texts(data: Source) -> list[str]:
    rows = list(data.rows())
    assert not [row.problem for row in rows if row.problem]
    return [row.values["text"] for row in rows if row.values]


def write(file: Path, *words: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
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
    (tmp_path / "SHOUTED.CSV").write_bytes((tmp_path / "a.csv").read_bytes())
    for name in ("a.jsonl", "a.json", "a.csv", "a.parquet", "a.jsonl.gz", "SHOUTED.CSV"):
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
    ("suffix", "entry"), [(".jsonl", {}), (".txt", {}), (".txt", {"path": "text", "data_files": ...})]
)
def test_hidden_files_are_left_out_and_counted(suffix: str, entry: dict[str, Any], tmp_path: Path) -> None:
    (folder := tmp_path / ".home" / "rows").mkdir(parents=True)  # a hidden folder above is the user's choice
    for name in ("x", "y", ".ipynb_checkpoints/x-checkpoint", ".draft"):
        (folder / name).parent.mkdir(exist_ok=True)
        write((folder / name).with_name(Path(name).name + suffix), name)
    (folder / ".DS_Store").write_bytes(b"\0")
    named = source(
        **{"path": str(folder)} | {key: value if key == "path" else str(folder) for key, value in entry.items()}
    )
    assert len(texts(named)) == 2
    assert named.notes == {"hidden files (names that begin with a dot), left out": 2}


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
    ("split", "words"),
    [("train[:2]+train[-1:]", "write each part as a data set of its own"), ("train[:150%]", "a share above 100 %"),
     ("train[-101%:]", "a share above 100 %")],
)  # fmt: skip
def test_slices_that_are_none(split: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        read_split(split)


BOUNDS = st.none() | st.integers(-100, 100).map(lambda share: f"{share}%") | st.integers(-100, 100).map(str)


def check_share(part: str, rows: int) -> None:
    (theirs,) = ReadInstruction.from_spec(f"train{part}").to_absolute({"train": rows})
    first, last = read_split(f"train{part}").bounds(rows)
    assert range(first, last) == range(theirs.from_ or 0, rows if theirs.to is None else theirs.to)


@pytest.mark.parametrize("part", ["[:33%]", "[66%:]", "[:1%]", "[-33%:]", "[12%:-3%]", "[-1:]"])
def test_a_share_takes_the_rows_that_datasets_takes(part: str) -> None:
    check_share(part, 150)


@settings(max_examples=50, deadline=None)
@given(first=BOUNDS, last=BOUNDS, rows=st.integers(300, 1500))
def test_every_share_does(first: str | None, last: str | None, rows: int) -> None:
    part = f"[{first or ''}:{last or ''}]"
    ours = read_split(f"train{part}").bounds(rows)
    if ours[0] < ours[1]:  # datasets has other bounds for nothing
        check_share(part, rows)


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


@pytest.mark.parametrize(
    ("files", "splits"),
    [
        # as the Hub's own names
        (["data/train_sft-00000-of-00002.jsonl", "data/train_sft-00001-of-00002.jsonl",
          "data/test_sft-00000-of-00001.jsonl"], {"train_sft": 2, "test_sft": 1}),
        (["dev.jsonl", "train1.jsonl", "train2.jsonl"], {"train": 2, "validation": 1, "dev": 1}),
        (["eval/a.jsonl", "training/a.jsonl", "training/b.jsonl"], {"train": 2, "test": 1}),
        (["a.jsonl", "contrained.jsonl"], {"train": 2, "a": 1}),
    ],
)  # fmt: skip
def test_the_split_chooses_the_files_of_a_folder(tmp_path: Path, files: list[str], splits: dict[str, int]) -> None:
    for name in files:
        write(tmp_path / name, name)
    for split, count in splits.items():
        assert len(texts(source(path=str(tmp_path), split=split))) == count, split
        assert len(texts(source(path=str(tmp_path), split=f"{split}[:1]"))) == 1, split
    with pytest.raises(DataError, match="there is no split 'trian', but ") as raised:
        source(path=str(tmp_path), split="trian")
    assert raised.value.exit_code == 2
    known = [split for split in splits if split not in ("dev", "a")]
    assert all(split in str(raised.value) for split in known)


def test_rows_to_test_on_are_not_trained_on(tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", "test")
    with pytest.raises(DataError, match="there is no split 'train', but test; write split: test"):
        source(path=str(tmp_path))


@pytest.mark.parametrize("split", ["trian", "validation", "train_sft", "trian[:10]"])
def test_a_split_that_named_files_do_not_have_is_refused(tmp_path: Path, split: str) -> None:
    file, name = write(tmp_path / "a.jsonl", "a"), split.split("[")[0]
    for entry in ({"path": str(file)}, {"path": "json", "data_files": str(file)}):
        with pytest.raises(DataError, match=f"a.jsonl: there is no split '{name}', but train; write split: train"):
            source(**entry, split=split)
    with pytest.raises(DataError, match=f"there is no split '{name}', but train; write split: train"):
        source(path=str(tmp_path), data_files="a.jsonl", split=split)


def test_files_named_after_a_split_are_it(tmp_path: Path) -> None:
    file = write(tmp_path / "valid-2.jsonl", "a")
    for split in ("train", "validation", "valid", "validation[:1]"):
        assert texts(source(path="json", data_files=str(file), split=split)) == ["a"]
    with pytest.raises(DataError, match="there is no split 'test', but train, validation; write split: train"):
        source(path="json", data_files=str(file), split="test")


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


def test_the_library_is_asked_for_what_the_recipe_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(*names: Any, **more: Any) -> list[dict[str, str]]:
        asked.append((names, more))
        return [{"text": "a"}]

    monkeypatch.setattr("datasets.load_dataset", load)
    data = source(path="owner/set", name="main", data_files="a/*.csv", split="test_sft[:9]", revision="v2")
    assert texts(data) == ["a"]
    more = {"data_files": "a/*.csv", "split": "test_sft[:9]", "revision": "v2"}
    assert asked == [(("owner/set", "main"), more)]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("Config name is missing.\nPlease pick one among the available configs: ['main', 'socratic']\nExample:",
         "openai/x: name: its configurations are main, socratic; add name: main"),
        ("BuilderConfig 'maine' not found. Available: ['main', 'socratic']",
         "openai/x: name: its configurations are main, socratic; add name: main"),
        ("Unknown split \"trian\". Should be one of ['train_sft', 'test_sft'].",
         "openai/x: split: there is no split 'trian', but train_sft, test_sft; write one of them"),
    ],
)  # fmt: skip
def test_what_the_library_names_is_passed_on(words: str, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise ValueError(words)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(DataError) as raised:
        list(source(path="openai/x", split="trian").rows())
    assert raised.value.mistakes == (answer,)


def test_the_libraries_words_for_a_split_are_those(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    file = write(tmp_path / "a.jsonl", "a")
    with pytest.raises(DataError, match="there is no split 'trian', but train; write one of them"):
        list(source(path="json", data_files=f"file://{file}", split="trian").rows())


def test_a_data_set_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub\nand more words")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"^nobody/nothing: cannot be loaded: Couldn't reach the Hub; check the name"):
        list(source(path="nobody/nothing").rows())


def test_a_row_that_the_library_cannot_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield {"text": "a"}
        raise ImportError("To support decoding images, please install 'Pillow'.")

    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: rows())
    first, second = source(path="owner/pictures").rows()
    assert (first.values, first.problem) == ({"text": "a"}, None)
    assert second.place == "owner/pictures:2"
    assert second.problem == (
        "cannot be read: To support decoding images, please install 'Pillow'; check the data set, and the network"
    )
