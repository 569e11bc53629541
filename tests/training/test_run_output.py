"""What rank 0 writes while a run trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.training import run_output
from finetune.training.run_output import SECONDS_BETWEEN_PAGES, RunOutput
from tests.support.runs.recipes import least_recipe


def output_in(folder: Path) -> RunOutput:
    return RunOutput(least_recipe(output_dir=str(folder)), 9)


def test_a_slow_disk_is_asked_for_the_state_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, steps = [1000.0], []

    def slow(_: Path, step: int) -> None:
        steps.append(step)
        now[0] += 0.045

    monkeypatch.setattr(run_output.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(run_output, "mark_step", slow)
    output = output_in(tmp_path)
    for step in range(1, 13):
        output.write_metrics({"kind": "train", "step": step, "loss": 1.0})
        now[0] += 1.0
    assert steps == [1, 6, 11], "a hundredth of the time at most"


def test_the_page_is_drawn_at_evaluations_and_not_again_within_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, drawn, steps = [1000.0], [], []
    monkeypatch.setattr(run_output, "mark_step", lambda _, step: steps.append(step))
    monkeypatch.setattr(run_output.time, "monotonic", lambda: now[0])
    monkeypatch.setattr("finetune.report.run_page.write_page", lambda *_: drawn.append(now[0]))
    output = output_in(tmp_path)
    for step, (seconds, kind) in enumerate([(1, "eval"), (60, "train"), (0, "eval"), (59, "eval"), (1, "eval")]):
        now[0] += seconds
        output.write_metrics({"kind": kind, "step": step, "loss": 1.0})
    assert steps == [0, 1, 3, 4], "not twice within a second"
    assert SECONDS_BETWEEN_PAGES == 60
    assert drawn == [1061.0, 1121.0]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5
