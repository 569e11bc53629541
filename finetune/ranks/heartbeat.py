"""Heartbeats: each rank locks a small file in the run's folder and writes its position into it.

The lock shows death: the kernel drops it with the process, and other machines see that too. The content shows a freeze:
a stopped process no longer writes. Neither needs the network, where a dead rank may leave the others waiting. Machines
that do not see one folder use network_heartbeat.py.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import psutil

from finetune.files import is_locked, remove_folder
from finetune.paths import read_regular

FOLDER = ".ranks"
NEIGHBOURS = 8  # ranks that each rank watches: the next ones in a ring. 1,024 ranks read 8,192 files, not a million.
_BYTES = 1024  # every record is padded to this length, so that one write replaces the one before

RankState = Literal["running", "ended", "failed", "left"]  # left: ended because of another rank


@dataclass(frozen=True)
class HeartbeatRecord:
    """One heartbeat: where a rank was."""

    rank: int
    token: int  # this start's number: an earlier start's files have another
    host: str
    machine: str  # the rank's `this_machine()`: if it equals ours, we can look up the process
    process: int
    state: RankState
    phase: str
    step: int  # finished optimizer steps
    count: int


def record_now(rank: int, token: int, state: RankState, phase: str, step: int, count: int) -> HeartbeatRecord:
    """This process's heartbeat."""
    return HeartbeatRecord(rank, token, socket.gethostname(), this_machine(), os.getpid(), state, phase, step, count)


def heartbeat_file(run_dir: Path, rank: int) -> Path:
    return run_dir / FOLDER / f"rank-{rank:05d}.json"


def clear_heartbeats(run_dir: Path) -> None:
    """Make the folder of heartbeats, or empty it. Rank 0 calls it before the others begin."""
    folder = run_dir / FOLDER
    if folder.is_symlink():  # else another folder would be emptied
        folder.unlink()
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        remove_folder(path)


class Heartbeats(Protocol):
    """How the others hear of this rank, and it of them: by files (`Heartbeat`), or over the network."""

    failure: dict[str, Any] | None  # the first that this rank heard of

    def watched(self, world_size: int) -> list[int]: ...

    def write(self, state: RankState, phase: str, step: int, *, sync: bool = False) -> None: ...

    def last(self, rank: int) -> HeartbeatRecord | None: ...

    def holds_lock(self, rank: int) -> bool: ...

    def tell(self, failure: Mapping[str, Any]) -> None: ...


class Heartbeat:
    """Writes this rank's heartbeats and reads the others'. Nothing else in this process may open its file: closing it
    would drop the lock."""

    failure: dict[str, Any] | None = None  # run_state.json has it, which every rank sees

    def __init__(self, run_dir: Path, rank: int, token: int) -> None:
        self._file = os.open(heartbeat_file(run_dir, rank), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        self._run_dir, self._rank, self._token, self._count = run_dir, rank, token, 0
        self._one_at_a_time = threading.Lock()

    def write(self, state: RankState, phase: str, step: int, *, sync: bool = False) -> None:
        """Write a heartbeat. `sync` flushes it to other machines at once: NFS would keep it for half a minute."""
        with self._one_at_a_time:
            self._count += 1
            record = record_now(self._rank, self._token, state, phase, step, self._count)
            os.pwrite(self._file, json.dumps(asdict(record)).encode().ljust(_BYTES), 0)
        if sync:
            os.fdatasync(self._file)

    def watched(self, world_size: int) -> list[int]:
        """The ranks that this one watches."""
        return [(self._rank + step) % world_size for step in range(1, world_size)][:NEIGHBOURS]

    def last(self, rank: int) -> HeartbeatRecord | None:
        """A rank's latest heartbeat of this start."""
        return last_heartbeat(self._run_dir, rank, self._token)

    def holds_lock(self, rank: int) -> bool:
        """Whether a living process holds another rank's file."""
        return holds_lock(self._run_dir, rank)

    def tell(self, failure: Mapping[str, Any]) -> None:
        """Nothing: run_state.json tells the others."""


def last_heartbeat(run_dir: Path, rank: int, token: int) -> HeartbeatRecord | None:
    """A rank's latest heartbeat; None before its first, or if the read came in the middle of a write."""
    try:
        record = heartbeat_of(json.loads(read_regular(heartbeat_file(run_dir, rank), 4 * _BYTES, follow=False)))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    if record.token == token:
        return record
    return None


def heartbeat_of(values: Mapping[str, Any]) -> HeartbeatRecord:
    """The heartbeat in a message or a file. Raises TypeError or ValueError for one that no rank wrote."""
    record = HeartbeatRecord(**values)
    numbers, texts = ("rank", "token", "process", "step", "count"), ("host", "machine", "state", "phase")
    if not all(type(values[name]) is int for name in numbers) or not all(type(values[name]) is str for name in texts):
        raise ValueError("a value of another kind")
    return record


def holds_lock(run_dir: Path, rank: int) -> bool:
    """Whether a living process holds that rank's file. Do not call it for this process's own rank."""
    return is_locked(heartbeat_file(run_dir, rank))


@dataclass(frozen=True)
class Meeting:
    """Where this rank works, and how it hears from the others (meeting.py)."""

    run_dir: Path  # rank 0's folder, or the own folder of a machine that does not see it
    heartbeat: Heartbeats | None = None  # None: a single rank
    apart: Mapping[int, int] = field(default_factory=dict)  # as in `Ranks`
    own_lock: int | None = None  # of a machine's own folder, on the rank that made it

    def leave(self) -> None:
        """Delete this machine's own folder, if this rank made it."""
        if self.own_lock is not None:
            shutil.rmtree(self.run_dir, ignore_errors=True)
            os.close(self.own_lock)


def process_is_gone(record: HeartbeatRecord) -> bool:
    """Whether the heartbeat's process has ended. False for a process on another machine, which we cannot look up."""
    return record.machine == this_machine() and not psutil.pid_exists(record.process)


_machine: str | None = None


def this_machine() -> str:
    """A text for the running kernel and this process's process numbering, because containers have their own."""
    global _machine
    if _machine is None:
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            _machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        except OSError:
            _machine = f"{socket.gethostname()} {os.getppid()}"
    return _machine
