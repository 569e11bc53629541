"""Objectives: each turns a micro-batch into a summed loss. The step, the loop and the strategies do not know which
runs.

An objective is one file in this folder and one `case` in `objective_of`. It counts in units of its own: supervised
tokens, preference pairs or rows. A step's loss is the sum over its units on all ranks, divided once by their number.

May import: everything below training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from torch import Tensor, nn

from finetune.recipe.schema import Recipe
from finetune.tokens.batches import MicroBatch
from finetune.tokens.mixture import Rows


@dataclass(frozen=True)
class LossSum:
    """The loss of one micro-batch on this rank."""

    total: Tensor  # float32 [], summed over `count` units; backward starts here
    count: int
    metrics: tuple[Tensor, ...] = ()  # one for each name in `metric_names`: [], summed over units, on the device


class Objective(Protocol):
    """How a micro-batch becomes a loss."""

    @property
    def unit(self) -> Literal["tokens", "pairs", "rows"]:
        """The unit that sums are divided by: supervised tokens, preference pairs or rows."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Metrics beside the loss, in the order of `LossSum.metrics`; each is reported as a mean over units."""

    @property
    def needs_whole_step(self) -> bool:
        """Whether `before_step` wants the step's micro-batches. They are all on the device then, before the first."""

    def planned_count(self, rows: Rows, indices: np.ndarray) -> int:
        """The units in these rows over all ranks, known before the step from the tokenised rows."""

    def count(self, batch: MicroBatch) -> int:
        """The units in this rank's micro-batch."""

    def before_step(self, model: nn.Module, batches: Sequence[MicroBatch]) -> None:
        """A pass without gradients over the step's micro-batches, before the first backward."""

    def loss(self, model: nn.Module, batch: MicroBatch) -> LossSum:
        """The summed loss. It enters `model` once, so that a strategy's hooks run once for each micro-batch."""


def objective_of(recipe: Recipe) -> Any:
    """The objective that a recipe trains for. There is one so far: supervised answers and texts."""
    from finetune.training.objectives.supervised import Supervised

    return Supervised()
