"""For the ranks: train two steps under an engine, then one whose loss is infinite on the last rank alone.

What was seen of the engine goes to spoilt.json in each recipe's run folder.
"""

from __future__ import annotations

import json
import math
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from finetune.errors import NotFinite
from finetune.run_folder.train_state import TrainState
from finetune.strategies.zero_state import full_weights, trained_pieces
from finetune.tokens.batches import prefetch
from finetune.training import session
from finetune.training.run import Run
from finetune.training.step.optimizer_step import optimizer_step
from finetune.training.step.run_steps import Steps
from tests.support.cells import main


def train_and_spoil(run: Run, state: TrainState) -> bool:
    batches = chain.from_iterable(run.plan.batches_from(0, run.train_rows))
    steps = Steps(run, state, prefetch(batches, run.accelerator.device, False), late=False)
    for _ in range(2):
        steps.begin()
        steps.read()
    before, whole = trained_pieces(run.model), full_weights(run.model, dtype=None, keep=True)
    facts: dict[str, Any] = {"refused": _refuses_a_spoilt_step(run)}
    after = trained_pieces(run.model)
    facts["moved"] = [
        f"{group} {name}"
        for group, pieces in before.items()
        for name, piece in pieces.items()
        if not torch.equal(piece.tensor, after[group][name].tensor)
    ]
    again = full_weights(run.model, dtype=None, keep=True)
    facts["moved"] += [name for name, tensor in whole.items() if not torch.equal(tensor, again[name])]
    facts["pieces"] = len(before["model"])
    steps.begin()
    steps.read()  # nothing of the spoilt gradients is left
    facts["next_norm"] = state.window.records[-1].grad_norm
    folder = Path(run.recipe.run_dir)
    facts["swapped_bytes"] = sum(file.stat().st_size for file in folder.rglob("*.swp"))
    if run.accelerator.is_main_process:
        (folder / "spoilt.json").write_text(json.dumps(facts), "utf-8")
    run.accelerator.wait_for_everyone()
    return False  # as if stopped: nothing to export


def _refuses_a_spoilt_step(run: Run) -> bool:
    last = run.accelerator.process_index == run.accelerator.num_processes - 1

    class Spoilt(torch.nn.Module):
        def forward(self, **batch: Any) -> torch.Tensor:
            loss: torch.Tensor = run.model(**batch)
            return loss * math.inf if last else loss

    indices = run.plan.rows_of(0)
    try:
        optimizer_step(
            run.accelerator,
            Spoilt(),
            run.optimizer,
            iter(run.plan.micro_batches(run.train_rows, indices)),
            micro_steps=run.plan.micro_steps(len(indices)),
            supervised_tokens=int(run.train_rows.supervised[indices].sum()),
            max_grad_norm=run.recipe.training.max_grad_norm,
            seed=0,
            stop=False,
            phases=run.phases,
            skip_gradient_sync=run.skip_gradient_sync,
        )
    except NotFinite:
        return True
    return False


if __name__ == "__main__":
    session.train = train_and_spoil
    sys.exit(main(sys.argv[1:]))
