"""A run's folder: which process may write in it, where a run starts, and how it ended.

recipe.yaml  environment.json  receipt.json  run_state.json
metrics.jsonl  samples.jsonl  reference.json  checkpoints/  adapter/ or model/  hub.json
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from finetune.base.identity import base_in_words, is_same_base
from finetune.errors import FinetuneError
from finetune.files import (
    LOCK,
    TEMPORARY_PREFIX,
    clear_leftovers,
    cut_lines,
    exclusive,
    lock,
    remove_folder,
    sync,
    write_json,
)
from finetune.model.optimizer import Schedule
from finetune.output_stream import one_line
from finetune.recipe.resolved import leaves
from finetune.recipe.schema import Recipe, Training
from finetune.run_folder.checkpoint import (
    Checkpoint,
    checkpoint_steps,
    newest_valid,
    read_state_of,
    step_folder,
)
from finetune.run_folder.facts import EXPORT_RECORD, EXPORTED_RECORDS, EXPORTS, STATE, lost_lines, read_state
from finetune.wording import first_lines

_UNSET = "(not set)"
STATE_LOCK = ".state.lock"  # between reading the state and writing it
LINES = ("metrics.jsonl", "samples.jsonl")
WRITTEN_ONCE = ("recipe.yaml", "receipt.json", "environment.json", "conversation.json", "reference.json")
OWN_FILES = (STATE, *LINES, *WRITTEN_ONCE, LOCK, STATE_LOCK)

# Keys that a resumed run may change: reporting, machines, and the split of a batch. None changes the loss curve.
FREE_TO_CHANGE = (
    *("budget", "accelerate_config", "samples", "eval", "logging_steps", "eval_steps", "save_steps"),
    *("save_total_limit", "measure_phases", "output_dir", "report_to", "run", "hub", "timeout_seconds"),
    *("training.activation_checkpointing", "training.activation_offloading", "training.compile"),
    *("training.deterministic", "training.per_device_batch_size", "training.load_best_model_at_end"),
    *("training.non_blocking", "training.resume"),
)

# The base in a run's identity: base/identity.py. Content counts, so files may lie elsewhere in a resumed run.
BASE = "base"
DATA_PLACES = re.compile(r"data\.(train|eval)(\[\d+\])?\.(path|name|revision|data_files(\[\d+\])?)|data\.chat_template")

RunState = Literal["running", "stopped", "finished", "failed"]


@dataclass(frozen=True)
class Claim:
    """How the process that owns a run's folder starts."""

    status: Literal["fresh", "resumed", "finished"]
    checkpoint: Checkpoint | None  # to start from; None when fresh
    notes: tuple[str, ...]  # lines for the user: a renamed folder, a damaged checkpoint
    lock: int | None  # descriptor that stays open for the process's life; None when finished

    def release(self) -> None:
        """Unlock the folder before the process ends."""
        if self.lock is not None:
            os.close(self.lock)


@dataclass(frozen=True)
class RunIdentity:
    """Every value on which a run's curve depends. A start with other values is another run."""

    values: Mapping[str, Any]  # `curve_identity` and the curve's other inputs (data fingerprint, ...), as JSON
    at_default: Collection[str] = ()  # `keys_at_default`: an older release lacks newer keys, and may lack these
    also: Mapping[str, Collection[str]] = field(default_factory=dict)  # values of earlier releases, the same in meaning

    def __post_init__(self) -> None:
        # The saved identity was JSON once. The same round trip makes tuples lists, so that the two can be compared.
        object.__setattr__(self, "values", json.loads(json.dumps(self.values)))

    def refuse_other(self, place: object, previous: Mapping[str, Any], remedy: str) -> None:
        """Raise FinetuneError if the state `previous`, found in `place`, is another run's.

        Args:
            remedy: What to do, other than to set the keys back.
        """
        differing, earlier, _ = self.compare(place, previous)
        if differing:
            raise self.other(place, differing, earlier, remedy)

    def compare(self, place: object, previous: Mapping[str, Any]) -> tuple[list[str], dict[str, Any], list[str]]:
        """The keys that make `previous` another run, its identity, and a note for each key that changed harmlessly."""
        # An older release may have saved keys that are free to change now. It lacks newer keys, then at their defaults.
        identity = self.values
        earlier = {key: identity[key] for key in self.at_default} | previous["identity"]
        for key, values in self.also.items():
            if earlier.get(key) in values:
                earlier[key] = identity[key]
        keys = (key for key in {**earlier, **identity} if not _is_free(key))
        differing = [key for key in keys if earlier.get(key, _UNSET) != identity.get(key, _UNSET)]
        # Releases that knew no base's identity wrote none, and a part of it may be unknown.
        same_base = is_same_base(earlier.get(BASE), identity.get(BASE))
        if same_base is not False:
            differing = [key for key in differing if key != BASE]
        notes: list[str] = []
        for is_equal, places in (
            (same_base, re.compile(r"model\.(name_or_path|revision)")),
            (_equal("data fingerprint", earlier, identity), DATA_PLACES),
            (_equal("adapter fingerprint", earlier, identity), re.compile(r"model\.adapter(_revision)?")),
        ):
            moved = [key for key in differing if is_equal and places.fullmatch(key)]
            differing = [key for key in differing if key not in moved]
            notes += [
                f"{place}: {key}: {one_line(earlier.get(key, _UNSET))} there, {one_line(identity.get(key, _UNSET))} "
                "now; its content is the same, so the run goes on"
                for key in moved
            ]
        return differing, earlier, notes

    def other(self, place: object, differing: Sequence[str], earlier: Mapping[str, Any], remedy: str) -> FinetuneError:
        """The error that lists the differing keys, for a run whose identity was `earlier`."""
        lines = []
        for key in differing:
            before, now = (
                base_in_words(facts[key]) if key == BASE else one_line(facts.get(key, _UNSET))
                for facts in (earlier, self.values)
            )
            if key == BASE and earlier[BASE].get("commit"):
                now += f" (model.revision={earlier[BASE]['commit']} is the earlier one)"
            lines.append(f"  {one_line(key, 80)}: {before} there, {now} now")
        other = "base" if differing == [BASE] else "recipe"
        text = [f"{place}: holds a run of another {other}:", *first_lines(lines, 40), f"  set them back, {remedy}"]
        return FinetuneError("\n".join(text))


def curve_identity(recipe: Recipe) -> dict[str, Any]:
    """Every key on which the curve depends, flat: `data.train[0].path` -> value."""
    identity = {key: value for key, value in _keys(recipe.model_dump(mode="json")) if not _is_free(key)}
    # Only the objective's own section counts. Supervised runs have neither, as in folders of earlier releases.
    objective = recipe.training.objective
    others = tuple(f"{name}." for name in ("dpo", "kto") if name != objective)
    supervised = ("training.objective",) if objective == "supervised" else ()
    return {key: value for key, value in identity.items() if not key.startswith(others) and key not in supervised}


def keys_at_default(recipe: Recipe) -> set[str]:
    """The keys of `curve_identity` that have the schema's default."""
    written = dict(_keys(recipe.model_dump(mode="json", exclude_defaults=True)))
    return curve_identity(recipe).keys() - written.keys()


def _keys(sections: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each leaf as `data.train[0].path`, with its value."""
    for path, value in leaves(sections, lists="all"):
        yield "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix("."), value


def _equal(key: str, earlier: Mapping[str, Any], identity: Mapping[str, Any]) -> bool:
    return key in earlier and earlier[key] == identity.get(key)


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith((f"{free}.", f"{free}[")) for free in FREE_TO_CHANGE)


@dataclass(frozen=True)
class LockedFolder:
    """A run folder that no other process writes to. The caller may put a run from a storage there, then claims it."""

    run_dir: Path
    lock: int  # descriptor
    is_new: bool  # made for this lock

    def give_up(self) -> None:
        """Unlock it, and remove a new one that nothing was put into."""
        os.close(self.lock)
        if self.is_new:
            with suppress(OSError):
                (self.run_dir / LOCK).unlink()
                self.run_dir.rmdir()


def lock_run_folder(run_dir: Path, *, wait_seconds: float = 10.0) -> LockedFolder:
    """Lock the folder, made if missing. Only rank 0 calls it, and `claim_run_folder` next.

    Args:
        wait_seconds: The longest wait for a process that is still saving.

    Raises FinetuneError: another process trains here; the folder is not a run's; its file system lacks something.
    """
    try:
        is_new = not run_dir.exists()
    except (OSError, ValueError) as error:  # a name that is too long for any folder
        reason = getattr(error, "strerror", None) or error
        raise FinetuneError(f"{one_line(run_dir, 120)}: output_dir cannot be used: {reason}; choose another") from None
    if not is_new and not run_dir.is_dir():
        raise FinetuneError(f"{run_dir}: output_dir is a file; choose another output_dir")
    if not is_new and not (run_dir / STATE).exists():
        names = [path.name for path in run_dir.iterdir()]
        foreign = sorted(name for name in names if name != LOCK and not name.startswith(TEMPORARY_PREFIX))
        if foreign:
            named = ", ".join(foreign[:3] + ["..."] * (len(foreign) > 3))
            raise FinetuneError(
                f"{run_dir}: output_dir holds other files ({named}) and no run; choose another output_dir"
            )
    # Through a link a run would write into another folder, and from a pipe it would read forever.
    for path in (run_dir / name for name in OWN_FILES):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            kind = "a link" if path.is_symlink() else "a folder" if path.is_dir() else "not a file"
            raise FinetuneError(f"{path}: is {kind}, not the run's own file; remove it, or choose another output_dir")
    locked = LockedFolder(run_dir, _lock(run_dir, wait_seconds), is_new)
    try:
        refuse_mount(run_dir)
    except BaseException:
        locked.give_up()
        raise
    return locked


def claim_run_folder(
    folder: LockedFolder,
    *,
    resume: Literal["auto", "never"],
    identity: RunIdentity,
    command: str,
    length: RunLength | None = None,
) -> Claim:
    """Decide where the run in a locked folder starts. The lock stays for this process's life.

    Afterwards the folder's state is `running`, temporary files are deleted, and metrics end exactly at the checkpoint.

    Args:
        resume: never: an existing run is renamed to `<run_dir>.previous-N`. Nothing is deleted.
        command: The command that continues the run.
        length: The recipe's length. A finished run is resumed if it is shorter and otherwise equal.

    Raises FinetuneError, and unlocks the folder: its run has another identity; all its checkpoints are damaged.
    """
    run_dir, locked, notes = folder.run_dir, folder.lock, list[str]()
    try:
        previous = read_state(run_dir)
        if previous is not None and resume == "never":
            place, number = run_dir.resolve(), 1  # of a link, the folder behind it: the new run goes there too
            try:
                while (renamed := place.with_name(f"{place.name}.previous-{number}")).exists():
                    number += 1
                os.rename(place, renamed)
                place.mkdir()
            except OSError as error:  # a name that is too long with the suffix, another user's folder above
                raise FinetuneError(
                    f"{run_dir}: resume is never, and this folder cannot be renamed to .previous-{number}: "
                    f"{error.strerror}; move it away yourself, or choose another output_dir"
                ) from None
            sync(place.parent)
            notes.append(f"{run_dir}: resume is never: the run that was there is now {renamed}")
            new_lock = _lock(run_dir)
            os.close(locked)  # the lock went with the renamed folder
            locked, previous = new_lock, None

        # A finished run without its result continues from its last checkpoint and exports again.
        has_result = any((run_dir / name).is_dir() for name in HANDED_OVER)
        is_finished = previous is not None and previous["state"] == "finished" and has_result
        checkpoint, warnings = newest_valid(run_dir)
        if checkpoint is None and warnings:
            problem = f"{run_dir}: none of its checkpoints is complete; {_START_OVER}"
            raise FinetuneError("\n".join([*warnings, problem]))
        status: Literal["fresh", "resumed", "finished"] = "fresh"
        if previous is None or (checkpoint is None and not is_finished):
            checkpoint, warnings = None, ()
        else:
            status = "finished" if is_finished else "resumed"
            differing, earlier, moved = identity.compare(run_dir, previous)
            warnings = (*warnings, *moved)
            if is_finished and length is not None:
                planned = length.as_before(earlier)
                if length.steps > planned.steps:  # a finished run may get longer
                    differing = [key for key in differing if key not in LENGTH_KEYS]
                    if not differing:
                        status = "resumed"
                        checkpoint, line = go_on(run_dir, planned, length, checkpoint, int(previous["step"]))
                        warnings = (*warnings, line)
            if differing:
                remedy = f"choose another output_dir, or start over: {_START_OVER}"
                raise identity.other(run_dir, differing, earlier, remedy)
        if status == "finished":
            os.close(locked)
            return Claim(status, checkpoint, (*notes, *warnings), None)

        step = 0
        clear_leftovers(run_dir)
        clear_leftovers(run_dir / "checkpoints")
        if checkpoint is None:
            for name in LINES:  # from a run that ended before its first checkpoint
                (run_dir / name).unlink(missing_ok=True)
        else:
            # A step's metrics are written before its checkpoint. The samples after the last step are written after its
            # checkpoint, so a resumed run writes them again.
            step = checkpoint.step
            notes.append(f"resumed from step {step} ({checkpoint.path})")
            torn = cut_lines(run_dir / "metrics.jsonl", step)
            cut_lines(run_dir / "samples.jsonl", step - 1)
            notes += lost_lines(run_dir, torn, step)
        _write_state(run_dir, "running", step, command, identity.values)
    except BaseException:
        os.close(locked)
        raise
    return Claim(status, checkpoint, (*notes, *warnings), locked)


_START_OVER = "training.resume=never starts over (this folder is renamed and kept)"


def _lock(run_dir: Path, wait_seconds: float = 10.0) -> int:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if os.access(run_dir, os.X_OK | os.R_OK):
            own = [*(run_dir / name for name in (*OWN_FILES, "checkpoints")), *run_dir.glob("checkpoints/*")]
            for path in own:
                if path.exists() and not os.access(path, os.W_OK) and (user := path.stat().st_uid) != os.getuid():
                    raise FinetuneError(
                        f"{run_dir}: {path.relative_to(run_dir)} cannot be written, it belongs to user {user}; give it "
                        f"to this user: chown -R {os.getuid()} {shlex.quote(str(run_dir))}"
                    )
        return lock(run_dir / LOCK, wait_seconds=wait_seconds)
    except BlockingIOError as error:
        remedy = "wait for it, stop it, or choose another output_dir"
        raise FinetuneError(f"{run_dir}: another run is writing here ({error.strerror}); {remedy}") from None
    except OSError as error:
        problem, remedy = f"output_dir cannot be used: {error.strerror}", "choose another"
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            problem = f"this file system has no locks ({error.strerror}), as a mounted bucket has none"
            remedy = "set output_dir to a local disk, and run.storage to the bucket's address"
        raise FinetuneError(f"{run_dir}: {problem}; {remedy}") from None


def refuse_mount(run_dir: Path) -> None:
    """Raise FinetuneError if the file system cannot do what a run needs, as a bucket that is mounted cannot: append,
    write in place, rename a file and a folder, lock."""
    trial, step = run_dir / f"{TEMPORARY_PREFIX}trial", "make a folder"
    try:
        trial.mkdir(exist_ok=True)
        file = trial / "file"
        step = "append to a file"
        for _ in range(2):
            with open(file, "ab") as appended:
                appended.write(b"1")
        step = "write in place"
        with open(file, "r+b") as written:
            written.write(b"2")
        step = "rename a file"
        os.replace(file, trial / "renamed")
        step = "keep what was written"
        if (trial / "renamed").read_bytes() != b"21":
            raise OSError(errno.EIO, "a file has other content")
        step = "rename a folder"
        remove_folder(moved := trial.with_name(f"{trial.name}-moved"))
        os.rename(trial, moved)
        trial = moved
        step = "lock a file"
        os.close(lock(trial / "renamed", wait_seconds=0))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise FinetuneError(f"{run_dir}: output_dir cannot be used: {error.strerror}; choose another") from None
        raise FinetuneError(
            f"{run_dir}: this file system cannot {step} ({error.strerror}), as a mounted bucket cannot; set output_dir "
            "to a local disk, and run.storage to the bucket's address"
        ) from None
    finally:
        with suppress(OSError):
            remove_folder(trial)


def mark_run(
    run_dir: Path, state: RunState, *, step: int, exported: Mapping[str, Any] | None = None, reason: str | None = None
) -> str:
    """Write the run's state after `step`, the exported step, and what stopped it. Returns the command that continues
    the run."""
    saved = read_state(run_dir)
    if saved is None:
        raise FinetuneError(f"{run_dir}: the run's folder, or its {STATE}, was deleted or renamed while it trained")
    more: dict[str, Any] = {"exported": dict(exported)} if exported else {}
    if reason is not None:
        more["reason"] = reason
    _write_state(run_dir, state, step, saved["command"], saved["identity"], more)
    return str(saved["command"])


def record_base(run_dir: Path, base: Mapping[str, Any]) -> None:
    """Write the base's identity into a running run's state. A base from the Hub has its files here only when loaded."""
    with exclusive(run_dir / STATE_LOCK):
        saved = read_state(run_dir)
        if saved is not None and saved["state"] == "running":
            _write_state(run_dir, "running", saved["step"], saved["command"], saved["identity"] | {BASE: dict(base)})


def mark_step(run_dir: Path, step: int) -> None:
    """Write the present step into a running run's state. A failure that another rank has recorded stays."""
    with exclusive(run_dir / STATE_LOCK):
        saved = read_state(run_dir)
        if saved is not None and saved["state"] == "running":
            _write_state(run_dir, "running", step, saved["command"], saved["identity"])


def mark_failed(run_dir: Path, error: BaseException | str, *, phase: str, rank: int, step: int) -> None:
    """Record a failure, from any rank. The first one stays: other ranks' later failures are its consequences.

    `error` may be a text, as another rank has sent it. A machine that does not see the run's folder records nothing.
    """
    if not (run_dir / STATE).exists():
        return
    if isinstance(error, BaseException):
        error = f"{type(error).__name__}: {error}"
    failure = {"phase": phase, "rank": rank, "error": error}
    with exclusive(run_dir / STATE_LOCK):
        saved = read_state(run_dir)
        if saved is not None and saved["state"] == "running":
            _write_state(run_dir, "failed", step, saved["command"], saved["identity"], failure)


def _write_state(
    run_dir: Path,
    state: RunState,
    step: int,
    command: str,
    identity: Mapping[str, Any],
    more: Mapping[str, Any] | None = None,
) -> None:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    facts = {"state": state, "step": step, **(more or {}), "command": command, "updated": now}
    write_json(run_dir / STATE, {**facts, "process": os.getpid(), "identity": dict(identity)})


LENGTH_KEYS = ("training.num_train_epochs", "training.max_steps")  # the keys of a run's identity that may grow
HANDED_OVER = ("adapter", "model", "merged", "serving", "hub.json")


@dataclass(frozen=True)
class RunLength:
    """The length that this start's recipe asks for. A finished run continues if it is longer.

    The finished run's result then moves to exports/end-NNNNNNNN, which chat, eval, merge and push read. So nothing in
    the run's folder is older than the run.
    """

    training: Training
    rows: int  # in an epoch

    @property
    def total_rows(self) -> int:
        return self.training.rows_of_run(self.rows)

    @property
    def steps(self) -> int:
        return math.ceil(self.total_rows / self.training.global_batch_size)

    def as_before(self, identity: Mapping[str, Any]) -> RunLength:
        """This recipe with the length of the run in the folder."""
        before = {key.removeprefix("training."): identity.get(key) for key in LENGTH_KEYS}
        return RunLength(self.training.model_copy(update=before), self.rows)


def go_on(
    run_dir: Path, planned: RunLength, length: RunLength, newest: Checkpoint | None, done: int
) -> tuple[Checkpoint, str]:
    """Prepare a finished run's folder for a longer run. Returns the checkpoint to start from, and a line for the user.

    If the rows ended in a short last step, the longer run has more rows there, and continues from the checkpoint before
    it, if there is one. Example with 10 rows and steps of 4 rows: step 3 had 2 rows. A run over 20 rows has 4 there, so
    it continues from step 2. Checkpoints after the start are deleted, and the run's result moves to exports/.

    Args:
        planned: The length that the finished run's recipe asked for.
        newest: Its newest valid checkpoint; None: none is left.
        done: The run's last step.

    Raises FinetuneError if early stopping ended the run, or no checkpoint is left.
    """
    start_with = f"model.name_or_path={run_dir / 'model'}"
    if (run_dir / "adapter").is_dir():
        start_with = f"model.adapter={run_dir / 'adapter'}"
    remedy = f"begin a new run with its result: {shlex.quote(start_with)} and another output_dir"
    # Early stopping may also have come in the very last step. Then it would end the longer run at once.
    stopped_early, patience = done < planned.steps, length.training.early_stopping_patience
    if not stopped_early and newest is not None and patience is not None:
        stopped_early = int(read_state_of(newest)["worse_evaluations"]) >= patience
    if stopped_early:
        raise FinetuneError(f"{run_dir}: early stopping ended this run at step {done} of {planned.steps}; {remedy}")
    if newest is None:
        raise FinetuneError(f"{run_dir}: this finished run has no checkpoint to go on from; {remedy}")
    start, note = newest, ""
    batch = planned.training.global_batch_size
    rows = planned.total_rows % batch  # in a short last step; 0: it was full
    if rows and newest.step == done:
        note = f"; step {done} had {rows} of {batch} rows"
        earlier, _ = newest_valid(run_dir, before=done)
        if earlier is None:
            note += f", no checkpoint before it is left: {batch - rows} rows are skipped"
        else:
            start, note = earlier, f"{note} and is repeated with all of them"
    line = f"{run_dir}: {_in_words(length, planned, start.step)}{note}"
    _set_aside(run_dir, start.step, done)
    return start, line


def _in_words(length: RunLength, planned: RunLength, start: int) -> str:
    """Describe the learning rate, and whether the curve equals that of a run planned with the new length."""
    training, rate = length.training, Schedule(length.training, length.steps).rate
    before = Schedule(planned.training, planned.steps).rate
    finished = f"finished after {planned.steps} steps, goes on from step {start} to {length.steps}"
    # Equal rates for all finished steps, as with a constant schedule, make the longer run's curve that of a new run.
    if all(before(step) == rate(step) for step in range(start)):
        return f"{finished}; its learning rates so far are those of a run planned with {length.steps} steps"
    return (
        f"{finished}; learning rate: {training.lr_scheduler_type} of {length.steps} steps, {rate(start):.3g} at step "
        f"{start + 1} ({before(start - 1):.3g} before): the curve is not that of a run planned with {length.steps} "
        "steps"
    )


def _set_aside(run_dir: Path, start: int, done: int) -> None:
    """Move the run's result after `done` steps to exports/, and delete checkpoints after step `start`."""
    folder = run_dir / EXPORTS / f"end-{done:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    for name in EXPORTED_RECORDS:
        if (run_dir / name).is_file():
            shutil.copyfile(run_dir / name, folder / name)
    # The exported weights are not the last step's if the best evaluation's were exported.
    try:
        step = json.loads((folder / "receipt.json").read_text(encoding="utf-8")).get("export", {}).get("step") or done
    except (OSError, ValueError):
        step = done
    write_json(folder / EXPORT_RECORD, {"run": run_dir.resolve().name, "step": step})
    # A crash may have come between two of these renames. Then the next start moves the rest.
    for name in HANDED_OVER:
        if (run_dir / name).exists() and not (folder / name).exists():
            os.rename(run_dir / name, folder / name)
    sync(folder)
    for step in checkpoint_steps(run_dir):
        if step > start:
            remove_folder(step_folder(run_dir, step))
