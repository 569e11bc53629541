"""Finished runs without a training: a recipe's model whose trained weights were moved at random, exported as ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from finetune.answers.by_ranks import Computing
from finetune.answers.evaluation import measure
from finetune.answers.requests import EvalRequest
from finetune.finished_run import FinishedRun
from finetune.model.build import build_model
from finetune.model.new_tokens import load_tokenizer
from finetune.recipe.loader import load_recipe
from finetune.recipe.resolved import resolved_yaml
from finetune.recipe.schema import Recipe
from finetune.run_folder.save_restore import export_weights
from finetune.strategies.assemble import Assembled
from tests.support.models.tiny import write_chats
from tests.support.runs.recipes import merged, tiny, write_recipe

LENGTHS = [30, 45, 60, 80, 25, 100, 40, 55, 70, 35, 65, 50]


def finished_run(folder: Path, base: Path, *, move: float = 0.1, **sections: Any) -> Path:
    """A run's folder with adapter/ or model/; `sections` are the recipe's, over float32 throughout."""
    folder.mkdir(parents=True, exist_ok=True)
    chats = write_chats(folder / "chats.jsonl", LENGTHS)
    plain: dict[str, Any] = {
        "lora": {"r": 4},
        "data": {"eval": {"fraction": 0.3}, "max_length": 128},
        "training": {"activation_checkpointing": False},
        "output_dir": str(folder / "run"),
    }
    write_recipe(folder, merged(tiny(base, chats, **plain), sections))
    loaded = load_recipe(folder / "recipe.yaml")
    run = Path(loaded.recipe.run_dir)
    run.mkdir()
    (run / "recipe.yaml").write_text(resolved_yaml(loaded), "utf-8")
    _export(loaded.recipe, move)
    return run


def _export(recipe: Recipe, move: float) -> None:
    model: Any = build_model(recipe, torch.device("cpu"))
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=draw) * move)
    dtype = None if recipe.lora else getattr(torch, recipe.model.dtype)
    weights = Assembled(model, model, None).trained_weights(dtype=dtype, keep=True)
    export_weights(recipe, model, weights, load_tokenizer(recipe))


def held_out_figures(run: FinishedRun, device: torch.device) -> dict[str, Any]:
    """Held-out loss and perplexity of the base and the tuned model."""
    figures: dict[str, Any] = measure(
        run, Computing(device), EvalRequest(generate=False), lambda _: None, lambda _: None
    )[0]["held_out"]
    return figures
