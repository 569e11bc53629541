"""Host memory for hidden states that wait there: `training.activation_offloading` (architecture/offloading.py)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from finetune.errors import DoesNotFit, FinetuneError
from finetune.measure.host_memory import available_bytes, pinned_bytes
from finetune.measure.units import GIB
from finetune.model.known_configs import config_here, planned_config
from finetune.recipe.schema import Recipe
from finetune.wording import counted

KEY = "training.activation_offloading"


def host_state_bytes(recipe: Recipe, config: Mapping[str, Any], *, pinned: bool = True) -> int:
    """One rank's host memory for all layers' hidden states, [T, hidden] each.

    Llama 8B with rows of 32,768 tokens in bfloat16: 32 layers x 2 x 32,768 x 4,096 = 8 GiB. Pinned tensors take the
    next power of two: with rows of 40,960 tokens not 10 GiB but 16.
    """
    training = recipe.training
    in_float32 = training.mixed_precision == "no" or (recipe.lora is not None and recipe.model.dtype == "float32")
    tokens = training.rows_at_once * recipe.data.row_tokens
    state = (4 if in_float32 else 2) * tokens * int(config.get("hidden_size") or 0)
    return int(config["num_hidden_layers"]) * (pinned_bytes(state) if pinned else state)


def describe_states(recipe: Recipe, ranks: int, *, pinned: bool) -> list[str]:
    """A line about the host memory for a machine with so many ranks, if the model's sizes are on this machine."""
    if config_here(recipe.model.name_or_path, recipe.model.revision) is None:
        return []
    nbytes = _of_machine(recipe, ranks, pinned=pinned)
    return [_in_words(nbytes, ranks, pinned=pinned)] if nbytes else []


def check_host_memory(recipe: Recipe, ranks: int, *, pinned: bool) -> None:
    """Refuse hidden states that this machine's `ranks` cannot keep in host memory. Raises DoesNotFit."""
    nbytes, free = _of_machine(recipe, ranks, pinned=pinned), available_bytes()
    if nbytes > free:
        remedy = "set it to false, or lower data.max_length or training.per_device_batch_size"
        raise DoesNotFit(f"{_in_words(nbytes, ranks, pinned=pinned)}, {free / GIB:.1f} are free; {remedy}")


def _of_machine(recipe: Recipe, ranks: int, *, pinned: bool) -> int:
    """0 where the model's sizes are not known."""
    with suppress(FinetuneError):
        config, _ = planned_config(recipe.model.name_or_path, recipe.model.revision)
        return ranks * host_state_bytes(recipe, config, pinned=pinned)
    return 0


def _in_words(nbytes: int, ranks: int, *, pinned: bool) -> str:
    memory, machine = "pinned host memory" if pinned else "host memory", counted(ranks, "rank")
    return f"{KEY}: hidden states take {nbytes / GIB:.1f} GiB of {memory} on a machine with {machine}"
