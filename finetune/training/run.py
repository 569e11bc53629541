"""What one training works with: the parts that compute a step, and the run around them.

`build` (training/session.py) makes both. Neither changes afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from accelerate import Accelerator
from torch import nn

from finetune.errors import FinetuneError
from finetune.launch.signals import StopRequest
from finetune.measure.metrics import Terminal
from finetune.measure.phases import Phases
from finetune.model.optimizer import Schedule
from finetune.recipe.schema import Recipe
from finetune.recipe.sections.base import steps_between
from finetune.recipe.strategy import Strategy
from finetune.run_folder.background import Saves
from finetune.run_folder.save_restore import save
from finetune.run_folder.train_state import TrainState
from finetune.run_folder.trained_tensors import trained_checksums
from finetune.strategies.accelerator import accumulating
from finetune.strategies.assemble import Assembled
from finetune.strategies.pieces import all_ranks
from finetune.tokens.mixture import Rows
from finetune.training.batch_plan import BatchPlan
from finetune.training.cast_weights import AS_THEY_ARE, CastWeights
from finetune.training.objectives import Objective
from finetune.training.run_output import RunOutput
from finetune.training.watchdog import Progress

if TYPE_CHECKING:
    from finetune.strategies.pipeline.schedule import Pipeline


@dataclass(frozen=True)
class StepParts:
    """Everything that computes a step, the same in every step of a run."""

    accelerator: Accelerator
    model: nn.Module  # as the strategy wrapped it
    optimizer: torch.optim.Optimizer
    objective: Objective
    phases: Phases
    max_grad_norm: float | None
    strategy: Strategy | None = None  # None: one rank, which has no gradients to reduce
    weights: CastWeights = AS_THEY_ARE  # 16-bit copies that forward and backward compute with
    pipeline: Pipeline | None = None  # computes all micro-batches of a step; None: one after another

    def accumulating(self) -> AbstractContextManager[Any]:
        """The context for every micro-batch in a step except the last."""
        if self.strategy is None:
            return nullcontext()
        return accumulating(self.accelerator, self.strategy, self.model)


class Scorer(Protocol):
    """Answers held-out rows and scores them: generation/held_out.py."""

    def score(self, step: int) -> dict[str, Any]:
        """Answer with the weights after `step` steps, and write the line. Every rank calls it. Returns the line."""


@dataclass(frozen=True)
class Checkpoints:
    """Keeps a run's steps: in its folder, and on the recipe's storage."""

    recipe: Recipe
    assembled: Assembled
    saves: Saves
    output: RunOutput

    def save(self, state: TrainState) -> None:
        """Write a checkpoint; it may be complete only later. Every rank calls it."""
        push = None
        if self.recipe.storage is not None:
            lost = self.output.mirror.lost if self.output.mirror is not None else None
            if lost := next(filter(None, all_ranks().gather(lost)), None):
                raise FinetuneError(lost)
            # A checkpoint in which nothing has changed yet is not sent. Every rank takes part in the checksums.
            if not self.output.has_changed:
                self.output.has_changed = trained_checksums(self.assembled) != state.start_checksums
            if self.output.has_changed:
                best = state.best_step if self.recipe.training.exports_best else None
                push = partial(self.output.push_checkpoint, state.step, best)
        save(self.recipe, self.assembled, state, self.saves, push)


@dataclass(frozen=True)
class Run:
    """What the loop trains with."""

    recipe: Recipe
    plan: BatchPlan
    parts: StepParts
    train_rows: Rows
    eval_rows: Rows | None
    schedule: Schedule  # of the learning rate
    output: RunOutput
    stop: StopRequest = field(default_factory=StopRequest)
    progress: Progress = field(default_factory=Progress)
    checkpoints: Checkpoints | None = None  # None: no step is kept, as in a measurement
    eval_sets: Mapping[str, Rows] = field(default_factory=dict)  # eval_rows by data set, if there are several
    scorer: Scorer | None = None  # None: no answers are scored

    def stop_requested(self, step: int) -> bool:
        """Whether this rank was told to stop, or its last checkpoint failed, or another start took over this run. The
        loop asks once a step."""
        self.progress.reached(step)
        lost = self.output.mirror is not None and self.output.mirror.lost is not None
        return bool(self.stop) or lost or (self.checkpoints is not None and self.checkpoints.saves.failed)

    def write_metrics(self, line: dict[str, Any]) -> None:
        """Write a line of metrics.jsonl."""
        self.progress.reached(line["step"])
        self.output.write_metrics(line)


@dataclass(frozen=True)
class Forwards:
    """A model under a strategy, and the rows that it computes without a step: for the guard and a reference."""

    accelerator: Accelerator
    model: nn.Module
    weights: CastWeights
    plan: BatchPlan
    train: Rows
    held_out: Sequence[Rows]  # each data set by itself
    terminal: Terminal
    phases: Phases

    @classmethod
    def of(cls, run: Run) -> Forwards:
        """The forwards of a built run."""
        parts, terminal = run.parts, run.output.terminal
        held_out = held_out_sets(run.eval_rows, run.eval_sets)
        return cls(
            parts.accelerator, parts.model, parts.weights, run.plan, run.train_rows, held_out, terminal, parts.phases
        )


def held_out_sets(rows: Rows | None, sets: Mapping[str, Rows]) -> list[Rows]:
    """The held-out rows as an evaluation takes them: each data set by itself."""
    return [*sets.values()] or ([] if rows is None else [rows])


def steps_of(recipe: Recipe, total_steps: int) -> dict[str, int]:
    """eval_steps and save_steps in optimizer steps of this run, and score_steps if answers are scored."""
    steps = {
        "eval_steps": steps_between(recipe.eval_steps, total_steps),
        "save_steps": steps_between(recipe.save_steps, total_steps),
    }
    if recipe.eval.generate.every is not None:
        steps["score_steps"] = steps_between(recipe.eval.generate.every, total_steps)
    return steps
