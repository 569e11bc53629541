"""Training wholly in bfloat16: it learns what float32 masters learn, and all copies of a weight stay one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.files import read_lines
from finetune.model.optimizers import rounded_adamw
from finetune.train import main
from tests.support.models.tiny import write_chats
from tests.support.runs.cells import launch
from tests.support.runs.one_rank import as_before
from tests.support.runs.recipes import tiny, write_recipe

STEPS = 200
PURE = {"pure_bf16": True}


def recipe_of(folder: Path, base: Path, steps: int = STEPS, **training: Any) -> Path:
    """All weights at a small, constant rate, at which most updates are below what bfloat16 can hold."""
    chats = write_chats(folder / "chats.jsonl", range(24, 56), seed=3)
    content: dict[str, Any] = {
        "lora": None,
        "data": {"packing": False, "max_length": 64, "eval": {"fraction": 0.25}},
        "training": {
            "max_steps": steps,
            "global_batch_size": 4,
            "per_device_batch_size": 2,
            "learning_rate": 3e-5,
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
            "mixed_precision": "bf16",
            **training,
        },
        "eval_steps": steps,
        "save_steps": steps,
        "samples": {"count": 0},
        "output_dir": str(folder / "run"),
    }
    return write_recipe(folder, tiny(base, chats, **content))


def held_out_loss(folder: Path, base: Path, **training: Any) -> float:
    folder.mkdir()
    with as_before():
        assert main([str(recipe_of(folder, base, **training))]) == 0
    lines = read_lines(folder / "run" / "metrics.jsonl")
    return float([line["loss"] for line in lines if line["kind"] == "eval"][-1])


@pytest.mark.slow
def test_it_learns_what_float32_learns(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    masters = held_out_loss(tmp_path / "masters", tiny_llama)
    pure = held_out_loss(tmp_path / "pure", tiny_llama, **PURE)

    def rounded_to_nearest(groups: Any, *, seed: int, **settings: Any) -> torch.optim.AdamW:
        return torch.optim.AdamW(groups, **settings, fused=True)

    monkeypatch.setattr(rounded_adamw, "RoundedAdamW", rounded_to_nearest)
    nearest = held_out_loss(tmp_path / "nearest", tiny_llama, **PURE)
    assert pure == pytest.approx(masters, rel=0.01)
    receipt = json.loads((tmp_path / "pure" / "run" / "receipt.json").read_text("utf-8"))
    assert receipt["change"]["unchanged_tensors"] == [], "norms too, whose weights are 1"
    assert nearest > 1.01 * masters


@pytest.mark.slow
def test_copies_stay_equal_to_the_bit(tiny_llama: Path, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, tiny_llama, steps=6, **PURE)
    recipe = write_recipe(tmp_path, json.loads(recipe.read_text()) | {"accelerate_config": "ddp"})
    assert launch([recipe], ranks=2, program="tests/support/runs/copies.py") == [0]
    first, second = (json.loads((tmp_path / "run" / f"copy-{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert len(set(first)) > len(first) / 2, "they are not all one tensor"
