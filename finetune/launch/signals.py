"""Stopping: a signal sets a flag, the step finishes, the run saves.

What reaches the trainer (read in torch 2.13's elastic agent and accelerate 1.15's launchers):

- One process, `accelerate launch`: Ctrl-C reaches launcher and trainer; the launcher gives up after 0.25 s. SIGTERM and
  SIGKILL reach the launcher alone. So the kernel is asked for a SIGTERM to us when the launcher dies.
- Several processes (torchrun, `accelerate launch`): ranks live in sessions of their own. The agent passes SIGINT,
  SIGTERM, SIGHUP on to every rank, a second Ctrl-C as SIGTERM, and kills what is left after 30 s
  (TORCH_ELASTIC_SHUTDOWN_TIMEOUT). When one rank ends first, it sends the others SIGTERM: leave together, after a
  barrier.

Hence only a second SIGINT breaks off at once; any number of SIGTERMs means one thing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from finetune.launch.launcher import arguments_of, launcher_words, under_launcher

_PARENT_AT_START = os.getppid()
_PR_SET_PDEATHSIG = 1  # prctl(2)


@dataclass
class StopRequest:
    """Truthy once a signal came; `signal_name` says which was first."""

    signal_name: str | None = None

    def __bool__(self) -> bool:
        return self.signal_name is not None


@contextmanager
def stop_on_signals(request: StopRequest, *, announce: bool = True) -> Iterator[None]:
    """Turns SIGINT, SIGTERM and SIGHUP into a flag while the block runs; the handlers before it come back after it.

    A SIGHUP that is ignored (nohup) stays ignored. Outside the main thread, where Python allows no handlers, the flag
    is never set. Not around the start of a process group: a rank that waits there for another inside a library never
    gets to run a handler, so that only the default action ends it before the launcher's 30 s.

    Args:
        request: The flag.
        announce: Say on standard error that the step is being finished; for one rank.

    Raises:
        KeyboardInterrupt: at the second SIGINT.
    """
    interrupted = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if number == signal.SIGINT and interrupted:
            raise KeyboardInterrupt
        interrupted |= number == signal.SIGINT
        if announce and not request:
            # os.write, because a handler may interrupt a print that holds the stream's lock.
            with suppress(OSError):  # standard error on a full disk is no reason to break off
                os.write(2, b"\nstopping: finishing this step, then saving; Ctrl-C again breaks off without saving\n")
        request.signal_name = request.signal_name or signal.Signals(number).name

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wanted = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if _is_heard(number)]
    before = {number: signal.signal(number, handle) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_heard(number: signal.Signals) -> bool:
    return not (number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN)


def die_with_launcher() -> bool:
    """Asks the kernel for a SIGTERM to this process when its launcher dies; returns whether that is in force.

    Only under `accelerate launch` or torchrun, which otherwise leave a trainer without its launcher (SIGTERM to the
    launcher of one process, SIGKILL to any). Under a shell it would end a run that nohup protects. Linux only. Inside
    `stop_on_signals` that signal saves, before it it ends the process; not inherited by child processes.
    """
    if not under_launcher() or not die_with_parent(signal.SIGTERM):
        return False
    if _launcher_is_gone():  # it died before the kernel knew of our wish
        os.kill(os.getpid(), signal.SIGTERM)
    return True


def die_with_parent(number: signal.Signals) -> bool:
    """Asks the kernel for this signal when the process dies that started this one; returns whether that is in force."""
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) == 0)


def _launcher_is_gone() -> bool:
    """Whether an orphan's new parent has taken the launcher's place; in a container the launcher itself may be 1."""
    return os.getppid() != _PARENT_AT_START or (os.getppid() == 1 and not launcher_words(arguments_of(1)))
