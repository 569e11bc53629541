"""A time limit for trials, because a compiler or a kernel that hangs raises nothing.

Parts that are chosen for speed are compiled and compared before a run uses them. If such a trial raises, the run goes
on without the part. If it does not return, its thread still holds the device, so this process cannot go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TRIAL_SECONDS = 600.0  # one kind of layer took 78 s at most to compile and compare, on an H200 and an H100

_ends: list[Callable[[str], None]] = []  # what ends the process; the innermost block's is the last


@contextmanager
def trials_end_process(end: Callable[[str], None]) -> Iterator[None]:
    """Within the block, a trial that takes too long calls `end` with a line for the user, from a thread of its own."""
    _ends.append(end)
    try:
        yield
    finally:
        _ends.pop()


@contextmanager
def limited(trial: str, instead: str) -> Iterator[None]:
    """The block is a trial. Outside `trials_end_process` it has no limit.

    Args:
        trial: Its subject, for the line: "training.compile: LlamaDecoderLayer".
        instead: The setting that makes a run do without it.
    """
    if not _ends:
        yield
        return
    minutes = f"{TRIAL_SECONDS / 60:.0f} minutes"
    line = f"{trial}: comparing it with the library's own has not ended after {minutes}; set {instead}"
    timer = threading.Timer(TRIAL_SECONDS, _ends[-1], [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
