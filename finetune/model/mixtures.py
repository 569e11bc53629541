"""Mixtures of experts by their configuration alone, and the settings that they are not trained with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune.errors import FinetuneError
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import Strategy
from finetune.untrusted.config_sizes import MXFP4, expert_counts, stored_format

# Their experts compute in a way that model/packed_experts.py does not know: a trial of a small copy found it, and
# DBRX's are matrices with all experts' rows.
NOT_IN_FOUR_BITS = ("dbrx", "inkling", "inkling_text", "jetmoe", "longcat_flash")


def refuse_mixture(recipe: Recipe, strategy: Strategy, config: Mapping[str, Any] | None) -> None:
    """Raise FinetuneError if this recipe quantises a mixture in a way that is not trained.

    Args:
        config: config.json as it is written; None: it is not known here.
    """
    if recipe.quantization is None or config is None or max(expert_counts(config), default=0) < 2:
        return
    name, kind, stored = recipe.model.name_or_path, config.get("model_type"), stored_format(config)
    sharded_by_engine = strategy.uses_engine and strategy.shards_parameters
    if recipe.quantization.load_in_8bit:
        problem = f"quantization.load_in_8bit: bitsandbytes leaves the experts of {name} in 16 bits"
        remedy = "set load_in_4bit: true, or quantization: null"
    elif stored == "bitsandbytes":
        problem = f"model.name_or_path: {name} is a mixture stored in bitsandbytes' 4 bits, of one matrix an expert"
        problem, remedy = f"{problem}, which transformers no longer joins", "name the model in 16 bits"
    elif kind in NOT_IN_FOUR_BITS:
        known = f"the experts of {name} ({kind}) compute in a way that is not known in 4 bits"
        problem, remedy = f"quantization.load_in_4bit: {known}", "set quantization: null, or choose another model"
    elif strategy.schedule is not None:
        problem = f"accelerate_config: {strategy.name}: stages do not split experts in 4 bits"
        remedy = "set accelerate_config=fsdp2, or quantization: null"
    elif stored == MXFP4 and sharded_by_engine:
        problem = f"accelerate_config: {strategy.name} does not cut experts in MXFP4"
        remedy = "set accelerate_config=fsdp2, or name the model in 16 bits"
    else:
        return
    raise FinetuneError(f"{problem}; {remedy}")
