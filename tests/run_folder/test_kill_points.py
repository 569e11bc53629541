"""A crash at any call to the file system leaves the old checkpoint or the new one, whole.

The crash is the worst that a machine may do: the call does not happen, nothing after it does, and what was written but
not synced is lost by half.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune import files
from finetune.files import clear_leftovers, read_lines, write_text
from finetune.run_folder import checkpoint as checkpoints
from finetune.run_folder.checkpoint import newest_valid, read_checkpoint, step_folder, write_checkpoint

# Grown by lines while a run trains; synced when a checkpoint is written. A line of each step, as long as any other.
LINES = ("metrics.jsonl", "samples.jsonl")


class Killed(BaseException):
    """No `except Exception` of the code under test may see it."""


class Disk:
    """Counts calls that change the disk and dies at the chosen one; a dead process changes nothing any more."""

    def __init__(self, die_at: int | None, half_done: bool = False) -> None:
        self.calls: list[tuple[str, str]] = []
        self.die_at, self.half_done = die_at, half_done
        self.dead = False
        self.synced: dict[int, int] = {}  # inode -> the call that synced it last

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
                self.synced[os.fstat(arguments[0]).st_ino] = len(self.calls) - 1
            return result

        return call

    def opener(self, real: Callable[..., Any]) -> Callable[..., Any]:
        counted = self.wrap("open", real)
        return lambda path, mode="r", **options: (counted if "w" in mode else real)(path, mode, **options)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir"):
            patch.setattr(os, name, self.wrap(name, getattr(os, name)))
        patch.setattr(checkpoints, "save_file", self.wrap("save_file", checkpoints.save_file))
        patch.setattr(files, "open", self.opener(open), raising=False)

    def lose_what_was_not_synced(self, folder: Path, known: set[int]) -> None:
        for path in folder.rglob("*"):
            facts = path.stat()
            if stat.S_ISREG(facts.st_mode) and facts.st_ino not in self.synced.keys() | known:
                os.truncate(path, facts.st_size // 2)


def save(run_dir: Path, step: int) -> None:
    tensors = {"model": {"w": torch.full((50,), float(step))}, "optimizer": {"w:step": torch.tensor(float(step))}}
    write_checkpoint(run_dir, step, tensors, {"value": step}, keep=1)


def add_lines(run_dir: Path) -> None:
    """Those of steps 1 and 2; the half that a crash may lose is the second."""
    for name in LINES:
        (run_dir / name).write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2)))


def crash(template: Path, work: Path, disk: Disk) -> bool:
    """Copies the template, writes step 2 on `disk`; returns whether it died."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(template, work)
    known = {path.stat().st_ino for path in work.rglob("*") if path.name not in LINES}
    with pytest.MonkeyPatch.context() as patch:
        disk.install(patch)
        try:
            save(work, 2)
        except Killed:
            assert disk.dead
    disk.lose_what_was_not_synced(work, known)
    return disk.dead


@pytest.mark.sample(2, thorough=4)
@pytest.mark.parametrize("start", ["one older checkpoint", "a damaged one of the same step"])
@pytest.mark.parametrize("half_done", [False, True])
def test_a_crash_anywhere_leaves_old_or_new(tmp_path: Path, half_done: bool, start: str) -> None:
    template = tmp_path / "template"
    save(template, 1)
    add_lines(template)
    if start != "one older checkpoint":
        shutil.copytree(step_folder(template, 1), step_folder(template, 2))
    work = tmp_path / "work"
    seen: set[int] = set()
    point = 0
    while crash(template, work, Disk(point, half_done)):
        newest, _ = newest_valid(work)
        assert newest is not None, f"nothing valid is left after a crash at call {point}"
        tensors, state = read_checkpoint(newest)
        assert tensors["model"]["w"].eq(newest.step).all()
        assert state["value"] == tensors["optimizer"]["w:step"].item() == newest.step
        for name in LINES:  # up to the checkpoint nothing is lost
            assert [row["step"] for row in read_lines(work / name)][: newest.step] == [*range(1, newest.step + 1)]
        seen.add(newest.step)
        clear_leftovers(work / "checkpoints")
        save(work, 2)
        assert [path.name for path in (work / "checkpoints").iterdir()] == ["step-00000002"]
        point += 1
    assert seen == {1, 2}
    assert point > 20, f"only {point} calls were tried"


def test_synced_before_named_and_named_before_pruned(tmp_path: Path) -> None:
    template = tmp_path / "template"
    save(template, 1)
    add_lines(template)
    disk = Disk(None)
    assert not crash(template, tmp_path / "work", disk)
    names = [name for name, _ in disk.calls]
    published = max(
        index for index, (name, path) in enumerate(disk.calls) if name == "rename" and "step-00000002" in path
    )
    assert names[published - 1] == "fsync"
    assert names[published + 1] == "fsync"
    removed = [
        index
        for index, (name, path) in enumerate(disk.calls)
        if name in ("unlink", "rmdir") and not path.endswith(".tmp-mode")  # made to see the mode of a new file
    ]
    assert removed
    assert min(removed) > published + 1
    inodes = {path.stat().st_ino for path in step_folder(tmp_path / "work", 2).iterdir()}
    assert inodes <= disk.synced.keys()
    for name in LINES:
        assert disk.synced.get((tmp_path / "work" / name).stat().st_ino, published) < published, name


def test_a_file_written_over_is_the_old_text_or_the_new(tmp_path: Path) -> None:
    """Not in a folder that is synced again when it gets its name: run_state.json, hub.json, a dataset's lines."""
    file, old, new = tmp_path / "run_state.json", "the old text\n", "the new one, which is longer\n"
    seen = set()
    for point in range(10):
        file.write_text(old, "utf-8")
        known, disk = {file.stat().st_ino}, Disk(point)
        with pytest.MonkeyPatch.context() as patch:
            disk.install(patch)
            try:
                write_text(file, new)
            except Killed:
                assert disk.dead
        disk.lose_what_was_not_synced(tmp_path, known)
        assert file.read_text("utf-8") in (old, new), f"torn after a crash at call {point}"
        seen.add(file.read_text("utf-8"))
        clear_leftovers(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [file.name]
        if not disk.dead:
            break
    assert not disk.dead
    assert file.read_text("utf-8") == new
    assert seen == {old, new}
    renamed = [index for index, (name, _) in enumerate(disk.calls) if name == "replace"]
    assert disk.synced[file.stat().st_ino] < renamed[0]
    assert disk.synced[tmp_path.stat().st_ino] > renamed[0], "the folder's list of names"
