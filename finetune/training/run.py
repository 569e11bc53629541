"""A run as the loop sees it: the arithmetic of its batches, and the parts that it trains with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from finetune.errors import FinetuneError, RecipeError
from finetune.measure.metrics import Terminal
from finetune.measure.phases import Phases
from finetune.model.build import decoder_parts
from finetune.recipe.cross_checks import steps_between, unsaved_evaluations
from finetune.recipe.schema import Recipe
from finetune.run_folder.train_state import TrainState
from finetune.strategies.zero_state import full_shape
from finetune.tokens.batches import Documents, MicroBatch, micro_batches, rows_of_step
from finetune.tokens.dataset import Prepared
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

    def rows_of(self, step: int) -> np.ndarray:
        """The rows of step `step`, counted from 0; the same on every rank."""
        return rows_of_step(
            step,
            rows=self.rows,
            global_batch_size=self.global_batch_size,
            seed=self.seed,
            total_rows=self.total_rows,
        )

    def micro_batches(self, rows: Documents, indices: np.ndarray) -> list[MicroBatch]:
        """This rank's share of these rows."""
        return micro_batches(
            rows,
            indices,
            rank=self.rank,
            world_size=self.world_size,
            per_device_batch_size=self.per_device_batch_size,
            flat=self.flat,
        )

    def batches_from(self, first_step: int, rows: Documents) -> Iterator[MicroBatch]:
        """This rank's micro-batches from step `first_step` to the end of the run."""
        for step in range(first_step, self.total_steps):
            yield from self.micro_batches(rows, self.rows_of(step))

    def batches_of_all(self, rows: Rows) -> Iterator[MicroBatch]:
        """This rank's micro-batches of all rows, each row once and in order: an evaluation's."""
        share = self.per_device_batch_size * self.world_size
        for first in range(0, len(rows), share):
            yield from self.micro_batches(rows, np.arange(first, min(first + share, len(rows))))

    def micro_steps(self, rows: int) -> int:
        """Forwards of one rank for this many rows."""
        return math.ceil(rows / (self.per_device_batch_size * self.world_size))

    def facts(self) -> dict[str, int]:
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
        }


def plan_batches(recipe: Recipe, rows: int, *, world_size: int, rank: int, flat: bool) -> BatchPlan:
    """Steps and rows of the run. The last step of the last epoch may be short; nothing is dropped or doubled."""
    training = recipe.training
    total_rows = math.ceil(training.num_train_epochs * rows)
    if training.max_steps is not None:
        total_rows = training.max_steps * training.global_batch_size
    return BatchPlan(
        rows=rows,
        total_rows=total_rows,
        total_steps=math.ceil(total_rows / training.global_batch_size),
        global_batch_size=training.global_batch_size,
        per_device_batch_size=training.per_device_batch_size,
        world_size=world_size,
        rank=rank,
        seed=training.seed,
        flat=flat,
    )


@dataclass(frozen=True)
class Run:
    """What the loop trains with; training/session.py builds it."""

    recipe: Recipe
    accelerator: Accelerator
    model: nn.Module  # as the strategy wrapped it
    optimizer: torch.optim.Optimizer
    train_rows: Rows
    eval_rows: Rows | None
    plan: BatchPlan
    learning_rate: Callable[[int], float]
    terminal: Terminal
    phases: Phases
    stop_requested: Callable[[], bool]
    write_metrics: Callable[[dict[str, Any]], None]
    save: Callable[[TrainState], None]
    skip_gradient_sync: Callable[[], AbstractContextManager[Any]]  # entered for every micro-batch but a step's last
    eval_sets: Mapping[str, Rows] = field(default_factory=dict)  # eval_rows by data set, where there are several


def steps_of(recipe: Recipe, total_steps: int) -> dict[str, int]:
    """eval_steps and save_steps in optimizer steps of this run."""
    return {
        "eval_steps": steps_between(recipe.eval_steps, total_steps),
        "save_steps": steps_between(recipe.save_steps, total_steps),
    }


def check_best(recipe: Recipe, total_steps: int) -> None:
    """Refuse a best evaluation that may have no checkpoint to export. Raises RecipeError."""
    if unsaved := unsaved_evaluations(recipe, total_steps):
        raise RecipeError([f"save_steps: {'; '.join(unsaved)}"])


def check_vocabulary(prepared: Prepared, model: nn.Module) -> None:
    """Refuse token ids that the embedding has no row for. Raises FinetuneError."""
    embeddings: Any = decoder_parts(model).get_input_embeddings()
    rows, largest = full_shape(embeddings.weight)[0], prepared.facts["largest_token_id"]
    if largest >= rows:
        raise FinetuneError(
            f"model.name_or_path: the tokenizer makes token {largest}, the model has {rows} embeddings; "
            "use the tokenizer that belongs to the model"
        )
