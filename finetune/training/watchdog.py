"""The ranks watch each other: when one dies, fails or freezes, the others end the job and the last line names it.

Ranks that wait for a dead rank notice it late or never: gloo's error names no rank, NCCL waits for its timeout, and
torchrun reports only on the dead rank's machine. So a thread in every rank examines its neighbours' heartbeats
(heartbeat.py). A rank with a broken collective examines all ranks' heartbeats. Where machines do not see one folder,
rank 0 watches all ranks over the network, and they watch rank 0 (network_heartbeat.py).
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from finetune.errors import EnvironmentMismatch, FinetuneError, RankLost, Stopped
from finetune.launch.launcher import Launch, continue_command, print_after_launcher
from finetune.launch.signals import Interrupted
from finetune.ranks.heartbeat import (
    HeartbeatRecord,
    Heartbeats,
    Meeting,
    RankState,
    heartbeat_file,
    process_is_gone,
    this_machine,
)
from finetune.recipe.schema import Recipe
from finetune.run_folder.facts import read_state
from finetune.run_folder.folder import mark_failed, mark_run
from finetune.trial_limit import trials_end_process

GRACE_SECONDS = 5.0  # for our own main thread, which may be failing for the same reason
# Words in gloo's and NCCL's errors when a rank is gone. gloo's errors are plain RuntimeErrors.
BROKEN = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out|peer", re.IGNORECASE)


@dataclass
class Progress:
    """This rank's phase and step, for its heartbeat and for the record of a failure."""

    phase: str = "load"
    step: int = 0
    heartbeat: Heartbeats | None = None  # None: this rank writes none

    def reached(self, step: int) -> None:
        self.step = step
        self.write_heartbeat()

    def write_heartbeat(self, *, sync: bool = False) -> None:
        if self.heartbeat is not None:
            with suppress(OSError):  # a full disk is reported by what saves
                self.heartbeat.write("running", self.phase, self.step, sync=sync)


@dataclass(frozen=True)
class LostRank:
    """A rank that died, froze or failed: the others cannot continue without it."""

    heartbeat: HeartbeatRecord  # the last one
    how: Literal["died", "froze", "failed"]


@contextmanager
def watchdog(recipe: Recipe, launch: Launch, progress: Progress) -> Iterator[Meeting]:
    """While the block runs, this rank writes heartbeats and watches other ranks. Its failure goes to run_state.json.

    When another rank is lost, this process ends with RankLost's exit code: there is no other way out of a collective
    that waits for the lost rank. When a trial does not end, the stacks of all threads go to standard error, and this
    process ends with EnvironmentMismatch's exit code.

    Args:
        recipe: Rank 0 has claimed its folder and cleared the heartbeats there. A rank without a heartbeat for the
            recipe's `timeout_seconds` counts as frozen.
        progress: The training keeps it up to date.

    Raises:
        NoRendezvous: ranks do not share the run's folder, and `meet` finds no other way.
        Stopped: a signal came where there is nothing to save.
    """
    meeting, watch = Meeting(Path(recipe.run_dir)), None

    def record(error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}"
        failure: dict[str, Any] = {"phase": progress.phase, "rank": launch.rank, "step": progress.step, "error": text}
        mark_failed(meeting.run_dir, **failure)
        if meeting.heartbeat is not None:
            meeting.heartbeat.tell(failure)

    try:
        if launch.world_size > 1:
            from finetune.ranks.meeting import meet

            meeting = meet(meeting.run_dir, launch, progress.phase, progress.step)
            command = continue_command(launch, resume=recipe.training.resume)
            watch = Watchdog(meeting, launch, progress, recipe.timeout_seconds, command)
            watch.start()

        def end_trial(line: str) -> None:
            faulthandler.dump_traceback()
            with suppress(FinetuneError, OSError):
                record(EnvironmentMismatch(line))
            if watch is not None:
                watch.close("failed")
            print_after_launcher(line)
            os._exit(EnvironmentMismatch.exit_code)

        with trials_end_process(end_trial):
            yield meeting
    except Interrupted:
        if watch is not None:
            watch.close("failed")  # ranks that got no signal end too
        if launch.is_main:
            mark_run(meeting.run_dir, "stopped", step=progress.step)
        line = f"stopped at step {progress.step}; continue with:"
        if progress.step == 0:
            line = "stopped before the first step; start again with:"
        raise Stopped(f"{line}\n  {continue_command(launch, resume=recipe.training.resume)}") from None
    except BaseException as error:
        if watch is not None:
            watch.explain(error)
            watch.close("failed")
        record(error)
        raise
    else:
        if watch is not None:
            watch.close("ended")
    finally:
        meeting.leave()


class Watchdog:
    """Writes this rank's heartbeats and examines the others'. A thread does both from `start` to `close`."""

    def __init__(
        self, meeting: Meeting, launch: Launch, progress: Progress, timeout_seconds: int, command: str
    ) -> None:
        assert meeting.heartbeat is not None
        self._meeting, self._heartbeat, self._run_dir = meeting, meeting.heartbeat, meeting.run_dir
        self._launch, self._progress, self._command = launch, progress, command
        self._timeout_seconds = timeout_seconds
        self._interval = min(5.0, timeout_seconds / 8)  # between two heartbeats
        # A frozen rank may stop just after a heartbeat, and we may look just before the next. With two intervals less
        # the run has ended when the timeout is over: 600 s and heartbeats every 5 s make 590 s.
        self._silence = timeout_seconds - 2 * self._interval
        self._others = [(launch.rank + step) % launch.world_size for step in range(1, launch.world_size)]
        self._neighbours = self._heartbeat.watched(launch.world_size)
        # Some file systems' locks do not reach other machines. Then every rank there would seem dead, so locks count
        # only for ranks that show one now.
        self._locked = {rank for rank in self._others if self._heartbeat.holds_lock(rank)}
        self._latest: dict[int, tuple[HeartbeatRecord, float]] = {}  # rank -> its latest heartbeat, and since when
        self._last_examined = time.monotonic()
        self._closing, self._ends_once = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._progress.heartbeat = self._heartbeat
        self._thread.start()

    def close(self, state: RankState) -> None:
        """Write the final heartbeat, `ended` or `failed`. A rank that is gone without one counts as dead."""
        self._closing.set()
        self._progress.heartbeat = None
        if self._thread.is_alive():
            self._thread.join(2 * self._interval)
        with suppress(OSError):
            self._heartbeat.write(state, self._progress.phase, self._progress.step, sync=True)

    def explain(self, error: BaseException) -> None:
        """End the process if the error came from a lost rank. Else add a note to the error: the others' places."""
        if not isinstance(error, RuntimeError) or not BROKEN.search(str(error)):
            return
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            lost = self.first_lost(self._others, time.monotonic(), broken=True)
            if lost is not None:
                self.end_process(lost)
            time.sleep(0.1)
        records = [self._heartbeat.last(rank) for rank in self._others[:16]]
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
                self._progress.write_heartbeat(sync=True)
            lost = self.first_lost(self._neighbours, time.monotonic())
        if lost.how != "failed" or not self._closing.wait(GRACE_SECONDS):
            self.end_process(lost)

    def first_lost(self, ranks: Iterable[int], now: float, *, broken: bool = False) -> LostRank | None:
        """The first lost rank among these. `now`: seconds on a monotonic clock; `broken` as in `examine`."""
        if now - self._last_examined > self._silence / 2:
            # This process was stopped, perhaps with all the others: they have not been silent for that time.
            self._latest.clear()
        self._last_examined = now
        for rank in ranks:
            if (lost := self.examine(rank, now, broken=broken)) is not None:
                return lost
        return None

    def examine(self, rank: int, now: float, *, broken: bool = False) -> LostRank | None:
        """Judge a rank by its lock and its last heartbeat; None: not lost. `broken`: a collective failed already."""
        # The lock first: a rank may write its final heartbeat and end between the two reads.
        unlocked = rank in self._locked and not self._heartbeat.holds_lock(rank)
        heartbeat = self._heartbeat.last(rank)
        if heartbeat is None or heartbeat.state == "ended":
            return None
        if heartbeat.state != "running":
            return LostRank(heartbeat, "failed")
        latest, since = self._latest.get(rank, (None, now))
        if latest != heartbeat:
            since = now
            self._latest[rank] = (heartbeat, now)
        silent = now - since  # seconds
        # A file server that was away for long drops locks that living ranks still hold.
        if process_is_gone(heartbeat) or (unlocked and (broken or silent > 3 * self._interval)):
            return LostRank(heartbeat, "died")
        if silent > self._silence:
            return LostRank(heartbeat, "froze")
        return None

    def end_process(self, lost: LostRank) -> None:
        """Record and print the lost rank, and end this process."""
        with self._ends_once:  # never released: a second thread waits here until the process has ended
            places = ", on every machine," if self._launch.nodes > 1 else ""
            line = f"{self.record(lost)}; continue{places} with: {self._command}"
            if self._prints_for_this_machine():
                print_after_launcher(line)
            if lost.how == "froze" and lost.heartbeat.machine == this_machine():
                with suppress(OSError):
                    os.kill(lost.heartbeat.process, signal.SIGKILL)  # its launcher would wait for it for 30 s
            with suppress(OSError):
                self._heartbeat.write("left", self._progress.phase, self._progress.step, sync=True)
            self._meeting.leave()
            os._exit(RankLost.exit_code)

    def record(self, lost: LostRank) -> str:
        """Write the loss to run_state.json, where the first failure stays. Returns the recorded failure as a line."""
        last = lost.heartbeat
        match lost.how:
            case "died":
                reason = "killed, perhaps for memory (see dmesg), or crashed"
            case "froze":
                reason = f"no sign of life for {self._timeout_seconds} s"
            case "failed":
                reason = "it left no reason"
                # The rank records its own error, which says more.
                deadline = time.monotonic() + GRACE_SECONDS
                while self._recorded() is None and time.monotonic() < deadline:
                    self._heartbeat.last(last.rank)  # over the network the reason comes with it
                    time.sleep(0.1)
        error = f"RankLost: {lost.how} on {last.host} (process {last.process}): {reason}"
        failure: dict[str, Any] = {"rank": last.rank, "step": last.step, "phase": last.phase, "error": error}
        self._heartbeat.tell(failure)
        failure = self._heartbeat.failure or failure
        with suppress(FinetuneError, OSError):
            mark_failed(self._run_dir, **failure)
        failure = self._recorded() or failure
        text = str(failure["error"]).removeprefix("RankLost: ").splitlines()[0][:300]
        if "RankLost" not in str(failure["error"]):  # a RankLost's text begins with its verb: died, froze
            text = f"failed: {text}"
        return f"rank {failure['rank']} {text}; it was at step {failure['step']}, {failure['phase']}"

    def _recorded(self) -> dict[str, Any] | None:
        """The first failure, if there is one."""
        with suppress(FinetuneError, OSError):
            state = read_state(self._run_dir)
            if state is not None and state["state"] == "failed":
                return state
        return self._heartbeat.failure

    def _prints_for_this_machine(self) -> bool:
        """True for one rank of each machine: each machine has its own terminal."""
        host = re.sub(r"[^\w.-]", "_", os.uname().nodename)
        try:
            # The rank that creates this file prints. Without a mode, os.open would make an executable file.
            printed = heartbeat_file(self._run_dir, 0).with_name(f"said-{host}")
            os.close(os.open(printed, os.O_CREAT | os.O_EXCL, 0o666))
        except FileExistsError:
            return False
        except OSError:
            return True
        return True
