"""Mixtures of experts by their configuration alone, and the settings that they are not trained with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from finetune.errors import FinetuneError
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import Strategy

# Their experts compute in a way that model/packed_experts.py does not know: a trial of a small copy found it, and
# DBRX's are matrices with all experts' rows.
NOT_IN_FOUR_BITS = ("dbrx", "inkling", "inkling_text", "jetmoe")
MXFP4 = "mxfp4"


def expert_counts(config: Mapping[str, Any]) -> set[int]:
    """The numbers under keys that speak of experts, in this section of a configuration and in those below it."""
    below = (value for value in config.values() if isinstance(value, dict))
    here = {value for key, value in config.items() if "expert" in str(key) and type(value) is int}
    return here.union(*map(expert_counts, below))


def stored_format(config: Mapping[str, Any]) -> str | None:
    """The number format with scales that a base's files have."""
    stored = config.get("quantization_config") or {}
    method: str | None = stored.get("quant_method", "bitsandbytes" if stored.get("load_in_4bit") else None)
    return method


def refuse_mixture(recipe: Recipe, strategy: Strategy, config: Mapping[str, Any] | None) -> None:
    """Raise FinetuneError if this recipe quantises a mixture in a way that is not trained.

    Args:
        config: config.json as it is written; None: it is not known here.
    """
    if recipe.quantization is None or config is None or max(expert_counts(config), default=0) < 2:
        return
    if problem := next(_problems(recipe, strategy, config), None):
        raise FinetuneError(problem)


def _problems(recipe: Recipe, strategy: Strategy, config: Mapping[str, Any]) -> Iterator[str]:
    assert recipe.quantization is not None
    name, kind = recipe.model.name_or_path, config.get("model_type")
    if recipe.quantization.load_in_8bit:
        yield (
            f"quantization.load_in_8bit: bitsandbytes leaves the experts of {name} in 16 bits; set load_in_4bit: true, "
            "or quantization: null"
        )
    if stored_format(config) == "bitsandbytes":
        yield (
            f"model.name_or_path: {name} is a mixture stored in bitsandbytes' 4 bits, of one matrix an expert, which "
            "transformers no longer joins; name the model in 16 bits"
        )
    if kind in NOT_IN_FOUR_BITS:
        yield (
            f"quantization.load_in_4bit: the experts of {name} ({kind}) compute in a way that is not known in 4 bits; "
            "set quantization: null, or choose another model"
        )
    if strategy.schedule is not None:
        yield (
            f"accelerate_config: {strategy.name}: stages do not split experts in 4 bits; set accelerate_config=fsdp2, "
            "or quantization: null"
        )
    if stored_format(config) == MXFP4 and strategy.uses_engine and strategy.shards_parameters:
        yield (
            f"accelerate_config: {strategy.name} does not cut experts in MXFP4; set accelerate_config=fsdp2, or name "
            "the model in 16 bits"
        )
