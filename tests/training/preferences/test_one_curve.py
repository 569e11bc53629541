"""One curve for preferences, whatever splits a step: micro-batches, packing, recomputation, ranks and strategies."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from finetune.train import main as train
from tests.support.runs.cells import launch
from tests.support.runs.preferences import STEPS, lines_of, preference_recipe, write_base

TOLERANCE = 2e-5
LORA = {"lora": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}}
WHOLE: dict[str, Any] = {"data": {"packing": False}, "training": {"per_device_batch_size": 4}}
SPLITS: dict[str, dict[str, Any]] = {
    "accumulated": {"data": {"packing": False}, "training": {"per_device_batch_size": 1}},
    "packed": {"data": {"packing": True}, "training": {"per_device_batch_size": 1}},
    "two packed": {"data": {"packing": True}, "training": {"per_device_batch_size": 2}},
    "recomputed": {**WHOLE, "training": {"per_device_batch_size": 4, "activation_checkpointing": True}},
    "selective": {**WHOLE, "training": {"per_device_batch_size": 4, "activation_checkpointing": "selective"}},
    "padded": {**WHOLE, "model": {"attention": "sdpa"}},
}
KINDS = {
    "dpo": ("dpo", {"dpo": {"sft_weight": 0.3}}),
    "simpo": ("dpo", {"dpo": {"loss_type": "simpo", "beta": 2.0}}),
    "kto": ("kto", {}),
    "dpo lora": ("dpo", LORA),
    "kto lora": ("kto", LORA),
}
BY_DEFAULT = ("dpo", "kto lora")
OTHERS = [name for name in KINDS if name not in BY_DEFAULT]
STRATEGIES = ("ddp", "fsdp2", "fsdp2_offload", "zero2", "zero3")
METRICS = ("loss", "grad_norm", "reward_chosen", "reward_rejected", "reward_accuracy", "logps_chosen", "logps_rejected")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


Curve = list[dict[str, Any]]


@pytest.fixture(scope="module")
def curve_of(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Curve]:
    """A kind's curve by one process, trained when it is first asked for: a whole step in one forward."""

    @cache
    def trained(name: str) -> Curve:
        kind, settings = KINDS[name]
        recipe = preference_recipe(tmp_path_factory.mktemp("whole"), base, kind, settings, WHOLE)
        assert train([str(recipe)]) == 0
        return lines_of(recipe.parent / "run")

    return trained


def compare(lines: Curve, expected: Curve) -> None:
    assert len(lines) == len(expected) == STEPS
    for line, whole in zip(lines, expected, strict=True):
        for name in METRICS:
            if name in whole:
                assert line[name] == pytest.approx(whole[name], rel=TOLERANCE, abs=TOLERANCE), (name, line["step"])


@pytest.mark.sample(1, thorough=2)
@pytest.mark.parametrize("name", [*BY_DEFAULT, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_the_curve_moves(name: str, curve_of: Callable[[str], Curve]) -> None:
    lines = curve_of(name)
    assert abs(lines[-1]["loss"] - lines[0]["loss"]) > 1e-4
    assert lines[0]["grad_norm"] > 1e-3


@pytest.mark.sample(1, thorough=4)
@pytest.mark.parametrize(
    ("name", "split"),
    [
        pytest.param(name, split, marks=[] if name in BY_DEFAULT and "packed" in split else pytest.mark.slow)
        for name in KINDS
        for split in SPLITS
    ],
)
def test_one_process(name: str, split: str, curve_of: Callable[[str], Curve], base: Path, tmp_path: Path) -> None:
    kind, settings = KINDS[name]
    assert train([str(preference_recipe(tmp_path, base, kind, settings, SPLITS[split]))]) == 0
    compare(lines_of(tmp_path / "run"), curve_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks(strategy: str, curve_of: Callable[[str], Curve], base: Path, tmp_path: Path) -> None:
    recipes = []
    for name, (kind, settings) in KINDS.items():
        folder = tmp_path / name.replace(" ", "_")
        recipes.append(preference_recipe(folder, base, kind, settings, {"accelerate_config": strategy}))
    assert launch(recipes, ranks=2) == [0] * len(recipes)
    for recipe, name in zip(recipes, KINDS, strict=True):
        compare(lines_of(recipe.parent / "run"), curve_of(name))
