"""`finetune rehearse`: the recipe from the first line to the adapter in the hand, small and on the CPU.

Trains four steps to the end; trains again and is killed after the second; starts that run again, which must go on
bitwise; loads back what was exported. Every training is a real `accelerate launch` of the real entrypoint.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from finetune.compare import failure
from finetune.durable import read_lines
from finetune.errors import FinetuneError
from finetune.load_back import load_back
from finetune.recipe import Recipe
from finetune.recipe_file import CONFIG_FOLDER, load_recipe
from finetune.rehearse import KILLED_AFTER, STEPS, changes, overrides, processes_of
from finetune.shrink import shrink_model
from finetune.strategy import read_strategy

PATIENCE_SECONDS = 300  # for one training of four steps
ATTEMPTS = 3  # a kill may come after the last step was saved
# What this process got from a launcher or a scheduler of its own is not for its children.
FOREIGN = re.compile(r"SLURM_|PET_|ACCELERATE_|TORCHELASTIC_|FSDP_|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)$|MASTER_")


class StepFailed(Exception):
    """A line of the checklist did not come true."""

    def __init__(self, reason: str, exit_code: int = 1) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


@dataclass
class Checklist:
    """What was looked at so far: name, whether it held, seconds, what was seen."""

    tell: Callable[[dict[str, Any]], None]
    steps: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int = 0

    @contextmanager
    def line(self, name: str) -> Iterator[dict[str, Any]]:
        """Time the block; it fills in `seen`. A StepFailed or a FinetuneError ends as a line, and the rest is off."""
        step: dict[str, Any] = {"name": name, "ok": False, "seconds": 0.0, "seen": ""}
        began = time.monotonic()
        self.steps.append(step)
        failed: StepFailed | None = None
        try:
            yield step
            step["ok"] = True
        except (StepFailed, FinetuneError) as error:
            failed = StepFailed(str(error), error.exit_code)
            step["seen"], self.exit_code = str(error), error.exit_code
        step["seconds"] = round(time.monotonic() - began, 1)
        self.tell(step)
        if failed is not None:
            raise failed


@dataclass(frozen=True)
class Stage:
    """What every training of a rehearsal has in common."""

    recipe: Path
    settings: tuple[str, ...]
    processes: int
    folder: Path

    def command(self, run_dir: Path) -> list[str]:
        """What a user would type."""
        where = "single" if self.processes == 1 else "cpu_2proc"
        launcher = ["-m", "accelerate.commands.launch", "--config_file", str(CONFIG_FOLDER / f"{where}.yaml")]
        launcher += ["--cpu"] if self.processes == 1 else ["--num_processes", str(self.processes)]
        script = [str(Path(__file__).with_name("train.py")), str(self.recipe)]
        return [sys.executable, *launcher, *script, *self.settings, f"output_dir={run_dir}"]


def rehearse(
    recipe: Path, given: Sequence[str], *, processes: int = 2, tell: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Rehearse and return the report; `tell` gets each line of it when it is known.

    The report's `exit_code` is 0, or that of the step that failed. Raises RecipeError for a wrong recipe.
    """
    loaded = load_recipe(recipe, given).recipe
    strategy = read_strategy(loaded.accelerate_config)
    ranks = processes_of(strategy, processes)
    checklist, began = Checklist(tell), time.monotonic()
    report: dict[str, Any] = {"recipe": str(recipe), "strategy": strategy.name, "processes": ranks, "differs": []}
    with tempfile.TemporaryDirectory(prefix="finetune-rehearsal-") as name, ended_by_signals():
        folder = Path(name)
        try:
            with checklist.line("loads") as step:
                with hushed():
                    model = shrink_model(
                        loaded.model.name_or_path, loaded.model.revision, loaded.data, folder / "model"
                    )
                found = changes(loaded, strategy, model, processes=ranks, folder=folder)
                settings = [*given, *overrides(found)]
                small = load_recipe(recipe, settings).recipe
                step["seen"] = f"{model.architecture} of {model.parameters:,} parameters"
            report["differs"] = [change.told for change in found if change.told]
            for told in report["differs"]:
                tell({"differs": told})
            stage = Stage(recipe, tuple(settings), ranks, folder)
            report["receipt"] = _perform(stage, small, checklist)
        except StepFailed:
            pass
    seconds = round(time.monotonic() - began, 1)
    return report | {
        "ok": checklist.exit_code == 0,
        "exit_code": checklist.exit_code,
        "seconds": seconds,
        "steps": checklist.steps,
    }


def _perform(stage: Stage, recipe: Recipe, checklist: Checklist) -> dict[str, Any]:
    whole, broken = stage.folder / "whole", stage.folder / "broken"
    with checklist.line(f"trains {STEPS} steps") as step:
        _train(stage, whole)
        receipt: dict[str, Any] = json.loads((whole / "receipt.json").read_text("utf-8"))
        step["seen"] = sharding(receipt)
    with checklist.line(f"killed after step {KILLED_AFTER}") as step:
        step["seen"] = _train_and_kill(stage, broken)
    with checklist.line("resumed the same") as step:
        _train(stage, broken)
        step["seen"] = same_curve(whole, broken)
    with checklist.line("exported") as step:
        step["seen"] = _exported(broken)
    with checklist.line("loaded back") as step, hushed():
        step["seen"] = load_back(recipe, broken)
    return receipt


def sharding(receipt: dict[str, Any]) -> str:
    """The strategy in force and how much of the weights a rank holds, in a line."""
    facts, world = receipt["sharding"], receipt["world_size"]
    spread = f"each rank holds {facts['held_share']:.0%} of the weights" if world > 1 else "one process"
    mesh = f", mesh {' x '.join(f'{count} {name}' for name, count in facts['mesh'].items())}" if facts["mesh"] else ""
    dtypes = receipt["dtypes"]
    return f"{receipt['strategy']} on {world}: {spread}{mesh}; {dtypes['master']} masters, {dtypes['compute']} compute"


def same_curve(whole: Path, broken: Path) -> str:
    """Compare what came after the kill, bit by bit. Raises StepFailed with the first difference."""
    expected, found = (_curve(folder) for folder in (whole, broken))
    if len(expected) != STEPS or len(found) != STEPS:
        raise StepFailed(f"{len(found)} steps were logged by the resumed run, {len(expected)} by the whole one")
    for one, other in zip(expected, found, strict=True):
        if one != other:
            raise StepFailed(f"step {one[0]}: loss, gradient norm {one[1:]} uninterrupted, {other[1:]} resumed")
    return f"steps {KILLED_AFTER + 1} to {STEPS}: loss and gradient norm bitwise"


def _curve(run_dir: Path) -> list[tuple[Any, ...]]:
    lines = [line for line in read_lines(run_dir / "metrics.jsonl") if line["kind"] == "train"]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def _exported(run_dir: Path) -> str:
    folder = next((run_dir / name for name in ("adapter", "model") if (run_dir / name).is_dir()), None)
    if folder is None:
        raise StepFailed("neither adapter/ nor model/ was written")
    files = [path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".pt", ".pkl")]
    if not files or any(not name.endswith(".safetensors") for name in files):
        raise StepFailed(f"{folder.name}/ holds {', '.join(files) or 'no weights'}; safetensors alone were expected")
    return f"{folder.name}/{', '.join(sorted(files))}"


def _train(stage: Stage, run_dir: Path) -> None:
    with started(stage, run_dir) as process:
        try:
            code = process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise StepFailed(f"not finished after {PATIENCE_SECONDS} s; {_said(stage, run_dir)}") from None
    if code != 0:
        _raise_failure(stage, run_dir)


def _train_and_kill(stage: Stage, run_dir: Path) -> str:
    """Kill every process of the job as soon as the second step's checkpoint is there."""
    saved = run_dir / "checkpoints" / f"step-{KILLED_AFTER:08d}"
    last = saved.with_name(f"step-{STEPS:08d}")
    for _ in range(ATTEMPTS):
        with started(stage, run_dir) as process:
            killed = kill_all(process, _until(saved, process, stage, run_dir))
        if not last.exists():
            return f"SIGKILL to {killed} processes, {len(_curve(run_dir))} steps logged"
        run_dir.rename(run_dir.with_name(f"{run_dir.name}-too-late-{time.monotonic_ns()}"))
    raise StepFailed(f"the kill came after the last step {ATTEMPTS} times")


def _until(saved: Path, process: subprocess.Popen[bytes], stage: Stage, run_dir: Path) -> list[psutil.Process]:
    """Wait for a checkpoint; the processes below the launcher, looked up before, for a step takes little."""
    end, looked, found = time.monotonic() + PATIENCE_SECONDS, 0.0, []
    while not saved.is_dir():
        if process.poll() is not None:
            _raise_failure(stage, run_dir)
        if (now := time.monotonic()) > end:
            raise StepFailed(f"no checkpoint after {PATIENCE_SECONDS} s; {_said(stage, run_dir)}")
        if now > looked + 0.5:
            looked, found = now, below(process)
        time.sleep(0.005)
    return found


@contextmanager
def started(stage: Stage, run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A training in a session of its own; none of its processes outlives the block."""
    environment = {key: value for key, value in os.environ.items() if not FOREIGN.match(key)}
    environment |= {
        "CUDA_VISIBLE_DEVICES": "",
        "FINETUNE_CACHE": str(stage.folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONWARNINGS": "ignore",
    }
    with open(_log(run_dir), "wb") as log:
        process = subprocess.Popen(
            stage.command(run_dir), env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        kill_all(process)


def below(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The processes that it started, and those that they did; ranks live in sessions of their own."""
    try:
        return list(psutil.Process(process.pid).children(recursive=True))
    except psutil.Error:
        return []


def kill_all(process: subprocess.Popen[bytes], known: Sequence[psutil.Process] = ()) -> int:
    """SIGKILL to a launcher and all below it, `known` first; returns how many there were."""
    if process.poll() is not None:
        return 0
    # The launcher is stopped first: else it would see its ranks fall; and if it fell first, they would save and leave.
    process.send_signal(signal.SIGSTOP)
    _kill(known)
    found = below(process)
    _kill(found)
    process.kill()
    process.wait()
    end = time.monotonic() + 10
    while any(_lives(child) for child in found) and time.monotonic() < end:
        time.sleep(0.01)
    return len(found) + 1


def _kill(processes: Sequence[psutil.Process]) -> None:
    for each in processes:
        with suppress(psutil.Error):
            each.kill()


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


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


@contextmanager
def hushed() -> Iterator[None]:
    """What libraries say while small models are made and loaded is not about the recipe; errors still come through."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _log(run_dir: Path) -> Path:
    return run_dir.with_suffix(".log")


def _said(stage: Stage, run_dir: Path) -> str:
    return failure(run_dir, _log(run_dir).read_text("utf-8", errors="replace"))


def _raise_failure(stage: Stage, run_dir: Path) -> None:
    """As the training itself said it, with its exit code, which its launcher only reports."""
    log = _log(run_dir).read_text("utf-8", errors="replace")
    code = re.search(r"exitcode +: (\d+)", log) or re.search(r"non-zero exit status (\d+)", log)
    raise StepFailed(_said(stage, run_dir), int(code[1]) if code else 1)
