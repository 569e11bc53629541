"""What a pipeline cannot train with yet, refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from finetune.architecture import attention
from finetune.errors import EnvironmentMismatch
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import Strategy
from finetune.wording import counted


def require_pipeline(recipe: Recipe, strategy: Strategy) -> None:
    """Raise EnvironmentMismatch, in one line, for settings that no stage of a pipeline can compute with yet."""
    if strategy.schedule is None:
        return
    for problem in _problems(recipe, strategy.name):
        raise EnvironmentMismatch(problem)


def require_micro_batches(recipe: Recipe, strategy: Strategy, ranks: int) -> None:
    """Raise EnvironmentMismatch where 1F1B has fewer micro-batches in a step than stages, which it cannot order."""
    stages, training = strategy.stage_count(ranks), recipe.training
    micro_batches = -(-training.global_batch_size // training.per_device_batch_size)
    if strategy.schedule == "1f1b" and micro_batches < stages:
        raise EnvironmentMismatch(
            f"training.global_batch_size: {counted(micro_batches, 'micro-batch', 'micro-batches')} a step are fewer "
            f"than the {stages} stages that 1f1b fills; set training.global_batch_size="
            f"{stages * training.per_device_batch_size}, lower training.per_device_batch_size, or take "
            "accelerate_config=gpipe"
        )


def _problems(recipe: Recipe, name: str) -> Iterator[str]:
    if recipe.quantization is not None:
        yield f"quantization: {name} does not split quantised weights yet; set quantization: null, or take fsdp2"
    if recipe.training.float8:
        yield f"training.mixed_precision: {name} does not compute in float8 yet; set bf16, or take fsdp2"
    if recipe.training.mixed_precision == "fp16":
        yield f"training.mixed_precision: the stages of {name} do not agree on fp16's loss scale; set bf16"
    if recipe.model.attention not in ("auto", attention.NAME):
        yield f"model.attention: {name} sends rows of one length between stages, flat ones; set model.attention: auto"
    if recipe.model.new_tokens:
        yield f"model.add_tokens: {name} does not train rows of new tokens yet; take accelerate_config=fsdp2"
