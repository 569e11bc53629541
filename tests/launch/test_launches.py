"""However two ranks are started, on one host or two, they make the same run."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from finetune.files import read_lines
from tests.support.runs.launching import (
    ACCELERATE,
    TORCHRUN,
    Started,
    beat,
    by_srun,
    last_line,
    running,
    said,
    until_step,
    wait_all,
)
from tests.support.runs.soak_resume import write_resume_recipe
from tests.support.runs.two_hosts import Host

pytestmark = pytest.mark.slow
FIRST, PORT = "10.77.0.1", "29511"


def by_accelerate(machine: int, ranks: int = 2) -> Started:
    machines = ["--num_machines", "2", "--machine_rank", str(machine), "--num_processes", str(ranks)]
    return Started([*ACCELERATE, *machines, "--main_process_ip", FIRST, "--main_process_port", PORT], machine)


def by_torchrun(machine: int) -> Started:
    place = ["--master-addr", FIRST, "--master-port", PORT]
    return Started([*TORCHRUN, "--nnodes", "2", "--node-rank", str(machine), "--nproc-per-node", "1", *place], machine)


LAUNCHES = {
    "torchrun by PET_ variables": [Started(TORCHRUN, None, {"PET_NPROC_PER_NODE": "2", "PET_MASTER_PORT": "29512"})],
    "srun": [by_srun(rank, host=None, nodes="thishost") for rank in range(2)],
    "accelerate on two hosts": [by_accelerate(machine) for machine in range(2)],
    "accelerate on two hosts, four ranks": [by_accelerate(machine, 4) for machine in range(2)],
    "torchrun on two hosts": [by_torchrun(machine) for machine in range(2)],
    "srun on two hosts": [by_srun(rank, host=rank, nodes="10.77.0.[1-2]") for rank in range(2)],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("launches")


@pytest.fixture(scope="module")
def recipe(folder: Path) -> Path:
    return write_resume_recipe(folder, steps=5, dropout=0.0)


def curve(run_dir: Path) -> list[tuple[float, ...]]:
    lines = read_lines(run_dir / "metrics.jsonl")
    return [tuple(line[key] for key in ("step", "loss", "grad_norm") if key in line) for line in lines]


@pytest.fixture(scope="module")
def expected(folder: Path, recipe: Path) -> list[tuple[float, ...]]:
    """Two ranks of `accelerate launch` on this machine."""
    with running([Started(ACCELERATE)], recipe, folder / "one-host", []) as processes:
        assert wait_all(processes, folder / "one-host") == [0], said(folder / "one-host", 0)
    actual = curve(folder / "one-host")
    assert len(actual) > 4
    return actual


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_same_run(
    name: str, folder: Path, recipe: Path, expected: list[tuple[float, ...]], request: pytest.FixtureRequest
) -> None:
    launch = LAUNCHES[name]
    two_hosts = launch[0].host is not None
    hosts = request.getfixturevalue("hosts") if two_hosts else ()
    run_dir = folder / name.replace(" ", "-").replace(",", "")
    with running(launch, recipe, run_dir, hosts) as processes:
        assert wait_all(processes, run_dir) == [0] * len(launch), said(run_dir, 0)
    assert len(expected) == len(curve(run_dir))
    for actual, point in zip(curve(run_dir), expected, strict=True):
        assert actual == pytest.approx(point, rel=1e-6)
    receipt = json.loads((run_dir / "receipt.json").read_text())
    ranks = 4 if "four" in name else 2
    assert (receipt["world_size"], receipt["nodes"]) == (ranks, 2 if two_hosts else 1)
    assert receipt["local_world_size"] == (ranks // 2 if two_hosts else 2)
    command = json.loads((run_dir / "run_state.json").read_text())["command"]
    assert command.startswith("srun python" if "srun" in name else "PET_" if "PET_" in name else "python -m")


# It has its own processes too: what the first host sees of the second is the network and the shared folder.
MACHINE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def apart(run_dir: Path) -> list[Started]:
    """torchrun on two hosts; the second mounts an empty folder where the first has the run."""
    run_dir.parent.mkdir()
    first, second = LAUNCHES["torchrun on two hosts"]
    hidden = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {run_dir.parent} && exec "$@"', "sh"]
    return [first, Started([*MACHINE, *hidden, *second.words], second.host)]


def test_a_folder_that_is_not_shared(
    folder: Path, recipe: Path, expected: list[tuple[float, ...]], hosts: tuple[Host, ...]
) -> None:
    run_dir = folder / "apart" / "run"
    with running(apart(run_dir), recipe, run_dir, hosts) as processes:
        assert wait_all(processes, run_dir) == [0, 0], said(run_dir, 0) + said(run_dir, 1)
    assert "1 of 2 ranks do not see" in said(run_dir, 0)
    assert len(expected) == len(curve(run_dir))
    for actual, point in zip(curve(run_dir), expected, strict=True):
        assert actual == pytest.approx(point, rel=1e-6)


def test_a_cable_that_is_pulled_between_machines_apart(folder: Path, recipe: Path, hosts: tuple[Host, ...]) -> None:
    """Each ends in time and names the other."""
    run_dir = folder / "apart-cut" / "run"
    more: Mapping[str, Any] = {"training.max_steps": 3000, "save_steps": 5, "eval_steps": 5000, "timeout_seconds": 15}
    try:
        with running(apart(run_dir), recipe, run_dir, hosts, **more) as processes:
            until_step(run_dir, 8)
            subprocess.run(["ip", "-n", hosts[0].namespace, "link", "set", "cable", "down"], check=True)
            began = time.monotonic()
            assert all(wait_all(processes, run_dir))
            took = time.monotonic() - began
    finally:
        subprocess.run(["ip", "-n", hosts[0].namespace, "link", "set", "cable", "up"], check=True)
    assert took < 15 + 20
    for rank in range(2):
        lines = [line for line in said(run_dir, rank).splitlines() if line.startswith("rank ")]
        assert lines, said(run_dir, rank)[-3000:]
        assert lines[-1].startswith(f"rank {1 - rank} froze on host-{'ba'[rank]} ")


@pytest.mark.parametrize(
    ("name", "sent", "what", "seconds"),
    [
        ("accelerate on two hosts", signal.SIGKILL, "died", 60),
        ("srun on two hosts", signal.SIGKILL, "died", 60),
        ("torchrun on two hosts", signal.SIGSTOP, "froze", 45),
    ],
)
def test_a_rank_that_is_lost_on_the_other_machine(
    name: str, sent: signal.Signals, what: str, seconds: float, folder: Path, hosts: tuple[Host, ...], recipe: Path
) -> None:
    run_dir = folder / f"{what}-{name.split()[0]}"
    more: Mapping[str, Any] = {"training.max_steps": 3000, "save_steps": 5, "eval_steps": 5000, "timeout_seconds": 15}
    first, second = LAUNCHES[name]
    parts = [first, Started([*MACHINE, *second.words], second.host, second.environment)]
    with running(parts, recipe, run_dir, hosts, **more) as processes:
        until_step(run_dir, 8)
        trainer_below(processes[1].pid).send_signal(sent)
        began = time.monotonic()
        wait_all(processes[:1], run_dir)
        assert time.monotonic() - began < seconds
    last = last_line(run_dir)
    state = json.loads((run_dir / "run_state.json").read_text())
    assert (state["state"], state["rank"]) == ("failed", 1)
    assert f"rank 1 {what} on host-b (process {beat(run_dir, 1)['process']})" in last
    assert f"at step {state['step']}, training" in last
    assert last.endswith(f"continue, on every machine, with: {state['command']}")


def trainer_below(process: int) -> psutil.Process:
    """The one rank among a process and its descendants."""
    family = [psutil.Process(process), *psutil.Process(process).children(recursive=True)]
    return next(one for one in family[::-1] if "finetune/train.py" in one.cmdline() and one.name().startswith("python"))
