"""Plans of `model.load_in_fp8`: a byte a weight, what ran, and cards that have no float8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune.cli.main import main as cli
from finetune.model.known_configs import full_config
from finetune.planner import audit
from finetune.planner.plan_recipe import plan_recipe
from finetune.recipe.gpus import parse_gpus
from finetune.recipe.loader import load_recipe
from finetune.train import main as train
from tests.support.memory.closed_form_points import closed, key_of, traced
from tests.support.models.tiny import save_tiny, write_chats
from tests.support.runs.one_curve import LENGTHS, write_curve_recipe


@pytest.mark.thorough
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


@pytest.mark.parametrize("named", ["A100", "RTX3090"])
def test_a_card_without_it_is_refused(named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["plan", "recipes/llama3_1b_lora_1x8gb.yaml", "--gpus", named, "model.load_in_fp8=true"]) == 4
    assert "has no products in it" in " ".join("".join(capsys.readouterr()).split())


@pytest.mark.thorough
@pytest.mark.sample(1, thorough=2)
@pytest.mark.parametrize("named", ["H100", "80GB"])
def test_a_plans_weights_are_a_byte_each(named: str, tmp_path: Path) -> None:
    """Its two layers' weights are a byte less each, their scales 4 bytes an output."""
    base, chats = save_tiny(tmp_path / "tiny"), write_chats(tmp_path / "chats.jsonl", LENGTHS)
    config, _ = full_config(str(base), "main")

    def weights(changes: dict[str, Any]) -> int:
        halves = {"model": {"dtype": "bfloat16", **changes}, "training": {"mixed_precision": "bf16"}}
        path = write_curve_recipe(tmp_path / f"{len(changes)}", base, chats, "lora", halves)
        return plan_recipe(load_recipe(path).recipe, parse_gpus(named)).phases["load"].peak.parts["parameters"]

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = config["num_key_value_heads"] * hidden // config["num_attention_heads"]
    layer = hidden * (2 * hidden + 2 * keys + 3 * inner)
    outputs = hidden + 2 * keys + hidden + 2 * inner + hidden
    assert weights({}) - weights({"load_in_fp8": True}) == config["num_hidden_layers"] * (layer - 4 * outputs)


FLOAT8: list[tuple[Any, ...]] = [
    ("HuggingFaceTB/SmolLM2-360M", "lora fp8", ("single", "80GB", 1), 512, 1, False),
    ("meta-llama/Llama-3.2-1B", "lora fp8", ("single", "80GB", 1), 4096, 1, True),
    ("meta-llama/Llama-3.1-8B", "lora fp8", ("single", "80GB", 1), 2048, 2, False),
    ("Qwen/Qwen3-4B", "lora fp8", ("ddp", "4x80GB", 1), 2048, 2, 2),
]


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("point", FLOAT8, ids=key_of)
def test_a_base_in_float8_traced_now(point: tuple[Any, ...]) -> None:
    """Without a closed form, `auto` would recompute every layer."""
    found, expected = closed(point), traced(point)
    assert found["closed_bytes"] == pytest.approx(expected["traced_bytes"], rel=0.01)
    assert expected["traced_upper"] <= found["closed_upper"]
