"""benchmarks/checker.py: the figures of finished seeds, counted by hand, and the page that shows them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

RIGHT = {  # seed -> kind -> the held-out questions that are answered right, of ten
    1: {"right": range(6), "random": range(2), "pairs": range(7)},
    2: {"right": range(4), "random": range(2, 5)},
    3: {"right": range(10)},  # its control is not done
}


@pytest.fixture
def checker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import checker

    monkeypatch.setattr(checker, "ROOT", tmp_path)
    yield checker
    del sys.modules["checker"]


def write(folder: Path, **files: Any) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        lines = content if isinstance(content, list) else [content]
        suffix = "jsonl" if isinstance(content, list) else "json"
        (folder / f"{name}.{suffix}").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def test_figures_are_counted_by_hand(checker: Any, tmp_path: Path) -> None:
    runs = tmp_path / checker.RUNS
    assert checker.figures("sums") is None
    for seed, kinds in RIGHT.items():
        for kind, right in kinds.items():
            answers = [{"scores": {"number": [float(n == 0), float(n in right)]}} for n in range(10)]
            both = {"base": {"mean": 0.5}, "tuned": {"mean": 0.25}}
            write(runs / f"sums_{seed}" / kind, eval={"general": {"rows": 240, "all": both}}, eval_answers=answers)
        passed = {key: {"mean": share} for key, share in (("1", 0.125), ("8", 0.5))}
        write(runs / f"sums_{seed}" / "rows", sample={"figures": {"rows": 30, "pass_at": passed}})
    write(runs / "sums_1" / "second", sample={"figures": {"rows": 9, "pass_at": passed}})
    seconds = [
        {"command": f"finetune eval {checker.RUNS}/{run}", "cpu_seconds": 90} for run in ("sums_1/a", "three_1/a")
    ]
    (runs / "cpu_seconds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in seconds), "utf-8")

    found = checker.figures("sums")
    assert [each["seed"] for each in found["seeds"]] == [1, 2]
    assert found["before"]["mean"] == pytest.approx(0.1)
    assert found["after"] == {
        kind: pytest.approx(share) for kind, share in (("right", 0.5), ("random", 0.25), ("pairs", 0.7))
    }
    assert found["checker"]["mean"] == pytest.approx(0.25)
    assert found["checker"]["low"] < 0.25 < found["checker"]["high"]
    assert found["gained"]["mean"] == pytest.approx(0.4)
    assert (found["pairs"]["seeds"], found["pairs"]["mean"]) == (1, pytest.approx(0.1))
    assert found["cpu_minutes"] == pytest.approx(1.5)

    page = "\n".join(checker.sections({"tasks": {"sums": found}}))
    assert "| 50% | 25% | +25 points (" in page
    assert "| 1 | 12% | 50% | 30 | 60% | 20% | 9 | 70% |" in page
    assert "| 2 | 12% | 50% | 30 | 40% | 30% | - | - |" in page
    assert "After right answers (seed 1): 60 of 240 general questions, 120 before." in page
