"""A rank that dies or freezes ends the job in time, and the printed command completes the run."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from finetune.ranks.heartbeat import clear_heartbeats
from finetune.run_folder.folder import RunIdentity, claim_run_folder, lock_run_folder
from tests.support.runs.launching import (
    ACCELERATE,
    REPOSITORY,
    TORCHRUN,
    Started,
    beat,
    last_line,
    running,
    until_step,
    wait_all,
)
from tests.support.runs.soak_resume import fingerprint, write_resume_recipe

pytestmark = pytest.mark.slow
TIMEOUT = 15  # three quarters of it without a heartbeat is a freeze, on a machine that does other things too
SLACK = 30  # for launchers and interpreters to end
OVERRIDES = {"training.max_steps": 60, "save_steps": 5, "eval_steps": 30, "timeout_seconds": TIMEOUT}
LAUNCHERS = {"accelerate": ACCELERATE, "torchrun": [*TORCHRUN, "--nproc-per-node", "2"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lost")


@pytest.fixture(scope="module")
def recipe(folder: Path) -> Path:
    return write_resume_recipe(folder, steps=60, dropout=0.1)


@pytest.fixture(scope="module")
def uninterrupted(folder: Path, recipe: Path) -> dict[str, Any]:
    """The run that nothing happened to."""
    with running([Started(ACCELERATE)], recipe, folder / "whole", [], **OVERRIDES) as processes:
        assert wait_all(processes, folder / "whole") == [0]
    return what_counts(folder / "whole")


@pytest.mark.parametrize(
    ("name", "launcher", "lost", "seconds"),
    [
        ("SIGKILL", "accelerate", 1, 60),
        ("SIGKILL", "torchrun", 0, 60),
        ("SIGSTOP", "accelerate", 1, TIMEOUT + SLACK),
        ("SIGSTOP", "torchrun", 1, TIMEOUT + SLACK),
    ],
)
def test_the_last_line_names_it_and_continues(
    name: str, launcher: str, lost: int, seconds: float, folder: Path, recipe: Path, uninterrupted: dict[str, Any]
) -> None:
    run_dir = folder / f"{name}-{launcher}"
    with running([Started(LAUNCHERS[launcher])], recipe, run_dir, [], **OVERRIDES) as processes:
        until_step(run_dir, 12)
        process = beat(run_dir, lost)["process"]
        os.kill(process, getattr(signal, name))
        began = time.monotonic()
        wait_all(processes, run_dir)
        assert time.monotonic() - began < seconds
    assert not Path(f"/proc/{process}").exists()
    state = json.loads((run_dir / "run_state.json").read_text())
    assert (state["state"], state["rank"], state["phase"]) == ("failed", lost, "training")
    assert state["step"] >= 12 - 1  # rank 0 has written a step down before the other has counted it
    last = last_line(run_dir)
    what = "died" if name == "SIGKILL" else "froze"
    assert last.startswith(f"rank {lost} {what} on {os.uname().nodename} (process {process})")
    assert f"at step {state['step']}, training" in last
    command = last.split("continue with: ")[1]
    assert command == state["command"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    resumed = subprocess.run(
        shlex.split(command), cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600
    )
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert what_counts(run_dir) == uninterrupted


FAILING = """
import os, sys
from finetune.training import loop
from finetune.training import worst_step  # which keeps the real step: those counted here are the training's
from finetune.errors import EnvironmentMismatch
from finetune.train import main
original, calls = loop.optimizer_step, []
def step(*arguments, **options):
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) == 4:
        raise EnvironmentMismatch("the disk of this machine is full")
    return original(*arguments, **options)
loop.optimizer_step = step
sys.exit(main())
"""


def test_a_failure_of_one_rank_is_reported_by_another(folder: Path, recipe: Path) -> None:
    """Rank 1 alone meets an error that is a line for the user, and only rank 0 speaks to the user."""
    script, run_dir = folder / "failing_train.py", folder / "failing"
    script.write_text(FAILING)
    launch = [Started(LAUNCHERS["torchrun"])]
    with running(launch, recipe, run_dir, [], script=str(script), **OVERRIDES) as processes:
        assert wait_all(processes, run_dir) != [0]
    assert last_line(run_dir).startswith(
        "rank 1 failed: EnvironmentMismatch: the disk of this machine is full; it was at step 3, training; continue"
    )
    state = json.loads((run_dir / "run_state.json").read_text())
    assert (state["state"], state["rank"], state["step"]) == ("failed", 1, 3)


WAITING = """
import sys, time
from pathlib import Path
from finetune.ranks.heartbeat import Heartbeat
from finetune.launch.launcher import Launch
from finetune.ranks.heartbeat import Meeting
from finetune.training.watchdog import Progress, Watchdog
run_dir, rank = Path(sys.argv[1]), int(sys.argv[2])
heartbeat = Heartbeat(run_dir, rank, 11)
heartbeat.write("running", "training", 7)
while not (run_dir / ".ranks" / f"rank-{1 - rank:05d}.json").exists():
    time.sleep(0.01)
launch = Launch((), None, None, True, 2, rank, True)
Watchdog(Meeting(run_dir, heartbeat), launch, Progress("training", 7), 600, "again").start()
print("waiting", flush=True)
time.sleep(600)
"""


@contextmanager
def waiting_rank(run_dir: Path, rank: int) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-c", WAITING, str(run_dir), str(rank)]
    with subprocess.Popen(words, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_rank_that_waits_in_a_collective_forever_ends_too(tmp_path: Path) -> None:
    """As under NCCL, which does not notice that its peer is gone."""
    claim_run_folder(lock_run_folder(tmp_path), resume="auto", identity=RunIdentity({}), command="again")
    clear_heartbeats(tmp_path)
    with ExitStack() as open_now:
        ranks = [open_now.enter_context(waiting_rank(tmp_path, rank)) for rank in range(2)]
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "waiting\n"
        ranks[1].kill()
        began = time.monotonic()
        said_there = ranks[0].communicate(timeout=120)[1]
        assert time.monotonic() - began < SLACK  # its own timeout is 600
    assert ranks[0].returncode == 1
    said_there = said_there[said_there.index("rank 1 died") :]  # libraries print above it when they are imported
    assert said_there.startswith(f"rank 1 died on {os.uname().nodename} (process {ranks[1].pid})")
    assert said_there.strip().endswith("it was at step 7, training; continue with: again")


def what_counts(run_dir: Path) -> dict[str, Any]:
    """All that must be bitwise equal; peft writes its set of layers in the order of that process's hashes."""
    result = fingerprint(run_dir)
    del result["files"]["adapter/adapter_config.json"]
    return result
