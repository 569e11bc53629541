"""Decides which weights are exported: the last step's, or those with the lowest held-out loss.

Evaluations from step 1 on count, by training.metric_for_best_model. Each has a checkpoint (recipe/cross_checks.py).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.recipe.schema import Recipe
from finetune.run_folder.checkpoint import Checkpoint, examine, step_folder
from finetune.run_folder.save_restore import load_weights
from finetune.run_folder.train_state import TrainState
from finetune.strategies.assemble import Assembled
from finetune.strategies.pieces import all_ranks


@dataclass(frozen=True)
class Exported:
    """The step whose weights are exported, and their held-out loss."""

    step: int
    best: bool  # of the best evaluation; else of the last step
    metric: str
    loss: float | None  # by `metric`; None where no rows are held out

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def forget_lost_best(recipe: Recipe, state: TrainState) -> str:
    """Have a resumed run look for the best evaluation anew where the checkpoint of the one so far is not there.

    Returns a line that says so, or an empty text. Every rank calls it; rank 0 looks.
    """
    if state.best_step is None or not recipe.training.exports_best:
        return ""
    folder = step_folder(Path(recipe.run_dir), state.best_step)
    found = examine(folder, hashes=False) if all_ranks().rank == 0 else None
    problem = all_ranks().gather(found if isinstance(found, str) else None)[0]
    if problem is None:
        return ""
    lost, state.best_step, state.best_eval_loss = state.best_step, None, math.inf
    return f"{folder}: the best evaluation so far, of step {lost}, cannot be exported ({problem}); later ones count"


def weights_to_export(recipe: Recipe, parts: Assembled, state: TrainState) -> Exported:
    """Give the model the weights that are to be exported; every rank calls it.

    Raises FinetuneError, on every rank, where the best evaluation's checkpoint is damaged.
    """
    metric, step = recipe.training.metric_for_best_model, state.best_step
    if not recipe.training.exports_best or step is None:
        return Exported(state.step, False, metric, state.last_eval_loss)
    if step != state.step:
        _load(parts, step_folder(Path(recipe.run_dir), step))
    return Exported(step, True, metric, state.best_eval_loss)


def _load(parts: Assembled, folder: Path) -> None:
    """Load a checkpoint's weights after rank 0 has verified the hash over every byte."""
    checkpoint = examine(folder, hashes=all_ranks().rank == 0)
    problems = all_ranks().gather(checkpoint if isinstance(checkpoint, str) else None)
    if problem := next(filter(None, problems), None):
        raise FinetuneError(
            f"{folder}: the best evaluation's checkpoint cannot be exported: {problem}; the last step's weights can: "
            "start again with training.load_best_model_at_end=false"
        )
    assert isinstance(checkpoint, Checkpoint)
    load_weights(parts, checkpoint)


def describe_exported(exported: Exported, state: TrainState) -> str:
    """A line for the terminal: the exported step, and its loss if known."""
    if exported.loss is None:
        return f"exported: the weights of step {exported.step}, the last"
    named = "held-out loss" if exported.metric == "eval_loss" else exported.metric
    text = f"exported: the weights of step {exported.step}, {named} {exported.loss:.4f}"
    if not exported.best or state.last_eval_loss is None:
        return f"{text}, the last"
    if exported.step == state.step:
        return f"{text}, the last and the best"
    return f"{text}, the best evaluation; of step {state.step}, the last, it is {state.last_eval_loss:.4f}"
