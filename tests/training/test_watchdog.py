"""Heartbeats: the lock shows death, the content a freeze; and what the watchdog concludes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from finetune.errors import RankLost
from finetune.launch import launcher
from finetune.launch.launcher import print_after_launcher
from finetune.ranks import heartbeat
from finetune.ranks.heartbeat import (
    Heartbeat,
    HeartbeatRecord,
    Meeting,
    RankState,
    clear_heartbeats,
    heartbeat_file,
    holds_lock,
    last_heartbeat,
    process_is_gone,
)
from finetune.run_folder.facts import read_state
from finetune.run_folder.folder import RunIdentity, claim_run_folder, lock_run_folder
from finetune.training import watchdog
from finetune.training.watchdog import Progress, Watchdog
from tests.support.runs.launching import ALONE

REPOSITORY = Path(__file__).resolve().parents[2]
TOKEN = 11
OTHER = """
import sys, time
from pathlib import Path
from finetune.ranks.heartbeat import Heartbeat
heartbeat = Heartbeat(Path(sys.argv[1]), 1, 11)
heartbeat.write(sys.argv[2], "training", 7)
print("beating", flush=True)
while True:
    time.sleep(0.05)
    if sys.argv[2] == "running":
        heartbeat.write("running", "training", 7)
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    claim_run_folder(lock_run_folder(tmp_path), resume="auto", identity=RunIdentity({}), command="again")
    clear_heartbeats(tmp_path)
    return tmp_path


@contextmanager
def other_rank(run_dir: Path, state: RankState = "running") -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(run_dir), state], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "beating\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def watchdog_of(meeting: Meeting, seconds: int) -> Watchdog:
    return Watchdog(meeting, replace(ALONE, world_size=2), Progress(), seconds, "again")


@contextmanager
def watch(run_dir: Path, seconds: int = 8) -> Iterator[Watchdog]:
    """Rank 0 of two; its thread, which would end the process, is not started."""
    own = watchdog_of(Meeting(run_dir, Heartbeat(run_dir, 0, TOKEN)), seconds)
    yield own
    own.close("ended")


def another_heartbeat(run_dir: Path) -> None:
    """When it returns the other rank has written one more."""
    before = last_heartbeat(run_dir, 1, TOKEN)
    while last_heartbeat(run_dir, 1, TOKEN) in (before, None):
        time.sleep(0.01)


def stop(process: subprocess.Popen[str]) -> None:
    """When it returns the process no longer writes."""
    process.send_signal(signal.SIGSTOP)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)


def test_a_heartbeat_is_read_back_and_an_older_start_s_is_not(run_dir: Path) -> None:
    heartbeat = Heartbeat(run_dir, 3, TOKEN)
    assert last_heartbeat(run_dir, 3, TOKEN) is None
    heartbeat.write("running", "load", 0)
    heartbeat.write("running", "training", 12, sync=True)
    last = last_heartbeat(run_dir, 3, TOKEN)
    assert last is not None
    assert (last.rank, last.state, last.phase, last.step, last.count) == (3, "running", "training", 12, 2)
    assert last.process == os.getpid()
    assert last_heartbeat(run_dir, 3, TOKEN + 1) is None
    heartbeat_file(run_dir, 3).write_bytes(heartbeat_file(run_dir, 3).read_bytes()[:40])
    assert last_heartbeat(run_dir, 3, TOKEN) is None, "torn"
    clear_heartbeats(run_dir)
    assert last_heartbeat(run_dir, 3, TOKEN) is None


def test_the_lock_ends_with_the_process(run_dir: Path) -> None:
    with other_rank(run_dir) as process:
        assert holds_lock(run_dir, 1)
        process.send_signal(signal.SIGSTOP)
        assert holds_lock(run_dir, 1)
        last = last_heartbeat(run_dir, 1, TOKEN)
        process.kill()
        process.wait()
        assert not holds_lock(run_dir, 1)
    assert isinstance(last, HeartbeatRecord)
    assert process_is_gone(last)
    assert not process_is_gone(replace(last, machine="another"))
    assert not holds_lock(run_dir, 5), "never there"


def test_a_rank_that_writes_is_not_lost_and_a_dead_one_is(run_dir: Path) -> None:
    with other_rank(run_dir) as process, watch(run_dir) as own:
        assert own.examine(1, 0.0) is None
        another_heartbeat(run_dir)
        assert own.examine(1, 1000.0) is None, "its count has grown"
        stop(process)
        assert own.examine(1, 1001.0) is None
        assert own.examine(1, 1006.0) is None
        frozen = own.examine(1, 1008.0)
        assert frozen is not None
        assert (frozen.how, frozen.heartbeat.rank, frozen.heartbeat.step) == ("froze", 1, 7)
        process.kill()
        process.wait()
        died = own.examine(1, 1009.0)
        assert died is not None
        assert (died.how, died.heartbeat.process) == ("died", process.pid)


@pytest.mark.parametrize(("state", "what"), [("ended", None), ("failed", "failed"), ("left", "failed")])
def test_the_final_heartbeat_counts(run_dir: Path, state: RankState, what: str | None) -> None:
    with other_rank(run_dir, state) as process, watch(run_dir) as own:
        process.kill()
        process.wait()
        lost = own.examine(1, 0.0)
        assert (lost and lost.how) == what


def test_where_locks_do_not_travel_a_living_rank_is_not_lost(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "holds_lock", lambda run_dir, rank: False)
    with other_rank(run_dir), watch(run_dir) as own:
        assert own.examine(1, 0.0) is None


def test_another_machine_is_believed_dead_by_lock_and_silence(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "process_is_gone", lambda record: False)
    with other_rank(run_dir) as process, watch(run_dir) as own:
        process.kill()
        process.wait()
        assert own.examine(1, 0.0) is None
        assert own.examine(1, 2.0) is None
        for lost in (own.examine(1, 4.0), own.examine(1, 0.0, broken=True)):
            assert lost is not None
            assert lost.how == "died"


def test_who_was_stopped_itself_starts_counting_anew(run_dir: Path) -> None:
    with other_rank(run_dir) as process, watch(run_dir, seconds=80) as own:
        stop(process)
        began = time.monotonic()
        assert own.first_lost([1], began) is None
        assert own.first_lost([1], began + 100) is None, "this process was stopped meanwhile"
        assert own.first_lost([1], began + 130) is None
        assert own.first_lost([1], began + 160) is None
        assert own.first_lost([1], began + 175) is not None


def test_the_record_names_the_first_cause(run_dir: Path) -> None:
    with other_rank(run_dir) as process, watch(run_dir) as own:
        process.kill()
        process.wait()
        lost = own.examine(1, 0.0)
        assert lost is not None
        line = own.record(lost)
        assert line.startswith(f"rank 1 died on {os.uname().nodename} (process {process.pid})")
        assert line.endswith("it was at step 7, training")
        state = read_state(run_dir)
        assert state is not None
        assert (state["state"], state["rank"], state["phase"], state["step"]) == ("failed", 1, "training", 7)
        other = replace(lost, heartbeat=replace(lost.heartbeat, rank=0))
        assert own.record(other) == line, "what other ranks meet then is its consequence"


class Ended(BaseException):
    """In place of this process's end."""


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The codes with which this process would have ended, under no launcher."""
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        raise Ended

    monkeypatch.setattr(os, "_exit", end)
    for name in ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    return codes


def last_line(process: subprocess.Popen[str]) -> str:
    return (
        f"\nrank 1 died on {os.uname().nodename} (process {process.pid}): killed, perhaps for memory (see dmesg), or "
        "crashed; it was at step 7, training; continue with: again\n"
    )


def test_the_thread_ends_this_process_when_another_rank_dies(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, ends: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    with other_rank(run_dir) as process:
        own = watchdog_of(Meeting(run_dir, Heartbeat(run_dir, 0, TOKEN)), 8)
        ended = threading.Event()

        def end(code: int) -> None:
            ends.append(code)
            ended.set()

        monkeypatch.setattr(os, "_exit", end)
        own.start()
        process.kill()
        process.wait()
        assert ended.wait(60)
    assert ends == [RankLost.exit_code]
    assert capfd.readouterr().err == last_line(process)
    state, last = read_state(run_dir), last_heartbeat(run_dir, 0, TOKEN)
    assert state is not None
    assert (state["state"], state["rank"]) == ("failed", 1)
    assert last is not None
    assert last.state == "left", "so that this rank is not taken for the first cause"


@pytest.mark.parametrize("words", ["[gloo] Connection closed by peer", "NCCL error: remote process exited"])
def test_a_broken_collective_ends_it_too_and_one_rank_speaks(
    run_dir: Path, ends: list[int], capfd: pytest.CaptureFixture[str], words: str
) -> None:
    with other_rank(run_dir) as process, watch(run_dir) as own:
        process.kill()
        process.wait()
        for _ in range(2):  # as if by two ranks of this machine
            with pytest.raises(Ended):
                own.explain(RuntimeError(words))
    assert ends == [RankLost.exit_code] * 2
    assert capfd.readouterr().err == last_line(process)


def test_a_frozen_rank_is_killed(run_dir: Path, ends: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    """Its launcher would wait for it."""
    with other_rank(run_dir) as process, watch(run_dir) as own:
        another_heartbeat(run_dir)
        stop(process)
        own.examine(1, 0.0)
        lost = own.examine(1, 7.0)
        assert lost is not None
        with pytest.raises(Ended):
            own.end_process(lost)
        assert process.wait(60) == -signal.SIGKILL
    assert "rank 1 froze on" in capfd.readouterr().err
    assert ends == [RankLost.exit_code]


def test_an_error_of_our_own_is_left_to_us(run_dir: Path) -> None:
    with other_rank(run_dir), watch(run_dir) as own:
        began = time.monotonic()
        own.explain(ValueError("timed out"))
        own.explain(RuntimeError("CUDA out of memory"))
        assert time.monotonic() - began < watchdog.GRACE_SECONDS


def test_a_wait_without_a_loss_says_where_everybody_is(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 0.2)
    error = RuntimeError("[gloo] Timed out waiting 1800000ms for recv operation to complete")
    with other_rank(run_dir), watch(run_dir) as own:
        own.explain(error)
    assert error.__notes__ == ["rank 0 at step 0, load; alive: rank 1 at step 7, training"]


def test_printed_again_when_the_launcher_is_gone(tmp_path: Path) -> None:
    """The launcher's own report comes between."""
    rank = "import sys; from finetune.launch.launcher import print_after_launcher; "
    rank += "print_after_launcher('rank 1 died'); sys.exit(1)"
    launcher = f"""
import os, subprocess, sys, time
os.environ["TORCHELASTIC_RUN_ID"] = "x"
subprocess.run([sys.executable, "-c", {rank!r}])
time.sleep(0.5)
print("forty lines of report", file=sys.stderr)
"""
    process = subprocess.run([sys.executable, "-c", launcher], cwd=REPOSITORY, capture_output=True, text=True)
    assert process.stderr.split("\n") == ["", "rank 1 died", "forty lines of report", "", "rank 1 died", ""]


@pytest.mark.parametrize("name", [None, "FINETUNE_RANKS"])
def test_without_a_launcher_that_reports_it_is_printed_once(
    name: str | None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(other, raising=False)
    if name is not None:
        monkeypatch.setenv(name, "2")
    monkeypatch.setattr(launcher.subprocess, "Popen", lambda *_, **__: pytest.fail("somebody waits for the launcher"))
    print_after_launcher("rank 1 died")
    assert capfd.readouterr().err == "\nrank 1 died\n"


def test_heartbeats_are_as_long_as_each_other(run_dir: Path) -> None:
    heartbeat = Heartbeat(run_dir, 0, TOKEN)
    heartbeat.write("running", "looking before", 10**9)
    heartbeat.write("ended", "x", 0)
    assert json.loads(heartbeat_file(run_dir, 0).read_text())["state"] == "ended"
