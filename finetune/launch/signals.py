"""Stopping: during training a signal sets a flag, the step finishes, the run saves. In other phases it ends the run.

The signals that reach the trainer (read in torch 2.13's elastic agent and accelerate 1.15's launchers):

- One process, `accelerate launch`: Ctrl-C reaches launcher and trainer; the launcher ends after 0.25 s. SIGTERM and
  SIGKILL reach the launcher alone. So we ask the kernel to send us SIGTERM when the launcher dies.
- Several processes (torchrun, `accelerate launch`): each rank has its own session. The agent passes SIGINT, SIGTERM
  and SIGHUP on to every rank, a second Ctrl-C as SIGTERM, and kills the remaining ranks after 30 s
  (TORCH_ELASTIC_SHUTDOWN_TIMEOUT). When one rank ends first, the agent sends the others SIGTERM. So ranks leave
  together, after a barrier.
- `finetune train`: one process is the trainer itself. Several have their own sessions. local_ranks.py sends them one
  SIGTERM for the first signal, and SIGKILL for a second Ctrl-C.

So during training only a second SIGINT ends the process at once; further SIGTERMs change nothing.

`run.stop_after` sets the same flag, on rank 0 alone: clocks differ, and the step's collective tells the other ranks.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from finetune.errors import STOPPED, Stopped
from finetune.launch.launcher import (
    BY_ACCELERATE,
    BY_TORCHRUN,
    PARENT_AT_START,
    arguments_of,
    launcher_words,
    under_launcher,
)

if TYPE_CHECKING:
    from finetune.recipe.stop_time import StopTime

# SIGUSR1 is Slurm's warning before the end of a job's time, SIGQUIT what Ctrl-\\ sends.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT)
BROKEN_OFF = "broken off without saving"
STARTED_AT = time.monotonic()  # of this process: a trainer imports this file before torch
GRACE_VARIABLE = "FINETUNE_GRACE_SECONDS"  # job files set it: nothing tells a process how long its engine waits
FIRST_SIGNAL = "FINETUNE_SIGNAL_FILE"  # a descriptor: local_ranks.py writes there which signal it got
USUAL_GRACE = 30.0  # seconds: torchrun's, Kubernetes', and Slurm's KillWait
SECONDS_TO_LEAVE = 3.0  # from a signal in a phase without steps to the end of the process


class Interrupted(KeyboardInterrupt):
    """A signal to stop, in a phase that has nothing to save."""


@dataclass
class StopRequest:
    """Truthy once a signal came; `signal_name` is the first one's.

    `in_steps` is true while the training loop runs: it looks at the request after each step, and saves. In other phases
    (loading, worst step, samples, export) a signal ends the run, because there is nothing to save.
    """

    signal_name: str | None = None
    in_steps: bool = False
    came_in_steps: bool | None = None  # the first signal, once Python's handler has run
    stop_time: StopTime | None = None  # of `run.stop_after`; rank 0's alone

    def __bool__(self) -> bool:
        return self.signal_name is not None or self.is_due

    @property
    def is_due(self) -> bool:
        """Whether the time of `run.stop_after` has come, in the steps."""
        return self.in_steps and self.stop_time is not None and self.stop_time.has_come

    @property
    def reason(self) -> str:
        """What stopped the run, for its state; this rank may have got no signal itself."""
        if self.signal_name is None and self.stop_time is not None and self.stop_time.has_come:
            return f"run.stop_after: {self.stop_time.text}"
        return self.signal_name or "a signal to another rank"

    @contextmanager
    def finishes_step(self) -> Iterator[None]:
        """While the block runs, a signal only sets the flag."""
        self.in_steps = True
        try:
            yield
        finally:
            self.in_steps = False


def signal_name(number: int) -> str:
    """The signal that the user sent. `finetune train` passes each on to its ranks as SIGTERM."""
    name = signal.Signals(number).name
    with suppress(OSError, ValueError):  # another launcher has no such file
        passed_on = os.pread(int(os.environ.get(FIRST_SIGNAL, "")), 20, 0).decode("ascii", "replace")
        if number == signal.SIGTERM and passed_on in signal.Signals.__members__:
            return passed_on
    return name


def grace_period(environment: Mapping[str, str] = os.environ) -> tuple[float, str] | None:
    """The seconds from a signal to SIGKILL, and who sends it; None: nobody that is known here.

    The job file's word counts before an engine's usual period, and torchrun's own limit always.
    """
    known = []
    if environment.get(GRACE_VARIABLE, "").isdecimal():
        known.append((float(environment[GRACE_VARIABLE]), GRACE_VARIABLE))
    elif "SLURM_JOB_ID" in environment:
        known.append((USUAL_GRACE, "Slurm"))
    elif "KUBERNETES_SERVICE_HOST" in environment:
        known.append((USUAL_GRACE, "Kubernetes"))
    if BY_TORCHRUN in environment:
        limit = environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
        known.append((float(limit) if limit.isdecimal() else USUAL_GRACE, "torchrun"))
    return min(known, default=None)


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Within the block, signals in STOPPING end this process like Ctrl-C, with exit code 130 and one word.

    Use it while there is nothing to save yet. `stop_on_signals` takes over later. One of several ranks keeps the
    signals' default action: it may wait for the others inside a library, and only that action ends it there.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(STOPPED)

    several = under_launcher() or {"RANK", "SLURM_PROCID"} & os.environ.keys()
    with on_signals(stop, () if several else STOPPING[1:]):  # Python itself hears SIGINT
        yield


@contextmanager
def on_signals(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers, numbers: Sequence[signal.Signals] = STOPPING
) -> Iterator[list[signal.Signals]]:
    """Give these signals a handler while the block runs, and then their earlier handlers. Yields those that have it.

    A SIGHUP that is ignored (nohup) stays ignored. Outside the main thread Python allows no handlers.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        ignored = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else []
        before = {number: signal.signal(number, handler) for number in numbers if number not in ignored}
    try:
        yield [*before]
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def stop_on_signals(request: StopRequest, *, announce: bool = True) -> Iterator[None]:
    """Obey the signals in STOPPING while the block runs.

    Within `request.finishes_step()` a signal sets the flag. Otherwise it raises Interrupted. If the process is
    still here SECONDS_TO_LEAVE later (it computes, or waits for another rank, inside a library), a thread ends it with
    exit code 130.

    Do not enter the block before the process group exists: a rank that waits for another inside a library cannot run a
    Python handler. Only the signal's default action ends it before the launcher's 30 s.

    Args:
        request: The flag.
        announce: Print on standard error that the step is being finished. Set it on one rank only.

    Raises:
        Interrupted: at the first signal, outside the steps.
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
        if request.signal_name is not None:
            return
        request.signal_name, request.came_in_steps = signal_name(number), request.in_steps
        if not request.in_steps:
            raise Interrupted(STOPPED)
        if announce:
            # os.write, because a handler may interrupt a print that holds the stream's lock.
            with suppress(OSError):  # standard error may be a file on a full disk
                os.write(2, message + b"\n")

    with on_signals(handle) as numbers, _ended_in_time(request, numbers) if numbers else nullcontext():
        yield


@contextmanager
def _ended_in_time(request: StopRequest, numbers: Sequence[int]) -> Iterator[None]:
    """Within the block, a thread ends the process SECONDS_TO_LEAVE after a signal that came outside the steps.

    Python's handlers run between two of the main thread's bytecodes, so not while it is inside a library. The
    interpreter writes each signal's number into a pipe at once, and the thread reads the pipe.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    left = threading.Event()

    def read_numbers() -> None:
        while os.read(reader, 1)[0] not in (0, *numbers):  # other signals have handlers too; 0 ends the thread
            pass
        # The first signal counts. If it came in a step, the run finishes that step and saves, however long it takes.
        if left.wait(SECONDS_TO_LEAVE):
            return
        came_in_steps = request.came_in_steps
        if came_in_steps is None:  # the main thread is still inside the library
            came_in_steps = request.in_steps
        if not came_in_steps:
            with suppress(OSError):
                os.write(2, f"\n{STOPPED}\n".encode())
            os._exit(Stopped.exit_code)

    thread = threading.Thread(target=read_numbers, name="signals", daemon=True)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(before)
        os.write(writer, bytes([0]))
        thread.join()
        os.close(writer)
        os.close(reader)


def die_with_launcher() -> bool:
    """Ask the kernel to send this process SIGTERM when its launcher dies. Returns whether the kernel agreed.

    Only under `accelerate launch` or torchrun: the trainer would outlive a launcher that dies by SIGKILL, and a
    one-process launcher that gets SIGTERM. Under a shell the request would end a run that nohup protects. Linux only.
    Within `stop_on_signals` the SIGTERM saves; earlier it ends the process. Child processes do not inherit the request.
    """
    if not under_launcher():
        return False
    from finetune.launch.with_parent import die_with_parent

    if not die_with_parent(signal.SIGTERM):
        return False
    # The launcher may have died before prctl() took effect. Then another process is our parent: most often process 1,
    # which is the launcher itself in some containers.
    parent = os.getppid()
    if parent != PARENT_AT_START or (parent == 1 and not launcher_words(arguments_of(1))):
        os.kill(os.getpid(), signal.SIGTERM)
    return True
