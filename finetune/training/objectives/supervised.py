"""Supervised fine-tuning: the cross-entropy of the supervised tokens, summed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import numpy as np
from torch import nn

from finetune.tokens.batches import MicroBatch
from finetune.tokens.mixture import Rows
from finetune.training.batch_plan import BatchPlan
from finetune.training.objectives import ChosenRows, LossSum, Reduce


class Supervised:
    """Counts supervised tokens. `model` returns their summed loss (architecture/loss.py)."""

    unit: Literal["tokens"] = "tokens"
    metric_names: tuple[str, ...] = ()
    needs_whole_step = False

    def planned_count(self, rows: Rows, indices: np.ndarray) -> int:
        """The supervised tokens of these rows."""
        return int(rows.supervised[indices].sum())

    def count(self, batch: MicroBatch) -> int:
        """`supervised` lists the positions that have a label."""
        return len(batch["supervised"])

    def batches(self, chosen: ChosenRows) -> list[MicroBatch]:
        """The plan's own."""
        return chosen.plan.micro_batches(chosen.rows, chosen.indices)

    def eval_batches(self, plan: BatchPlan, rows: Rows, first: int = 0) -> Iterator[MicroBatch]:
        """The plan's own."""
        return plan.batches_of_all(rows)

    def before_step(self, model: nn.Module, batches: Iterable[MicroBatch], reduce: Reduce) -> None:
        """Nothing: each token's loss depends on its own document."""

    def loss(self, model: nn.Module, batch: MicroBatch) -> LossSum:
        """One forward."""
        return LossSum(model(**batch), self.count(batch))

    def means(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """There are none."""
        return {}
