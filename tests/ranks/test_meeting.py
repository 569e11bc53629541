"""Three ranks on two machines: one folder where they share it; else a folder of each machine's own, and rank 0's."""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from finetune.errors import EnvironmentMismatch, NoRendezvous
from finetune.files import LOCK, lock
from finetune.ranks import heartbeat, meeting, transfers
from finetune.ranks.heartbeat import Heartbeat, Meeting, clear_heartbeats
from finetune.ranks.meeting import meet
from finetune.ranks.network_heartbeat import NetworkHeartbeat
from finetune.run_folder.checkpoint import Checkpoint, examine, read_checkpoint, step_folder, write_checkpoint
from finetune.run_folder.save_restore import on_every_machine
from finetune.strategies.pieces import Piece, all_ranks
from tests.support.runs.launching import ALONE

RANKS = 3
MACHINES = "abb"


def by_ranks(folder: Path, act: Callable[[int], Any]) -> list[Any]:
    """What each of three processes returns or raises, of a gloo group. Each knows the machine that it is on."""
    processes = []
    for rank in range(RANKS):
        process = os.fork()
        if process:
            processes.append(process)
            continue
        found: Any = None
        try:
            heartbeat._machine = f"kernel-{MACHINES[rank]} processes"
            where = f"file://{folder / 'store'}"
            timeout = timedelta(seconds=60)
            dist.init_process_group("gloo", init_method=where, rank=rank, world_size=RANKS, timeout=timeout)
            found = act(rank)
        except BaseException as error:
            traceback.print_exc()
            found = error
        (folder / f"result-{rank}").write_bytes(pickle.dumps(found))
        os._exit(0)
    for process in processes:
        os.waitpid(process, 0)
    return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(RANKS)]


def place_of(folder: Path, rank: int) -> Path:
    """The run's folder as a rank names it; in truth all would give it one name."""
    path = folder / MACHINES[rank] / "run"
    path.parent.mkdir(exist_ok=True)
    return path


def meet_in(run_dir: Path, rank: int) -> Meeting:
    if rank == 0:
        run_dir.mkdir(exist_ok=True)
        clear_heartbeats(run_dir)
    return meet(run_dir, replace(ALONE, world_size=RANKS, rank=rank), "load", 0)


def test_ranks_that_share_a_folder_write_files_there(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        met = meet_in(tmp_path / "run", rank)
        assert isinstance(met.heartbeat, Heartbeat)
        assert met.heartbeat.watched(RANKS) == [(rank + 1) % 3, (rank + 2) % 3]
        seen = [met.heartbeat.last(other) is not None for other in range(RANKS) if other != rank]
        dist.barrier()  # its end drops a rank's lock
        return met.run_dir, met.apart, seen

    assert by_ranks(tmp_path, act) == [(tmp_path / "run", {}, [True, True])] * RANKS


def test_machines_apart_save_resume_and_hear_of_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "BYTES_AT_ONCE", 1000)  # of files with 2.1 KB
    (tmp_path / "b").mkdir()
    stale = tmp_path / "b" / f".tmp-run-on-{os.uname().nodename}"
    stale.mkdir()
    (stale / "left by an earlier start").write_text("x")
    weight = torch.arange(1500.0).view(500, 3)

    def act(rank: int) -> Any:
        met = meet_in(place_of(tmp_path, rank), rank)
        assert isinstance(met.heartbeat, NetworkHeartbeat)
        ranks, folder = all_ranks(apart=met.apart), step_folder(met.run_dir, 3)
        before = sorted(os.listdir(met.run_dir))
        own = {"model": {"w": Piece(weight[rank * 200 :][:200].clone(), (500, 3), 600 * rank)}}
        for step in (2, 3):
            write_checkpoint(met.run_dir, step, own, {"step": step}, keep=1, ranks=ranks)
        left = [path.name for path in met.run_dir.rglob("*.safetensors")]
        with on_every_machine(folder, ranks):
            time.sleep(0.3 * (rank == 2))  # rank 1, which deletes their machine's copy, has read it long before
            checkpoint = examine(folder)
            assert isinstance(checkpoint, Checkpoint), checkpoint
            assert torch.equal(read_checkpoint(checkpoint)[0]["model"]["w"], weight)
        dist.barrier()
        kept = folder.exists()
        watched = met.heartbeat.watched(RANKS)
        heard = [met.heartbeat.last(other) is not None for other in watched]
        dist.barrier()
        met.leave()
        return met.run_dir, met.apart, before, left, kept, watched, heard

    found = by_ranks(tmp_path, act)
    pieces = [f"model-{rank:05d}.safetensors" for rank in range(RANKS)]
    assert found[0][:3] == (tmp_path / "a" / "run", {1: 1, 2: 1}, [".ranks"])
    assert sorted(found[0][3]) == pieces
    assert found[0][4:] == (True, [1, 2], [True, True])
    for rank in (1, 2):
        assert found[rank] == (stale, {1: 1, 2: 1}, [LOCK, ".ranks"], [], False, [0], [True])
    assert not stale.exists()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_disk_that_fills_up_ends_a_transfer_on_every_rank(
    victim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that fails is not the last: nobody waits for ever for the others."""
    monkeypatch.setattr(transfers, "BYTES_AT_ONCE", 1000)

    places = [Path("/dev/full")]

    def full(path: Path, mode: str, buffering: int) -> Any:
        return open(places.pop() if places else path, mode, buffering)

    def act(rank: int) -> Any:
        met = meet_in(place_of(tmp_path, rank), rank)
        ranks, folder = all_ranks(apart=met.apart), step_folder(met.run_dir, 1)
        own = {"model": {"w": Piece(torch.ones(600), (1800,), 600 * rank)}}
        if victim == 0:
            monkeypatch.setattr(transfers, "open", full, raising=False)
        try:
            write_checkpoint(met.run_dir, 1, own, {}, keep=1, ranks=ranks)
            monkeypatch.setattr(transfers, "open", full, raising=False)
            with on_every_machine(folder, ranks):
                raise AssertionError
        except EnvironmentMismatch as error:
            return str(error), met.run_dir

    found = by_ranks(tmp_path, act)
    whose, run_dir = found[victim]
    assert whose.startswith(f"{step_folder(run_dir, 1)}: could not be written: the disk is full"), whose
    for rank in {0, 1, 2} - {victim}:
        assert f"rank {victim} could not write: [Errno 28]" in found[rank][0]


@pytest.mark.parametrize("problem", ["read-only", "in use", "no way"])
def test_a_machine_that_cannot_take_part_is_named_on_every_rank(
    problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "CONNECT_SECONDS", 0.5)
    own = tmp_path / "b" / f".tmp-run-on-{os.uname().nodename}"
    own.parent.mkdir()

    def act(rank: int) -> Any:
        if problem == "no way" and rank == 2:
            monkeypatch.setenv("MASTER_ADDR", "127.0.0.77")
            monkeypatch.setattr(meeting, "connect", lambda *_: (_ for _ in ()).throw(ConnectionRefusedError(111, "no")))
        try:
            meet_in(place_of(tmp_path, rank), rank)
        except NoRendezvous as error:
            return str(error)

    words = "127.0.0.77:"
    with ExitStack() as stack:
        if problem == "read-only":
            own.write_text("a file")
            words = "own folder cannot be used: File exists"
        if problem == "in use":
            monkeypatch.setattr(meeting, "lock", lambda path, wait_seconds: lock(path, wait_seconds=0.1))
            own.mkdir()
            held = lock(own / LOCK, wait_seconds=0.0)
            stack.callback(os.close, held)
            words = f"own folder cannot be used: process {os.getpid()}"
        found = by_ranks(tmp_path, act)
    assert len(set(found)) == 1
    assert words in found[0]
    host = os.uname().nodename
    rank = 2 if problem == "no way" else 1
    assert f"rank {rank} on {host} says" in found[0]
