"""A finished run continues from its last checkpoint if its recipe now asks for more steps.

Its result moves to exports/end-NNNNNNNN, a folder that chat, eval, merge and push read. So nothing in the run's folder
is older than the run.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.files import remove_folder, sync, write_json
from finetune.model.optimizer import learning_rate_schedule
from finetune.recipe.schema import Training
from finetune.run_folder.checkpoint import Checkpoint, checkpoint_steps, examine, read_state_of, step_folder
from finetune.run_folder.facts import EXPORT_RECORD, EXPORTED_RECORDS, EXPORTS

LENGTH_KEYS = ("training.num_train_epochs", "training.max_steps")  # the keys of a run's identity that may grow
HANDED_OVER = ("adapter", "model", "merged", "adapter-plain", "serving", "hub.json")


@dataclass(frozen=True)
class Asked:
    """The length that this start's recipe asks for."""

    training: Training
    rows: int  # in an epoch

    @property
    def total_rows(self) -> int:
        return self.training.rows_of_run(self.rows)

    @property
    def steps(self) -> int:
        return math.ceil(self.total_rows / self.training.global_batch_size)

    @property
    def last_step_is_short(self) -> bool:
        return self.total_rows % self.training.global_batch_size != 0

    def as_before(self, identity: Mapping[str, Any]) -> Asked:
        """This recipe with the length of the run in the folder."""
        length = {key.removeprefix("training."): identity.get(key) for key in LENGTH_KEYS}
        return Asked(self.training.model_copy(update=length), self.rows)


def go_on(
    run_dir: Path, previous: Mapping[str, Any], asked: Asked, newest: Checkpoint | None
) -> tuple[Checkpoint, str] | None:
    """The checkpoint from which the finished run continues, and a line for the user; None: the recipe is not longer.

    If the rows ended in a short last step, the longer run has more rows there. If there is a checkpoint before it, the
    run continues from that one, and the last is deleted. Example with 10 rows and steps of 4 rows: step 3 had 2 rows.
    A run over 20 rows has 4 there, so it continues from step 2.

    Args:
        previous: The run's run_state.json.
        newest: Its newest valid checkpoint.

    Raises FinetuneError if early stopping ended the run, or no checkpoint is left.
    """
    planned, done = asked.as_before(previous["identity"]), int(previous["step"])
    if asked.steps <= planned.steps:  # the caller then refuses the changed keys
        return None
    start_with = f"model.name_or_path={run_dir / 'model'}"
    if (run_dir / "adapter").is_dir():
        start_with = f"model.adapter={run_dir / 'adapter'}"
    remedy = f"begin a new run with its result: {shlex.quote(start_with)} and another output_dir"
    # Early stopping may also have come in the very last step. Then it would end the longer run at once.
    stopped_early, patience = done < planned.steps, asked.training.early_stopping_patience
    if not stopped_early and newest is not None and patience is not None:
        stopped_early = int(read_state_of(newest)["worse_evaluations"]) >= patience
    if stopped_early:
        raise FinetuneError(f"{run_dir}: early stopping ended this run at step {done} of {planned.steps}; {remedy}")
    if newest is None:
        raise FinetuneError(f"{run_dir}: this finished run has no checkpoint to go on from; {remedy}")
    start, note = newest, ""
    if planned.last_step_is_short and newest.step == done:
        start, note = _before_a_short_step(run_dir, planned, newest)
    return start, f"{run_dir}: {_in_words(asked, planned, start.step)}{note}"


def _before_a_short_step(run_dir: Path, planned: Asked, newest: Checkpoint) -> tuple[Checkpoint, str]:
    """The newest valid checkpoint before a short last step, else the one after it; and a note about its rows."""
    batch = planned.training.global_batch_size
    rows = planned.total_rows % batch
    short = f"step {newest.step} had {rows} of {batch} rows"
    for step in reversed(checkpoint_steps(run_dir)):
        if step >= newest.step:
            continue
        earlier = examine(step_folder(run_dir, step))
        if isinstance(earlier, Checkpoint):
            return earlier, f"; {short} and is repeated with all of them"
    return newest, f"; {short}, no checkpoint before it is left: {batch - rows} rows are skipped"


def _in_words(asked: Asked, planned: Asked, start: int) -> str:
    """Describe the learning rate, and whether the curve equals that of a run planned with the new length."""
    training, rate = asked.training, learning_rate_schedule(asked.training, asked.steps)
    before = learning_rate_schedule(planned.training, planned.steps)
    finished = f"finished after {planned.steps} steps, goes on from step {start} to {asked.steps}"
    # Equal rates for all finished steps, as with a constant schedule, make the longer run's curve that of a new run.
    if all(before(step) == rate(step) for step in range(start)):
        return f"{finished}; its learning rates so far are those of a run planned with {asked.steps} steps"
    return (
        f"{finished}; learning rate: {training.lr_scheduler_type} of {asked.steps} steps, {rate(start):.3g} at step "
        f"{start + 1} ({before(start - 1):.3g} before): the curve is not that of a run planned with {asked.steps} steps"
    )


def set_aside(run_dir: Path, start: int, done: int) -> None:
    """Move the run's result after `done` steps to exports/, and delete checkpoints after step `start`."""
    folder = run_dir / EXPORTS / f"end-{done:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    for name in EXPORTED_RECORDS:
        if (run_dir / name).is_file():
            shutil.copyfile(run_dir / name, folder / name)
    # The exported weights are not the last step's if the best evaluation's were exported.
    try:
        step = json.loads((folder / "receipt.json").read_text(encoding="utf-8")).get("export", {}).get("step") or done
    except (OSError, ValueError):
        step = done
    write_json(folder / EXPORT_RECORD, {"run": run_dir.resolve().name, "step": step})
    # A crash may have come between two of these renames. Then the next start moves the rest.
    for name in HANDED_OVER:
        if (run_dir / name).exists() and not (folder / name).exists():
            os.rename(run_dir / name, folder / name)
    sync(folder)
    for step in checkpoint_steps(run_dir):
        if step > start:
            remove_folder(step_folder(run_dir, step))
