"""Choose the exported weights: the last step's, or those of the best evaluation.

Evaluations from step 1 on count, by training.metric_for_best_model. Each has a checkpoint (recipe/schema.py).
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
from finetune.wording import metric_in_words


@dataclass(frozen=True)
class Exported:
    """The step whose weights are exported, and their held-out loss, score or reward."""

    step: int
    best: bool  # the best evaluation's step; else the last one
    metric: str
    loss: float | None  # the value of `metric`; None if no rows are held out

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def forget_lost_best(recipe: Recipe, state: TrainState) -> str:
    """Let a resumed run forget the best evaluation so far if its checkpoint is lost.

    Returns a line that says so, or an empty text. Every rank calls it, and rank 0 examines the checkpoint.
    """
    if state.best_step is None or not recipe.training.exports_best:
        return ""
    folder, ranks = step_folder(Path(recipe.run_dir), state.best_step), all_ranks()
    # Rank 0 decides for all: ranks that disagree about the best step would export different weights.
    problem = None
    if ranks.rank == 0:
        found = examine(folder, hashes=False)
        problem = None if isinstance(found, Checkpoint) else found
    problem = ranks.gather(problem)[0]
    if problem is None:
        return ""
    lost, state.best_step, state.best_eval_loss = state.best_step, None, math.inf
    return f"{folder}: the best evaluation so far, of step {lost}, cannot be exported ({problem}); later ones count"


def weights_to_export(recipe: Recipe, parts: Assembled, state: TrainState) -> Exported:
    """Load the weights to export into the model. Every rank calls it.

    Raises FinetuneError, on every rank, if the best evaluation's checkpoint is damaged.
    """
    metric, step = recipe.training.metric_for_best_model, state.best_step
    if not recipe.training.exports_best or step is None:
        return Exported(state.step, False, metric, state.last_eval_loss)
    if step != state.step:  # else the model has these weights already
        _load(parts, step_folder(Path(recipe.run_dir), step))
    return Exported(step, True, metric, state.best_eval_loss)


def _load(parts: Assembled, folder: Path) -> None:
    """Load a checkpoint's weights after rank 0 has verified the hash over every byte."""
    checkpoint = examine(folder, hashes=all_ranks().rank == 0)
    problem = checkpoint if isinstance(checkpoint, str) else None
    # All ranks raise together: one that raised alone would leave the others in load_weights' collectives.
    if problem := next(filter(None, all_ranks().gather(problem)), None):
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
    text = f"exported: the weights of step {exported.step}, {metric_in_words(exported.metric, exported.loss)}"
    if not exported.best or state.last_eval_loss is None:
        return f"{text}, the last"
    if exported.step == state.step:
        return f"{text}, the last and the best"
    last = metric_in_words(exported.metric, state.last_eval_loss).rpartition(" ")[2]
    return f"{text}, the best evaluation; of step {state.step}, the last, it is {last}"
