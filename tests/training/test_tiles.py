"""MLPs in tiles: a run's curve, receipt and refusals, under strategies and objectives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from finetune.recipe.strategy import read_strategy
from finetune.recipe.strategy_fit import unfit
from finetune.train import main
from tests.support.models.tiny import write_chats
from tests.support.runs.cells import launch
from tests.support.runs.one_curve import LENGTHS, curve_of, write_curve_recipe
from tests.support.runs.preferences import lines_of, preference_recipe, write_base
from tests.support.runs.recipes import least_recipe

TILES: dict[str, Any] = {"training": {"mlp_tile_tokens": 48, "activation_checkpointing": True}}
WHOLE: dict[str, Any] = {"training": {"activation_checkpointing": True}}
FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32", "bnb_4bit_quant_storage": "float32"}
QLORA = {"quantization": FOUR_BITS}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", LENGTHS)


def test_a_run_in_tiles(tiny_llama: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = write_curve_recipe(tmp_path / "whole", tiny_llama, chats, "lora", WHOLE)
    tiled = write_curve_recipe(tmp_path / "tiled", tiny_llama, chats, "lora", TILES)
    assert [main([str(whole)]), main([str(tiled)])] == [0, 0]
    for one, other in zip(curve_of(tiled), curve_of(whole), strict=True):
        assert tuple(one) == pytest.approx(tuple(other), rel=1e-6)
    receipt = json.loads((tmp_path / "tiled" / "run" / "receipt.json").read_text("utf-8"))
    assert receipt["mlp_tiles"] == {"tokens": 48, "layers": 2}
    assert "MLPs of 2 of 2 layers run in tiles of 48 tokens" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2), ("fsdp2", 2), ("1f1b", 2)])
def test_the_curve_is_that_without_tiles(
    strategy: str, ranks: int, tiny_llama: Path, chats: Path, tmp_path: Path
) -> None:
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "full": ("full", {}),
        "lora": ("lora", {}),
        "qlora": ("lora", QLORA),
    }
    words = {"accelerate_config": strategy, "training": {"per_device_batch_size": 1}}
    recipes = [
        write_curve_recipe(tmp_path / f"{name}-{at}", tiny_llama, chats, method, tiles, changes, words)
        for name, (method, changes) in kinds.items()
        for at, tiles in enumerate((WHOLE, TILES))
    ]
    assert launch(recipes, ranks=ranks) == [0] * len(recipes)
    for whole, tiled in zip(recipes[::2], recipes[1::2], strict=True):
        for one, other in zip(curve_of(tiled), curve_of(whole), strict=True):
            assert tuple(one) == pytest.approx(tuple(other), rel=1e-6), tiled


@pytest.mark.thorough
@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_preferences(objective: str, tmp_path: Path) -> None:
    base, lora = write_base(tmp_path / "base"), {"lora": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}}
    curves = []
    for at, tiles in enumerate((WHOLE, TILES)):
        recipe = preference_recipe(tmp_path / f"{at}", base, objective, lora, tiles)
        assert main([str(recipe)]) == 0
        curves.append(lines_of(recipe.parent / "run"))
    for one, other in zip(*curves, strict=True):
        for name in ("loss", "grad_norm", "logps_chosen", "logps_rejected"):
            if name in other:
                assert one[name] == pytest.approx(other[name], rel=2e-6), (name, one["step"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"training": {"activation_checkpointing": "selective"}},
            "set activation_checkpointing: true, or leave it out",
        ),
        ({"lora": {"lora_dropout": 0.1}}, "set lora.lora_dropout: 0, or leave it out"),
    ],
)
def test_settings_beside_which_there_are_no_tiles(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        least_recipe(**{**changes, "training": {"mlp_tile_tokens": 4096, **changes.get("training", {})}})


def test_zero_3_is_refused() -> None:
    recipe = least_recipe(training={"mlp_tile_tokens": 4096})
    found = {name: [str(each) for each in unfit(recipe, read_strategy(name))] for name in ("zero2", "zero3", "fsdp2")}
    assert found["zero2"] == found["fsdp2"] == []
    assert found["zero3"] == [
        "training.mlp_tile_tokens: zero3 gathers weights inside the MLP, once for each tile; leave it out, or take "
        "accelerate_config=fsdp2"
    ]
