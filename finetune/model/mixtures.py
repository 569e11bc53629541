"""Mixtures of experts by their configuration alone, and the settings that they are not trained with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
