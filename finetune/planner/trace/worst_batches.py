"""A recipe's micro-batches that take most memory, without its data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from finetune.architecture import attention
from finetune.model.build import attention_name
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import strategy_of
from finetune.tokens.batches import MicroBatch, changed_tensors, micro_batches
from finetune.training.objectives.answers import planned_answers


def worst_batches(recipe: Recipe, ranks: int) -> list[MicroBatch]:
    """The largest possible micro-batches: full rows.

    There are two if steps accumulate, and three if weights stay gathered between them, because only a middle one has
    all gradients and all weights. Under a pipeline a step has all its micro-batches, because a stage receives and waits
    for each.

    Each row is one document. The last row has two if attention needs a mask for a row with several documents, or for a
    padded one: masks take memory in every layer.
    """
    rows, tokens = recipe.training.rows_at_once, recipe.data.max_length
    strategy = strategy_of(recipe)
    count = math.ceil(recipe.training.global_batch_size / (rows * strategy.data_rank_count(ranks)))
    if not strategy.schedule:
        count = min(count, 3 if strategy.gathers_once else 2)
    flat = attention_name(recipe) == attention.NAME
    if recipe.data.unit != "documents":  # a pair's two answers, each as long as it may be
        return batches_with_lengths(recipe, ((tokens,) * recipe.data.answers_a_row,) * rows, count, flat=flat)
    ids = torch.full((rows, tokens), 3)
    positions = torch.arange(tokens).repeat(rows, 1)
    supervised = torch.arange(ids.numel())
    batch = MicroBatch(input_ids=ids, position_ids=positions, shift_labels=ids, supervised=supervised)
    if flat:
        ids, positions = ids.reshape(1, -1), positions.reshape(1, -1)
        batch = MicroBatch(input_ids=ids, position_ids=positions, shift_labels=ids, supervised=supervised)
        batch["cu_seq_lens"] = torch.arange(0, (rows + 1) * tokens, tokens, dtype=torch.int32)
        batch["document_lengths"] = (tokens,) * rows
    elif recipe.data.packing or rows > 1:
        positions[-1, tokens // 2 :] -= tokens // 2
    return [changed_tensors(batch, lambda tensor: tensor.contiguous().clone()) for _ in range(count)]


@dataclass(frozen=True)
class _RowLengths:
    """Rows of documents with these lengths. All tokens are number 3, because only lengths matter."""

    documents_of: Sequence[Sequence[int]]

    def documents(self, row: int) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(np.full(length, 3), np.full(length, 3)) for length in self.documents_of[row]]


def batches_with_lengths(
    recipe: Recipe, rows: Sequence[Sequence[int]], count: int, *, flat: bool, width: int | None = None
) -> list[MicroBatch]:
    """`count` micro-batches of these rows, given by their documents' lengths; every token is supervised."""
    options: dict[str, Any] = {"rank": 0, "world_size": 1, "per_device_batch_size": len(rows)}
    options |= {"flat": flat, "width": width}

    def made() -> MicroBatch:  # tensors of its own: an earlier one may still be there
        return micro_batches(_RowLengths(rows), range(len(rows)), **options)[0]

    if recipe.data.unit == "documents":
        return [made() for _ in range(count)]
    lengths = [length for row in rows for length in row]
    return [planned_answers(recipe.data.unit, lengths, made) for _ in range(count)]
