"""What a finished run hands over: the adapter in PEFT's own layout, or the whole model, each with its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from finetune.durable import ASIDE, disk_errors, publish_folder, remove_folder, write_json

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def export_adapter(
    model: PeftModel, weights: dict[str, Tensor], tokenizer: PreTrainedTokenizerBase, run_dir: Path, *, base: str
) -> Path:
    """Writes run_dir/adapter, which plain `PeftModel.from_pretrained` loads; written aside and renamed.

    Args:
        model: Unwrapped, maybe sharded.
        weights: Its trained weights by its own names, whole.
        base: The base model's name as others can load it, for adapter_config.json.
    """
    config = model.peft_config["default"]
    config.base_model_name_or_path = base

    def write(folder: Path) -> None:
        # "auto" would ask the Hub whether the vocabulary grew; embeddings that are trained are saved as such anyway.
        model.save_pretrained(str(folder), state_dict=weights, save_embedding_layers=False)
        tokenizer.save_pretrained(str(folder))

    return _publish(run_dir / "adapter", write)


def export_model(
    model: PreTrainedModel,
    weights: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    run_dir: Path,
    *,
    dtype: torch.dtype,
) -> Path:
    """Writes run_dir/model as safetensors; written aside and renamed.

    Args:
        model: Unwrapped, maybe sharded.
        weights: All of its weights by its own names, whole and in `dtype`; tied ones are one tensor.
        dtype: That of the weights.
    """

    def write(folder: Path) -> None:
        model.save_pretrained(str(folder), state_dict=weights)
        # save_pretrained states the dtype of the model in memory, by which others would load the weights again.
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        write_json(folder / "config.json", config | {"dtype": str(dtype).removeprefix("torch.")})
        tokenizer.save_pretrained(str(folder))

    return _publish(run_dir / "model", write)


def _publish(target: Path, write: Callable[[Path], None]) -> Path:
    aside = target.with_name(f"{ASIDE}{target.name}")
    remove_folder(aside)
    with disk_errors(target, "checkpoints are intact; "):
        write(aside)
        publish_folder(aside, target)
    return target
