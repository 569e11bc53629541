"""What a pipeline cannot train with yet, refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from finetune.architecture import attention
from finetune.errors import EnvironmentMismatch
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import Strategy
from finetune.strategies.pipeline.timeline import can_interleave
from finetune.wording import counted


def require_pipeline(recipe: Recipe, strategy: Strategy) -> None:
    """Raise EnvironmentMismatch, in one line, for settings that no stage of a pipeline can compute with yet."""
    if strategy.schedule is None:
        return
    for problem in _problems(recipe, strategy.name):
        raise EnvironmentMismatch(problem)


def require_stages(recipe: Recipe, strategy: Strategy, ranks: int) -> None:
    """Raise EnvironmentMismatch where so many ranks are not pipelines of two stages or more, or where a step has a
    number of micro-batches that the schedule cannot order."""
    pipelines = strategy.pipelines
    if pipelines is None:
        return
    if (misfit := pipelines.misfit(ranks)) is not None:
        raise EnvironmentMismatch(f"accelerate_config: {strategy.name} {misfit}")
    stages, training = strategy.stage_count(ranks), recipe.training
    rows = training.per_device_batch_size * pipelines.copies
    micro_batches = -(-training.global_batch_size // rows)
    fitting = stages * -(-micro_batches // stages) * rows
    each = " in each pipeline" if pipelines.copies > 1 else ""
    if pipelines.schedule in ("1f1b", "interleaved_1f1b") and micro_batches < stages:
        raise EnvironmentMismatch(
            f"training.global_batch_size: {counted(micro_batches, 'micro-batch', 'micro-batches')} a step{each} are "
            f"fewer than the {stages} stages that {pipelines.schedule} fills; set training.global_batch_size={fitting},"
            " lower training.per_device_batch_size, or take accelerate_config=gpipe"
        )
    if pipelines.runs > 1 and not can_interleave(stages, micro_batches):
        raise EnvironmentMismatch(
            f"training.global_batch_size: {micro_batches} micro-batches a step{each} are no rounds of equal size, of "
            f"{stages} or more, as {pipelines.schedule} takes them; set training.global_batch_size={fitting}, or take "
            "accelerate_config=1f1b"
        )


def _problems(recipe: Recipe, name: str) -> Iterator[str]:
    if recipe.quantization is not None and not recipe.quantization.load_in_4bit:
        yield f"quantization.load_in_8bit: {name} does not split int8 weights yet; set load_in_4bit, or take ddp"
    if recipe.training.float8:
        yield f"training.mixed_precision: {name} does not compute in float8 yet; set bf16, or take fsdp2"
    if recipe.training.mixed_precision == "fp16":
        yield f"training.mixed_precision: the stages of {name} do not agree on fp16's loss scale; set bf16"
    if recipe.model.attention not in ("auto", attention.NAME):
        yield f"model.attention: {name} sends rows of one length between stages, flat ones; set model.attention: auto"
    if recipe.model.new_tokens:
        yield f"model.add_tokens: {name} does not train rows of new tokens yet; take accelerate_config=fsdp2"
