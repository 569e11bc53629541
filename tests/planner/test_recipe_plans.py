"""Every recipe fits its own budget by its plan; docs/recipes.md shows these plans."""

from __future__ import annotations

import pytest

from finetune.closed_form.estimate import estimate, unsupported
from finetune.closed_form.recomputation import choose_recomputation, choose_reduction
from finetune.model.known_configs import full_config
from finetune.recipe.gpus import gpus_of
from finetune.recipe.loader import load_recipe
from finetune.recipe.strategy import strategy_of
from tests.support.runs.recipe_plans import NAME, on_page, plan, table, with_plan
from tests.support.runs.recipe_results import known, recipes, sha256_of

PLANNED = known(NAME)
NEAR = 0.01
# All weights on pairs: the closed form does not know that backward computes the head's logits a second time.
FURTHER = {"smollm3_3b_full_apo_fsdp2_2x80gb": 0.05}


pytestmark = pytest.mark.skipif(not PLANNED, reason="python benchmarks/plan_recipes.py has not been run")


def closed_ones() -> dict[str, int]:
    """What the recipes of which there is a closed form need by it, of those for GPUs."""
    found = {}
    for name, path in recipes().items():
        asked = load_recipe(path).recipe
        gpus, config = gpus_of(asked.budget), full_config(asked.model.name_or_path)[0]
        recipe = choose_recomputation(asked, config, gpus).recipe if gpus else asked
        if gpus is not None and unsupported(recipe, config, gpus) is None:
            kept = choose_reduction(recipe, config, strategy_of(recipe), gpus, ranks=gpus.count, memory=gpus.memory)
            keeps = kept is not None and kept.once
            found[name] = estimate(recipe, config, gpus, keeps_gradients=keeps).needed
    return found


def test_the_table_is_made_of_the_plans() -> None:
    """Else: python benchmarks/plan_recipes.py"""
    assert on_page() == table(PLANNED)


def test_no_recipe_was_changed_since_it_was_planned() -> None:
    assert {name for name, row in PLANNED.items() if row["sha256"] != sha256_of(recipes()[name])} == set()


def test_every_planned_recipe_fits_its_budget() -> None:
    assert {name for name, row in PLANNED.items() if not row["fits"]} == set()


def test_the_closed_form_agrees() -> None:
    found = {name: needed for name, needed in closed_ones().items() if name in PLANNED}
    assert len(found) >= 19, "of 39 recipes"
    off = {name: needed / PLANNED[name]["needed_bytes"] - 1 for name, needed in found.items()}
    assert {name: error for name, error in off.items() if abs(error) > FURTHER.get(name, NEAR)} == {}


def test_a_header_takes_the_plans_figures() -> None:
    row = {"needed_bytes": 12_345_000_000, "upper_bytes": 13e9, "gpu_bytes": 24e9, "phase": "step"}
    old = "# x\n# Each GPU: 9.0 GB planned of 24 (A, B; C), 9.9 reserved at most, peak in forward. Host: 1.5\n# GB.\n"
    new = old.replace("9.0 GB", "12.3 GB").replace("9.9", "13.0").replace("forward", "step")
    for end in ("# Data: 3 rows\n", "# Needs: a disk\n", "budget: {gpus: 1}\n"):
        assert with_plan(old + end, row).replace("#", "").split() == (new + end).replace("#", "").split()
        assert with_plan(with_plan(old + end, row), row) == with_plan(old + end, row)
    assert with_plan("# x\n#   needs: little\na: 1\n", row) == "# x\n#   needs: little\na: 1\n"
    with pytest.raises(AssertionError, match=r"write 12\.3 GB planned, peak in step"):
        with_plan("# GPU: about 9 GB\na: 1\n", row)


QUICK = ("llama3_3b_lora_gsm8k_1x24gb", "llama3_8b_lora_1x80gb")  # two CPU seconds each


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.thorough if name in QUICK else pytest.mark.slow) for name in recipes()],
)
def test_a_recipe_planned_now(name: str) -> None:
    """The record is of a recipe that did not change; the planner may have. The first tier has the closed form."""
    assert plan(recipes()[name])["needed_bytes"] == pytest.approx(PLANNED[name]["needed_bytes"], rel=0.001)
