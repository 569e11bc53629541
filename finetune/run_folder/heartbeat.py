"""Signs of life: each rank locks a small file in the run's folder and writes into it where it is.

The lock tells death: the kernel drops it with the process, between machines too. The content tells a freeze: a stopped
process no longer writes. Neither needs the network, on which a dead rank may leave the others waiting.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

FOLDER = ".ranks"
_BYTES = 1024  # each beat is as long as any other, so that one write replaces the last

State = Literal["running", "ended", "failed", "left"]  # left: ended because of another rank


@dataclass(frozen=True)
class Beat:
    """What a rank last said of itself."""

    rank: int
    token: int  # of this start: an older file of the same name is none of ours
    host: str
    machine: str  # which kernel and which numbering of processes, so that a process may be looked up
    process: int
    state: State
    phase: str
    step: int  # finished optimizer steps
    count: int


def beat_file(run_dir: Path, rank: int) -> Path:
    return run_dir / FOLDER / f"rank-{rank:05d}.json"


def clear_beats(run_dir: Path) -> None:
    """An empty folder for the beats. For rank 0, before the others begin."""
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink(missing_ok=True)


class Heartbeat:
    """This rank's own beat. Nothing else in this process may open its file: closing that would drop the lock."""

    def __init__(self, run_dir: Path, rank: int, token: int) -> None:
        self._file = os.open(beat_file(run_dir, rank), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        self._rank, self._token, self._count = rank, token, 0
        self._one_at_a_time = threading.Lock()

    def beat(self, state: State, phase: str, step: int, *, sync: bool = False) -> None:
        """Writes the beat; with `sync` it also leaves this machine (NFS would keep it for half a minute)."""
        with self._one_at_a_time:
            self._count += 1
            own = Beat(
                self._rank,
                self._token,
                socket.gethostname(),
                this_machine(),
                os.getpid(),
                state,
                phase,
                step,
                self._count,
            )
            os.pwrite(self._file, json.dumps(asdict(own)).encode().ljust(_BYTES), 0)
        if sync:
            os.fdatasync(self._file)


def read_beat(run_dir: Path, rank: int, token: int) -> Beat | None:
    """A rank's last beat; None before its first, or when it was read in the middle of a write."""
    try:
        beat = Beat(**json.loads(beat_file(run_dir, rank).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
    return beat if beat.token == token else None


def holds_lock(run_dir: Path, rank: int) -> bool:
    """Whether a living process holds that rank's file. Not for the own rank."""
    try:
        with open(beat_file(run_dir, rank), "rb") as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        return False
    return False


def process_is_gone(beat: Beat) -> bool:
    """Whether the beat's process has ended, as far as this machine can tell."""
    return beat.machine == this_machine() and not psutil.pid_exists(beat.process)


_machine: str | None = None


def this_machine() -> str:
    """Which running kernel this is, and which numbering of its processes (containers have their own)."""
    global _machine
    if _machine is None:
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            _machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        except OSError:
            _machine = f"{socket.gethostname()} {os.getppid()}"
    return _machine
