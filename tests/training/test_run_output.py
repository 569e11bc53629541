"""What rank 0 writes while a run trains."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune.training import run_output
from finetune.training.run_output import SECONDS_BETWEEN_PAGES, RunOutput
from tests.support.recipes import least_recipe


def test_the_page_is_drawn_at_evaluations_and_not_again_within_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, drawn = [1000.0], []
    monkeypatch.setattr(run_output.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(run_output, "write_page", lambda *_: drawn.append(now[0]))
    start: Any = SimpleNamespace(
        plan=SimpleNamespace(total_steps=9),
        launch=SimpleNamespace(is_main=True),
        run_dir=tmp_path,
        writes=True,
        recipe=least_recipe(output_dir=str(tmp_path)),
    )
    output = RunOutput(start)
    for seconds, kind in [(1, "eval"), (60, "train"), (0, "eval"), (59, "eval"), (1, "eval")]:
        now[0] += seconds
        output.write_metrics({"kind": kind, "step": 1, "loss": 1.0})
    assert SECONDS_BETWEEN_PAGES == 60
    assert drawn == [1061.0, 1121.0]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5
