"""A user's own scorer: a failure costs one answer at most, and `eval` and `sample` call it in the same child."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.answers.own_scorer import OwnScorer
from finetune.cli.main import main
from finetune.scoring.metrics import Metric, Scored, Unread, scores_of
from tests.support.models.tiny import save_tiny
from tests.support.runs.sampling import sampled_run

# A dataclass looks its module up, and a helper lies beside the file.
SCORER = """from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar
from helper import same

@dataclass
class Verdict:
    count: ClassVar[int] = 0
    right: bool = False

def score(answer, reference, row):
    exec(row.pop("code"))
    return Verdict(same(answer, reference)).right

def on_words(answer, reference, row):
    if answer != reference:
        raise GeneratorExit
    return 1

def seven(answer, reference, row):
    return 7
"""
BAD_TEXT = "raise type('E', (Exception,), {'__str__': lambda self: 1 / 0})"
CODES = {  # what the function does, and what is said; "" is a score
    "pass": "",
    "raise KeyError('nope')": "the function raised KeyError: 'nope'",
    "raise ValueError('x' * 10**6)": "the function raised ValueError: xxx",
    "raise GeneratorExit": "the function raised GeneratorExit",
    "raise KeyboardInterrupt": "the function raised KeyboardInterrupt",
    BAD_TEXT: "the function raised ZeroDivisionError",
    "import sys; sys.exit(0)": "the function raised SystemExit",
    "import os; os._exit(0)": "ended its process (0)",
    "import os; os.kill(os.getpid(), 11)": "ended its process (SIGSEGV)",
    "while True: pass": "took more than 0.5 s",
    "import os; os.fork()": "",
    "import os; os.fork() or sys.exit(3)": "",
    "print('\\x1b[31mred\\x1b]0;title\\x07')": "",
}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "json.py").write_text("raise SystemExit('of the working folder')\n", "utf-8")
    (tmp_path / "mine/json.py").write_text("raise SystemExit('beside the scorer')\n", "utf-8")
    (tmp_path / "mine/helper.py").write_text("def same(a, b):\n    return a == b\n", "utf-8")
    (tmp_path / "mine/own.py").write_text(SCORER, "utf-8")
    return tmp_path / "mine/own.py"


def test_whatever_it_does_costs_one_answer(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = [Scored("yes", f"rows:{number}", {"code": code}) for number, code in enumerate(CODES)]
    with OwnScorer(f"{file}:score", seconds=0.5) as own:
        metric = Metric(own.name, function=own.score)
        scores = scores_of(metric, ["<think>no</think>yes"] * len(items), items)
        assert scores_of(metric, ["yes"], items[:1]) == [1.0]  # its row was a copy
        file.write_text("raise KeyError\n", "utf-8")  # changed meanwhile, and the child is lost
        exits = [item for item in items if "_exit" in item.row["code"]]
        _, changed = (scores_of(metric, ["yes"], exits)[0] for _ in range(2))
        assert isinstance(changed, Unread)
        assert "the file fails: KeyError" in changed.why
    for score, said in zip(scores, CODES.values(), strict=True):
        assert (score.why.startswith(said) and len(score.why) <= 300) if isinstance(score, Unread) else said == ""
        assert float(score) == float(said == "")
    printed = capsys.readouterr().err
    assert "[31mred" in printed
    assert "\x1b" not in printed


def test_eval_counts_answers_on_which_it_fails(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused if it fails on a reference, before anything is generated."""
    run = sampled_run(tmp_path / "made", save_tiny(tmp_path / "base"))
    asked = ["eval", str(run), "--limit", "2", "--max-new-tokens", "2", "--scorer"]
    assert main([*asked, f"{file}:on_words", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["scores"]["metrics"]["on_words"]
    assert figures["unread"]["tuned"]["count"] == 2
    assert figures["unread"]["tuned"]["why"] == "the function raised GeneratorExit"
    assert (run / "eval_answers.jsonl").is_file()
    for more, said in (
        ([f"{file}:seven"], ": metric seven: its reference as an answer: the function returned 7; return a number"),
        ([f"{file}:seven", "--metric", "exact", "--metric", "exact"], "--metric: exact is named twice"),
        ([f"{file}:seven", "--scorer-seconds", "nan"], "--scorer-seconds nan: write seconds above 0"),
        ([f"{file}:seven", "--loss-only"], "--loss-only: generates no answers"),
        ([f"{file}"], "write a file and a function in it, as my_metric.py:score"),
        ([f"{file}:nope"], "has no function nope"),
        (["other.py:score"], "no such file"),
        (["json.py:score"], "the file fails: SystemExit: of the working folder"),
    ):
        assert main([*asked, *more]) == 2
        error = capsys.readouterr().err
        assert said in " ".join(error.split()), error
