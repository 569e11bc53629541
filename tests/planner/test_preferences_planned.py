"""Plans of preference runs equal the bytes that their worst step tracked, in eight configurations on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune.planner import audit
from finetune.train import main as train
from tests.support.runs.preferences import preference_recipe, write_base

ADAPTERS: dict[str, Any] = {"lora": {"r": 4, "target_modules": "all-linear"}}
TWO = {"training": {"per_device_batch_size": 2}}
CONFIGURATIONS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "dpo": ("dpo", []),
    "dpo, lora": ("dpo", [ADAPTERS]),
    "dpo, not packed": ("dpo", [{"data": {"packing": False}}]),
    "dpo, two pairs, recomputed": ("dpo", [TWO, {"training": {"activation_checkpointing": True}}]),
    "simpo, lora, two pairs": ("dpo", [ADAPTERS, TWO, {"dpo": {"loss_type": "simpo"}}]),
    "dpo, padded": ("dpo", [{"model": {"attention": "sdpa"}, "data": {"packing": False}}]),
    "kto": ("kto", []),
    "kto, lora, two answers": ("kto", [ADAPTERS, TWO]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_plan_is_what_ran(name: str, tmp_path: Path) -> None:
    kind, changes = CONFIGURATIONS[name]
    base = write_base(tmp_path / "base")
    assert train([str(preference_recipe(tmp_path / "training", base, kind, *changes))]) == 0
    result, _ = audit([tmp_path / "training" / "run"], print)
    rows = [row for row in result["rows"] if row["phase"] != "load"]
    assert {row["phase"] for row in rows} == {"forward", "backward", "step"}
    for row in rows:
        assert row["planned_bytes"] == row["measured_bytes"], row["phase"]
