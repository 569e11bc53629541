"""Models that are known by name: adapters on each are planned, and their weights are as many bytes as they have."""

from __future__ import annotations

import pytest

from finetune.doctor import count_weights
from finetune.model.known_configs import HUB_NAMES
from finetune.planner import candidates
from finetune.planner.plan_recipe import plan_recipe
from finetune.recipe.gpus import parse_gpus

# One of each family; of Gemma 4 one whose layers repeat and one whose layers do not.
QUICK = ("qwen3-30b-a3b",)
SLOW = """
    gemma-3-27b gemma-4-31b gemma-4-e2b phi-4 gpt-oss-20b qwen3.5-0.8b llama-4-scout-17b-16e olmo-3-7b smollm3-3b
    glm-4-9b-0414 ministral-3-3b
""".split()


@pytest.mark.slow
@pytest.mark.parametrize("stem", [*QUICK, *(pytest.param(stem, marks=pytest.mark.slow) for stem in SLOW)])
def test_weights_of_the_plan_are_those_of_the_model(stem: str) -> None:
    gpus = parse_gpus("1x300GB")
    assert gpus is not None
    recipe = candidates.adapters(candidates.for_model(HUB_NAMES[stem][0]), gpus)
    total, trained = count_weights(recipe)
    planned = plan_recipe(recipe, gpus)
    held = planned.phases["load"].end["parameters"]
    assert held == pytest.approx(2 * (total - trained) + 4 * trained, rel=1e-3)
    assert planned.phases["step"].peak.parts["optimizer state"] == pytest.approx(8 * trained, rel=1e-2)
    assert planned.needed > held
