"""With --json, a mistake in the command line is one JSON object with the exit code that the text has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.cli.main import main

RECIPE = str(Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml")


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["check"], "name a recipe"),
        (["check", RECIPE, "--no-such-option"], "--no-such-option"),
        (["compare", RECIPE, "--steps", "none"], "--steps"),
        (["chat", "runs/x"], "--json needs --prompt"),
        (["export", "runs/x", "--for", "nobody"], "nobody is not one of transformers"),
        (["export", "runs/x"], "runs/x"),  # a mistake that the verb finds
        (["chekc"], "chekc"),
        (["train", RECIPE], "--json"),  # has no such option
    ],
    ids=lambda value: " ".join(value[:1]) if isinstance(value, list) else "",
)
def test_the_same_mistake_in_both_forms(
    words: list[str], names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main([*words, "--json"])
    output = capsys.readouterr()
    result = json.loads(output.out)
    assert (result["ok"], result["exit_code"]) == (False, code)
    assert names in " ".join(result["mistakes"])
    assert "Usage:" not in output.err
    if words[0] not in ("train", "chat"):  # without --json, these two are no mistake, or another one
        assert main(words) == code
        assert capsys.readouterr().out == ""


def test_what_is_right_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", RECIPE, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    assert main(["check", "--help", "--json"]) == 0
    assert "Usage:" in capsys.readouterr().out


def test_the_process_ends_with_the_code() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "finetune.cli.main", "check", "--json"], capture_output=True, text=True
    )
    assert process.returncode == 2
    assert json.loads(process.stdout)["mistakes"]
