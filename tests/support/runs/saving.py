"""Saves of a test, and disks that are slow or full."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from finetune.run_folder import checkpoint
from finetune.run_folder.background import Saves
from finetune.strategies.pieces import all_ranks
from finetune.wording import GIB

ROOM = (1000 * GIB, 0)  # bytes left on the machine, and bytes that training may still take


def in_the_foreground() -> Saves:
    """Saves that are complete when they return, by the ranks of the process group."""
    return Saves(all_ranks(), all_ranks(), print, background=False)


@contextmanager
def held_up(patch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that writes nothing until the event is set."""
    go, real = threading.Event(), checkpoint.save_file

    def wait_and_save(tensors: Any, path: Path) -> None:
        assert go.wait(60)
        real(tensors, path)

    patch.setattr(checkpoint, "save_file", wait_and_save)
    try:
        yield go
    finally:
        go.set()


def slow(seconds: float) -> Callable[[Any, Path], None]:
    """A disk that writes half of each file, sleeps, and writes the rest."""
    real = checkpoint.save_file

    def save_slowly(tensors: Any, path: Path) -> None:
        real(tensors, path)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        time.sleep(seconds)
        path.write_bytes(content)

    return save_slowly


def full(tensors: Any, path: Path) -> None:
    """A disk on which half of a file fits."""
    path.write_bytes(b"half")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
