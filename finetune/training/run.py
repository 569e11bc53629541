"""A run as the loop sees it.

Which object holds which:

    Start       known before the process group: recipe, launch, strategy, tokenizer, prepared data, plan, claim
      Launch      this process's rank and world size
      Prepared    training and held-out rows, prompts
      BatchPlan   which rows make a step, and this rank's share of them
      Claim       rank 0's lock on the run folder, and the checkpoint to start from
    Session     one process's training (training/session.py): Start, Accelerator, RunOutput, Progress, and then
      Assembled   what the strategy built: model, optimizer, pipeline
      Run         what the loop needs: rows, plan, schedule, and functions that write and save
        StepParts   what computes one step: model, optimizer, objective, weights, pipeline
      TrainState  what a checkpoint keeps beside tensors: the step, the best evaluation, the loss scale
      Progress    step and phase, for heartbeats and messages
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from finetune.errors import FinetuneError, RecipeError
from finetune.measure.metrics import Terminal
from finetune.model.build import decoder_parts
from finetune.recipe.schema import Recipe
from finetune.recipe.sections.base import steps_between
from finetune.run_folder.train_state import TrainState
from finetune.strategies.zero_state import full_shape
from finetune.tokens.dataset import Prepared
from finetune.tokens.mixture import Rows
from finetune.training.batch_plan import BatchPlan
from finetune.training.step import StepParts


@dataclass(frozen=True)
class Run:
    """What the loop trains with; training/session.py builds it."""

    recipe: Recipe
    plan: BatchPlan
    parts: StepParts
    train_rows: Rows
    eval_rows: Rows | None
    learning_rate: Callable[[int], float]  # by step, counted from 0
    terminal: Terminal
    stop_requested: Callable[[], bool]
    write_metrics: Callable[[dict[str, Any]], None]
    save: Callable[[TrainState], None]  # may return before the checkpoint is written
    wait_for_saves: Callable[[], None] = lambda: None  # until background saves are complete
    eval_sets: Mapping[str, Rows] = field(default_factory=dict)  # eval_rows by data set, if there are several
    score: Callable[[int], dict[str, Any]] | None = None  # answers, scores and writes a line; None: nothing is scored


def steps_of(recipe: Recipe, total_steps: int) -> dict[str, int]:
    """eval_steps and save_steps in optimizer steps of this run, and score_steps if answers are scored."""
    steps = {
        "eval_steps": steps_between(recipe.eval_steps, total_steps),
        "save_steps": steps_between(recipe.save_steps, total_steps),
    }
    if recipe.eval.generate.every is not None:
        steps["score_steps"] = steps_between(recipe.eval.generate.every, total_steps)
    return steps


def check_best(recipe: Recipe, total_steps: int) -> None:
    """Refuse a best evaluation that may have no checkpoint to export. Raises RecipeError."""
    if unsaved := recipe.unsaved_evaluations(total_steps):
        raise RecipeError([f"save_steps: {'; '.join(unsaved)}"])


def check_vocabulary(prepared: Prepared, model: nn.Module) -> None:
    """Refuse token ids that the embedding has no row for. Raises FinetuneError."""
    embeddings: Any = decoder_parts(model).get_input_embeddings()
    embeddings = getattr(embeddings, "original_module", embeddings)  # peft's wrapper computes its own weight
    rows, largest = full_shape(embeddings.weight)[0], prepared.facts["largest_token_id"]
    if largest >= rows:
        raise FinetuneError(
            f"model.name_or_path: the tokenizer makes token {largest}, the model has {rows} embeddings; "
            "use the tokenizer that belongs to the model"
        )
