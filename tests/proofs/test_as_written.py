"""Every recipe as it is written trains: a rate at each step, a held-out loss that falls, no tensor left as it was.

Only the model is a tiny one and the data are the loopback Hub's: tests/support/runs/as_written.py. All recipes take
half an hour, so benchmarks/train_recipes.py keeps a record of them, which is held to the recipes' text; four are
trained here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.recipe.loader import load_recipe
from tests.support.hub.data_sets import DATA_SETS
from tests.support.runs.as_written import NEEDED, train_as_written
from tests.support.runs.recipe_results import RESULTS, recipes, sha256_of

COUNT = 61
SAMPLE = ["llama3_fsdp", "llama3_zero3", "qwen3_8b_lora_sql_1x24gb", "smollm2_1.7b_full_text_1x48gb"]
SAMPLE_STEPS = 3
AGAIN = "run python benchmarks/train_recipes.py"


def is_a_training(name: str, row: dict[str, Any]) -> None:
    """What must be so of each recipe, from the figures and not from the record's own verdict."""
    recipe = load_recipe(recipes()[name]).recipe
    assert row["ok"], f"{name}: {row}"
    assert 0 < row["first_rate"] <= row["highest_rate"] == recipe.training.learning_rate, name
    assert row["last_rate"] > 0, name
    assert row["loss_after"] < row["loss_before"], name
    assert row["evaluations"] >= 2, name
    stay = row["unchanged"] if not recipe.training.pure_bf16 else [x for x in row["unchanged"] if "norm" not in x]
    assert stay == [], name
    assert all(key.startswith(NEEDED) for key in row["replaced"]), name
    assert row["data_sets"] == sorted({entry.path for entry in recipe.data.sets if entry.path in DATA_SETS}), name
    assert not recipe.hub.push or "adapter_model.safetensors" in row["pushed"], name
    assert row["data_sets"] or not recipe.budget.gpus, name


def test_every_recipe_was_trained_as_it_is_written() -> None:
    results = json.loads((RESULTS / "train_recipes.json").read_text("utf-8"))["recipes"]
    every = recipes()
    assert len(every) == COUNT
    assert set(results) == set(every), AGAIN
    assert {name for name, path in every.items() if results[name]["sha256"] != sha256_of(path)} == set(), AGAIN
    for name, row in results.items():
        is_a_training(name, row)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_recipe_trains_as_it_is_written(name: str, tmp_path: Path) -> None:
    row = train_as_written(recipes()[name], tmp_path, SAMPLE_STEPS)
    is_a_training(name, row)
    assert row["steps"] >= SAMPLE_STEPS - 1
