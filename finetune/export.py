"""What a finished run hands over: the adapter in PEFT's own layout, or the whole model, each with its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from finetune.durable import ASIDE, disk_errors, publish_folder, remove_folder, write_json

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def export_adapter(model: PeftModel, tokenizer: PreTrainedTokenizerBase, run_dir: Path, *, base: str) -> Path:
    """Writes run_dir/adapter, which plain `PeftModel.from_pretrained` loads; written aside and renamed.

    Args:
        model: Unwrapped; on one process.
        base: The base model's name as others can load it, for adapter_config.json.
    """
    config = model.peft_config["default"]
    config.base_model_name_or_path = base

    def write(folder: Path) -> None:
        # "auto" would ask the Hub whether the vocabulary grew; embeddings that are trained are saved as such anyway.
        model.save_pretrained(str(folder), save_embedding_layers=False)
        tokenizer.save_pretrained(str(folder))

    return _publish(run_dir / "adapter", write)


def export_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, run_dir: Path, *, dtype: torch.dtype
) -> Path:
    """Writes run_dir/model as safetensors in `dtype` (trained weights are float32); written aside and renamed."""

    def write(folder: Path) -> None:
        model.save_pretrained(str(folder), state_dict=_in_dtype(model.state_dict(), dtype))
        # save_pretrained states the dtype of the model in memory, by which others would load the weights again.
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        write_json(folder / "config.json", config | {"dtype": str(dtype).removeprefix("torch.")})
        tokenizer.save_pretrained(str(folder))

    return _publish(run_dir / "model", write)


def _in_dtype(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Floating-point weights in `dtype`; tied ones stay one tensor, by which transformers knows them."""
    cast: dict[int, torch.Tensor] = {}
    for tensor in weights.values():
        if tensor.is_floating_point() and tensor.data_ptr() not in cast:
            cast[tensor.data_ptr()] = tensor.to(dtype)
    return {name: cast.get(tensor.data_ptr(), tensor) for name, tensor in weights.items()}


def _publish(target: Path, write: Callable[[Path], None]) -> Path:
    aside = target.with_name(f"{ASIDE}{target.name}")
    remove_folder(aside)
    with disk_errors(target, "checkpoints are intact; "):
        write(aside)
        publish_folder(aside, target)
    return target
