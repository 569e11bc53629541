"""Recipes for tests: the least that is valid and a tiny training in float32; a test names what it changes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.recipe.schema import Recipe

SETTING = re.compile(r"[a-z_]+\.[a-z_]+=[\w.]+")  # as a message proposes it and an override takes it


def merged(content: Mapping[str, Any], *changes: Mapping[str, Any]) -> dict[str, Any]:
    """`content` with each of `changes`: a dict changes its section key by key, any other value replaces what was."""
    result = dict(content)
    for change in changes:
        for name, value in change.items():
            both = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
            result[name] = {**result[name], **value} if both else value
    return result


def least(base: Path | str = "x", **sections: Any) -> dict[str, Any]:
    """The keys that a recipe cannot do without, and `sections`."""
    return merged({"model": {"name_or_path": str(base)}, "data": {"train": [{"path": "json"}]}}, sections)


def least_recipe(base: Path | str = "x", **sections: Any) -> Recipe:
    """The same, checked; what it does not say is the schema's default."""
    return Recipe.model_validate(least(base, **sections))


def half_recipe(base: Path | str = "x", **sections: Any) -> Recipe:
    """`least_recipe` that computes in bf16 on every processor: `auto` is float32 on CPUs without arithmetic for it."""
    return least_recipe(base, **merged({"training": {"mixed_precision": "bf16"}}, sections))


def tiny(base: Path, chats: Path, **sections: Any) -> dict[str, Any]:
    """A model in a folder, trained in float32 on a file of chats."""
    data = {"train": [{"path": "json", "data_files": str(chats)}]}
    plain = {"model": {"dtype": "float32"}, "data": data, "training": {"mixed_precision": "no"}}
    return merged(least(base), plain, sections)


def tiny_lora(base: Path, chats: Path, **sections: Any) -> dict[str, Any]:
    """`tiny` with adapters of rank 4 and a fifth of the chats held out: steps of two rows, none of them recomputed."""
    plain: dict[str, Any] = {
        "lora": {"r": 4},
        "data": {"eval": {"fraction": 0.2}, "max_length": 128},
        "training": {"global_batch_size": 2, "learning_rate": 1e-2, "activation_checkpointing": False},
        "samples": {"count": 0},
    }
    return merged(tiny(base, chats, **plain), sections)


def write_recipe(folder: Path, content: Mapping[str, Any], name: str = "recipe.yaml") -> Path:
    """`folder`/`name`, written in JSON, which is YAML."""
    path = folder / name
    path.write_text(json.dumps(content), "utf-8")
    return path
