"""Plans of a new adapter over a frozen one (`lora.on_top`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.cli.main import main as cli
from finetune.planner import audit
from finetune.train import main as train
from tests.support.models.tiny import save_tiny
from tests.training.test_on_top import on_top, trained


@pytest.mark.slow
@pytest.mark.parametrize("rank", [2, 16])
def test_the_plan_is_what_ran(rank: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = save_tiny(tmp_path / "tiny")
    below = trained(tmp_path / "first", base, {"lora": {"r": rank}})
    recipe = on_top(tmp_path / "second", base, below)
    assert train([str(recipe)]) == 0
    result, _ = audit([tmp_path / "second" / "run"], print)
    rows = [row for row in result["rows"] if row["phase"] != "load"]
    assert {row["phase"] for row in rows} == {"forward", "backward", "step"}
    for row in rows:
        assert row["planned_bytes"] == row["measured_bytes"], row["phase"]
    capsys.readouterr()
    assert cli(["plan", str(recipe), "--details"]) == 0
    assert f"{below} is frozen, in memory beside the new adapter" in " ".join(capsys.readouterr().out.split())
