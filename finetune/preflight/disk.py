"""How much disk a run will take, and how much is free; no weights are read or downloaded."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from finetune.files import cache_folder
from finetune.model.packaged import weights_are_here
from finetune.recipe.optimizers import checkpoint_bytes
from finetune.recipe.schema import Recipe

_WIDTH = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Need:
    """Bytes that a run writes."""

    checkpoint: int  # one of them
    keep: int  # checkpoints, the best evaluation's included
    export: int
    download: int  # of base weights that are not on this machine yet

    @property
    def in_run_folder(self) -> int:
        """All checkpoints, one more while it is written, and the result."""
        return (self.keep + 1) * self.checkpoint + self.export


def need_of(recipe: Recipe) -> Need:
    """The bytes that the run will write. Raises EnvironmentMismatch if the model's configuration is not here."""
    total, trained = count_weights(recipe)
    training, frozen = recipe.training, _WIDTH[recipe.model.dtype]
    width = 2 if training.pure_bf16 else 4
    on_disk = weights_are_here(recipe.model.name_or_path, recipe.model.revision)
    return Need(
        checkpoint=checkpoint_bytes(training, trained),
        keep=recipe.save_total_limit + training.exports_best,
        export=trained * width if recipe.lora else total * frozen,
        download=0 if on_disk else total * 2,  # published in 16 bits
    )


def count_weights(recipe: Recipe) -> tuple[int, int]:
    """The numbers of all weights and of trained weights, counted on the model's structure without any data."""
    import torch

    from finetune.model.build import build_model
    from finetune.model.known_configs import full_config

    config, _ = full_config(recipe.model.name_or_path, recipe.model.revision)
    with tempfile.TemporaryDirectory(prefix="finetune-doctor-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), "utf-8")
        changed: dict[str, object] = {
            "model": recipe.model.model_copy(update={"name_or_path": folder, "revision": "main"}),
            "quantization": None,
        }
        if recipe.lora:
            changed["lora"] = recipe.lora.model_copy(update={"init_lora_weights": True})
        model = build_model(recipe.model_copy(update=changed), torch.device("meta"))
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, learns in sizes if learns)


def folders(recipe: Recipe | None) -> dict[str, Path]:
    """The folders that a run writes to, by purpose."""
    from huggingface_hub import constants

    run = Path(recipe.run_dir) if recipe else Path.cwd()
    return {"run folder": run, "model cache": Path(constants.HF_HUB_CACHE), "token cache": cache_folder()}


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk of a folder that may not exist yet."""
    return shutil.disk_usage(_first_existing(folder)).free


def may_write(folder: Path) -> bool:
    """Whether the folder, or the first existing one above it, can be written."""
    return os.access(_first_existing(folder), os.W_OK)


def _first_existing(folder: Path) -> Path:
    return next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
