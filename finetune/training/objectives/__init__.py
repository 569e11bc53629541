"""Objectives: each turns a micro-batch into a summed loss. The step, the loop and the strategies do not know which
runs.

An objective is one file in this folder and one line in `objective_of`. It counts in units of its own: supervised
tokens, preference pairs or rows. A step's loss is the sum over its units on all ranks, divided once by their number.

May import: everything below training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from torch import Tensor, nn

from finetune.recipe.schema import Recipe
from finetune.tokens.batches import MicroBatch
from finetune.tokens.mixture import Rows
from finetune.training.batch_plan import BatchPlan

Reduce = Callable[[Tensor], Tensor]  # a tensor's sum over all ranks


@dataclass(frozen=True)
class LossSum:
    """The loss of one micro-batch on this rank."""

    total: Tensor  # float32 [], summed over `count` units; backward starts here
    count: int
    metrics: tuple[Tensor, ...] = ()  # one for each name in `metric_names`: [], summed, on the device


@dataclass(frozen=True)
class ChosenRows:
    """Rows that become this rank's micro-batches: a step's, or an evaluation's."""

    plan: BatchPlan
    rows: Rows
    indices: np.ndarray  # of the chosen rows
    first: int = 0  # the place of the first one in the run's stream of rows, or among all held-out rows
    held_out: bool = False
    groups: list[list[int]] | None = None  # places that are computed as one row each; None: as the plan packs them

    @classmethod
    def held_out_rows(cls, plan: BatchPlan, rows: Rows, first: int) -> ChosenRows:
        """An evaluation's: each row once and in order."""
        return cls(plan, rows, np.arange(len(rows)), first, held_out=True)

    def grouped(self) -> list[list[int]]:
        """The places that are computed together."""
        return self.groups or self.plan.groups(self.rows, self.indices)

    def documents(self, place: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """input_ids and labels of the documents of the row at this place, int64, unshifted."""
        return self.rows.documents(int(self.indices[place]))


class Objective(Protocol):
    """How a micro-batch becomes a loss."""

    @property
    def unit(self) -> Literal["tokens", "pairs", "rows"]:
        """The unit that sums are divided by: supervised tokens, preference pairs or rows."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Metrics beside the loss, in the order of `LossSum.metrics`."""

    @property
    def needs_whole_step(self) -> bool:
        """Whether `before_step` wants the step's micro-batches. They are all on the device then, before the first."""

    def planned_count(self, rows: Rows, indices: np.ndarray) -> int:
        """The units in these rows over all ranks, known before the step from the tokenised rows."""

    def count(self, batch: MicroBatch) -> int:
        """The units in this rank's micro-batch."""

    def batches(self, chosen: ChosenRows) -> list[MicroBatch]:
        """This rank's micro-batches of these rows."""

    def eval_batches(self, plan: BatchPlan, rows: Rows, first: int = 0) -> Iterator[MicroBatch]:
        """This rank's micro-batches of all rows, each row once and in order: an evaluation's. `first`: the place of the
        first one among all held-out rows."""

    def before_step(self, model: nn.Module, batches: Iterable[MicroBatch], reduce: Reduce) -> None:
        """A pass without gradients over the step's micro-batches, before the first backward."""

    def loss(self, model: nn.Module, batch: MicroBatch) -> LossSum:
        """The summed loss. It enters `model` once, so that a strategy's hooks run once for each micro-batch."""

    def means(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """The metrics to report, from their sums over all ranks and the step's units."""


def objective_of(recipe: Recipe) -> Objective:
    """The objective that a recipe trains for."""
    if recipe.training.objective == "supervised":
        from finetune.training.objectives.supervised import Supervised

        return Supervised()
    from finetune.training.objectives.preferences import JudgedAnswers, Pairs

    if recipe.training.objective == "dpo":
        return Pairs(recipe.dpo)
    return JudgedAnswers(recipe.kto, recipe.data.max_length)
