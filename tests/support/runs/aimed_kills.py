"""SIGKILL at a chosen moment of a training: in a phase of a step, or at a call to the file system within a save.

Moments drawn by seconds mostly hit the end of a run, or what takes longest; these are drawn by what is going on.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from finetune import files
from finetune.files import read_lines
from finetune.measure.phases import Phases
from finetune.run_folder import background, checkpoint
from finetune.training import loop, session
from finetune.training.batch_plan import BatchPlan

# Where a kill may come, and how often it is drawn. `end`: after the last step, while samples and export are made.
PLACES = {"load": 1, "forward": 3, "backward": 4, "step": 3, "evaluate": 2, "save": 8, "end": 1}
DELAYS = {"load": 0.1, "forward": 0.002, "backward": 0.002, "step": 0.001, "evaluate": 0.003, "end": 0.2}  # at most
DISK_CALLS = ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir")


class Aim(NamedTuple):
    """A moment of one rank's training."""

    rank: int
    place: str
    step: int  # 0: any
    seconds: float = 0.0  # after the place was reached
    call: int = 0  # of a save: its place in the order of the calls that change the disk
    before: bool = True  # of a call: instead of it, a file half written; else after it


class Schedule(NamedTuple):
    """What a drawn moment has to fit."""

    steps: int
    save_steps: int
    eval_steps: int
    calls: Sequence[int]  # by rank: calls of a save that change the disk

    def steps_with(self, place: str) -> list[int]:
        """The steps in which there is such a place."""
        every = {"save": self.save_steps, "evaluate": self.eval_steps}.get(place, 1)
        return [step for step in range(1, self.steps + 1) if step % every == 0 or step == self.steps]


def draw_aim(draw: random.Random, schedule: Schedule, newest: int) -> Aim:
    """A moment of a run whose newest checkpoint is that of step `newest`."""
    place = "end" if newest == schedule.steps else draw.choices(list(PLACES), list(PLACES.values()))[0]
    rank = draw.randrange(len(schedule.calls))
    seconds = draw.uniform(0, DELAYS.get(place, 0.0))
    if place in ("load", "end"):
        return Aim(rank, place, 0, seconds)
    step = draw.choice([step for step in schedule.steps_with(place) if step > newest])
    if place != "save":
        return Aim(rank, place, step, seconds)
    # Rank 0 writes most of a checkpoint, and under DDP all of it.
    rank = rank if draw.random() < 0.3 and schedule.calls[rank] else 0
    return Aim(rank, place, step, call=draw.randrange(schedule.calls[rank]), before=draw.random() < 0.7)


class Armed:
    """Watches this process and kills it at its moment; `file` gets a line that says where that was."""

    def __init__(self, aim: Aim | None, rank: int, file: Path) -> None:
        self.aim = aim if aim is not None and aim.rank == rank else None
        self.rank = rank
        self.lines = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.step, self.phase = 0, "before loading"
        self.save = threading.local()  # step and calls of the save that this thread makes

    def install(self) -> None:
        """Put itself around what it watches, for the life of the process."""
        step_seed, phases, write = loop.step_seed, Phases.__call__, background.write_pieces

        def begun(plan: BatchPlan, step: int) -> int:  # the loop asks at each step's beginning
            self.step = step + 1
            return step_seed(plan, step)

        def entered(found: Phases, name: str) -> AbstractContextManager[None]:
            self.reached(name)
            return phases(found, name)

        def written(run_dir: Path, step: int, *arguments: Any, **options: Any) -> Path:
            self.save.step, self.save.calls = step, 0
            try:
                return write(run_dir, step, *arguments, **options)
            finally:
                self.say({"saved": step, "calls": self.save.calls})
                self.save.step = None

        loop.step_seed = begun  # type: ignore[attr-defined]
        Phases.__call__ = entered  # type: ignore[method-assign]
        background.write_pieces = written
        self._around(loop, "evaluate", before="evaluate")
        self._around(session, "take_steps", after="end")
        for name in DISK_CALLS:
            setattr(os, name, self.counted(getattr(os, name)))
        checkpoint.save_file = self.counted(checkpoint.save_file, half=_half_a_file)
        files.open = self._opener(open)  # type: ignore[attr-defined]

    def _around(self, module: Any, name: str, before: str = "", after: str = "") -> None:
        real = getattr(module, name)

        def called(*arguments: Any, **options: Any) -> Any:
            if before:
                self.reached(before)
            result = real(*arguments, **options)
            if after:
                self.reached(after)
            return result

        setattr(module, name, called)

    def _opener(self, real: Callable[..., Any]) -> Callable[..., Any]:
        counted = self.counted(real)
        return lambda path, mode="r", **options: (counted if "w" in mode else real)(path, mode, **options)

    def reached(self, phase: str) -> None:
        """A phase begins; its moment, if it is this one, comes some time later, while another thread computes."""
        self.phase = phase
        aim = self.aim
        if aim is not None and aim.place == phase != "save" and aim.step in (0, self.step):
            self.aim = None
            threading.Thread(target=self._die_after, args=(aim.seconds,), daemon=True).start()

    def _die_after(self, seconds: float) -> None:
        time.sleep(seconds)
        self.die()

    def counted(self, real: Callable[..., Any], half: Callable[..., Any] = lambda *_, **__: None) -> Callable[..., Any]:
        """`real`, which changes the disk; within a save it has a number. `half`: what is left of it at a crash."""

        def call(*arguments: Any, **options: Any) -> Any:
            step = getattr(self.save, "step", None)
            if step is None:
                return real(*arguments, **options)
            number, aim = self.save.calls, self.aim
            self.save.calls += 1
            hit = aim is not None and (aim.place, aim.step, aim.call) == ("save", step, number)
            if hit and aim is not None and aim.before:
                half(*arguments, **options)
                self.die(number)
            result = real(*arguments, **options)
            if hit:
                self.die(number)
            return result

        return call

    def die(self, call: int | None = None) -> None:
        """Say where, and end as if the power had gone."""
        saving = getattr(self.save, "step", None)
        place = {"phase": "save", "step": saving, "call": call} if saving is not None else {"phase": self.phase}
        self.say({"killed": True, "rank": self.rank, "step": self.step, **place})
        os.kill(os.getpid(), signal.SIGKILL)

    def say(self, line: Mapping[str, Any]) -> None:
        """Add a line to the file, in one write."""
        os.write(self.lines, (json.dumps({"rank": self.rank, **line}) + "\n").encode())


def _half_a_file(tensors: Any, path: Path) -> None:
    path.write_bytes(b"\0" * 100)


def calls_of_saves(file: Path, ranks: int) -> list[int]:
    """By rank: the fewest calls that a save of a run made which was watched and not killed."""
    saves = [line for line in read_lines(file) if "saved" in line]
    return [min(line["calls"] for line in saves if line["rank"] == rank) for rank in range(ranks)]


def kills_of(file: Path) -> list[dict[str, Any]]:
    """Where the runs that wrote this file were killed, in order."""
    return [line for line in read_lines(file) if "killed" in line] if file.exists() else []
