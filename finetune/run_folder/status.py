"""How a run is doing, from its folder alone: `finetune status`. No torch here, and nothing is written.

The run may write at the same time. Its files are replaced by one rename or grow by whole lines, so each is read as it
was at some moment. Life is judged by the lock that the kernel drops with the process, and not by a process number,
which another program may have by now.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from finetune.errors import FinetuneError
from finetune.files import LOCK, is_locked, read_lines
from finetune.output_stream import one_line
from finetune.ranks.heartbeat import HeartbeatRecord, heartbeat_file, last_heartbeat, this_machine
from finetune.recipe.loader import recipe_from_resolved
from finetune.recipe.schema import Recipe
from finetune.run_folder.facts import MOST_RECORD_BYTES, STATE, is_as_written, read_state, saved_steps
from finetune.untrusted.json_files import read_object
from finetune.wording import duration

LARGEST_FIGURE = 1e30  # larger figures are damage: a product of two would be infinite
TAIL_BYTES = 2**18  # of metrics.jsonl: some hundred lines
SPEED_LINES = 20  # training lines whose mean speed tells the time that is left
SILENT_SHARE = 4  # a rank writes a heartbeat every 5 s at least; a quarter of timeout_seconds without one is a stall
SLOW_LINES = 10  # lines of metrics that could have been written meanwhile
ENDED = ("stopped", "finished", "failed")
SILENT_STORAGE = 600.0  # seconds; an owner writes every ten, and machines' clocks differ
REMEDY = "take the file of the run itself"


@dataclass(frozen=True)
class RunStatus:
    """The keys of `finetune status --json`, which docs/elsewhere.md explains. None: not known, or there is none."""

    run: str
    state: Literal["starting", "running", "stalled", "dead", "stopped", "finished", "failed"]
    reason: str | None
    phase: str | None
    step: int
    total_steps: int | None
    loss: float | None
    tokens_per_second: float | None
    seconds_left: float | None
    silent_seconds: float | None
    checkpoint: Mapping[str, Any] | None  # step, where
    command: str | None
    updated: str | None

    def __str__(self) -> str:
        head = f"{self.run}: {self.state}"
        if self.phase is not None:
            head += f", {self.phase}"
        if self.reason is not None:
            head += f": {self.reason}"
        of_total = "" if self.total_steps is None else f" of {self.total_steps:,}"
        parts = [f"step {self.step:,}{of_total}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if self.seconds_left is not None:
            parts.append(f"{duration(self.seconds_left)} left")
        saved = "no complete checkpoint"
        if self.checkpoint is not None:
            saved = f"last complete checkpoint: step {self.checkpoint['step']:,}, {self.checkpoint['where']}"
        lines = [head, ", ".join(parts), saved]
        if self.command is not None and self.state in ("dead", "stopped", "failed"):
            lines.append(f"continue with:\n  {self.command}")
        return "\n".join(lines)


def read_status(run_dir: Path, mirrored: Mirrored | None = None) -> RunStatus:
    """A run's status now. Raises FinetuneError if no run is or was in the folder.

    Args:
        mirrored: The folder is a copy of the run's records from its storage, and this is what else the storage says.
    """
    state, locked = _state_and_lock(run_dir)
    if state is None and not locked:
        raise FinetuneError(f"{run_dir}: no run is or was here ({STATE} is missing); name a run's output_dir")
    state = state or {"state": "starting", "step": 0}
    recipe = None
    with suppress(FinetuneError):  # not written yet, or an earlier release's
        recipe = recipe_from_resolved(run_dir / "recipe.yaml")

    metrics: list[dict[str, Any]] = []
    with suppress(FinetuneError, OSError):
        metrics = [line for line in read_lines(run_dir / "metrics.jsonl", TAIL_BYTES) if is_as_written(line)]
    trained = [line for line in metrics if line.get("kind") == "train" and _is_finite(line)]
    beats = dict(_heartbeats(run_dir, state))
    reached = [int(state["step"]), *(line["step"] for line in trained[-1:])]
    reached += [record.step for record in beats if record.rank == 0]
    step, total = max(reached), _total_steps(run_dir)

    recent = [float(line["step_seconds"]) for line in trained[-SPEED_LINES:]]
    seconds = statistics.fmean(recent) if recent else None  # of a step
    if mirrored is None:
        word, reason, silent = _life(run_dir, state, locked, beats, recipe, seconds)
    else:
        word, reason, silent = mirrored.life(state)
    left = None
    if seconds is not None and total is not None and word != "finished" and step < total:
        left = seconds * (total - step)
    if word == "finished" and total is not None and step < total:
        reason = "early stopping"
    phase = str(state["phase"]) if "phase" in state else next((beat.phase for beat in beats if beat.rank == 0), None)
    last = trained[-1] if trained else {}
    return RunStatus(
        run=str(run_dir) if mirrored is None else mirrored.url,
        state=word,  # type: ignore[arg-type]  # one of a run's states, or of `_life`
        reason=reason,
        phase=phase and one_line(phase, 40),
        step=step,
        total_steps=total,
        loss=last.get("loss"),
        tokens_per_second=last.get("tokens_per_second"),
        seconds_left=left,
        silent_seconds=silent,
        checkpoint=_last_checkpoint(run_dir) if mirrored is None else mirrored.checkpoint,
        command=one_line(state["command"], 2000) if state.get("command") else None,
        updated=one_line(state["updated"], 40) if "updated" in state else None,
    )


@dataclass(frozen=True)
class Mirrored:
    """What a storage says about its run beside the records."""

    url: str
    checkpoint: Mapping[str, Any] | None  # the newest complete one: step, where
    silent_seconds: float | None  # since the owner moved its counter; None: it said that it ended, or never counts

    def life(self, state: Mapping[str, Any]) -> tuple[str, str | None, float | None]:
        """The state's word, its reason, and the seconds since the last sign of life."""
        if state["state"] in ENDED:
            return _ended(state)
        if self.silent_seconds is not None and self.silent_seconds > SILENT_STORAGE:
            told = f"the storage has had no sign of life for {duration(self.silent_seconds)}"
            reason = f"{told}, by this machine's clock: its machine went away, or has no network"
            return "dead", reason, self.silent_seconds
        return str(state["state"]), None, self.silent_seconds


def _ended(state: Mapping[str, Any]) -> tuple[str, str | None, float | None]:
    reason = state.get("error", state.get("reason"))
    if reason is not None and "rank" in state:
        reason = f"rank {state['rank']}: {reason}"
    return state["state"], None if reason is None else one_line(reason, 500), None


def _state_and_lock(run_dir: Path) -> tuple[dict[str, Any] | None, bool]:
    """The recorded state, None before there is one, and whether a process holds the run's lock."""
    for seconds in (0.2, 0.2, 0.0):
        # The lock before and after: a run writes its end before it drops the lock, and takes it before it begins.
        before = is_locked(run_dir / LOCK)
        try:
            state = read_state(run_dir, REMEDY)
        except FinetuneError:
            if not seconds:
                raise
            state = None
        locked = before or is_locked(run_dir / LOCK)
        if state is not None or locked:
            break
        time.sleep(seconds)  # `resume: never` renames the folder and makes a new one
    if state is not None and state["state"] not in ENDED and state["state"] != "running":
        raise FinetuneError(f"{run_dir / STATE}: unreadable (state is not as a run writes it); {REMEDY}")
    return state, locked


def _heartbeats(run_dir: Path, state: Mapping[str, Any]) -> Iterator[tuple[HeartbeatRecord, float]]:
    """The present start's heartbeats, rank 0's first, each with the seconds since it was written."""
    token, present = None, False
    for file in sorted(heartbeat_file(run_dir, 0).parent.glob("rank-*.json")):
        with suppress(FinetuneError, OSError, ValueError):
            age = time.time() - file.stat().st_mtime
            token = token or read_object(file).get("token")
            record = last_heartbeat(run_dir, int(file.stem.removeprefix("rank-")), token)  # type: ignore[arg-type]
            if record is None or type(record.step) is not int:
                continue
            # One process after a start of several leaves the others' files behind.
            present = present or (record.rank == 0 and record.process == state.get("process"))
            if not present:
                return
            yield record, max(0.0, age)


def _life(
    run_dir: Path,
    state: Mapping[str, Any],
    locked: bool,
    beats: Mapping[HeartbeatRecord, float],
    recipe: Recipe | None,
    step_seconds: float | None,
) -> tuple[str, str | None, float | None]:
    """The state's word, its reason, and the seconds since the last sign of life of a run without an end."""
    if state["state"] in ENDED:
        return _ended(state)

    names = (STATE, "receipt.json", "metrics.jsonl", "samples.jsonl", "checkpoints", LOCK)
    written = []
    for name in names:
        with suppress(OSError):
            written.append((run_dir / name).stat().st_mtime)
    unwritten = max(0.0, time.time() - max(written, default=time.time()))  # seconds without a new line or file
    silent = min([unwritten, *beats.values()])
    timeout, lines = Recipe.model_fields["timeout_seconds"].default, 1
    if recipe is not None:
        timeout, lines = recipe.timeout_seconds, recipe.logging_steps
    most = timeout / SILENT_SHARE  # between two heartbeats

    # Some file systems' locks do not reach other machines. There a fresh heartbeat is the sign.
    elsewhere = [age for beat, age in beats.items() if beat.machine != this_machine()]
    if not locked and not (elsewhere and min(elsewhere) <= most):
        gone = "it was killed, perhaps for memory, or its machine went away"
        reason = f"no process holds the run's lock: {gone}, {duration(silent)} after its last sign of life"
        return "dead", reason, silent
    quiet = [(age, beat) for beat, age in beats.items() if beat.state == "running" and age > most]
    if quiet:
        age, beat = max(quiet, key=lambda pair: pair[0])
        reason = f"rank {beat.rank} on {one_line(beat.host, 80)} shows no sign of life for {duration(age)}"
        return "stalled", reason, age
    if unwritten > max(timeout, SLOW_LINES * lines * (step_seconds or 0.0)):
        return "stalled", f"its process lives, and has written nothing for {duration(unwritten)}", unwritten
    return state["state"], None, silent


def _is_finite(line: Mapping[str, Any]) -> bool:
    return all(-LARGEST_FIGURE < value < LARGEST_FIGURE for value in line.values() if isinstance(value, int | float))


def _total_steps(run_dir: Path) -> int | None:
    with suppress(FinetuneError, OSError):
        batch = read_object(run_dir / "receipt.json", MOST_RECORD_BYTES).get("batch")
        total = batch.get("total_steps") if isinstance(batch, dict) else None
        return total if type(total) is int and total < LARGEST_FIGURE else None
    return None


def _last_checkpoint(run_dir: Path) -> dict[str, Any] | None:
    """The newest checkpoint whose files have the sizes in its manifest; none is read. None: there is none."""
    for _ in range(3):  # a save may delete all that were listed
        steps = saved_steps(run_dir)
        for step in reversed(steps):
            folder = run_dir / "checkpoints" / f"step-{step:08d}"
            with suppress(FinetuneError, OSError, ValueError, KeyError, TypeError, AttributeError):
                files = read_object(folder / "MANIFEST.json", MOST_RECORD_BYTES)["files"]
                if all((folder / name).stat().st_size == facts["bytes"] for name, facts in files.items()):
                    return {"step": step, "where": str(folder)}
        if saved_steps(run_dir) == steps:
            return None
    return None
