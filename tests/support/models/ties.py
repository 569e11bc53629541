"""Bases whose config.json and files disagree about head and embeddings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.models.tiny import save_tiny

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
Change = Callable[[dict[str, Tensor]], object]


def say(folder: Path, *, tied: bool) -> Path:
    """Have its config.json say so, of the text part too."""
    file = folder / "config.json"
    config = json.loads(file.read_text("utf-8"))
    for section in (config, config.get("text_config", {})):
        section["tie_word_embeddings"] = tied
    file.write_text(json.dumps(config), "utf-8")
    return folder


def rewrite(folder: Path, change: Change) -> Path:
    """Change the tensors of model.safetensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def changed_base(folder: Path, *, tied: bool, change: Change = bool) -> Path:
    """A tiny base with two different matrices, changed by `change`, beside a config.json that says `tied`."""
    return say(rewrite(save_tiny(folder), change), tied=tied)


def head_alone(tensors: dict[str, Tensor]) -> None:
    """One matrix, under the head's name."""
    del tensors[EMBEDDINGS]


def no_head(tensors: dict[str, Tensor]) -> None:
    """One matrix, under the embeddings' name."""
    del tensors[HEAD]


def equal_ones(tensors: dict[str, Tensor]) -> None:
    """The same matrix under both names."""
    tensors[HEAD] = tensors[EMBEDDINGS].clone()
