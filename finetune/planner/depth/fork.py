"""Functions run at the same time, each in a forked child of this process: a plan's two depths, a probe."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

from finetune.launch.forking import can_fork, start_forked

T = TypeVar("T")


@contextmanager
def run_in_forks(functions: Mapping[int, Callable[[], T]], *, even_one: bool = False) -> Iterator[Callable[[int], T]]:
    """Start each function in a child, and yield a callable that waits for a result. Children end with the context.

    A function runs in this process if its child failed, if this process cannot be forked, or if it is the only one and
    not `even_one`. Their errors are raised here. Results are pickled.
    """
    children = {}
    if (even_one or len(functions) > 1) and can_fork():
        children = {name: start_forked(_send_result, function) for name, function in functions.items()}

    def result(name: int) -> T:
        if name in children:
            with suppress(EOFError):  # the child failed
                return children[name][1].recv()  # type: ignore[no-any-return]
        return functions[name]()

    try:
        yield result
    finally:
        for child, pipe in children.values():
            pipe.close()
            child.kill()
            child.join()


def _send_result(function: Callable[[], T], pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback in addition to the parent's
    torch.set_num_threads(1)  # OpenMP's threads were not forked, and it would wait for them
    try:
        pipe.send(function())
    except Exception:  # the parent runs the function again, and raises it
        os._exit(1)
