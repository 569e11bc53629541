"""`finetune init` never writes a KTO recipe whose step has one row: check would refuse it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from finetune.cli.main import main


@pytest.mark.parametrize("gpus", ["cpu", "1x24GB"])
def test_a_step_of_kto_has_two_rows(gpus: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {n}?", "completion": f"It is {n}.", "label": n % 2 == 0} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "recipe.yaml"
    assert main(["init", str(tmp_path / "rows.jsonl"), "-o", str(recipe), "--gpus", gpus]) == 0
    training = yaml.safe_load(recipe.read_text("utf-8"))["training"]
    assert training["objective"] == "kto"
    assert training["global_batch_size"] >= 2
    assert main(["check", str(recipe)]) == 0
