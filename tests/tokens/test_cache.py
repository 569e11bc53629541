"""The cache of tokenised data: found again, made again when anything differs, safe for processes and crashes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune.data.sources import resolve
from finetune.errors import EnvironmentMismatch
from finetune.files import cache_folder
from finetune.recipe.schema import Data
from finetune.tokens import cache
from finetune.tokens.cache import VERSION, ArrayWriter, StoredDocuments, read_array, stored_documents
from finetune.tokens.encoder import IGNORE, Encoder
from tests.support.models.chat_families import LLAMA3, tokenizer_of
from tests.support.rows.masks import encoded

ROWS = [
    {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"answer {n}"}]}
    for n in range(9)
]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that are built, as they are built."""
    built: list[Path] = []
    build = cache._build

    def counted(folder: Path, *arguments: Any) -> None:
        built.append(folder)
        build(folder, *arguments)

    monkeypatch.setattr(cache, "_build", counted)
    return built


def store(file: Path, family: str = "llama3", **settings: Any) -> tuple[str, StoredDocuments]:
    entry = {"path": "json", "data_files": str(file)} | settings.pop("entry", {})
    data = Data.model_validate({"train": [entry], "max_length": 256, **settings})
    keys, stored = stored_documents(resolve(data.train[0]), data, Encoder(tokenizer_of(family), data))
    return keys[VERSION], stored


def test_what_is_stored_is_what_was_encoded(rows: Path) -> None:
    _, stored = store(rows)
    encoder = Encoder(tokenizer_of("llama3"), Data.model_validate({"train": [{"path": "x"}]}))
    assert len(stored) == len(ROWS)
    for index, row in enumerate(ROWS):
        document = encoded(encoder, row, "messages")
        ((ids, labels),) = stored.documents(index)
        assert ids.tolist() == document.input_ids
        assert labels.tolist() == document.labels
        assert stored.supervised[index] == sum(label != IGNORE for label in document.labels)
        assert stored.place(index) == f"{rows}:{index + 1}"
    assert isinstance(stored.tokens, np.memmap)


def test_the_second_time_nothing_is_tokenised(rows: Path, builds: list[Path]) -> None:
    first, second = store(rows), store(rows)
    assert first[0] == second[0]
    assert len(builds) == 1
    moved = shutil.copy(rows, rows.with_name("other.jsonl"))
    key, stored = store(Path(moved))
    assert key == first[0]
    assert stored.place(0) == f"{moved}:1"
    assert len(builds) == 1


def test_the_address_covers_everything_that_tokens_follow_from(rows: Path, builds: list[Path]) -> None:
    keys = [store(rows)[0]]
    different: list[dict[str, Any]] = [
        {"family": "llama31"}, {"family": "qwen"}, {"chat_template": LLAMA3 + "!"}, {"train_on": "all"},
        {"truncation": "drop"}, {"max_length": 255}, {"date_string": "1 May 2020"},
        {"entry": {"format": "messages"}}, {"entry": {"columns": {"messages": "messages"}}},
        {"entry": {"roles": {"narrator": "user"}}}, {"entry": {"chat_template_kwargs": {"bos_token": "x"}}},
    ]  # fmt: skip
    keys += [store(rows, **settings)[0] for settings in different]
    rows.write_text(rows.read_text().replace("q3", "q4"))
    keys.append(store(rows)[0])
    assert len(set(keys)) == len(keys) == len(builds)
    assert store(rows, packing=False)[0] == keys[-1]  # packing is laid over the tokens, it does not change them


def test_an_edited_template_file_makes_other_tokens(rows: Path, builds: list[Path], tmp_path: Path) -> None:
    """The file keeps its name; another one of the same text makes the same."""
    mine = tmp_path / "mine.jinja"
    mine.write_text(LLAMA3)
    key, documents = store(rows, chat_template=str(mine))
    mine.write_text(LLAMA3.replace("<|end_header_id|>", "<|end_header_id|>!"))
    edited_key, edited = store(rows, chat_template=str(mine))
    assert edited_key != key
    assert len(edited.tokens) > len(documents.tokens)
    mine.write_text(LLAMA3)
    assert store(rows, chat_template=str(mine))[0] == key
    assert len(builds) == 2


def test_what_is_told_of_the_rows_is_told_from_the_cache_too(rows: Path, builds: list[Path]) -> None:
    more = {"role": "user", "id": 7, "content": "?"}
    told = [{"source": "x", "messages": [*row["messages"], more]} for row in ROWS]
    rows.write_text("".join(json.dumps(row) + "\n" for row in told))
    expected = {
        "read_as": None, "unused_columns": ["source"], "unused_message_keys": ["id"], "unanswered": 9,
            "read_only": 0, "with_tools": 0, "odd_calls": {}, "systems": [""],
        "run_together": 0, "written_tokens": [0, ""], "begins_of_text": [0, ""], "encoded_twice": [0, "", ""],
        "dropped": {}, "dialect": "", "remarks": [], "told": {},
    }  # fmt: skip
    assert [store(rows)[1].facts["rows"] for _ in range(2)] == [expected] * 2
    assert len(builds) == 1
    # A template that reads the key uses it.
    reading = LLAMA3.replace("m['content']", "(m.id | string if m.id else '') + m['content']")
    assert store(rows, chat_template=reading)[1].facts["rows"]["unused_message_keys"] == []


FACTS = {"facts": "{", "deep": "[" * 100_000, "list": "[1]", "number": "7", "empty": "{}", "null": "null",
         "true": "true", "no digest": '{"value": {}}', "text": '"digest"', "long": "1" * 5000}  # fmt: skip
HEADERS = {"dtype": (b"<i4", b"<f4"), "wider": (b"<i4", b"<i8"), "order": (b"False", b"True "), "length": (b"(", b"(1")}


@pytest.mark.sample(6, thorough=22)
@pytest.mark.parametrize(
    "damage", ["cut", "flip", "missing", "empty_folder", "file", "pipe", "pipe of facts", "link", *FACTS, *HEADERS]
)
def test_a_damaged_cache_is_made_again(
    rows: Path, builds: list[Path], damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    key, stored = store(rows)
    tokens = stored.tokens.tolist()
    del stored
    folder = cache_folder() / "tokens" / key
    file = folder / "tokens.npy"
    content = bytearray(file.read_bytes())
    match damage:
        case "cut":
            file.write_bytes(content[:-4])
        case "flip":
            content[200] ^= 1
            file.write_bytes(content)
        case "missing":
            (folder / "learned.npy").unlink()
        case "empty_folder":
            shutil.rmtree(folder)
            folder.mkdir()
        case "file":
            shutil.rmtree(folder)
            folder.write_text("not a folder")
        case "pipe":
            file.unlink()
            os.mkfifo(file)
        case "pipe of facts":
            (folder / "facts.json").unlink()
            os.mkfifo(folder / "facts.json")
        case "link":
            shutil.rmtree(folder)
            folder.symlink_to(folder / "itself")
        case _ if damage in FACTS:
            (folder / "facts.json").write_text(FACTS[damage])
        case _:
            before, after = HEADERS[damage]
            assert before in content[:128]
            file.write_bytes(content[:128].replace(before, after)[:128] + content[128:])
    capsys.readouterr()
    assert store(rows)[1].tokens.tolist() == tokens
    assert len(builds) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) <= 1
    assert all("made again" in line or "tokenised again" in line for line in said)
    assert said or damage in ("empty_folder", "file", "link")  # as if nothing had been there


def test_what_a_killed_process_left_is_no_hindrance(rows: Path, builds: list[Path]) -> None:
    key, _ = store(rows)
    folder = cache_folder() / "tokens" / key
    folder.rename(folder.with_suffix(".partial"))
    assert len(store(rows)[1]) == len(ROWS)
    assert len(builds) == 2
    assert sorted(path.suffix for path in folder.parent.iterdir()) == ["", ".lock"]


def test_a_cache_that_cannot_be_written(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(rows))  # a file
    with pytest.raises(EnvironmentMismatch, match="set FINETUNE_CACHE") as raised:
        store(rows)
    assert raised.value.exit_code == 4


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_arrays_of_any_length_read_back(tmp_path: Path, count: int) -> None:
    writer = ArrayWriter(tmp_path / "a.npy", "<i8")
    for value in range(count):
        writer.append(value)
    digest = writer.close()
    assert read_array(tmp_path / "a.npy", digest).tolist() == list(range(count))
    assert np.load(tmp_path / "a.npy").dtype == np.int64
    with pytest.raises(ValueError, match="is not what was written"):
        read_array(tmp_path / "a.npy", "0" * 32)


@pytest.mark.slow
def test_processes_that_prepare_at_once_build_once(rows: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from tests.tokens import test_cache as t; from finetune.tokens import cache\n"
        "build = cache._build\n"
        "def counted(*arguments):\n    print('built'); build(*arguments)\n"
        "cache._build = counted\n"
        "print(t.store(Path(sys.argv[1]))[1].tokens.sum())"
    )
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    running = [
        subprocess.Popen([sys.executable, "-c", program, str(rows)], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=120)[0].split() for process in running]
    assert sum(words.count("built") for words in outputs) == 1
    assert len({words[-1] for words in outputs}) == 1
