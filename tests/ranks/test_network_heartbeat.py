"""Heartbeats over the network: a closed connection shows death, silence a freeze, and the first failure goes to all."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from finetune.errors import RankLost
from finetune.ranks import network_heartbeat
from finetune.ranks.heartbeat import Heartbeat, Meeting, clear_heartbeats, last_heartbeat
from finetune.ranks.network_heartbeat import NetworkHeartbeat, accept_all, connect, listen
from finetune.run_folder.facts import read_state
from finetune.run_folder.folder import RunIdentity, claim_run_folder, lock_run_folder
from finetune.training import watchdog
from finetune.training.watchdog import Progress, Watchdog
from tests.support.runs.launching import ALONE

TOKEN, RANKS = 11, 3
FAILED = {"rank": 2, "step": 7, "phase": "training", "error": "ValueError: no such row"}


@contextmanager
def connections(others: Callable[[int], None] = lambda port: None) -> Iterator[list[dict[int, socket.socket]]]:
    """Each rank's, as `meet` makes them. `others` connects before the ranks do."""
    listener = listen()
    port = listener.getsockname()[1]
    others(port)
    found: dict[int, socket.socket] = {}
    accepting = threading.Thread(target=lambda: found.update(accept_all(listener, RANKS, TOKEN, 10.0)))
    accepting.start()
    clients = [{0: connect("127.0.0.1", port, rank, TOKEN, 10.0)} for rank in range(1, RANKS)]
    accepting.join()
    try:
        yield [found, *clients]
    finally:
        for each in (found, *clients):
            for connection in each.values():
                connection.close()


@contextmanager
def three_ranks() -> Iterator[list[NetworkHeartbeat]]:
    """They have sent one heartbeat each."""
    with connections() as each:
        ranks = [NetworkHeartbeat(rank, TOKEN, of_rank, None) for rank, of_rank in enumerate(each)]
        for rank in ranks:
            rank.write("running", "training", 7, sync=True)
        yield ranks


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_rank_0_hears_all_and_all_hear_rank_0() -> None:
    with three_ranks() as (first, second, third):
        assert (first.watched(RANKS), second.watched(RANKS), third.watched(RANKS)) == ([1, 2], [0], [0])
        until(lambda: second.last(0) is not None and first.last(1) is not None and first.last(2) is not None)
        last = first.last(2)
        assert last is not None
        assert (last.rank, last.step, last.phase, last.process) == (2, 7, "training", os.getpid())
        assert second.last(2) is None, "there is no connection between them"
        third.write("running", "training", 8)
        third.write("running", "export", 9, sync=True)
        until(lambda: first.last(2) != last)
        last = first.last(2)
        assert last is not None
        assert (last.step, last.count) == (9, 3), "a step that ends soon after a heartbeat sends none"


@pytest.mark.parametrize("cut", [1, 50, -1])
def test_a_heartbeat_that_comes_in_two_parts_is_heard(cut: int) -> None:
    with three_ranks() as (first, _, third):
        until(lambda: first.last(2) is not None)
        line = json.dumps({"heartbeat": asdict(replace(third._own, step=8)), "failure": None}).encode() + b"\n"
        third._connections[0].send(line[:cut])
        time.sleep(0.05)
        last = first.last(2)
        assert last is not None
        assert last.step == 7
        third._connections[0].send(line[cut:])
        time.sleep(0.05)
        until(lambda: (last := first.last(2)) is not None and last.step == 8)


def test_a_step_is_sent_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_heartbeat, "SECONDS_BETWEEN_STEPS", 0.0)
    with three_ranks() as (first, _, third):
        third.write("running", "training", 8)
        until(lambda: (last := first.last(2)) is not None and last.step == 8)


def test_a_connection_ends_with_its_process_after_its_last_words() -> None:
    with three_ranks() as (first, second, third):
        assert first.holds_lock(2)
        third.write("ended", "training", 9, sync=True)
        third._connections[0].close()
        until(lambda: not first.holds_lock(2))
        last = first.last(2)
        assert last is not None
        assert (last.state, last.step) == ("ended", 9)
        assert first.holds_lock(1)
        assert second.holds_lock(0)
        assert not second.holds_lock(2)


def test_the_first_failure_goes_through_rank_0_to_all() -> None:
    with three_ranks() as (first, second, third):
        third.tell(FAILED)
        third.tell(FAILED | {"error": "RankLost: its consequence"})
        until(lambda: first.last(2) is not None and first.failure is not None)
        until(lambda: second.last(0) is not None and second.failure is not None)
        assert (first.failure, second.failure, third.failure) == (FAILED, FAILED, FAILED)
        second.tell(FAILED | {"rank": 1})
        assert second.failure == FAILED
        last = second.last(0)
        assert last is not None
        assert last.state == "left", "rank 0 is about to end"
        first.write("running", "training", 8, sync=True)
        until(lambda: (last := second.last(0)) is not None and last.step == 8)
        last = second.last(0)
        assert last is not None
        assert last.state == "left", "it does not live again"


@pytest.mark.parametrize(
    "line",
    [
        b"\x00\xff\n",
        b"[]\n",
        b'{"heartbeat": {}, "failure": null}\n',
        b"7" * 3 * network_heartbeat.MESSAGE_BYTES,
        b'{"heartbeat": {"rank": 1, "token": 12, "host": "", "machine": "", "process": 1, "state": "failed", '
        b'"phase": "", "step": 1, "count": 1}, "failure": {"rank": 1, "step": 1, "phase": "", "error": ""}}\n',
    ],
)
def test_a_line_that_is_no_heartbeat_of_this_start_is_passed_over(line: bytes) -> None:
    with three_ranks() as (first, second, _):
        second._connections[0].setblocking(True)
        writing = threading.Thread(target=second._connections[0].sendall, args=(line,))
        writing.start()
        until(lambda: first.last(1) is not None and not writing.is_alive())
        assert first.failure is None
        assert len(first._unread[1]) <= network_heartbeat.MESSAGE_BYTES
        writing.join()
        second._connections[0].setblocking(False)
        second.write("running", "training", 10, sync=True)
        second.write("running", "training", 11, sync=True)
        until(lambda: (last := first.last(1)) is not None and last.step == 11)


def test_strangers_are_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scanner that says nothing, another run's rank, and a rank twice."""
    monkeypatch.setattr(network_heartbeat, "HELLO_SECONDS", 0.2)
    strangers: list[socket.socket] = []

    def others(port: int) -> None:
        for hello in (b"", b"GET / HTTP/1.1\r\n\r\n" * 10, b"12 1\n", b"11 3\n", b"11 0\n", b"11 x\n"):
            strangers.append(socket.create_connection(("127.0.0.1", port)))
            strangers[-1].sendall(hello)

    with connections(others) as (found, *_):
        assert sorted(found) == [1, 2]
        for stranger in strangers:
            stranger.settimeout(10)
            with suppress(ConnectionResetError):  # it had more to say
                assert stranger.recv(10) == b""
            stranger.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    claim_run_folder(lock_run_folder(tmp_path), resume="auto", identity=RunIdentity({}), command="again")
    clear_heartbeats(tmp_path)
    return tmp_path


def watch(rank: int, heard: NetworkHeartbeat, run_dir: Path) -> Watchdog:
    launch = replace(ALONE, world_size=RANKS, rank=rank)
    return Watchdog(Meeting(run_dir, heard, {1: 1, 2: 2}), launch, Progress("training", 7), 8, "again")


def test_a_dead_a_frozen_and_a_failed_rank(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`process_is_gone` cannot help: they are on other machines."""
    monkeypatch.setattr(watchdog, "process_is_gone", lambda record: False)
    with three_ranks() as (first, second, third):
        own = watch(0, first, run_dir)
        until(lambda: first.last(1) is not None and first.last(2) is not None)
        assert [own.examine(rank, 0.0) for rank in (1, 2)] == [None, None]
        assert own.examine(1, 5.9) is None
        froze = own.examine(1, 6.1)
        assert froze is not None
        assert (froze.how, froze.heartbeat.rank) == ("froze", 1)
        third._connections[0].close()
        until(lambda: not first.holds_lock(2))
        assert own.examine(2, 2.9) is None
        for died in (own.examine(2, 3.1), own.examine(2, 0.1, broken=True)):
            assert died is not None
            assert (died.how, died.heartbeat.rank) == ("died", 2)
        second.write("failed", "training", 8, sync=True)
        second.tell(FAILED | {"rank": 1})
        until(lambda: first.failure is not None or first.last(1) is None)
        failed = own.examine(1, 6.1)
        assert failed is not None
        assert failed.how == "failed"
        assert own.record(failed) == "rank 1 failed: ValueError: no such row; it was at step 7, training"
        state = read_state(run_dir)
        assert state is not None
        assert (state["state"], state["rank"], state["error"]) == ("failed", 1, FAILED["error"])


def test_a_rank_apart_names_the_rank_that_rank_0_has_lost(run_dir: Path, tmp_path: Path) -> None:
    with three_ranks() as (first, second, _):
        until(lambda: first.last(2) is not None)
        last = first.last(2)
        assert last is not None
        line = watch(0, first, run_dir).record(watchdog.LostRank(last, "froze"))
        own = tmp_path / "own"
        own.mkdir()
        elsewhere = watch(1, second, own)
        until(lambda: elsewhere.examine(0, 0.0) is not None)
        lost = elsewhere.examine(0, 0.0)
        assert lost is not None
        assert elsewhere.record(lost) == line
        assert line.startswith(f"rank 2 froze on {os.uname().nodename} ")
        assert os.listdir(own) == [], "no run is there"


def test_a_rank_that_sees_the_folder_writes_there_too(run_dir: Path) -> None:
    """For `finetune status`."""
    with connections() as (found, *_):
        own = NetworkHeartbeat(0, TOKEN, found, Heartbeat(run_dir, 0, TOKEN))
        own.write("running", "training", 3)
        last = last_heartbeat(run_dir, 0, TOKEN)
        assert last is not None
        assert last.step == 3


def test_the_end_of_this_process_takes_its_machine_s_own_folder_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    own = tmp_path / "own"
    own.mkdir()
    with three_ranks() as (_, second, _):
        descriptor = os.open(own / "lock", os.O_CREAT | os.O_RDWR)
        launch = replace(ALONE, world_size=RANKS, rank=1)
        watching = Watchdog(Meeting(own, second, {1: 1}, descriptor), launch, Progress(), 8, "again")
        until(lambda: second.last(0) is not None)
        last = second.last(0)
        assert last is not None
        watching.end_process(watchdog.LostRank(replace(last, machine="another"), "died"))
    assert ended == [RankLost.exit_code]
    assert not own.exists()
