"""`finetune -h`: the verbs in the order of a user's way, each in one line of a terminal of 80 columns."""

from __future__ import annotations

import pytest

from finetune.cli.app import app
from finetune.cli.main import _program, main

WAY = (
    "init check preview plan list rehearse train compare status report chat eval sample merge export push launch "
    "import doctor"
).split()


@pytest.mark.parametrize("frames", [False, True])
def test_each_verb_has_one_whole_line(
    frames: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _program("", frames)(args=["-h"], prog_name="finetune", standalone_mode=False)
    text = capsys.readouterr().out
    assert ("╭" in text) is frames
    assert max(map(len, text.splitlines())) <= 80
    assert "..." not in text.replace("[ARGS]...", "")
    assert "…" not in text
    below = text.partition("Commands")[2].splitlines()[1:]
    rows = [line.strip("│")[1:] for line in below if line.strip("│╰─╯ ")]
    verbs = [row.split()[0] for row in rows if not row.startswith("   ")]
    assert len(rows) == len(verbs) == len(app.registered_commands), "a line is broken"
    assert verbs[: len(WAY)] == WAY


@pytest.mark.parametrize("verb", [command.name for command in app.registered_commands])
def test_every_verb_knows_the_short_option(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "-h"]) == 0
    short = capsys.readouterr().out
    assert main([verb, "--help"]) == 0
    assert short == capsys.readouterr().out
    assert short.startswith(f"Usage: finetune {verb} ")


def test_the_program_knows_the_short_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-h"]) == 0
    assert capsys.readouterr().out.startswith("Usage: finetune [OPTIONS] COMMAND")
