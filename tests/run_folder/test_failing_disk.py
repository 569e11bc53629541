"""Each call of a save that changes the disk fails once, with each error that a disk has: one line, and the old
checkpoint or the new one, whole; the next save writes it.

A crash at each of them is test_kill_points'.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune import files
from finetune.errors import EnvironmentMismatch
from finetune.files import clear_leftovers
from finetune.run_folder import checkpoint as checkpoints
from finetune.run_folder.background import Saves
from finetune.run_folder.checkpoint import checkpoint_steps, newest_valid, read_checkpoint, write_checkpoint
from finetune.strategies.pieces import Ranks
from tests.support.runs.saving import ROOM

ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class FailingDisk:
    """Numbers the calls that change the disk; the chosen one raises and, of a file, leaves half of it."""

    def __init__(self, fail_at: int | None, number: int) -> None:
        self.calls: list[str] = []
        self.fail_at, self.number = fail_at, number

    def counts(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) - 1 == self.fail_at:
            raise OSError(self.number, os.strerror(self.number))

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            try:
                self.counts(name)
            except OSError:
                if name == "save_file":
                    Path(arguments[1]).write_bytes(b"half")
                raise
            return real(*arguments, **options)

        return call

    def opened(self, path: Any, mode: str = "r", **options: Any) -> Any:
        if "w" not in mode:
            return open(path, mode, **options)
        self.counts("open")
        file = open(path, mode, **options)  # noqa: SIM115  # its caller closes it
        for name in ("write", "flush"):
            setattr(file, name, self.wrap(name, getattr(file, name)))
        return file

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir"):
            patch.setattr(os, name, self.wrap(name, getattr(os, name)))
        patch.setattr(checkpoints, "save_file", self.wrap("save_file", checkpoints.save_file))
        patch.setattr(files, "open", self.opened, raising=False)


def tensors(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((50,), float(step))}, "optimizer": {"w:step": torch.tensor(float(step))}}


def in_the_foreground(run_dir: Path) -> None:
    write_checkpoint(run_dir, 2, tensors(2), {"value": 2}, keep=1)


def in_the_background(run_dir: Path) -> None:
    saves = Saves(Ranks(), Ranks(), print, room=lambda: ROOM)
    saves.save(run_dir, 2, tensors(2), {"value": 2}, keep=1, best=None)
    saves.finish()


def failure_of(save: Callable[[Path], None], run_dir: Path) -> EnvironmentMismatch | None:
    """What a user would read; anything else would be a traceback."""
    try:
        save(run_dir)
    except EnvironmentMismatch as error:
        return error
    return None


@pytest.mark.sample(1, thorough=2)
@pytest.mark.parametrize("number", ERRORS, ids=[errno.errorcode[number] for number in ERRORS])
@pytest.mark.parametrize("save", [in_the_foreground, in_the_background])
def test_old_or_new_and_one_line(tmp_path: Path, save: Callable[[Path], None], number: int) -> None:
    template, work = tmp_path / "template", tmp_path / "work"
    write_checkpoint(template, 1, tensors(1), {"value": 1}, keep=1)
    for name in ("metrics.jsonl", "samples.jsonl"):
        (template / name).write_text('{"step": 1}\n{"step": 2}\n')
    seen: dict[str, set[int]] = {}
    for fail_at in range(1000):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(template, work)
        disk = FailingDisk(fail_at, number)
        with pytest.MonkeyPatch.context() as patch:
            disk.install(patch)
            failure = failure_of(save, work)
        assert failure is None or ("\n" not in str(failure) and str(work) in str(failure))
        if len(disk.calls) <= fail_at:
            break
        newest, damaged = newest_valid(work)
        assert newest is not None, f"nothing valid is left where {disk.calls[fail_at]} fails, call {fail_at}"
        assert not damaged
        found, state = read_checkpoint(newest)
        assert found["model"]["w"].eq(newest.step).all()
        assert state["value"] == newest.step
        seen.setdefault(disk.calls[fail_at], set()).add(newest.step)
        clear_leftovers(work / "checkpoints")
        save(work)
        assert checkpoint_steps(work) == [2]
        assert [path.name for path in (work / "checkpoints").iterdir()] == ["step-00000002"]
    assert fail_at > 25, f"only {fail_at} calls were tried"
    assert set.union(*seen.values()) == {1, 2}
    assert {"save_file", "write", "flush", "fsync", "replace", "rename", "open", "mkdir", "unlink"} <= seen.keys()
