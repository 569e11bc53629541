"""Files that are complete or absent: written aside, synced, renamed. No torch here, so that reports can read runs.

Whatever is written aside is named `.tmp-*`; a crash leaves such a name behind and nothing else, and the next start of
the run clears it away (`clear_leftovers`).
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from finetune.errors import EnvironmentMismatch

ASIDE = ".tmp-"


def cache_folder() -> Path:
    """$FINETUNE_CACHE, or ~/.cache/finetune: converted models and tokenised data sets."""
    return Path(os.environ.get("FINETUNE_CACHE") or Path.home() / ".cache" / "finetune")


def write_text(path: Path, text: str) -> None:
    """Replaces `path` by `text`, or leaves it as it was."""
    aside = path.with_name(f"{ASIDE}{os.getpid()}-{path.name}")
    with disk_errors(path):
        with open(aside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        sync(path.parent)


def write_json(path: Path, value: object) -> None:
    """Like write_text; NaN and infinity are refused, since JSON has no such numbers."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def sync(path: Path) -> None:
    """fsync of a file, or of a folder's list of names: without it a rename can outlive its file's content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish_folder(aside: Path, target: Path) -> None:
    """Gives a folder that was written aside its name; a folder of that name makes way first.

    A folder cannot be renamed over a full one, so between the two renames neither has the name: callers only replace
    what can be made again.
    """
    for path in sorted(aside.rglob("*")):
        sync(path)
    sync(aside)
    old = target.with_name(f"{ASIDE}old-{target.name}")
    if target.exists():
        remove_folder(old)
        os.rename(target, old)
    os.rename(aside, target)
    sync(target.parent)
    remove_folder(old)


def remove_folder(path: Path) -> None:
    """Deletes a folder; a crash midway leaves only a `.tmp-` name, never half a folder under its own name."""
    if not path.exists():
        return
    if not path.name.startswith(ASIDE):
        aside = path.with_name(f"{ASIDE}gone-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(path, aside)
        path = aside
    shutil.rmtree(path)


def clear_leftovers(folder: Path) -> None:
    """Deletes what a crash left written aside."""
    for path in sorted(folder.glob(f"{ASIDE}*")):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends one JSON object a line in one write each, so that a reader sees whole lines.

    Numbers keep their full precision; NaN and infinity, which JSON lacks, become null.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        with disk_errors(path):
            for row in rows:
                line = (json.dumps(_finite(row), ensure_ascii=False, allow_nan=False) + "\n").encode()
                written = os.write(descriptor, line)
                if written != len(line):  # the disk filled up within the line
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file; one that is still being written, or torn by a crash, ends the list."""
    return [row for row, _ in _whole_lines(path)]


def cut_lines(path: Path, last_step: int) -> None:
    """Keeps, bit for bit, the lines up to `last_step`: what the checkpoint of that step had seen.

    A line without a whole number `step` is kept. A torn line, and what follows it, goes: everything up to a checkpoint
    was synced before it, so a tear is younger.
    """
    if not path.exists():
        return
    kept = [line for row, line in _whole_lines(path) if not _later(row, last_step)]
    content = b"".join(kept).decode("utf-8")
    if content != path.read_bytes().decode("utf-8", errors="replace"):
        write_text(path, content)


def _later(row: Mapping[str, Any], last_step: int) -> bool:
    step = row.get("step")
    return isinstance(step, int) and step > last_step


def _whole_lines(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    with open(path, "rb") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                return
            if not line.endswith(b"\n") or not isinstance(row, dict):
                return
            yield row, line


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return value


@contextmanager
def disk_errors(path: Path, kept: str = "") -> Iterator[None]:
    """Turns a full or unwritable disk into one line: what could not be written, what is `kept`, what to do."""
    try:
        yield
    except OSError as error:
        raise EnvironmentMismatch(_disk_message(path, error.errno, error.strerror or str(error), kept)) from error
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))  # it carries the errno in its text alone
        if found is None:
            raise
        number = int(found[1])
        raise EnvironmentMismatch(_disk_message(path, number, os.strerror(number), kept)) from error


def _disk_message(path: Path, number: int | None, reason: str, kept: str) -> str:
    if number not in (errno.ENOSPC, errno.EDQUOT):
        return f"{path}: could not be written: {reason}; {kept}check the folder's rights and its disk"
    free = shutil.disk_usage(next(parent for parent in path.parents if parent.exists())).free
    return (
        f"{path}: could not be written: the disk is full ({free / 2**20:,.0f} MiB free); {kept}"
        "free some space or choose another output_dir, then run the same command again"
    )


def lock(path: Path, *, wait_seconds: float) -> int:
    """Holds `path` for this process's life; returns the open descriptor.

    A POSIX record lock: the kernel drops it with the process, also at SIGKILL, and a forked helper that lives on does
    not inherit it (flock's would be). It does not guard a process against itself.

    Raises:
        BlockingIOError: another living process holds it, still after `wait_seconds` (a run that was told to stop
            saves first, and its launcher may have returned to the prompt before).
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            holder = os.read(descriptor, 200).decode(errors="replace").strip()
            os.close(descriptor)
            raise BlockingIOError(errno.EAGAIN, holder or "unknown") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        return descriptor
