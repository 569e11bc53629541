"""What a launcher gives a process, and whole launches as a user starts them: processes, their words and their beats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.files import read_lines
from finetune.launch.launcher import Launch
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import Strategy
from finetune.recipe.strategy_fit import refuse_recipe
from finetune.strategies.machine import refuse_machine
from tests.support.runs.two_hosts import Host

REPOSITORY = Path(__file__).resolve().parents[3]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu_2proc.yaml"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ALONE = Launch(
    words=("accelerate", "launch"),
    requested_processes=None,
    config_file=None,
    threads_chosen=True,
    world_size=1,
    rank=0,
    on_cpu=False,
)


def check_launch(recipe: Recipe, launch: Launch) -> Strategy:
    """Both halves of `refuse`: the recipe's alone, then this machine's. Returns the strategy."""
    strategy = refuse_recipe(recipe)
    refuse_machine(recipe, strategy, launch)
    return strategy


@dataclass(frozen=True)
class Started:
    """One launcher, or one rank without a launcher."""

    words: list[str]
    host: int | None = None  # None: on this machine
    environment: dict[str, str] = field(default_factory=dict)


def by_srun(rank: int, *, host: int | None, nodes: str) -> Started:
    variables = {"SLURM_PROCID": rank, "SLURM_NTASKS": 2, "SLURM_LOCALID": 0 if host is not None else rank}
    variables |= {"SLURM_NODEID": host or 0, "SLURM_JOB_ID": 77, "SLURM_STEP_ID": 0, "SLURM_NODELIST": nodes}
    return Started([sys.executable], host, {key: str(value) for key, value in variables.items()})


@contextmanager
def running(
    launch: Sequence[Started],
    recipe: Path,
    run_dir: Path,
    hosts: Sequence[Host],
    script: str = "finetune/train.py",
    **overrides: Any,
) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes of a launch; what they say is in run_dir's name with .0.log, .1.log."""
    arguments = [script, str(recipe), f"output_dir={run_dir}", "accelerate_config=ddp"]
    arguments += [f"{key}={value}" for key, value in overrides.items()]
    started = []
    try:
        for index, part in enumerate(launch):
            words = [*part.words, *arguments]
            command = words if part.host is None else hosts[part.host].command(words)
            plain = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "PET_", "GLOO_"))}
            environment = plain | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
            environment |= part.environment
            with open(run_dir.with_suffix(f".{index}.log"), "w") as log:
                started.append(
                    subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log, text=True)
                )
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def said(run_dir: Path, index: int) -> str:
    return run_dir.with_suffix(f".{index}.log").read_text()


def wait_all(processes: Sequence[subprocess.Popen[str]], run_dir: Path, seconds: float = 400) -> list[int]:
    end = time.monotonic() + seconds
    while any(process.poll() is None for process in processes):
        assert time.monotonic() < end, "\n".join(said(run_dir, index)[-3000:] for index in range(len(processes)))
        time.sleep(0.05)
    return [process.wait() for process in processes]


def beat(run_dir: Path, rank: int) -> dict[str, Any]:
    while True:
        try:
            found = json.loads((run_dir / ".ranks" / f"rank-{rank:05d}.json").read_text())
        except ValueError:  # read in the middle of a write
            continue
        assert isinstance(found, dict)
        return found


def last_line(run_dir: Path) -> str:
    """What stands last when all is over; said by a process that outlives the launcher by a moment."""
    end = time.monotonic() + 30
    while True:
        last = said(run_dir, 0).strip().splitlines()[-1]
        if last.startswith("rank ") or time.monotonic() > end:
            return last
        time.sleep(0.1)


def until_step(run_dir: Path, step: int, seconds: float = 300) -> None:
    end, metrics = time.monotonic() + seconds, run_dir / "metrics.jsonl"
    while max((line["step"] for line in (read_lines(metrics) if metrics.exists() else ())), default=0) < step:
        assert time.monotonic() < end, said(run_dir, 0)[-3000:]
        time.sleep(0.05)
