"""Documents that a small model is tried on, shorter and longer than its window, in rows as a recipe makes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from finetune.architecture import attention
from finetune.model.build import attention_name
from finetune.recipe.schema import Recipe
from finetune.tokens.batches import MicroBatch, micro_batches, prefetch
from finetune.tokens.encoder import IGNORE

DOCUMENT_LENGTHS = (5, 20, 2, 13)
PACKED, ALONE = [[0, 1, 2], [3]], [[0], [1], [2], [3]]  # documents of each row

TokensAndLabels = tuple[np.ndarray, np.ndarray]


def probe_documents(
    vocabulary: int, special: frozenset[int], new: Sequence[int] = (), lengths: Sequence[int] = DOCUMENT_LENGTHS
) -> list[TokensAndLabels]:
    """Ids and labels of each document; its first third is a prompt, which is not supervised.

    Args:
        special: Tokens that are no text: an image, padding, an end.
        new: Token rows that are trained by themselves; the first few of them stand in every document.
    """
    text = np.array([token for token in range(vocabulary) if token not in special], np.int64)
    draw = np.random.default_rng(0)
    made = []
    for length in lengths:
        ids = draw.choice(text, length)
        places = np.arange(1, length, 3)[: len(new)]
        ids[places] = new[: len(places)]
        made.append((ids, np.where(np.arange(length) < length // 3, IGNORE, ids)))
    return made


class ProbeRows:
    """The documents in rows, packed or not, as batches ask for them."""

    def __init__(self, documents: list[TokensAndLabels], *, packing: bool) -> None:
        self._documents, self.members = documents, PACKED if packing else ALONE

    def documents(self, row: int) -> list[TokensAndLabels]:
        return [self._documents[index] for index in self.members[row]]


def probe_batches(recipe: Recipe, documents: list[TokensAndLabels], device: torch.device) -> Iterator[MicroBatch]:
    """The micro-batches that the recipe makes of these documents; two rows at most in one."""
    rows = ProbeRows(documents, packing=recipe.data.packing)
    batches = micro_batches(
        rows,
        range(len(rows.members)),
        rank=0,
        world_size=1,
        per_device_batch_size=min(2, recipe.training.rows_at_once),
        flat=attention_name(recipe) == attention.NAME,
    )
    return prefetch(batches, device, non_blocking=False)
