"""A recipe's micro-batches that take most memory, without its data."""

from __future__ import annotations

import math
from typing import Any, cast

import torch

from finetune.architecture import attention
from finetune.model.build import attention_name
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import strategy_of
from finetune.tokens.batches import MicroBatch


def worst_batches(recipe: Recipe, ranks: int) -> list[MicroBatch]:
    """The largest possible micro-batches: full rows.

    There are two if steps accumulate, and three if weights stay gathered between them, because only a middle one has
    all gradients and all weights. Under a pipeline a step has all its micro-batches, because a stage receives and waits
    for each.

    Each row is one document. The last row has two if attention needs a mask for a row with several documents, or for a
    padded one: masks take memory in every layer.
    """
    rows, tokens = recipe.training.per_device_batch_size, recipe.data.max_length
    strategy = strategy_of(recipe)
    count = math.ceil(recipe.training.global_batch_size / (rows * strategy.data_rank_count(ranks)))
    if not strategy.schedule:
        count = min(count, 3 if strategy.gathers_once else 2)
    ids = torch.full((rows, tokens), 3)
    positions = torch.arange(tokens).repeat(rows, 1)
    batch: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "shift_labels": ids}
    if attention_name(recipe) == attention.NAME:
        batch = {key: value.reshape(1, -1) for key, value in batch.items()}
        batch["cu_seq_lens"] = torch.arange(0, (rows + 1) * tokens, tokens, dtype=torch.int32)
        batch["document_lengths"] = (tokens,) * rows
    elif recipe.data.packing or rows > 1:
        positions[-1, tokens // 2 :] -= tokens // 2
    batch["supervised"] = torch.arange(ids.numel())
    return [cast(MicroBatch, {key: _copied(value) for key, value in batch.items()}) for _ in range(count)]


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.contiguous().clone()
    return value
