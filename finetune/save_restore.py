"""Between a run and its folder: checkpoints out and in, and what is handed over at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from finetune.checkpoint import (
    examine,
    load_model,
    load_optimizer,
    model_tensors,
    optimizer_tensors,
    read_checkpoint,
    step_folder,
    write_checkpoint,
)
from finetune.embedded import published_name
from finetune.errors import FinetuneError
from finetune.export import export_adapter, export_model
from finetune.recipe import Recipe
from finetune.run import TrainState


def save(recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer, state: TrainState) -> None:
    """Write a checkpoint of the unwrapped model; for rank 0, whom the others meet again at the next reduction."""
    tensors = {"model": model_tensors(model), "optimizer": optimizer_tensors(model, optimizer)}
    write_checkpoint(Path(recipe.run_dir), state.step, tensors, state.as_json(), keep=recipe.save_total_limit)


def restore(recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> TrainState:
    """The state to go on from; weights and optimizer are filled in place, on every rank from the same files.

    Raises FinetuneError when this rank does not see the checkpoint, or it does not fit the model.
    """
    if step == 0:
        return TrainState()
    folder = step_folder(Path(recipe.run_dir), step)
    checkpoint = examine(folder)
    if isinstance(checkpoint, str):
        raise FinetuneError(f"{folder}: {checkpoint}; every rank must see the run folder")
    tensors, saved = read_checkpoint(checkpoint)
    load_model(model, tensors["model"])
    load_optimizer(model, optimizer, tensors["optimizer"])
    return TrainState.from_json(saved)


def export(recipe: Recipe, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Write the adapter in PEFT's layout, or the whole model; returns its folder."""
    folder, section = Path(recipe.run_dir), recipe.model
    if recipe.lora is not None:
        return export_adapter(cast("Any", model), tokenizer, folder, base=published_name(section.name_or_path))
    return export_model(cast("Any", model), tokenizer, folder, dtype=getattr(torch, section.dtype))
