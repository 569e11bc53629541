"""Thirty SIGKILLs at random moments of a loop that saves in the background on a slow disk: it ends as if none had come.

The loop has a step's arithmetic and lines, and no model, so that a life takes half a second. Of real trainings
tests/support/runs/soak_resume.py kills as many as are asked for.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

from finetune.files import TEMPORARY_PREFIX, append_lines, clear_leftovers, cut_lines, read_lines
from finetune.run_folder import checkpoint
from finetune.run_folder.background import Saves
from finetune.run_folder.checkpoint import checkpoint_steps, newest_valid, read_checkpoint, step_folder
from finetune.strategies.pieces import Ranks
from tests.support.runs.saving import ROOM, slow
from tests.support.runs.soak_resume import kill, wait_all

KILLS, STEPS = 30, 24
LIFE = 0.4  # seconds: each of eight checkpoints takes 0.04 at least


def loop(run_dir: Path) -> None:
    """Weights that each step changes, lines that name them, a checkpoint of every third step."""
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    newest, damaged = newest_valid(run_dir)
    assert not damaged
    weight, first = torch.ones(500), 0
    if newest is not None:
        weight, first = read_checkpoint(newest)[0]["model"]["w"], newest.step
    clear_leftovers(run_dir / "checkpoints")
    cut_lines(run_dir / "metrics.jsonl", first)
    saves = Saves(Ranks(), Ranks(), print, room=lambda: ROOM)
    for step in range(first + 1, STEPS + 1):
        weight.mul_(1.01).add_(torch.arange(500.0) / step)
        append_lines(run_dir / "metrics.jsonl", [{"step": step, "sum": weight.sum().item()}])
        if step % 3 == 0:
            saves.save(run_dir, step, {"model": {"w": weight}}, {"step": step}, keep=2, best=None)
    saves.finish()


def fork(run_dir: Path) -> int:
    process = os.fork()
    if not process:
        code = 1
        try:
            torch.set_num_threads(1)  # more do not survive a fork
            checkpoint.save_file = slow(0.02)
            loop(run_dir)
            code = 0
        finally:
            os._exit(code)
    return process


@pytest.mark.slow
def test_it_ends_as_if_none_had_come(tmp_path: Path) -> None:
    assert wait_all([fork(tmp_path / "whole")], 60) == [0]
    expected = [(tmp_path / "whole" / "metrics.jsonl").read_bytes(), files_of(tmp_path / "whole")]
    assert checkpoint_steps(tmp_path / "whole") == [STEPS - 3, STEPS]
    draw, kills, while_writing, runs = random.Random(0), 0, 0, 0
    while kills < KILLS:
        runs += 1
        assert runs < 100, f"only {kills} kills"
        run_dir, ended, life = tmp_path / f"killed-{runs}", None, LIFE
        while ended is None:
            process = [fork(run_dir)]
            ended = wait_all(process, draw.uniform(0.02, life))
            if ended is None:
                kill(process)
                kills += 1
                life *= 1.1  # or it would never end on a busy machine
                while_writing += any(run_dir.glob(f"checkpoints/{TEMPORARY_PREFIX}step-*"))
        assert ended == [0], "the loop failed"
        assert [line["step"] for line in read_lines(run_dir / "metrics.jsonl")] == list(range(1, STEPS + 1))
        assert [(run_dir / "metrics.jsonl").read_bytes(), files_of(run_dir)] == expected
    assert while_writing > KILLS // 3, f"{while_writing} of {kills} kills came while a checkpoint was written"


def files_of(run_dir: Path) -> dict[str, bytes]:
    """Every file of the two checkpoints that are kept; a kill between a name and the pruning may leave an older one."""
    kept = [step_folder(run_dir, step) for step in checkpoint_steps(run_dir)[-2:]]
    paths = sorted(path for folder in kept for path in folder.iterdir())
    assert len(paths) == 6
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in paths}
