"""The ranks watch each other: when one dies, fails or freezes, the others end the job and the last line names it.

Those who wait for a dead rank notice it late or never: gloo's error names no rank, NCCL waits for its timeout, and
torchrun reports only on the machine where it happened. So a thread in every rank examines the heartbeats of its
neighbours (heartbeat.py), and a rank whose collective broke examines those of all ranks.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator

from finetune.errors import FinetuneError, NoRendezvous, RankLost
from finetune.launch.launcher import Launch, continue_command, print_after_launcher
from finetune.recipe.schema import Recipe
from finetune.run_folder.folder import mark_failed, read_state
from finetune.run_folder.heartbeat import (
    Heartbeat,
    HeartbeatRecord,
    RankState,
    heartbeat_file,
    holds_lock,
    last_heartbeat,
    process_is_gone,
    this_machine,
)

NEIGHBOURS = 8  # ranks that each rank watches: the next ones in a ring, so that thousands do not read each other
GRACE_SECONDS = 5.0  # for our own main thread, which may be failing for the same reason
SHARED_SECONDS = 30.0  # until another machine sees a new file
# What gloo and NCCL say when a rank is gone; gloo's errors are plain RuntimeErrors.
_BROKEN = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out|peer", re.IGNORECASE)


@dataclass
class Progress:
    """Where this rank is: for its heartbeat, and for the record of a failure."""

    phase: str = "load"
    step: int = 0
    write_heartbeat: Callable[[], None] = field(default=lambda: None)

    def reached(self, step: int) -> None:
        self.step = step
        self.write_heartbeat()


@dataclass(frozen=True)
class LostRank:
    """A rank without which the others cannot continue."""

    heartbeat: HeartbeatRecord  # its last
    how: Literal["died", "froze", "failed"]


@contextmanager
def watchdog(recipe: Recipe, accelerator: Accelerator, launch: Launch, progress: Progress) -> Iterator[None]:
    """While the block runs, this rank writes heartbeats and watches other ranks; its failure goes to run_state.json.

    When another rank is lost the process ends here, with RankLost's exit code: a collective that waits for that rank
    cannot be left in any other way.

    Args:
        recipe: Its folder is claimed by rank 0, the heartbeats there cleared; a rank without a heartbeat for its
            `timeout_seconds` is taken for frozen.
        progress: Kept up to date by the training.

    Raises:
        NoRendezvous: the ranks do not share the run's folder.
    """
    run_dir, watch = Path(recipe.run_dir), None
    try:
        if launch.world_size > 1:
            heartbeat, token = _join(run_dir, accelerator, launch, progress)
            command = continue_command(launch, resume=recipe.training.resume)
            watch = Watchdog(run_dir, launch, progress, heartbeat, token, recipe.timeout_seconds, command)
            watch.start()
        yield
    except BaseException as error:
        if watch is not None:
            watch.explain(error)
            watch.close("failed")
        mark_failed(run_dir, error, phase=progress.phase, rank=launch.rank, step=progress.step)
        raise
    if watch is not None:
        watch.close("ended")


def _join(run_dir: Path, accelerator: Accelerator, launch: Launch, progress: Progress) -> tuple[Heartbeat, int]:
    """Write this rank's first heartbeat once rank 0's is visible; afterwards every rank finds those of all."""

    def over_ranks(number: int) -> int:
        return int(accelerator.reduce(torch.tensor(number, device=accelerator.device), reduction="sum"))

    def first_heartbeat(token: int) -> Heartbeat:
        heartbeat = Heartbeat(run_dir, launch.rank, token)
        heartbeat.write("running", progress.phase, progress.step, sync=True)
        return heartbeat

    drawn = random.SystemRandom().randrange(1, 2**31) if launch.is_main else 0
    heartbeat = first_heartbeat(drawn) if launch.is_main else None
    token = over_ranks(drawn)
    if heartbeat is None and _rank_0_is_visible(run_dir, token):
        heartbeat = first_heartbeat(token)
    missing = launch.world_size - over_ranks(int(heartbeat is not None))
    if heartbeat is None or missing:
        raise NoRendezvous(
            f"output_dir: {run_dir.absolute()} is not shared: {missing} of {launch.world_size} ranks do not find there "
            "what rank 0 writes; put output_dir on storage that every machine mounts under this name"
        )
    return heartbeat, token


def _rank_0_is_visible(run_dir: Path, token: int) -> bool:
    deadline = time.monotonic() + SHARED_SECONDS
    while last_heartbeat(run_dir, 0, token) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


class Watchdog:
    """Writes this rank's heartbeats and examines those of others; a thread does both from `start` to `close`."""

    def __init__(
        self,
        run_dir: Path,
        launch: Launch,
        progress: Progress,
        heartbeat: Heartbeat,
        token: int,
        timeout_seconds: int,
        command: str,
    ) -> None:
        self._run_dir, self._launch, self._progress, self._command = run_dir, launch, progress, command
        self._heartbeat, self._token = heartbeat, token
        self._timeout_seconds = timeout_seconds
        self._interval = min(5.0, timeout_seconds / 8)  # between two heartbeats
        self._silence = timeout_seconds - 2 * self._interval  # so that the run has ended after the timeout
        others = [(launch.rank + step) % launch.world_size for step in range(1, launch.world_size)]
        self._others, self._neighbours = others, others[:NEIGHBOURS]
        # Where locks do not reach other machines, every rank there would seem dead.
        self._locked = {rank for rank in others if holds_lock(run_dir, rank)}
        self._seen: dict[int, tuple[HeartbeatRecord, float]] = {}  # latest heartbeat of a rank, and since when
        self._last_examined = time.monotonic()
        self._closing, self._ends_once = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._progress.write_heartbeat = self._write_heartbeat
        self._thread.start()

    def close(self, state: RankState) -> None:
        """Write the final heartbeat, `ended` or `failed`; a rank that is gone without one is taken for dead."""
        self._closing.set()
        self._progress.write_heartbeat = lambda: None
        if self._thread.is_alive():
            self._thread.join(2 * self._interval)
        with suppress(OSError):
            self._heartbeat.write(state, self._progress.phase, self._progress.step, sync=True)

    def explain(self, error: BaseException) -> None:
        """Ends the process when the error came from a lost rank; else notes at the error where the others are."""
        if not isinstance(error, RuntimeError) or not _BROKEN.search(str(error)):
            return
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            lost = self.first_lost(self._others, time.monotonic(), broken=True)
            if lost is not None:
                self.end_process(lost)
            time.sleep(0.1)
        records = [last_heartbeat(self._run_dir, rank, self._token) for rank in self._others[:16]]
        places = ", ".join(f"rank {record.rank} at step {record.step}, {record.phase}" for record in records if record)
        error.add_note(
            f"rank {self._launch.rank} at step {self._progress.step}, {self._progress.phase}; alive: {places}"
        )

    def _watch(self) -> None:
        written, lost = time.monotonic(), None
        while lost is None:
            if self._closing.wait(min(1.0, self._interval)):
                return
            if time.monotonic() - written >= self._interval:
                written = time.monotonic()
                self._write_heartbeat(sync=True)
            lost = self.first_lost(self._neighbours, time.monotonic())
        if lost.how != "failed" or not self._closing.wait(GRACE_SECONDS):
            self.end_process(lost)

    def _write_heartbeat(self, *, sync: bool = False) -> None:
        with suppress(OSError):  # a full disk is reported by what saves
            self._heartbeat.write("running", self._progress.phase, self._progress.step, sync=sync)

    def first_lost(self, ranks: Iterable[int], now: float, *, broken: bool = False) -> LostRank | None:
        """The first of these ranks that is lost. `now`: seconds of a steady clock; `broken` as in `examine`."""
        if now - self._last_examined > self._silence / 2:  # this process was stopped, perhaps with all the others
            self._seen.clear()
        self._last_examined = now
        return next((lost for rank in ranks if (lost := self.examine(rank, now, broken=broken)) is not None), None)

    def examine(self, rank: int, now: float, *, broken: bool = False) -> LostRank | None:
        """Whether this rank is lost, by its lock and its last heartbeat; `broken`: a collective failed already."""
        unlocked = rank in self._locked and not holds_lock(self._run_dir, rank)  # before its final heartbeat is read
        heartbeat = last_heartbeat(self._run_dir, rank, self._token)
        if heartbeat is None or heartbeat.state == "ended":
            return None
        if heartbeat.state != "running":
            return LostRank(heartbeat, "failed")
        known, since = self._seen.setdefault(rank, (heartbeat, now))
        if known != heartbeat:
            self._seen[rank] = (heartbeat, now)
        silent = now - since if known == heartbeat else 0.0
        # A file server that was away for long drops locks that living ranks still hold.
        if process_is_gone(heartbeat) or (unlocked and (broken or silent > 3 * self._interval)):
            return LostRank(heartbeat, "died")
        if silent > self._silence:
            return LostRank(heartbeat, "froze")
        return None

    def end_process(self, lost: LostRank) -> None:
        """Records and prints which rank was lost, and ends this process."""
        with self._ends_once:  # never released
            where = ", on every machine," if self._launch.nodes > 1 else ""
            line = f"{self.record(lost)}; continue{where} with: {self._command}"
            if self._prints_for_this_machine():
                print_after_launcher(line)
            if lost.how == "froze" and lost.heartbeat.machine == this_machine():
                with suppress(OSError):
                    os.kill(lost.heartbeat.process, signal.SIGKILL)  # its launcher would wait for it for 30 s
            with suppress(OSError):
                self._heartbeat.write("left", self._progress.phase, self._progress.step, sync=True)
            os._exit(RankLost.exit_code)

    def record(self, lost: LostRank) -> str:
        """Writes the loss to run_state.json, where the first failure stays; returns what is there as a line."""
        last = lost.heartbeat
        if lost.how == "failed":
            self._wait_for_its_own_record()
        why = {
            "died": "killed, perhaps for memory (see dmesg), or crashed",
            "froze": f"no sign of life for {self._timeout_seconds} s",
        }.get(lost.how, "it left no reason")
        error = RankLost(f"{lost.how} on {last.host} (process {last.process}): {why}")
        with suppress(FinetuneError, OSError):
            mark_failed(self._run_dir, error, phase=last.phase, rank=last.rank, step=last.step)
        failure = self._recorded() or {"rank": last.rank, "step": last.step, "phase": last.phase, "error": str(error)}
        text = str(failure["error"]).removeprefix("RankLost: ").splitlines()[0][:300]
        verb = "" if "RankLost" in str(failure["error"]) else "failed: "
        return f"rank {failure['rank']} {verb}{text}; it was at step {failure['step']}, {failure['phase']}"

    def _recorded(self) -> dict[str, object] | None:
        """The failure in run_state.json, if there is one."""
        with suppress(FinetuneError, OSError):
            state = read_state(self._run_dir)
            if state is not None and state["state"] == "failed":
                return state
        return None

    def _wait_for_its_own_record(self) -> None:
        deadline = time.monotonic() + GRACE_SECONDS
        while self._recorded() is None and time.monotonic() < deadline:
            time.sleep(0.1)

    def _prints_for_this_machine(self) -> bool:
        """True for one rank of each machine: each machine has its own terminal."""
        host = re.sub(r"[^\w.-]", "_", os.uname().nodename)
        try:
            said = heartbeat_file(self._run_dir, 0).with_name(f"said-{host}")
            os.close(os.open(said, os.O_CREAT | os.O_EXCL, 0o666))  # 0777, an executable, unless told otherwise
        except FileExistsError:
            return False
        except OSError:
            return True
        return True
