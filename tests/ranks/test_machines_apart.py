"""Machines that do not see rank 0's folder: they train the one curve, a lost one is named, and the run goes on."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from finetune.errors import EnvironmentMismatch
from finetune.files import TEMPORARY_PREFIX, read_lines
from finetune.recipe.strategy import read_strategy
from finetune.run_folder.checkpoint import newest_valid
from finetune.run_folder.facts import read_state
from finetune.training import held_state
from finetune.training.agreement import refuse_apart
from tests.support.runs.soak_resume import (
    How,
    fingerprint,
    fork_ranks,
    kill,
    run_whole,
    wait_all,
    write_resume_recipe,
)
from tests.support.runs.two_hosts import put_on_own_disk, why_not

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
STEPS, TIMEOUT = 40, 15


class Machines:
    """Machines a, b, ... of one kernel. Each has its own folder at the place where every run has its folder."""

    def __init__(self, root: Path) -> None:
        self.root, self.place = root, root / "out"
        self.place.mkdir()

    def disk(self, machine: str) -> Path:
        path = self.root / machine
        path.mkdir(exist_ok=True)
        return path

    def start(
        self,
        recipe: Path,
        name: str,
        strategy: str,
        ranks: str = "ab",
        then: Callable[[int], None] = lambda rank: None,
    ) -> list[int]:
        """The processes of a run, with a rank on the machine of each letter. Each calls `then` there."""
        disks = [self.disk(machine) for machine in ranks]

        def move(rank: int) -> None:
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)  # not pytest's
            put_on_own_disk(self.place, disks[rank], ranks[rank])
            then(rank)

        return fork_ranks(recipe, self.place / name, len(ranks), strategy, move)

    def said(self, name: str, rank: int) -> str:
        return (self.place / f"{name}.rank{rank}.log").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("apart")


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    return Machines(tmp_path)


def changed(folder: Path, name: str, steps: int, **more: Any) -> Path:
    """The recipe of resumed runs, with other settings."""
    (folder / name).mkdir()
    recipe = write_resume_recipe(folder / name, steps=steps, dropout=0.0)
    content = yaml.safe_load(recipe.read_text())
    content["training"] |= more.pop("training", {})
    recipe.write_text(yaml.safe_dump(content | {"timeout_seconds": TIMEOUT} | more))
    return recipe


@pytest.fixture(scope="module")
def short(folder: Path) -> Path:
    return changed(folder, "short", 7)


@pytest.fixture(scope="module")
def alone(folder: Path, short: Path) -> list[dict[str, Any]]:
    run_whole(short, folder / "alone", How(1, "single"))
    return read_lines(folder / "alone" / "metrics.jsonl")


def values(lines: list[dict[str, Any]]) -> Iterator[tuple[float, ...]]:
    for line in lines:
        if line["kind"] != "phase":
            yield tuple(line[key] for key in ("step", "loss", "grad_norm") if key in line)


def content_of(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero3"])
def test_the_one_curve(strategy: str, machines: Machines, short: Path, alone: list[dict[str, Any]]) -> None:
    processes = machines.start(short, "run", strategy)
    assert wait_all(processes, 300) == [0, 0], machines.said("run", 0) + machines.said("run", 1)
    run_dir = machines.disk("a") / "run"
    found, expected = list(values(read_lines(run_dir / "metrics.jsonl"))), list(values(alone))
    assert len(found) == len(expected) > 4
    for actual, point in zip(found, expected, strict=True):
        assert actual == pytest.approx(point, rel=1e-5)
    checkpoint, damaged = newest_valid(run_dir)
    assert checkpoint is not None
    assert (checkpoint.step, damaged) == (7, ())
    pieces = len(list(checkpoint.path.glob("model-*.safetensors")))
    assert pieces == (1 if strategy == "ddp" else 2)
    assert os.listdir(machines.disk("b")) == []
    assert "1 of 2 ranks do not see" in machines.said("run", 0)


def test_the_state_before_the_worst_step_may_lie_on_rank_0_s_disk(
    machines: Machines, short: Path, alone: list[dict[str, Any]]
) -> None:
    """Where the memory of one machine has no room for copies. It goes to rank 0 and comes back."""
    taken = machines.root / "taken"

    def then(rank: int) -> None:
        real = held_state.write_checkpoint

        def write(run_dir: Path, *arguments: Any, **more: Any) -> Path:
            taken.with_suffix(f".{rank}").write_text(str(run_dir))
            return real(run_dir, *arguments, **more)

        held_state.write_checkpoint = write
        held_state.machine_without_room = lambda *_: (1, 0)

    assert wait_all(machines.start(short, "run", "fsdp2", then=then), 300) == [0, 0], machines.said("run", 0)
    found = list(values(read_lines(machines.disk("a") / "run" / "metrics.jsonl")))
    for actual, point in zip(found, values(alone), strict=True):
        assert actual == pytest.approx(point, rel=1e-5)
    assert [Path(taken.with_suffix(f".{rank}").read_text()).name for rank in range(2)] == [".tmp-worst-step"] * 2
    left = [path for machine in "ab" for path in machines.disk(machine).rglob(f"{TEMPORARY_PREFIX}*")]
    assert left == []


def until_step(run_dir: Path, step: int) -> None:
    end = time.monotonic() + 300
    metrics = run_dir / "metrics.jsonl"
    while max((line["step"] for line in (read_lines(metrics) if metrics.exists() else ())), default=0) < step:
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(scope="module")
def long(folder: Path) -> Path:
    return changed(folder, "long", STEPS, save_steps=5, eval_steps=20)


@pytest.fixture(scope="module")
def whole(folder: Path, long: Path) -> Callable[[str], dict[str, Any]]:
    """What a strategy's run is on one machine, with two ranks."""
    known: dict[str, dict[str, Any]] = {}

    def find(strategy: str) -> dict[str, Any]:
        if strategy not in known:
            run_whole(long, folder / f"whole-{strategy}", How(2, strategy))
            known[strategy] = fingerprint(folder / f"whole-{strategy}")
        return known[strategy]

    return find


@pytest.mark.parametrize(
    ("strategy", "victim", "sent", "seconds"),
    [
        ("ddp", 1, signal.SIGKILL, 10),
        ("fsdp2", 0, signal.SIGKILL, 10),
        ("fsdp2", 1, signal.SIGSTOP, TIMEOUT + 3),
        ("ddp", 0, signal.SIGSTOP, TIMEOUT + 3),
    ],
)
def test_a_lost_machine_is_named_and_the_run_goes_on(
    strategy: str,
    victim: int,
    sent: signal.Signals,
    seconds: float,
    machines: Machines,
    long: Path,
    whole: Callable[[str], dict[str, Any]],
) -> None:
    """Where rank 0's machine is lost, the run's folder is carried to the other, and the machines change roles."""
    processes, run_dir = machines.start(long, "run", strategy), machines.disk("a") / "run"
    until_step(run_dir, 12)
    os.kill(processes[victim], sent)
    began = time.monotonic()
    other = wait_all([processes[1 - victim]], 60)
    took = time.monotonic() - began
    kill([processes[victim]])
    assert other == [1]
    assert took < seconds
    what = "died" if sent == signal.SIGKILL else "froze"
    last = machines.said("run", 1 - victim).strip().splitlines()[-1]
    assert last.startswith(f"rank {victim} {what} on {os.uname().nodename} (process {processes[victim]})"), last
    assert not (machines.disk("b") / "run").exists()
    state = read_state(run_dir)
    assert state is not None
    if victim == 1:
        assert (state["state"], state["rank"], state["phase"]) == ("failed", 1, "training")
        assert what in state["error"]
        again, first = "ab", "a"
    else:
        assert state["state"] == "running", "nobody was left who sees it"
        shutil.copytree(run_dir, machines.disk("b") / "run")
        again, first = "ba", "b"
    stale = content_of(run_dir)
    assert wait_all(machines.start(long, "run", strategy, again), 300) == [0, 0], machines.said("run", 0)
    assert "resumed from step" in machines.said("run", 0)
    assert fingerprint(machines.disk(first) / "run") == whole(strategy)
    if first == "b":
        assert content_of(run_dir) == stale, "what lies in output_dir on another machine is not touched"
    left = [path for machine in "ab" for path in machines.disk(machine).glob(f"{TEMPORARY_PREFIX}*")]
    assert left == []


def test_the_best_checkpoint_reaches_every_machine(folder: Path, machines: Machines) -> None:
    """Two of three ranks share a machine, and one of them receives. The loss grows from the first step on."""
    training = {"learning_rate": 5.0, "load_best_model_at_end": True}
    recipe = changed(folder, "best", 8, save_steps=2, eval_steps=2, training=training)
    run_whole(recipe, folder / "best-whole", How(3, "fsdp2"))
    assert wait_all(machines.start(recipe, "run", "fsdp2", "abb"), 300) == [0, 0, 0], machines.said("run", 0)
    run_dir = machines.disk("a") / "run"
    export = json.loads((run_dir / "receipt.json").read_text())["export"]
    assert (export["best"], export["step"] < 8) == (True, True)
    assert fingerprint(run_dir) == fingerprint(folder / "best-whole")
    assert os.listdir(machines.disk("b")) == []


def ended_with(machines: Machines, processes: list[int], code: int) -> str:
    """What rank 0 says last, after every rank has ended with this code and no step was trained."""
    assert wait_all(processes, 200) == [code] * len(processes), machines.said("run", 0) + machines.said("run", 1)
    assert " step 1" not in machines.said("run", 0)
    assert "Traceback" not in machines.said("run", 0)
    return machines.said("run", 0).strip().splitlines()[-1]


def test_another_machine_s_other_rows_are_refused(folder: Path, short: Path, machines: Machines) -> None:
    rows = short.parent / "chats.jsonl"
    lines = rows.read_text().splitlines(keepends=True)
    other = folder / "other.jsonl"
    other.write_text("".join([*lines[1:], lines[0]]))

    def then(rank: int) -> None:
        if rank == 1:
            subprocess.run(["mount", "--bind", str(other), str(rows)], check=True)

    line = ended_with(machines, machines.start(short, "run", "ddp", then=then), EnvironmentMismatch.exit_code)
    assert line.startswith("data: rows ")
    assert line.endswith(f"on rank 1, {os.uname().nodename}; put rank 0's files there")


def test_a_disk_of_rank_0_without_room_for_the_others_pieces_is_refused(folder: Path, machines: Machines) -> None:
    """150,000 weights with two moments are 1.8 MB. The disk has room for two checkpoints, and three are there at
    once."""
    recipe = changed(folder, "full", 8, lora=None)

    def then(rank: int) -> None:
        if rank == 0:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(machines.place)], check=True)

    line = ended_with(machines, machines.start(recipe, "run", "fsdp2", then=then), EnvironmentMismatch.exit_code)
    assert line.startswith("output_dir: checkpoints take 0.005 GiB more on rank 0's disk, where 0.004 are free"), line
    for words in ("storage that every machine mounts", "run.storage"):
        assert words in line


def test_offload_to_a_disk_needs_a_place_on_each_machine() -> None:
    agreed: Any = SimpleNamespace(strategy=read_strategy("zero3_nvme"))
    with pytest.raises(EnvironmentMismatch) as refused:
        refuse_apart(agreed, {1: 1})
    line = str(refused.value)
    assert line.startswith("output_dir: rank 1 does not see rank 0's folder, where optimizer offload keeps its files")
    assert "set offload_optimizer_nvme_path in accelerate_config's deepspeed_config" in line
