"""Send a run's checkpoints and records to its storage while it trains.

A thread that mostly waits for the network sends one checkpoint at a time, then the newest one saved meanwhile. A
failure is logged, the next checkpoint is another attempt, and the training does not wait.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.files import TEMPORARY_PREFIX, remove_folder
from finetune.hub.upload_files import SOMEBODYS_HOME, Outgoing, check_no_secrets, path_replacements, without_local_paths
from finetune.launch.signals import grace_period
from finetune.recipe.schema import Recipe
from finetune.redaction import known_secrets
from finetune.run_folder.checkpoint import step_folder
from finetune.run_folder.facts import STATE, read_state
from finetune.storage.backends import attempt
from finetune.storage.journal import Lease, Saved

MIRRORED_FILES = (
    *("metrics.jsonl", "samples.jsonl", "reference.json", "receipt.json", "recipe.yaml", "conversation.json"),
    *("report.html", "loss.png", "rewards.png", "memory.png"),
)
LOCAL = "a path of another machine, "
END_SECONDS = 3600.0  # the longest wait for the network after the last step
STOP_SECONDS = 300.0  # after a signal or run.stop_after; half of the grace period if that is shorter
FAILED_SECONDS = 10.0  # after an error


class Mirror:
    """Rank 0's copy of its run on the storage. `push` may be called on any thread."""

    def __init__(
        self,
        recipe: Recipe,
        lease: Lease,
        say: Callable[[str], None] = print,
        *,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._recipe, self._run_dir, self._key = recipe, Path(recipe.run_dir), recipe.storage_key
        self._lease, self._say, self._pause = lease, say, pause
        self._replacements = path_replacements(recipe, self._run_dir)
        self._lock = threading.Lock()
        self._next: tuple[int, int | None] | None = None
        self._thread: threading.Thread | None = None
        self._refused: set[str] = set()  # records with a secret in them, each reported once
        self._searched: dict[str, int] = {}  # bytes of growing files in which no secret was found
        # The Hub keeps deleted files in the branch's history, so one checkpoint beside the best is enough there.
        self._keep = 1 if lease.storage.in_one_commit else recipe.save_total_limit

    @property
    def lost(self) -> str | None:
        """The line that says which start has taken over; None: this one owns the run."""
        return self._lease.lost

    def give_back(self) -> None:
        """Own nothing any more: this start does not train."""
        self._lease.close()

    def push_missing(self, step: int, best: int | None) -> None:
        """Send the checkpoint that a start continues from, if the machine went away before it had arrived."""
        if step not in {saved.step for saved in self._lease.entry.checkpoints}:
            self.push(step, best)

    def push(self, step: int, best: int | None) -> None:
        """Send a complete checkpoint now, or after the one that is being sent.

        Args:
            best: The step of one more checkpoint that a restart needs; it is sent if the storage lacks it.
        """
        with self._lock:
            if self._next is not None:
                # The newer checkpoint replaces the one that still waits.
                self._say(f"{self._key}: step {self._next[0]} is replaced by the next one and is not sent")
                with suppress(FileNotFoundError):
                    remove_folder(self._staged)
            on_storage = {saved.step for saved in self._lease.entry.checkpoints}
            for saved_step in {step, best} - {None}:
                if saved_step == step or saved_step not in on_storage:
                    self._stage(step, saved_step)  # type: ignore[arg-type]  # not None
            self._next = step, best
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="checkpoints to the storage", daemon=True)
                self._thread.start()

    def close(self, *, wait: bool) -> None:
        """Send what is left and the run's last records, and give the lease back.

        `wait`: until that is done, or END_SECONDS or STOP_SECONDS have passed; else for FAILED_SECONDS. Raises
        FinetuneError if another start has taken over the run.
        """
        seconds = FAILED_SECONDS
        if wait:
            seconds = END_SECONDS
            if (read_state(self._run_dir) or {}).get("state") == "stopped":
                seconds = STOP_SECONDS
                if (grace := grace_period()) is not None:
                    seconds = min(seconds, grace[0] / 2)
        last, thread = threading.Thread(target=self._end, name="records to the storage", daemon=True), self._thread
        if wait and thread is not None:
            self._say(f"waiting for the last checkpoint to reach {self._lease.storage.url}, {seconds:g} s at most")
        last.start()
        last.join(seconds)
        if wait and last.is_alive():
            self._say(f"{self._key}: not all has arrived after {seconds:g} s; it is in {self._run_dir}")
        if wait and self.lost is not None:
            raise FinetuneError(self.lost)

    def _end(self) -> None:
        if (thread := self._thread) is not None:
            thread.join()
        records = self._records()
        sizes = {name: _size(content) for name, content in records.items()}

        def send() -> None:
            self._lease.refresh()
            self._lease.publish(records, self._lease.entry.checkpoints, sizes)

        self._try("the last records were", send)
        self._lease.close()

    def _work(self) -> None:
        while True:
            with self._lock:
                job, self._next = self._next, None
                if job is None:
                    self._thread = None
                    return
                sending = self._run_dir / f"{TEMPORARY_PREFIX}sending"
                remove_folder(sending)
                os.rename(self._staged, sending)
            # The lock is free while the network is slow, so that push() never makes the training wait.
            step, best = job
            self._try(f"step {step} was", lambda: self._send(sending, step, best))  # noqa: B023  # called at once
            remove_folder(sending)

    def _try(self, what: str, send: Callable[[], None]) -> None:
        """A failed upload must not end a training. One that has lost its run ends by itself, and says why."""
        try:
            attempt(self._lease.storage, send, self._pause)
        except Exception as error:
            if self.lost is None:
                self._say(f"{self._key}: {what} not sent: {error}; the training continues")

    def _send(self, staged: Path, step: int, best: int | None) -> None:
        self._lease.refresh()
        folder, files, new = self._lease.next_folder, dict[str, Path | bytes](), dict[int, Saved]()
        for checkpoint in sorted(staged.iterdir()):
            # A reader counts on the entry alone. A manifest that comes last is for whoever copies by hand.
            paths = sorted(checkpoint.iterdir(), key=lambda path: (path.name == "MANIFEST.json", path.name))
            files |= {f"checkpoints/{checkpoint.name}/{path.name}": path for path in paths}
            number = int(checkpoint.name.removeprefix("step-"))
            new[number] = Saved(number, folder, {path.name: path.stat().st_size for path in paths})
        # Checkpoints after `step` were found damaged at the start.
        earlier = {saved.step: saved for saved in self._lease.entry.checkpoints if saved.step < step}
        steps = sorted({**earlier, **new})
        kept = {*steps[-self._keep :], *({best} & set(steps))}
        records = self._records()
        self._lease.publish(
            {**files, **records},
            [({**earlier, **new})[number] for number in kept],  # type: ignore[index]  # a step
            {name: _size(content) for name, content in records.items()},
        )

    def _records(self) -> dict[str, Path | bytes]:
        """The run's records as they may leave this machine: without local paths, and none that holds a secret."""
        records: dict[str, Path | bytes] = {}
        for name in MIRRORED_FILES:
            path = self._run_dir / name
            if not path.is_file() or path.is_symlink():
                continue
            if path.suffix == ".png":
                records[name] = path
                continue
            text = path.read_text(encoding="utf-8", errors="replace")
            records[name] = without_local_paths(text, self._replacements).encode()
        if (state := read_state(self._run_dir)) is not None:
            records[STATE] = self._state(state)
        known = known_secrets()
        for name, content in list(records.items()):
            searched, new = self._searched.get(name, 0), content
            if isinstance(content, bytes) and name.endswith(".jsonl"):
                new = content[searched:]
            try:
                check_no_secrets([Outgoing(name, new)], known)
                self._searched[name] = _size(content)
            except FinetuneError as error:
                del records[name]
                if name not in self._refused:
                    self._refused.add(name)
                    self._say(f"{self._key}: {' '.join(str(error).splitlines()[1:])}; it is not sent")
        return records

    def _state(self, state: Mapping[str, Any]) -> bytes:
        """run_state.json without the command, which names this machine's paths, and with hashes for paths."""
        kept = {key: value for key, value in state.items() if key not in ("command", "process", "identity")}
        for key, value in kept.items():
            if isinstance(value, str):
                kept[key] = SOMEBODYS_HOME.sub("~", without_local_paths(value, self._replacements))
        identity = _without_paths(state["identity"], self._replacements)
        return json.dumps({**kept, "command": "", "identity": identity}, indent=1).encode()

    @property
    def _staged(self) -> Path:
        return self._run_dir / f"{TEMPORARY_PREFIX}staged"

    def _stage(self, step: int, saved_step: int) -> None:
        """Keep the files while they are sent, even if the checkpoint is pruned. Hard links take no space."""
        source = step_folder(self._run_dir, saved_step)
        if saved_step != step and not source.is_dir():  # the best one, of a run whose folder lost it
            return
        target = self._staged / source.name
        target.mkdir(parents=True, exist_ok=True)
        for file in source.iterdir():
            try:
                os.link(file, target / file.name)
            except OSError:  # a file system without hard links
                shutil.copyfile(file, target / file.name)


def _size(content: Path | bytes) -> int:
    if isinstance(content, bytes):
        return len(content)
    return content.stat().st_size


def hidden(value: str) -> str:
    """A text in place of a local path, the same for the same path."""
    return LOCAL + hashlib.sha256(value.encode()).hexdigest()[:16]


def _without_paths(value: Any, replacements: Mapping[str, str]) -> Any:
    """A run's identity, whose local paths are hashes: a start with the same path is the same run."""
    if isinstance(value, str):
        if os.path.isabs(value) or without_local_paths(value, replacements) != value or SOMEBODYS_HOME.search(value):
            return hidden(value)
        return value
    if isinstance(value, Mapping):
        return {key: _without_paths(entry, replacements) for key, entry in value.items()}
    if isinstance(value, list):
        return [_without_paths(entry, replacements) for entry in value]
    return value


def with_own_paths(value: Any, own: Any) -> Any:
    """The reverse for a start here: each hash of this start's own path becomes that path."""
    if isinstance(value, str) and isinstance(own, str) and value == hidden(own):
        return own
    if isinstance(value, Mapping) and isinstance(own, Mapping):
        return {key: with_own_paths(entry, own.get(key)) for key, entry in value.items()}
    if isinstance(value, list) and isinstance(own, list) and len(value) == len(own):
        return [with_own_paths(*pair) for pair in zip(value, own, strict=True)]
    return value
