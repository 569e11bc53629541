"""A crash at any call to the file system leaves the old checkpoint or the new one, whole.

The crash is the worst that a machine may do: the call does not happen, nothing after it does, and what was written but
not synced is lost by half.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune import checkpoint as checkpoints
from finetune import durable
from finetune.checkpoint import newest_valid, read_checkpoint, step_folder, write_checkpoint
from finetune.durable import clear_leftovers


class Killed(BaseException):
    """No `except Exception` of the code under test may see it."""


class Disk:
    """Counts calls that change the disk and dies at the chosen one; a dead process changes nothing any more."""

    def __init__(self, die_at: int | None, half_done: bool = False) -> None:
        self.calls: list[tuple[str, str]] = []
        self.die_at, self.half_done = die_at, half_done
        self.dead = False
        self.synced: set[int] = set()

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.dead:
                raise Killed
            self.calls.append((name, str(arguments[1] if name == "save_file" else arguments[0])))
            if len(self.calls) - 1 == self.die_at:
                self.dead = True
                if self.half_done and name == "save_file":
                    real(*arguments, **options)
                raise Killed
            result = real(*arguments, **options)
            if name == "fsync":
                self.synced.add(os.fstat(arguments[0]).st_ino)
            return result

        return call

    def opener(self, real: Callable[..., Any]) -> Callable[..., Any]:
        counted = self.wrap("open", real)
        return lambda path, mode="r", **options: (counted if "w" in mode else real)(path, mode, **options)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir"):
            patch.setattr(os, name, self.wrap(name, getattr(os, name)))
        patch.setattr(checkpoints, "save_file", self.wrap("save_file", checkpoints.save_file))
        patch.setattr(durable, "open", self.opener(open), raising=False)

    def lose_what_was_not_synced(self, folder: Path, known: set[int]) -> None:
        for path in folder.rglob("*"):
            facts = path.stat()
            if stat.S_ISREG(facts.st_mode) and facts.st_ino not in self.synced | known:
                os.truncate(path, facts.st_size // 2)


def save(run_dir: Path, step: int) -> None:
    tensors = {"model": {"w": torch.full((50,), float(step))}, "optimizer": {"w:step": torch.tensor(float(step))}}
    write_checkpoint(run_dir, step, tensors, {"value": step}, keep=1)


def crash(template: Path, work: Path, disk: Disk) -> bool:
    """Copies the template, writes step 2 on `disk`; returns whether it died."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(template, work)
    known = {path.stat().st_ino for path in work.rglob("*")}
    with pytest.MonkeyPatch.context() as patch:
        disk.install(patch)
        try:
            save(work, 2)
        except Killed:
            assert disk.dead
    disk.lose_what_was_not_synced(work, known)
    return disk.dead


@pytest.mark.parametrize("start", ["one older checkpoint", "a damaged one of the same step"])
@pytest.mark.parametrize("half_done", [False, True])
def test_a_crash_anywhere_leaves_old_or_new(tmp_path: Path, half_done: bool, start: str) -> None:
    template = tmp_path / "template"
    save(template, 1)
    (template / "metrics.jsonl").write_text('{"step": 2}\n')
    if start != "one older checkpoint":
        shutil.copytree(step_folder(template, 1), step_folder(template, 2))
    work = tmp_path / "work"
    seen: set[int] = set()
    point = 0
    while crash(template, work, Disk(point, half_done)):
        found, _ = newest_valid(work)
        assert found is not None, f"nothing valid is left after a crash at call {point}"
        tensors, state = read_checkpoint(found)
        assert tensors["model"]["w"].eq(found.step).all()
        assert state["value"] == tensors["optimizer"]["w:step"].item() == found.step
        seen.add(found.step)
        clear_leftovers(work / "checkpoints")
        save(work, 2)
        assert [path.name for path in (work / "checkpoints").iterdir()] == ["step-00000002"]
        point += 1
    assert seen == {1, 2}
    assert point > 20, f"only {point} calls were tried"


def test_synced_before_named_and_named_before_pruned(tmp_path: Path) -> None:
    template = tmp_path / "template"
    save(template, 1)
    disk = Disk(None)
    assert not crash(template, tmp_path / "work", disk)
    names = [name for name, _ in disk.calls]
    published = max(
        index for index, (name, path) in enumerate(disk.calls) if name == "rename" and "step-00000002" in path
    )
    assert names[published - 1] == "fsync"
    assert names[published + 1] == "fsync"
    removed = [index for index, name in enumerate(names) if name in ("unlink", "rmdir")]
    assert removed
    assert min(removed) > published + 1
    inodes = {path.stat().st_ino for path in step_folder(tmp_path / "work", 2).iterdir()}
    assert inodes <= disk.synced
