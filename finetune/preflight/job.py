"""A small training as a job, of a rehearsal or a proof: a real `accelerate launch` of the real entrypoint, watched."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from finetune.files import read_lines
from finetune.launch.launcher import environment_for_child
from finetune.launch.with_parent import with_parent
from finetune.paths import TRAIN_SCRIPT
from finetune.preflight.job_failure import failure_reason
from finetune.recipe.strategy import CONFIG_FOLDER

START_TIMEOUT_SECONDS = 300  # for one start


class StepFailed(Exception):
    """A step of the checklist failed."""

    def __init__(self, reason: str, exit_code: int = 1) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


@dataclass(frozen=True)
class TrainingJob:
    """A training that can be started, and started again."""

    recipe: Path
    settings: tuple[str, ...]  # key=value
    processes: int
    folder: Path  # of everything that it writes
    launcher: tuple[str, ...] = ()  # options of `accelerate launch`; else as many processes on the CPU
    on_gpus: bool = False  # else they are hidden from it
    timeout: float = START_TIMEOUT_SECONDS  # for one start
    shared_cache: Path | None = None  # of several jobs: prepared data and what probes found; else its own

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def log(self) -> Path:
        """What the last start printed."""
        return self.folder / "run.log"

    def command(self) -> list[str]:
        """What a user would type."""
        where = "single" if self.processes == 1 else "cpu_2proc"
        cpu_options = ["--config_file", str(CONFIG_FOLDER / f"{where}.yaml")]
        cpu_options += ["--cpu"] if self.processes == 1 else ["--num_processes", str(self.processes)]
        launcher = ["-m", "accelerate.commands.launch", *(self.launcher or cpu_options)]
        script = [str(TRAIN_SCRIPT), str(self.recipe)]
        return [sys.executable, *launcher, *script, *self.settings, f"output_dir={self.run_dir}"]

    def curve(self) -> list[tuple[Any, ...]]:
        """Step, loss and gradient norm of every step that was logged."""
        file = self.run_dir / "metrics.jsonl"
        lines = read_lines(file) if file.is_file() else []
        return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if line["kind"] == "train"]


@contextmanager
def started(job: TrainingJob) -> Iterator[subprocess.Popen[bytes]]:
    """The job in its own session; none of its processes outlives the block."""
    environment = environment_for_child() | {
        "FINETUNE_CACHE": str(job.shared_cache or job.folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    if not job.on_gpus:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with open(job.log, "wb") as log:
        command = with_parent(job.command())
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        kill_all(process)


def wait_for_end(job: TrainingJob, process: subprocess.Popen[bytes]) -> None:
    """Raises StepFailed when the job fails, or does not end."""
    try:
        code = process.wait(job.timeout)
    except subprocess.TimeoutExpired:
        raise StepFailed(f"not finished after {job.timeout:g} s; {_reason(job)}") from None
    if code != 0:
        raise _failed(job)


def wait_until(reached: Callable[[], bool], job: TrainingJob, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Wait for a moment of the training, to a few milliseconds; returns the processes below the launcher.

    They are looked up before, for that moment is short. Raises StepFailed when the job ends before.
    """
    end, looked, processes = time.monotonic() + job.timeout, 0.0, []
    while not reached():
        if process.poll() is not None and not reached():
            raise _failed(job)
        if (now := time.monotonic()) > end:
            raise StepFailed(f"not there after {job.timeout:g} s; {_reason(job)}")
        if now > looked + 0.5:
            looked, processes = now, _below(process)
        time.sleep(0.005)
    return processes


def kill_all(process: subprocess.Popen[bytes], known: Sequence[psutil.Process] = ()) -> int:
    """SIGKILL to a launcher and all below it, `known` first; returns how many there were."""
    if process.poll() is not None:
        return 0
    # Stop the launcher first: else it would see its ranks die; and if it died first, they would save and exit.
    process.send_signal(signal.SIGSTOP)
    _kill(known)
    children = _below(process)
    _kill(children)
    process.kill()
    process.wait()
    end = time.monotonic() + 10
    while any(_lives(child) for child in children) and time.monotonic() < end:
        time.sleep(0.01)
    return len(children) + 1


def _below(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The processes that it started, and those that they did; ranks are in their own sessions."""
    try:
        return list(psutil.Process(process.pid).children(recursive=True))
    except psutil.Error:
        return []


def _kill(processes: Sequence[psutil.Process]) -> None:
    for each in processes:
        with suppress(psutil.Error):
            each.kill()


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _reason(job: TrainingJob) -> str:
    return failure_reason(job.run_dir, job.log.read_text("utf-8", errors="replace"))


def _failed(job: TrainingJob) -> StepFailed:
    """The training's own reason, with its exit code, which the launcher only reports."""
    log = job.log.read_text("utf-8", errors="replace")
    code = re.search(r"exitcode +: (\d+)", log) or re.search(r"non-zero exit status (\d+)", log)
    return StepFailed(_reason(job), int(code[1]) if code else 1)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, so that its processes and its folder go."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
