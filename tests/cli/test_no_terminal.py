"""In a file or a pipe no line is broken and nothing is framed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.cli.main import main
from tests.support.models.tiny import write_chats
from tests.support.runs.recipes import least, write_recipe


def test_a_wrong_option_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    value = "nobody-that-is-known-anywhere-in-this-world-of-long-names-and-words"
    assert main(["chat", "run", "--who", value]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert f"Error: Invalid value for --who: {value} is not one of base, tuned, both" in lines
    assert not [line for line in lines if set(line) & set("╭│╰─")]


def test_a_preview_breaks_no_line(tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", [120] * 3)
    content = least(tiny_llama, data={"train": [{"path": "json", "data_files": str(chats)}], "max_length": 128})
    recipe = str(write_recipe(tmp_path, content))
    answer = json.loads(chats.read_text("utf-8").splitlines()[0])["messages"][1]["content"]
    assert len(answer) > 200
    assert main(["preview", recipe, "-n", "1"]) == 0
    out, error = capsys.readouterr()
    assert error.startswith("reading and tokenising the rows\n")  # at once: the libraries' imports take seconds
    assert answer in out
    assert max(map(len, out.splitlines())) > 200
