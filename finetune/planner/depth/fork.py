"""Works done at the same time, each in a forked child of this process: a plan's two depths, on two cores."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")
ENGINE = "pt_autograd"  # how torch's autograd names its threads, which no fork carries over


@contextmanager
def run_in_forks(works: Mapping[int, Callable[[], T]]) -> Iterator[Callable[[int], T]]:
    """Begin each work in a child; what it yields waits for the result of one. Children end with the context.

    Where this process cannot be forked, for a single work, and where a child fails, the work is done here, and raises
    here what it raises. Results are pickled.
    """
    children = {}
    if len(works) > 1 and can_fork():
        children = {name: _forked(work) for name, work in works.items()}

    def result(name: int) -> T:
        if name in children:
            with suppress(EOFError):  # it failed
                return children[name][1].recv()  # type: ignore[no-any-return]
        return works[name]()

    try:
        yield result
    finally:
        for child, pipe in children.values():
            pipe.close()
            child.kill()
            child.join()


def can_fork() -> bool:
    """Whether a child of this process could train: on Linux, as long as autograd has no threads here.

    One that began this moment may have no name yet; then torch refuses to train in the child, and it fails.
    """
    if not sys.platform.startswith("linux"):
        return False
    names = (_name_of(thread) for thread in Path("/proc/self/task").iterdir())
    return not any(name.startswith(ENGINE) for name in names)


def _name_of(thread: Path) -> str:
    with suppress(OSError):  # it has ended
        return (thread / "comm").read_text("utf-8")
    return ""


def _forked(work: Callable[[], T]) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(work, theirs), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later, of any second thread
        child.start()
    theirs.close()
    return child, ours


def _send(work: Callable[[], T], pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback beside the parent's own end
    torch.set_num_threads(1)  # OpenMP's threads were not forked, and it would wait for them
    try:
        pipe.send(work())
    except Exception:  # is raised by the parent, which does it again
        os._exit(1)
