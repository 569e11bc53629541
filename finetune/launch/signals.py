"""Stopping: a signal sets a flag, the step finishes, the run saves.

The signals that reach the trainer (read in torch 2.13's elastic agent and accelerate 1.15's launchers):

- One process, `accelerate launch`: Ctrl-C reaches launcher and trainer; the launcher ends after 0.25 s. SIGTERM and
  SIGKILL reach the launcher alone. So we ask the kernel to send us SIGTERM when the launcher dies.
- Several processes (torchrun, `accelerate launch`): each rank has its own session. The agent passes SIGINT, SIGTERM
  and SIGHUP on to every rank, a second Ctrl-C as SIGTERM, and kills the remaining ranks after 30 s
  (TORCH_ELASTIC_SHUTDOWN_TIMEOUT). When one rank ends first, the agent sends the others SIGTERM. So ranks leave
  together, after a barrier.
- `finetune train`: one process is the trainer itself. Several have their own sessions. local_ranks.py sends them one
  SIGTERM for the first signal, and SIGKILL for a second Ctrl-C.

So only a second SIGINT ends the process at once; further SIGTERMs change nothing.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from finetune.errors import STOPPED
from finetune.launch.launcher import (
    BY_ACCELERATE,
    BY_TORCHRUN,
    PARENT_AT_START,
    arguments_of,
    launcher_words,
    under_launcher,
)
from finetune.launch.with_parent import die_with_parent

# SIGUSR1 is Slurm's warning before the end of a job's time, SIGQUIT what Ctrl-\\ sends.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT)
BROKEN_OFF = "broken off without saving"


@dataclass
class StopRequest:
    """Truthy once a signal came; `signal_name` is the first one's."""

    signal_name: str | None = None

    def __bool__(self) -> bool:
        return self.signal_name is not None


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Within the block, signals in STOPPING end this process like Ctrl-C, with exit code 130 and one word.

    Use it while there is nothing to save yet. `stop_on_signals` takes over later. One of several ranks keeps the
    signals' default action: it may wait for the others inside a library, and only that action ends it there.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(STOPPED)

    several = under_launcher() or {"RANK", "SLURM_PROCID"} & os.environ.keys()
    if several or threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [number for number in STOPPING if number != signal.SIGINT and _is_heard(number)]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """Within the block, SIGINT ends this process at once, as SIGTERM does.

    A rank that waits for the others inside a library runs none of Python's handlers. The launcher would kill it after
    30 s, or nobody would.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def stop_on_signals(request: StopRequest, *, announce: bool = True) -> Iterator[None]:
    """Turn the signals in STOPPING into a flag while the block runs. Afterwards the earlier handlers are restored.

    A SIGHUP that is ignored (nohup) stays ignored. Outside the main thread Python allows no handlers, so the flag is
    never set. Do not enter the block before the process group exists: a rank that waits for another inside a library
    cannot run a Python handler. Only the signal's default action ends it before the launcher's 30 s.

    Args:
        request: The flag.
        announce: Print on standard error that the step is being finished. Set it on one rank only.

    Raises:
        KeyboardInterrupt: at the second SIGINT.
    """
    interrupted = False
    # Under these two no second Ctrl-C arrives. With one process, the shell has the terminal again. With several, the
    # agent sends SIGTERM instead.
    message = b"\nstopping after this step, then saving"
    if not {BY_TORCHRUN, BY_ACCELERATE} & os.environ.keys():
        message += b"; Ctrl-C again breaks off without saving"

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if number == signal.SIGINT and interrupted:
            raise KeyboardInterrupt(BROKEN_OFF)
        interrupted |= number == signal.SIGINT
        if announce and not request:
            # os.write, because a handler may interrupt a print that holds the stream's lock.
            with suppress(OSError):  # standard error may be a file on a full disk
                os.write(2, message + b"\n")
        request.signal_name = request.signal_name or signal.Signals(number).name

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [number for number in STOPPING if _is_heard(number)]
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_heard(number: signal.Signals) -> bool:
    return not (number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN)


def die_with_launcher() -> bool:
    """Ask the kernel to send this process SIGTERM when its launcher dies. Returns whether the kernel agreed.

    Only under `accelerate launch` or torchrun: the trainer would outlive a launcher that dies by SIGKILL, and a
    one-process launcher that gets SIGTERM. Under a shell the request would end a run that nohup protects. Linux only.
    Within `stop_on_signals` the SIGTERM saves; earlier it ends the process. Child processes do not inherit the request.
    """
    if not under_launcher() or not die_with_parent(signal.SIGTERM):
        return False
    # The launcher may have died before prctl() took effect. Then another process is our parent: most often process 1,
    # which is the launcher itself in some containers.
    parent = os.getppid()
    if parent != PARENT_AT_START or (parent == 1 and not launcher_words(arguments_of(1))):
        os.kill(os.getpid(), signal.SIGTERM)
    return True
