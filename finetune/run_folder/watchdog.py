"""The ranks watch each other: when one dies, fails or freezes, the others end the job and the last line names it.

A dead rank is noticed late or never by what waits for it: gloo's error names no rank, NCCL waits for its timeout, and
torchrun tells only the machine where it happened. So a thread in every rank looks at the beats of its neighbours
(beats.py), and whoever meets a broken collective looks there too.
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

import torch
from accelerate import Accelerator

from finetune.errors import FinetuneError, NoRendezvous, RankLost
from finetune.launch.launcher import Launch, print_after_launcher
from finetune.run_folder.folder import mark_failed, read_state
from finetune.run_folder.heartbeat import (
    Beat,
    Heartbeat,
    beat_file,
    holds_lock,
    process_is_gone,
    read_beat,
    this_machine,
)

_NEIGHBOURS = 8  # whom each rank watches: the next ones in a ring, so that thousands of ranks do not read each other
_GRACE_SECONDS = 5.0  # for our own main thread, which may be failing for the same reason
_SHARED_SECONDS = 30.0  # until a new file is seen by another machine
# What gloo and NCCL say when a rank is gone; gloo's are plain RuntimeErrors.
_BROKEN = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out|peer", re.IGNORECASE)


@dataclass
class Progress:
    """Where this rank is: for its beat, and for the record of a failure."""

    phase: str = "load"
    step: int = 0
    write_heartbeat: Callable[[], None] = field(default=lambda: None)  # write it down now

    def reached(self, step: int) -> None:
        self.step = step
        self.write_heartbeat()


@dataclass(frozen=True)
class Lost:
    """A rank that the others cannot go on without."""

    beat: Beat
    what: str  # died, froze or failed


@contextmanager
def watched(
    run_dir: Path, accelerator: Accelerator, launch: Launch, progress: Progress, *, timeout_seconds: int, command: str
) -> Iterator[None]:
    """While the block runs, this rank gives signs of life and watches the others; nothing with one process.

    When another rank is lost the process ends here, with RankLost's exit code: a collective that waits for that rank
    cannot be left in any other way.

    Args:
        run_dir: Claimed by rank 0, its folder of beats cleared.
        progress: Kept up to date by the training.
        timeout_seconds: A rank that gave no sign for this long is frozen.
        command: What continues the run, as typed on this machine.

    Raises:
        NoRendezvous: the ranks do not share `run_dir`.
    """
    if launch.world_size == 1:
        yield
        return
    heart, token = _join(run_dir, accelerator, launch, progress)
    watch = Watchdog(run_dir, launch, progress, heart, token, timeout_seconds, command)
    try:
        yield
    except BaseException as error:
        watch.explain(error)
        watch.close(ended=False)
        raise
    watch.close(ended=True)


def _join(run_dir: Path, accelerator: Accelerator, launch: Launch, progress: Progress) -> tuple[Heartbeat, int]:
    """This rank's first beat, when rank 0's is seen: every rank finds all beats there afterwards."""

    def over_ranks(number: int) -> int:
        return int(accelerator.reduce(torch.tensor(number, device=accelerator.device), reduction="sum"))

    def first_beat(token: int) -> Heartbeat:
        heart = Heartbeat(run_dir, launch.rank, token)
        heart.beat("running", progress.phase, progress.step, sync=True)
        return heart

    drawn = random.SystemRandom().randrange(1, 2**31) if launch.is_main else 0
    heart = first_beat(drawn) if launch.is_main else None
    token = over_ranks(drawn)
    if heart is None and _appears(run_dir, token):
        heart = first_beat(token)
    missing = launch.world_size - over_ranks(int(heart is not None))
    if heart is None or missing:
        raise NoRendezvous(
            f"output_dir: {run_dir.absolute()} is not shared: {missing} of {launch.world_size} ranks do not find there "
            "what rank 0 writes; put output_dir on storage that every machine mounts under this name"
        )
    return heart, token


def _appears(run_dir: Path, token: int) -> bool:
    end = time.monotonic() + _SHARED_SECONDS
    while read_beat(run_dir, 0, token) is None:
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


class Watchdog:
    """This rank's beat, and its eye on the others. A thread does both until `close`."""

    def __init__(
        self,
        run_dir: Path,
        launch: Launch,
        progress: Progress,
        heart: Heartbeat,
        token: int,
        timeout_seconds: int,
        command: str,
    ) -> None:
        self._run_dir, self._launch, self._progress, self._command = run_dir, launch, progress, command
        self._heart, self._token = heart, token
        self._timeout_seconds = timeout_seconds
        self._interval = min(5.0, timeout_seconds / 8)  # between two beats
        self._silence = timeout_seconds - 2 * self._interval  # so that the run has ended after the timeout
        others = [(launch.rank + step) % launch.world_size for step in range(1, launch.world_size)]
        self._others, self._neighbours = others, others[:_NEIGHBOURS]
        # Where locks are not passed on between machines, every other one would seem dead.
        self._locked = {rank for rank in others if holds_lock(run_dir, rank)}
        self._seen: dict[int, tuple[Beat, float]] = {}
        self._looked = time.monotonic()
        self._stop, self._one_ends = threading.Event(), threading.Lock()
        progress.write_heartbeat = self._beat
        self._thread = threading.Thread(target=self._live, name="pulse", daemon=True)
        self._thread.start()

    def close(self, *, ended: bool) -> None:
        """The last beat. Whoever leaves without one has died."""
        self._stop.set()
        self._progress.write_heartbeat = lambda: None
        self._thread.join(2 * self._interval)
        with suppress(OSError):
            self._heart.beat("ended" if ended else "failed", self._progress.phase, self._progress.step, sync=True)

    def explain(self, error: BaseException) -> None:
        """Ends the process when the error came from a lost rank; else notes at the error where the others are."""
        if not isinstance(error, RuntimeError) or not _BROKEN.search(str(error)):
            return
        end = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < end:
            lost = self._look(self._others, broken=True)
            if lost is not None:
                self._end(lost)
            time.sleep(0.1)
        beats = [beat for rank in self._others[:16] if (beat := read_beat(self._run_dir, rank, self._token))]
        places = ", ".join(f"rank {beat.rank} at step {beat.step}, {beat.phase}" for beat in beats)
        error.add_note(
            f"rank {self._launch.rank} at step {self._progress.step}, {self._progress.phase}; alive: {places}"
        )

    def _live(self) -> None:
        beaten = time.monotonic()
        while not self._stop.wait(min(1.0, self._interval)):
            if time.monotonic() - beaten >= self._interval:
                beaten = time.monotonic()
                self._beat(sync=True)
            lost = self._look(self._neighbours)
            if lost is not None:
                if lost.what == "failed" and self._stop.wait(_GRACE_SECONDS):
                    return
                self._end(lost)

    def _beat(self, *, sync: bool = False) -> None:
        with suppress(OSError):  # a full disk is the business of those who save
            self._heart.beat("running", self._progress.phase, self._progress.step, sync=sync)

    def _look(self, ranks: Iterable[int], *, broken: bool = False) -> Lost | None:
        """The first of these ranks that is lost. `broken`: the network has told already that some rank is."""
        now = time.monotonic()
        if now - self._looked > self._silence / 2:  # we were stopped ourselves, perhaps with all the others
            self._seen.clear()
        self._looked = now
        return next((lost for rank in ranks if (lost := self._look_at(rank, now, broken)) is not None), None)

    def _look_at(self, rank: int, now: float, broken: bool = False) -> Lost | None:
        free = rank in self._locked and not holds_lock(self._run_dir, rank)  # before its last word is read
        beat = read_beat(self._run_dir, rank, self._token)
        if beat is None or beat.state == "ended":
            return None
        if beat.state != "running":
            return Lost(beat, "failed")
        known, since = self._seen.setdefault(rank, (beat, now))
        if known != beat:
            self._seen[rank] = (beat, now)
        silent = now - since if known == beat else 0.0
        # A file server that was away for long gives locks up that living ranks still believe in.
        if process_is_gone(beat) or (free and (broken or silent > 3 * self._interval)):
            return Lost(beat, "died")
        return Lost(beat, "froze") if silent > self._silence else None

    def _end(self, lost: Lost) -> None:
        """Writes down and says which rank was lost, and ends this process."""
        with self._one_ends:  # and never leaves it
            line = f"{self._record(lost)}; continue{self._everywhere()} with: {self._command}"
            if self._speaks():
                print_after_launcher(line)
            if lost.what == "froze" and lost.beat.machine == this_machine():
                with suppress(OSError):
                    os.kill(lost.beat.process, signal.SIGKILL)  # its launcher would wait for it for 30 s
            with suppress(OSError):
                self._heart.beat("left", self._progress.phase, self._progress.step, sync=True)
            os._exit(RankLost.exit_code)

    def _record(self, lost: Lost) -> str:
        """Into run_state.json, where the first to write wins; returns what is there as a line."""
        beat = lost.beat
        if lost.what == "failed":
            self._wait_for_its_own_record()
        why = {
            "died": "killed, perhaps for memory (see dmesg), or crashed",
            "froze": f"no sign of life for {self._timeout_seconds} s",
        }.get(lost.what, "it left no reason")
        error = RankLost(f"{lost.what} on {beat.host} (process {beat.process}): {why}")
        with suppress(FinetuneError, OSError):
            mark_failed(self._run_dir, error, phase=beat.phase, rank=beat.rank, step=beat.step)
        record = self._recorded() or {"rank": beat.rank, "step": beat.step, "phase": beat.phase, "error": str(error)}
        text = str(record["error"]).removeprefix("RankLost: ").splitlines()[0][:300]
        verb = "" if "RankLost" in str(record["error"]) else "failed: "
        return f"rank {record['rank']} {verb}{text}; it was at step {record['step']}, {record['phase']}"

    def _recorded(self) -> dict[str, object] | None:
        with suppress(FinetuneError, OSError):
            state = read_state(self._run_dir)
            if state is not None and state["state"] == "failed":
                return state
        return None

    def _wait_for_its_own_record(self) -> None:
        end = time.monotonic() + _GRACE_SECONDS
        while self._recorded() is None and time.monotonic() < end:
            time.sleep(0.1)

    def _everywhere(self) -> str:
        return ", on every machine," if self._launch.nodes > 1 else ""

    def _speaks(self) -> bool:
        """One rank on each machine: each has a terminal of its own."""
        try:
            os.close(os.open(beat_file(self._run_dir, 0).with_name(f"said-{_host()}"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        except OSError:
            return True
        return True


def _host() -> str:
    return re.sub(r"[^\w.-]", "_", os.uname().nodename)
