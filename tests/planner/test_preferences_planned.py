"""Plans of preference runs equal the bytes that their worst step tracked, in eight configurations on a CPU. Picked
recipes stay what they were: preference recipes, with rates of preferences and pairs of two answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.errors import DoesNotFit
from finetune.model.known_configs import full_config
from finetune.planner import audit
from finetune.planner.candidates import (
    TOKENS_AT_ONCE,
    by_plans,
    candidates,
    commented,
    fitting_recipes,
    for_recipe,
    variant_in_words,
)
from finetune.planner.remedies import smaller_variants
from finetune.recipe.gpus import parse_gpus
from finetune.recipe.loader import load_recipe
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


RECIPES = Path(__file__).parents[2] / "recipes"
ADAPTERS_RATE = 5e-6  # the alignment-handbook's, of 7B
SHIPPED = sorted(path.stem for path in RECIPES.glob("*.yaml") if "objective:" in path.read_text("utf-8"))


@pytest.mark.parametrize("name", SHIPPED)
def test_a_pick_of_a_preference_recipe(name: str, tmp_path: Path) -> None:
    """By the closed form, on two GPUs on which each recipe fits."""
    assert len(SHIPPED) >= 5
    mine, gpus = load_recipe(RECIPES / f"{name}.yaml").recipe, parse_gpus("2x80GB")
    assert gpus is not None
    wanted = for_recipe(mine)
    found = list(candidates(wanted, gpus))
    assert len(found) > 10
    for recipe in found:
        rows = recipe.training.per_device_batch_size
        assert rows == 1 or rows * recipe.data.row_tokens <= TOKENS_AT_ONCE
        kept = (recipe.lora is None) == (mine.lora is None)
        assert recipe.training.learning_rate == (mine.training.learning_rate if kept else ADAPTERS_RATE)
    try:
        (best, *_), _ = fitting_recipes(wanted, full_config(mine.model.name_or_path)[0], gpus)
    except DoesNotFit:  # the closed form knows no dropout
        best = by_plans(wanted, gpus, lambda recipe: True)
    assert best is not None
    at_once = best.training.per_device_batch_size * best.data.row_tokens
    assert best.training.per_device_batch_size == 1 or at_once <= TOKENS_AT_ONCE
    file = tmp_path / "picked.yaml"
    file.write_text(commented(best, 1, gpus), "utf-8")
    picked = load_recipe(file).recipe
    assert (picked.training.objective, picked.data) == (mine.training.objective, mine.data)
    assert (picked.dpo, picked.kto, picked.model.adapter) == (mine.dpo, mine.kto, mine.model.adapter)
    rows, tokens = picked.training.per_device_batch_size, mine.data.max_length
    counted = "judged answer" if mine.training.objective == "kto" else "pair"
    tokens *= 1 if mine.training.objective == "kto" else 2
    assert f", {rows} {counted}{'s' * (rows > 1)} x {tokens:,} tokens, " in variant_in_words(picked)


def test_a_picked_recipe_keeps_its_header_and_no_defaults() -> None:
    mine, gpus = load_recipe(RECIPES / "llama3_8b_lora_1x24gb.yaml").recipe, parse_gpus("H100")
    assert gpus is not None
    picked = next(candidates(for_recipe(mine.model_validate(mine.model_dump())), gpus))  # each key is set
    text = commented(picked, 1, gpus, start="# Made by a tool.\n# Left out: x\nmodel: {}\n# later\n")
    assert text.splitlines()[3:6] == ["# Its recipe began:", "# Made by a tool.", "# Left out: x"]
    assert "# later" not in text
    assert "budget: {gpus: 1, gpu_memory_gb: 84.6, nodes: 1}\n" in text
    assert picked.budget.gpu_memory_gb * 1e9 <= gpus.memory
    assert not {"timeout_seconds", "hub", "kto", "samples"} & yaml.safe_load(text).keys()
    assert "# Its recipe began" not in commented(picked, 1, gpus, start="model: {}\n")


def test_adapters_as_a_remedy_have_a_rate_of_preferences() -> None:
    recipe, gpus = load_recipe(RECIPES / "smollm3_3b_full_apo_fsdp2_2x80gb.yaml").recipe, parse_gpus("2x24GB")
    assert gpus is not None
    found = [each.recipe for each in smaller_variants(recipe, gpus, None) if each.recipe.lora]
    assert {each.training.learning_rate for each in found} == {ADAPTERS_RATE}
