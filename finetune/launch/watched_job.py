"""A small training as a job, for rehearsals and proofs: a real `accelerate launch` of the real entrypoint, watched."""

from __future__ import annotations

import json
import math
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
import yaml

from finetune.files import read_lines
from finetune.launch.launcher import environment_for_child
from finetune.launch.signals import on_signals
from finetune.launch.with_parent import with_parent
from finetune.paths import TRAIN_SCRIPT
from finetune.recipe.strategy import CONFIG_FOLDER, Strategy
from finetune.recipe.yaml_text import shorten

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
    folder: Path  # for everything that it writes
    launcher: tuple[str, ...] = ()  # options of `accelerate launch`; by default `processes` on the CPU
    on_gpus: bool = False  # False hides them from it
    timeout: float = START_TIMEOUT_SECONDS  # for one start
    shared_cache: Path | None = None  # prepared data and the probe's results of several jobs; None: its own

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def log(self) -> Path:
        """The output of the last start."""
        return self.folder / "run.log"

    def command(self) -> list[str]:
        """The line that a user would type."""
        options: Sequence[str] = self.launcher
        if not options and self.processes == 1:
            options = ["--config_file", str(CONFIG_FOLDER / "single.yaml"), "--cpu"]
        elif not options:
            config = str(CONFIG_FOLDER / "cpu_2proc.yaml")
            options = ["--config_file", config, "--num_processes", str(self.processes)]
        launcher = [sys.executable, "-m", "accelerate.commands.launch", *options]
        return [*launcher, str(TRAIN_SCRIPT), str(self.recipe), *self.settings, f"output_dir={self.run_dir}"]

    def curve(self) -> list[tuple[Any, ...]]:
        """Step, loss and gradient norm of every step that was logged."""
        return [(line["step"], line["loss"], line["grad_norm"]) for line in train_lines(self.run_dir)]


def train_lines(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of a run's optimizer steps, as far as they are logged."""
    file = run_dir / "metrics.jsonl"
    lines = read_lines(file) if file.is_file() else []
    return [line for line in lines if line["kind"] == "train"]


def relative_difference(value: float | None, expected: float | None) -> float:
    """How far two losses or gradient norms are apart, relative to `expected`; 0 is bitwise.

    Infinite if one of them is not finite. None stands for a gradient that overflowed in fp16, and equals only None.
    """
    if value == expected:
        return 0.0
    if value is None or expected is None or expected == 0.0:
        return math.inf
    distance = abs(value - expected) / abs(expected)
    if math.isfinite(distance):
        return distance
    return math.inf


def with_two_copies(strategy: Strategy, folder: Path) -> Path:
    """Write the strategy's file with two copies of the shards into `folder`; else a copy would be a machine."""
    mesh = {"parallelism_config": {"parallelism_config_dp_replicate_size": 2}}
    file = folder / f"{strategy.name}.yaml"
    file.write_text(yaml.safe_dump(strategy.settings | mesh), "utf-8")
    return file


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
        raise _failure(job)


def wait_until(reached: Callable[[], bool], job: TrainingJob, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Wait for a moment of the training, to a few milliseconds; returns the processes below the launcher.

    They are looked up beforehand, because the moment is short. Raises StepFailed when the job ends before.
    """
    deadline, last_lookup, processes = time.monotonic() + job.timeout, 0.0, []
    while not reached():
        if process.poll() is not None and not reached():
            raise _failure(job)
        if (now := time.monotonic()) > deadline:
            raise StepFailed(f"not there after {job.timeout:g} s; {_reason(job)}")
        if now > last_lookup + 0.5:
            last_lookup, processes = now, _descendants(process)
        time.sleep(0.005)
    return processes


def kill_all(process: subprocess.Popen[Any], known: Sequence[psutil.Process] = ()) -> int:
    """SIGKILL to a launcher and all processes below it, `known` first; returns how many there were."""
    if process.poll() is not None:
        return 0
    # Stop the launcher first: else it would see its ranks die; and if it died first, they would save and exit.
    process.send_signal(signal.SIGSTOP)
    _kill(known)
    children = _descendants(process)
    _kill(children)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(_is_alive(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(children) + 1


def _descendants(process: subprocess.Popen[Any]) -> list[psutil.Process]:
    """The processes that it started, and those that they started; ranks are in their own sessions."""
    try:
        return list(psutil.Process(process.pid).children(recursive=True))
    except psutil.Error:
        return []


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _reason(job: TrainingJob) -> str:
    return failure_reason(job.run_dir, job.log.read_text("utf-8", errors="replace"))


def _failure(job: TrainingJob) -> StepFailed:
    """The training's own reason, with its exit code, which the launcher only reports."""
    log = job.log.read_text("utf-8", errors="replace")
    code = re.search(r"exitcode +: (\d+)", log) or re.search(r"non-zero exit status (\d+)", log)
    return StepFailed(_reason(job), int(code[1]) if code else 1)


def failure_reason(run_dir: Path | None, log: str) -> str:
    """Why a training, or another job under a launcher, failed: one line.

    Take the error that the run recorded. Without one, take the last line that it printed before the launcher's report.
    """

    def one_line(text: str) -> str:
        return shorten(" ".join(text.split()), 300, "…")

    state: dict[str, Any] = {}
    if run_dir is not None and (run_dir / "run_state.json").is_file():
        state = json.loads((run_dir / "run_state.json").read_text("utf-8"))
    if "error" in state:
        return f"{one_line(state['error'])} ({state['phase']}, rank {state['rank']})"
    # Cut the launcher's own report off: torchrun's, or the traceback of `accelerate launch` itself.
    printed = log
    if report := re.search(r"^[EWI]\d{4} .*torch/distributed/elastic", log, flags=re.M):
        printed = log[: report.start()]
    else:
        before, _, traceback = log.rpartition("Traceback (most recent call last)")
        if "CalledProcessError" in traceback:
            printed = before
    lines = [line for line in printed.splitlines() if line.strip() and "WARNING" not in line]
    if len(lines) > 2 and lines[-1].strip() == "^":  # a mistake in a recipe is a line, its source and a mark below it
        lines = lines[:-2]
    last_line = one_line(lines[-1]) if lines else "it printed nothing"
    # A signal counts only for the rank that failed first, because torchrun then ends the others with its own signal.
    killed = re.search(r"(?s)Root Cause.*exitcode +: -(\d+)|died with <Signals\.(\w+)", log)
    if killed:
        return f"killed by signal {killed[1] or killed[2]}; its last line: {last_line}"
    return last_line


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, so that its processes and its folder are removed. An ignored
    SIGHUP (nohup) stays ignored."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    with on_signals(interrupt, (signal.SIGTERM, signal.SIGHUP)):
        yield
