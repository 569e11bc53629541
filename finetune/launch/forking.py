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
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
            if (thread / "comm").read_text("utf-8").startswith(ENGINE):
                return False
    return True


def start_forked(send_result: Callable[[Any, Connection], None], request: Any) -> tuple[BaseProcess, Connection]:
    """Start `send_result(request, pipe)` in a forked child. Returns the child and the pipe's receiving end."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=send_result, args=(request, sender), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later, with any second thread
        child.start()
    # Only the child may hold the sending end: then its death ends our recv() with EOFError.
    sender.close()
    return child, receiver
