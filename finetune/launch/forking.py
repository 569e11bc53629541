"""Forked children of this process: whether one could train, and one that answers through a pipe."""

from __future__ import annotations

import multiprocessing
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ENGINE = "pt_autograd"  # how torch's autograd names its threads, which no fork carries over


def can_fork() -> bool:
    """Whether this process's child could train: on Linux, as long as autograd has no threads here.

    A thread that has just started may have no name yet. Then torch refuses to train in the child, which fails.
    """
    if not sys.platform.startswith("linux"):
        return False
    names = (_name_of(thread) for thread in Path("/proc/self/task").iterdir())
    return not any(name.startswith(ENGINE) for name in names)


def _name_of(thread: Path) -> str:
    with suppress(OSError):  # it has ended
        return (thread / "comm").read_text("utf-8")
    return ""


def start_forked(send_result: Callable[[Any, Connection], None], asked: Any) -> tuple[BaseProcess, Connection]:
    """Start `send_result(asked, pipe)` in a forked child; the child, and the end of the pipe to receive from."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=send_result, args=(asked, theirs), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later, of any second thread
        child.start()
    theirs.close()
    return child, ours
