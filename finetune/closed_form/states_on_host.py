"""Host memory for hidden states that wait there: `training.activation_offloading` (architecture/offloading.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune.errors import DoesNotFit
from finetune.measure.host_memory import available_bytes, pinned_bytes
from finetune.measure.units import GIB
from finetune.recipe.schema import Recipe
from finetune.wording import counted


def host_state_bytes(recipe: Recipe, config: Mapping[str, Any], *, pinned: bool = True) -> int:
    """One rank's host memory for all layers' hidden states, [T, hidden] each. Llama 8B with rows of 32,768 tokens in
    bfloat16: 32 layers x 2 x 32,768 x 4,096 = 8 GiB. Pinned, 40,960 tokens take not 10 GiB but 16."""
    training = recipe.training
    in_float32 = training.mixed_precision == "no" or (recipe.lora is not None and recipe.model.dtype == "float32")
    tokens = training.rows_at_once * recipe.data.row_tokens
    state = (4 if in_float32 else 2) * tokens * int(config.get("hidden_size") or 0)
    return int(config["num_hidden_layers"]) * (pinned_bytes(state) if pinned else state)


def check_host_memory(
    recipe: Recipe, config: Mapping[str, Any] | None, ranks: int, *, pinned: bool, here: bool = True
) -> list[str]:
    """A line about the host memory of a machine with so many ranks; none for a model with unknown sizes. If `here`,
    this is the machine: raises DoesNotFit if less is free."""
    if config is None:
        return []
    nbytes, free = ranks * host_state_bytes(recipe, config, pinned=pinned), available_bytes()
    memory = f"{nbytes / GIB:.1f} GiB of {'pinned ' * pinned}host memory on a machine with {counted(ranks, 'rank')}"
    line = f"training.activation_offloading: hidden states take {memory}"
    if here and nbytes > free:
        remedy = "set it to false, or lower data.max_length or training.per_device_batch_size"
        raise DoesNotFit(f"{line}, {free / GIB:.1f} are free; {remedy}")
    return [line]
