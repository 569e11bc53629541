"""A run as the loop sees it: the parts that it trains with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

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
from finetune.tokens.dataset import Prepared
from finetune.tokens.mixture import Rows
from finetune.training.batch_plan import BatchPlan
from finetune.training.step.cast_weights import AS_THEY_ARE, CastWeights
from finetune.training.step.micro_batches import MicroBatches


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
    save: Callable[[TrainState], None]  # may return before the checkpoint is written
    skip_gradient_sync: Callable[[], AbstractContextManager[Any]]  # entered for every micro-batch but a step's last
    wait_for_saves: Callable[[], None] = lambda: None  # until those in the background are complete
    weights: CastWeights = AS_THEY_ARE  # copies that forward and backward compute with
    pipeline: MicroBatches | None = None  # through which a step's micro-batches go; None: one after another
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
    embeddings = getattr(embeddings, "original_module", embeddings)  # of peft's wrapper, whose own weight is computed
    rows, largest = full_shape(embeddings.weight)[0], prepared.facts["largest_token_id"]
    if largest >= rows:
        raise FinetuneError(
            f"model.name_or_path: the tokenizer makes token {largest}, the model has {rows} embeddings; "
            "use the tokenizer that belongs to the model"
        )
