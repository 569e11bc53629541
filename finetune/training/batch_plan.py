"""The arithmetic of a run's batches, fixed before its first step.

No torch at import, so that `finetune check --data` and `finetune plan` can tell steps: micro-batches import it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.recipe.schema import Recipe

if TYPE_CHECKING:
    from finetune.tokens.batches import Documents, MicroBatch
    from finetune.tokens.mixture import Rows


@dataclass(frozen=True)
class BatchPlan:
    """The arithmetic of a run, fixed before its first step."""

    rows: int  # training rows of one epoch
    total_rows: int  # rows of the whole run
    total_steps: int
    global_batch_size: int
    per_device_batch_size: int
    world_size: int
    rank: int
    seed: int
    flat: bool  # micro-batches are one flat row of documents
    stages: int = (
        1  # of a pipeline, which compute the same rows; world_size and rank count those with rows of their own
    )
    stage: int = 0  # this rank's
    width: int | None = None  # tokens of every micro-batch, where they are padded to one length
    capacity: int | None = None  # tokens of preference rows that are computed as one row; None: each by itself
    noun: str = "row"  # a row in messages

    def rows_of(self, step: int) -> np.ndarray:
        """The rows of step `step`, counted from 0; the same on every rank."""
        from finetune.tokens.batches import rows_of_step

        return rows_of_step(
            step,
            rows=self.rows,
            global_batch_size=self.global_batch_size,
            seed=self.seed,
            total_rows=self.total_rows,
        )

    def micro_batches(self, rows: Documents, indices: np.ndarray) -> list[MicroBatch]:
        """This rank's share of these rows. Nothing in it is learned by a stage that is not the last."""
        from finetune.tokens.batches import micro_batches, without_learning

        batches = micro_batches(
            rows,
            indices,
            rank=self.rank,
            world_size=self.world_size,
            per_device_batch_size=self.per_device_batch_size,
            flat=self.flat,
            width=self.width,
        )
        if self.stage == self.stages - 1:
            return batches
        return [without_learning(batch) for batch in batches]

    def groups(self, rows: Rows, indices: np.ndarray) -> list[list[int]]:
        """The places of these rows, in groups that are computed as one row: packed up to `capacity` tokens, or each by
        itself."""
        if self.capacity is None:
            return [[place] for place in range(len(indices))]
        from finetune.tokens.packing import pack

        return pack(rows.lengths[indices], self.capacity)

    def dealt(self, rows: int) -> list[range]:
        """This rank's share of so many rows, for each of its micro-batches."""
        from finetune.tokens.batches import dealt

        return dealt(rows, self.rank, self.world_size, self.per_device_batch_size)

    def batches_of_all(self, rows: Rows) -> Iterator[MicroBatch]:
        """This rank's micro-batches of all rows, each row once and in order: an evaluation's."""
        share = self.per_device_batch_size * self.world_size
        for first in range(0, len(rows), share):
            yield from self.micro_batches(rows, np.arange(first, min(first + share, len(rows))))

    def micro_steps_of(self, rows: Rows, indices: np.ndarray) -> int:
        """Forwards of one rank for these rows."""
        if self.capacity is None:
            return self.micro_steps(len(indices))
        return self.micro_steps(len(self.groups(rows, indices)))

    def micro_steps(self, rows: int) -> int:
        """Forwards of one rank for this many rows, each computed by itself: the most."""
        return math.ceil(rows / (self.per_device_batch_size * self.world_size))

    def _padding(self, rows: Rows) -> dict[str, Any]:
        """A micro-batch's tokens, and the padding's share of an epoch; nothing if none is padded."""
        if self.width is None:
            return {}
        micro_batches = math.ceil(self.rows / self.global_batch_size * self.micro_steps(self.global_batch_size))
        tokens = micro_batches * self.world_size * self.width
        return {"width": self.width, "padding_share": 1 - int(rows.lengths.sum()) / tokens}

    def facts(self, rows: Rows) -> dict[str, Any]:
        """The batch arithmetic, for the receipt and the terminal."""
        micro_steps = self.micro_steps(self.global_batch_size)
        return {
            "rows": self.rows,
            "global_batch_size": self.global_batch_size,
            "per_device_batch_size": self.per_device_batch_size,
            "world_size": self.world_size,
            "micro_steps": micro_steps,
            "total_rows": self.total_rows,
            "total_steps": self.total_steps,
            "unit": self.noun,
            # Micro-steps are the most where pairs share a row: a step has as many as its answers' lengths need.
            **({} if self.capacity is None else {"row_tokens": self.capacity}),
            **self._padding(rows),
        }


def one_width(per_device_batch_size: int, rows: Iterable[Rows]) -> int:
    """The most tokens in any micro-batch from these sets of rows."""
    longest = [np.sort(row_set.lengths)[::-1][:per_device_batch_size] for row_set in rows]
    return int(max(lengths.sum() for lengths in longest))


def plan_batches(
    recipe: Recipe,
    rows: int,
    *,
    world_size: int,
    rank: int,
    flat: bool,
    stages: int = 1,
    width: int | None = None,
) -> BatchPlan:
    """The run's steps and rows. The last epoch's last step may be short; nothing is dropped or doubled.

    Args:
        world_size, rank: Over all processes; a pipeline's follow each other.
        stages: In each pipeline.
        width: Tokens that every micro-batch is padded to.
    """
    training = recipe.training
    total_rows = training.rows_of_run(rows)
    # The tokens of preference rows that one forward computes as one row; None if each is computed by itself. Other
    # rows are packed before a step.
    packs = recipe.data.packing and recipe.data.unit != "documents"
    return BatchPlan(
        rows=rows,
        total_rows=total_rows,
        total_steps=math.ceil(total_rows / training.global_batch_size),
        global_batch_size=training.global_batch_size,
        per_device_batch_size=training.rows_at_once,
        world_size=world_size // stages,
        rank=rank // stages,
        seed=training.seed,
        flat=flat,
        stages=stages,
        stage=rank % stages,
        width=width,
        capacity=recipe.data.row_tokens if packs else None,
        noun=recipe.data.row_noun,
    )
