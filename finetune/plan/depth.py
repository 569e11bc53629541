"""The same model with fewer layers: a folder with its configuration, for the trainer's own build to read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.recipe import Recipe


def with_layers(recipe: Recipe, config: Mapping[str, Any], layers: int, folder: Path) -> Recipe:
    """The recipe for that model with so many layers, its config.json in `folder`; there are no weights."""
    changed = dict(config) | {"num_hidden_layers": layers}
    if kinds := config.get("layer_types"):
        changed["layer_types"] = [kinds[index % len(kinds)] for index in range(layers)]
    for key in ("quantization_config", "auto_map"):
        changed.pop(key, None)
    here = folder / f"layers-{layers}"
    here.mkdir(parents=True, exist_ok=True)
    (here / "config.json").write_text(json.dumps(changed), "utf-8")
    model = recipe.model.model_copy(update={"name_or_path": str(here), "revision": "main"})
    return recipe.model_copy(update={"model": model})


def kept_whole(config: Mapping[str, Any], packed: int = 1) -> int:
    """How many layers' worth of weights ZeRO-3 may keep whole at once (finetune/zero.py): two layers and the largest
    tensor, which is the embedding. A model with fewer is whole for a while, so its layers add more than later ones.

    `packed`: weights of a quantised layer to one element of its container.
    """
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    size = int(config.get("head_dim") or hidden // heads)
    attention = 2 * hidden * size * (heads + int(config.get("num_key_value_heads") or heads))
    layer = (attention + 3 * hidden * int(config["intermediate_size"])) // packed
    return 2 + math.ceil(int(config["vocab_size"]) * hidden / layer)
