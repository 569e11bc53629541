"""For the ranks: train two steps under an engine, then one whose loss is infinite on the last rank alone.

What was seen of the engine goes to spoilt.json in each recipe's run folder.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from finetune.errors import NotFinite
from finetune.model.optimizer import set_learning_rate
from finetune.run_folder.train_state import TrainState
from finetune.strategies.zero_state import full_weights, trained_pieces
from finetune.tokens.batches import prefetch
from finetune.training import session
from finetune.training.run import Run, StepParts
from finetune.training.step import optimizer_step
from finetune.training.update import StepResult
from tests.support.runs.cells import main


def take_step(run: Run, parts: StepParts, step: int) -> StepResult:
    indices = run.plan.rows_of(step)
    return optimizer_step(
        parts,
        prefetch(run.plan.micro_batches(run.train_rows, indices), parts.accelerator.device, False),
        micro_steps=run.plan.micro_steps(len(indices)),
        planned_count=parts.objective.planned_count(run.train_rows, indices),
        seed=0,
        stop=False,
    ).result()


def train_and_spoil(run: Run, state: TrainState) -> bool:
    for step in range(2):
        set_learning_rate(run.parts.optimizer, run.schedule.rate(step))
        take_step(run, run.parts, step)
    before, whole = trained_pieces(run.parts.model), full_weights(run.parts.model, dtype=None, keep=True)
    facts: dict[str, Any] = {"refused": _refuses_a_spoilt_step(run)}
    after = trained_pieces(run.parts.model)
    facts["moved"] = [
        f"{group} {name}"
        for group, pieces in before.items()
        for name, piece in pieces.items()
        if not torch.equal(piece.tensor, after[group][name].tensor)
    ]
    again = full_weights(run.parts.model, dtype=None, keep=True)
    facts["moved"] += [name for name, tensor in whole.items() if not torch.equal(tensor, again[name])]
    facts["pieces"] = len(before["model"])
    facts["next_norm"] = take_step(run, run.parts, 2).grad_norm  # nothing of the spoilt gradients is left
    folder = Path(run.recipe.run_dir)
    facts["swapped_bytes"] = sum(file.stat().st_size for file in folder.rglob("*.swp"))
    if run.parts.accelerator.is_main_process:
        (folder / "spoilt.json").write_text(json.dumps(facts), "utf-8")
    run.parts.accelerator.wait_for_everyone()
    return False  # as if stopped: nothing to export


def _refuses_a_spoilt_step(run: Run) -> bool:
    last = run.parts.accelerator.process_index == run.parts.accelerator.num_processes - 1

    class Spoilt(torch.nn.Module):
        def forward(self, **batch: Any) -> torch.Tensor:
            loss: torch.Tensor = run.parts.model(**batch)
            return loss * math.inf if last else loss

    try:
        take_step(run, replace(run.parts, model=Spoilt()), 0)
    except NotFinite:
        return True
    return False


if __name__ == "__main__":
    session.take_steps = train_and_spoil
    sys.exit(main(sys.argv[1:]))
