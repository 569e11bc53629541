"""Every bad data file in bad_data.yaml: one error that names file and line, what is wrong, and the remedy.

A case has a name and these keys: `file`, its name (the ending decides the kind), and its content: `text`, `bytes`
(with Python's escapes), or `table` (columns, for Parquet); after a text come `repeat: {text, times}`, `then`,
`repeat_then` and `end`. `entry` and `data` add settings to the recipe, and `objective` is its training's. `family`:
tokenised with that of chat_families.py, for mistakes that only a template or a length shows. Expected: the line (`at`)
and words of the message (`says`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from finetune.data.rows import check_rows
from finetune.errors import DataError
from finetune.recipe.schema import Data, Recipe
from finetune.tokens.dataset import prepare
from tests.support.models.chat_families import tokenizer_of
from tests.support.rows.cases import cases_in

CASES = cases_in(Path(__file__).parent / "bad_data.yaml")


def write_bad_file(case: dict[str, Any], folder: Path) -> Path:
    file = folder / str(case["file"])
    if "table" in case:
        pyarrow.parquet.write_table(pyarrow.table(case["table"]), file)
        return file
    content = case["bytes"].encode().decode("unicode_escape").encode("latin-1") if "bytes" in case else b""
    content += str(case.get("text", "")).encode()
    for key in ("repeat", "then", "repeat_then", "end"):
        part = case.get(key, "")
        content += (part["text"] * part["times"] if isinstance(part, dict) else part).encode()
    file.write_bytes(content)
    return file


def mistakes_of(case: dict[str, Any], file: Path) -> tuple[str, ...]:
    builder = {"csv": "csv", "parquet": "parquet"}.get(file.suffix[1:], "json")
    entry = {"path": builder, "data_files": str(file), **case.get("entry", {})}
    data = {"train": [entry], **case.get("data", {})}
    training = {"objective": case.get("objective", "supervised")}
    recipe = Recipe.model_validate({"model": {"name_or_path": "none"}, "data": data, "training": training})
    with pytest.raises(DataError) as raised:
        prepare(recipe, tokenizer_of(case["family"])) if "family" in case else check_rows(recipe.data)
    assert raised.value.exit_code == 2
    return raised.value.mistakes


@pytest.mark.parametrize("name", CASES)
def test_bad_data(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    case = CASES[name]
    file = write_bad_file(case, tmp_path)
    mistakes = mistakes_of(case, file)
    assert len(mistakes) <= 3, mistakes
    expected = [mistake for mistake in mistakes if mistake.startswith(f"{file}:{case['at']}: ")]
    assert expected, f"none names line {case['at']}: {mistakes}"
    message = expected[0].removeprefix(f"{file}:{case['at']}: ")
    assert case["says"] in message, message
    assert "\n" not in message
    assert len(message) <= 240
    assert "; " in message, f"no remedy: {message}"
    assert not list((tmp_path / "cache").glob("tokens/*/"))


def test_the_corpus_is_large() -> None:
    assert len(CASES) >= 191


@pytest.mark.thorough
def test_the_check_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": ""}\n')
    program = (
        "import json, sys; from finetune.data.rows import check_rows; from finetune.recipe.schema import Data\n"
        f"data = Data.model_validate({{'train': [{{'path': 'json', 'data_files': {str(rows)!r}}}]}})\n"
        "try: check_rows(data)\n"
        "except Exception as error: print(json.dumps([str(error), sorted(sys.modules)]))"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    message, modules = json.loads(process.stdout)
    assert message == f"{rows}:1: text is empty; give it a text, or leave such rows out: drop: [empty]"
    heavy = {"torch", "transformers", "datasets", "tokenizers", "pyarrow", "accelerate", "peft"}
    assert not heavy & set(modules)


def test_equal_mistakes_are_one_line_with_their_places(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text('{"text": ""}\n' * 15)
    second.write_text('{"text": "good"}\n' + "{\n" * 2)
    entries = [{"path": "json", "data_files": str(file)} for file in (first, second)]
    missing = {"path": "json", "data_files": str(tmp_path / "c.jsonl")}
    data = Data.model_validate({"train": entries, "eval": [missing]})
    with pytest.raises(DataError) as raised:
        check_rows(data)
    one, two, three = raised.value.mistakes
    assert one.startswith(f"{first}:1, 2, 3 and 12 more rows: text is empty")
    assert two.startswith(f"{second}:2, 3: not JSON")
    assert three.startswith(f"{tmp_path / 'c.jsonl'}: no such file")
    recipe = Recipe.model_validate({"model": {"name_or_path": "none"}, "data": data.model_dump()})
    with pytest.raises(DataError) as prepared:
        prepare(recipe, tokenizer_of("llama3"))
    assert prepared.value.mistakes == raised.value.mistakes


def test_twenty_different_mistakes_are_named_and_the_others_counted(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join('{"text": ' + "[" * depth + "\n" for depth in range(1, 29)))
    with pytest.raises(DataError) as raised:
        check_rows(Data.model_validate({"train": [{"path": "json", "data_files": str(rows)}]}))
    *named, last = raised.value.mistakes
    assert (len(named), last) == (20, "and 8 more")
    assert named[19].startswith(f"{rows}:20: ")


def test_good_rows_are_counted(tmp_path: Path) -> None:
    """What surrounds the corpus' mistakes is right: marks, blank lines, both JSON shapes, quoted CSV."""
    (tmp_path / "mark.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b", "id": 1e5}')
    (tmp_path / "array.json").write_text('\n [ {"text": "a"} ,\n{"text": "b"}, {"text": "c"}]\n')
    (tmp_path / "rows.csv").write_bytes(b'\xef\xbb\xbftext,id\r\n"two\nlines, and ""quotes""",1\r\n')
    counts = {}
    for name, builder in (("mark.jsonl", "json"), ("array.json", "json"), ("rows.csv", "csv")):
        entry = {"path": builder, "data_files": str(tmp_path / name)}
        counts |= check_rows(Data.model_validate({"train": [entry]}))
    assert [*counts.values()] == [2, 3, 1]
