"""A finished run's model, loaded again: the base as training had it, quantised where it was, and what was learned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from torch import nn

from finetune.errors import DoesNotFit, FinetuneError
from finetune.model import load_base
from finetune.recipe import Recipe
from finetune.recipe_file import recipe_from_resolved


@dataclass(frozen=True)
class FinishedRun:
    """A run's folder with something to load in it."""

    folder: Path
    recipe: Recipe

    @property
    def product(self) -> Path:
        """adapter/ or model/; the tokenizer lies in it."""
        return self.folder / ("adapter" if self.recipe.lora else "model")


def finished_run(run_dir: Path) -> FinishedRun:
    """Raises FinetuneError when the folder holds no finished run."""
    resolved = run_dir / "recipe.yaml"
    if not resolved.is_file():
        raise FinetuneError(f"{run_dir}: no run is here (recipe.yaml is missing); name a run's output_dir")
    run = FinishedRun(run_dir, recipe_from_resolved(resolved))
    if not run.product.is_dir():
        raise FinetuneError(f"{run_dir}: this run has not finished: {run.product.name}/ is not there; resume it first")
    return run


def best_device() -> torch.device:
    """Where a loaded model goes: the first GPU, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_adapted(run: FinishedRun, device: torch.device) -> PeftModel:
    """Base and adapter, in evaluation mode; `disable_adapter` gives the base."""
    base = _load(run.recipe, device)
    return PeftModel.from_pretrained(base, str(run.product)).eval()


def load_whole(run: FinishedRun, device: torch.device, *, tuned: bool) -> nn.Module:
    """The base, or the model of a run that trained all weights, in `model.dtype` and evaluation mode."""
    return _load(run.recipe, device, str(run.product) if tuned else None).eval()


def _load(recipe: Recipe, device: torch.device, path: str | None = None) -> nn.Module:
    with fitting(device):
        # Answers and comparisons have no packed rows to keep apart, and need a cache.
        asked = recipe.model_copy(update={"model": recipe.model.model_copy(update={"attention": "sdpa"})})
        model: nn.Module = load_base(asked, device, dtype=getattr(torch, recipe.model.dtype), path=path)
        return model.to(device)


@contextmanager
def fitting(device: torch.device) -> Iterator[None]:
    """Turns a full GPU into one line."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DoesNotFit(
            f"the model does not fit into the memory of {device}; CUDA_VISIBLE_DEVICES= takes the CPU"
        ) from error
