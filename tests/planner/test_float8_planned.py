"""Plans of `model.load_in_fp8`: a byte a weight, what ran, and cards that have no float8."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.cli.main import main as cli
from finetune.planner import audit
from finetune.planner.plan_recipe import plan_recipe
from finetune.recipe.gpus import parse_gpus
from finetune.recipe.loader import load_recipe
from finetune.train import main as train
from tests.support.models.tiny import save_tiny, write_chats
from tests.support.runs.one_curve import LENGTHS, write_curve_recipe


@pytest.mark.sample(1)
@pytest.mark.parametrize("recomputed", [False, True])
def test_the_plan_is_what_ran(recomputed: bool, tmp_path: Path) -> None:
    base, chats = save_tiny(tmp_path / "tiny"), write_chats(tmp_path / "chats.jsonl", LENGTHS)
    changes = {"model": {"load_in_fp8": True}, "training": {"activation_checkpointing": recomputed}}
    assert train([str(write_curve_recipe(tmp_path / "here", base, chats, "lora", changes))]) == 0
    result, _ = audit([tmp_path / "here" / "run"], print)
    rows = {row["phase"]: row for row in result["rows"]}
    for phase in ("forward", "backward", "step"):
        assert rows[phase]["planned_bytes"] == rows[phase]["measured_bytes"], phase


@pytest.mark.parametrize(("named", "right"), [("A100", False), ("RTX3090", False), ("H100", True), ("80GB", True)])
def test_plan_knows_which_cards_have_it(named: str, right: bool, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "recipes/llama3_1b_lora_1x8gb.yaml", "--gpus", named, "model.load_in_fp8=true"]
    code = cli(asked)
    told = " ".join("".join(capsys.readouterr()).split())
    assert ("has no products in it" in told) is not right
    assert (code == 0) is right, told


def test_a_plans_weights_are_a_byte_each() -> None:
    """Its 16 layers' 973 M weights are a byte less each, their scales 4 bytes an output."""

    def weights(*changes: str) -> int:
        recipe = load_recipe("recipes/llama3_1b_lora_1x8gb.yaml", changes).recipe
        parts = plan_recipe(recipe, parse_gpus("H100")).phases["load"].peak.parts
        return parts["parameters"]

    layer = 2048 * (2 * 2048 + 2 * 512 + 3 * 8192)
    outputs = 2048 + 512 + 512 + 2048 + 8192 + 8192 + 2048
    assert weights() - weights("model.load_in_fp8=true") == 16 * (layer - 4 * outputs)
