"""Beats: the lock tells death, the content a freeze; and what a watch makes of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from finetune.errors import RankLost
from finetune.launch.launcher import print_after_launcher
from finetune.run_folder import watchdog
from finetune.run_folder.folder import claim_run_folder, read_state
from finetune.run_folder.heartbeat import (
    Beat,
    Heartbeat,
    State,
    beat_file,
    clear_beats,
    holds_lock,
    process_is_gone,
    read_beat,
)
from finetune.run_folder.watchdog import Progress, Watchdog
from tests.support.launching import ALONE

REPOSITORY = Path(__file__).resolve().parents[2]
TOKEN = 11
OTHER = """
import sys, time
from pathlib import Path
from finetune.run_folder.heartbeat import Heartbeat
heart = Heartbeat(Path(sys.argv[1]), 1, 11)
heart.beat(sys.argv[2], "training", 7)
print("beating", flush=True)
while True:
    time.sleep(0.05)
    if sys.argv[2] == "running":
        heart.beat("running", "training", 7)
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    claim_run_folder(tmp_path, resume="auto", identity={}, command="again")
    clear_beats(tmp_path)
    return tmp_path


@contextmanager
def other_rank(run_dir: Path, state: State = "running") -> Iterator[subprocess.Popen[str]]:
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


@contextmanager
def watch(run_dir: Path, seconds: int = 8) -> Iterator[Watchdog]:
    """Rank 0 of two; its thread, which would end the process, is at rest."""
    own = Watchdog(
        run_dir, replace(ALONE, world_size=2), Progress(), Heartbeat(run_dir, 0, TOKEN), TOKEN, seconds, "again"
    )
    own._stop.set()
    own._thread.join()
    yield own
    own.close(ended=True)


def another_beat(run_dir: Path) -> None:
    """When it returns the other rank has beaten once more."""
    before = read_beat(run_dir, 1, TOKEN)
    while read_beat(run_dir, 1, TOKEN) in (before, None):
        time.sleep(0.01)


def stop(process: subprocess.Popen[str]) -> None:
    """When it returns the process no longer beats."""
    process.send_signal(signal.SIGSTOP)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)


def test_a_beat_is_read_back_and_an_older_start_is_not(run_dir: Path) -> None:
    heart = Heartbeat(run_dir, 3, TOKEN)
    assert read_beat(run_dir, 3, TOKEN) is None
    heart.beat("running", "load", 0)
    heart.beat("running", "training", 12, sync=True)
    beat = read_beat(run_dir, 3, TOKEN)
    assert beat is not None
    assert (beat.rank, beat.state, beat.phase, beat.step, beat.count) == (3, "running", "training", 12, 2)
    assert beat.process == os.getpid()
    assert read_beat(run_dir, 3, TOKEN + 1) is None
    beat_file(run_dir, 3).write_bytes(beat_file(run_dir, 3).read_bytes()[:40])
    assert read_beat(run_dir, 3, TOKEN) is None, "torn"
    clear_beats(run_dir)
    assert read_beat(run_dir, 3, TOKEN) is None


def test_the_lock_ends_with_the_process(run_dir: Path) -> None:
    with other_rank(run_dir) as process:
        assert holds_lock(run_dir, 1)
        process.send_signal(signal.SIGSTOP)
        assert holds_lock(run_dir, 1)
        beat = read_beat(run_dir, 1, TOKEN)
        process.kill()
        process.wait()
        assert not holds_lock(run_dir, 1)
    assert isinstance(beat, Beat)
    assert process_is_gone(beat)
    assert not process_is_gone(replace(beat, machine="another"))
    assert not holds_lock(run_dir, 5), "never there"


def test_a_rank_that_beats_is_not_lost_and_a_dead_one_is(run_dir: Path) -> None:
    with other_rank(run_dir) as process, watch(run_dir) as own:
        assert own._look_at(1, 0.0) is None
        another_beat(run_dir)
        assert own._look_at(1, 1000.0) is None, "its count has grown"
        stop(process)
        assert own._look_at(1, 1001.0) is None
        assert own._look_at(1, 1006.0) is None
        frozen = own._look_at(1, 1008.0)
        assert frozen is not None
        assert (frozen.what, frozen.beat.rank, frozen.beat.step) == ("froze", 1, 7)
        process.kill()
        process.wait()
        died = own._look_at(1, 1009.0)
        assert died is not None
        assert (died.what, died.beat.process) == ("died", process.pid)


@pytest.mark.parametrize(("state", "what"), [("ended", None), ("failed", "failed"), ("left", "failed")])
def test_the_last_word_counts(run_dir: Path, state: State, what: str | None) -> None:
    with other_rank(run_dir, state) as process, watch(run_dir) as own:
        process.kill()
        process.wait()
        lost = own._look_at(1, 0.0)
        assert (lost and lost.what) == what


def test_where_locks_do_not_travel_a_living_rank_is_not_lost(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "holds_lock", lambda run_dir, rank: False)
    with other_rank(run_dir), watch(run_dir) as own:
        assert own._look_at(1, 0.0) is None


def test_another_machine_is_believed_dead_by_lock_and_silence(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "process_is_gone", lambda beat: False)
    with other_rank(run_dir) as process, watch(run_dir) as own:
        process.kill()
        process.wait()
        assert own._look_at(1, 0.0) is None
        assert own._look_at(1, 2.0) is None
        for lost in (own._look_at(1, 4.0), own._look_at(1, 0.0, broken=True)):
            assert lost is not None
            assert lost.what == "died"


def test_who_was_stopped_itself_starts_counting_anew(run_dir: Path) -> None:
    with other_rank(run_dir) as process, watch(run_dir, seconds=80) as own:
        stop(process)
        assert own._look([1]) is None
        own._looked -= 100
        own._seen[1] = (own._seen[1][0], own._seen[1][1] - 100)
        assert own._look([1]) is None
        own._seen[1] = (own._seen[1][0], own._seen[1][1] - 100)
        assert own._look([1]) is not None


def test_the_record_names_the_first_cause(run_dir: Path) -> None:
    with other_rank(run_dir) as process, watch(run_dir) as own:
        process.kill()
        process.wait()
        lost = own._look_at(1, 0.0)
        assert lost is not None
        line = own._record(lost)
        assert line.startswith(f"rank 1 died on {os.uname().nodename} (process {process.pid})")
        assert line.endswith("it was at step 7, training")
        state = read_state(run_dir)
        assert state is not None
        assert (state["state"], state["rank"], state["phase"], state["step"]) == ("failed", 1, "training", 7)
        other = replace(lost, beat=replace(lost.beat, rank=0))
        assert own._record(other) == line, "what other ranks meet then is its consequence"


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
        own = Watchdog(
            run_dir, replace(ALONE, world_size=2), Progress(), Heartbeat(run_dir, 0, TOKEN), TOKEN, 8, "again"
        )
        monkeypatch.setattr(os, "_exit", lambda code: (ends.append(code), own._stop.set()))
        process.kill()
        process.wait()
        own._thread.join(60)
    assert ends == [RankLost.exit_code]
    assert capfd.readouterr().err == last_line(process)
    state, beat = read_state(run_dir), read_beat(run_dir, 0, TOKEN)
    assert state is not None
    assert (state["state"], state["rank"]) == ("failed", 1)
    assert beat is not None
    assert beat.state == "left", "so that nobody takes this rank for the first cause"


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
        another_beat(run_dir)
        stop(process)
        own._look_at(1, 0.0)
        lost = own._look_at(1, 7.0)
        assert lost is not None
        with pytest.raises(Ended):
            own._end(lost)
        assert process.wait(60) == -signal.SIGKILL
    assert "rank 1 froze on" in capfd.readouterr().err
    assert ends == [RankLost.exit_code]


def test_an_error_of_our_own_is_left_to_us(run_dir: Path) -> None:
    with other_rank(run_dir), watch(run_dir) as own:
        began = time.monotonic()
        own.explain(ValueError("timed out"))
        own.explain(RuntimeError("CUDA out of memory"))
        assert time.monotonic() - began < watchdog._GRACE_SECONDS


def test_a_wait_without_a_loss_says_where_everybody_is(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_GRACE_SECONDS", 0.2)
    error = RuntimeError("[gloo] Timed out waiting 1800000ms for recv operation to complete")
    with other_rank(run_dir), watch(run_dir) as own:
        own.explain(error)
    assert error.__notes__ == ["rank 0 at step 0, load; alive: rank 1 at step 7, training"]


def test_said_again_when_the_launcher_is_gone(tmp_path: Path) -> None:
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
    done = subprocess.run([sys.executable, "-c", launcher], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stderr.split("\n") == ["", "rank 1 died", "forty lines of report", "", "rank 1 died", ""]


def test_without_a_launcher_it_is_said_once(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    print_after_launcher("rank 1 died")
    assert capfd.readouterr().err == "\nrank 1 died\n"


def test_beats_are_as_long_as_each_other(run_dir: Path) -> None:
    heart = Heartbeat(run_dir, 0, TOKEN)
    heart.beat("running", "looking before", 10**9)
    heart.beat("ended", "x", 0)
    assert json.loads(beat_file(run_dir, 0).read_text())["state"] == "ended"
