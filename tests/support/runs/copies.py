"""For the ranks: train, and have each write what its copy of the weights and moments is, to copy-RANK.json."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from finetune.run_folder.train_state import TrainState
from finetune.training import session
from finetune.training.run import Run
from tests.support.runs.cells import main

train = session.take_steps


def sha256_of(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def train_and_tell(run: Run, state: TrainState) -> bool:
    ended = train(run, state)
    weights = list(run.parts.model.parameters())
    moments = [run.parts.optimizer.state[weight][name] for weight in weights for name in ("exp_avg", "exp_avg_sq")]
    told = [sha256_of(tensor) for tensor in (*weights, *moments)]
    file = Path(run.recipe.run_dir) / f"copy-{run.parts.accelerator.process_index}.json"
    file.write_text(json.dumps(told), "utf-8")
    return ended


if __name__ == "__main__":
    session.take_steps = train_and_tell
    sys.exit(main(sys.argv[1:]))
