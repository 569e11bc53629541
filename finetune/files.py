"""Files that are complete or absent: written under a temporary name, synced, renamed. No torch here, so that reports
can read runs.

Temporary names begin with `.tmp-`. A crash leaves such a file or folder behind and nothing else, and the next start of
the run deletes it (`clear_leftovers`).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.library_errors import library_errors
from finetune.output_stream import one_line
from finetune.paths import kind_of_file, open_regular, regular_descriptor

TEMPORARY_PREFIX = ".tmp-"
MOST_LINES_BYTES = 4 * 2**30  # a line a step is 300 bytes: of ten million steps
MOST_SEALED_BYTES = 64 * 2**20  # a cache's facts have some kB


def cache_folder() -> Path:
    """$FINETUNE_CACHE, or ~/.cache/finetune: converted models and tokenised data sets."""
    try:
        return Path(os.environ.get("FINETUNE_CACHE") or "~/.cache/finetune").expanduser()
    except RuntimeError:  # no HOME, and the system does not know this user
        raise EnvironmentMismatch(
            "this user has no home folder; set HOME to a folder that can be written, or FINETUNE_CACHE and HF_HOME"
        ) from None


def write_text(path: Path, text: str) -> None:
    """Replaces the file's content by `text`, or leaves it as it was. Raises EnvironmentMismatch where it cannot."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{path.name}")
    with library_errors(writing=path):
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)


def write_json(path: Path, value: object) -> None:
    """Like write_text; NaN and infinity are refused, since JSON has no such numbers."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_sealed(path: Path, value: object) -> None:
    """Like write_json, with a digest of the value beside it, for `read_sealed`."""
    write_json(path, {"digest": _digest_of(value), "value": value})


def read_sealed(path: Path) -> Any:
    """The value that `write_sealed` wrote; None if the file is missing, changed or torn.

    A changed or torn file is reported in one line, because the caller then makes this cache again.
    """
    try:
        with open_regular(path) as file:
            content = json.loads(file.read(MOST_SEALED_BYTES))
        if content["digest"] == _digest_of(content["value"]):
            return content["value"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass
    print(f"{path}: is not what was written there; it is made again", file=sys.stderr, flush=True)
    return None


def _digest_of(value: object) -> str:
    """Digest of the value as JSON reads it back, with object keys as text."""
    text = json.dumps(json.loads(json.dumps(value)), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def sync(path: Path) -> None:
    """fsync a file, or a folder's list of names: without it a rename can outlive its file's content."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would wait for a writer
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish_folder(temporary: Path, target: Path) -> None:
    """Rename the folder `temporary` to `target`. An existing `target` is renamed first and deleted afterwards.

    Every file gets a new file's mode. A folder cannot be renamed onto a folder with files, so between the two renames
    no folder has the name. Callers therefore only replace folders that can be made again.
    """
    mode = _mode_of_a_new_file(temporary)
    for path in sorted(temporary.rglob("*")):
        if path.is_file() and not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) != mode:
            path.chmod(mode)
        sync(path)
    sync(temporary)
    old = target.with_name(f"{TEMPORARY_PREFIX}old-{target.name}")
    if os.path.lexists(target):
        remove_folder(old)
        os.rename(target, old)
    os.rename(temporary, target)
    sync(target.parent)
    remove_folder(old)


def _mode_of_a_new_file(folder: Path) -> int:
    """0666 less the umask, or the mode that the folder's default ACL gives.

    Libraries write files with other modes: safetensors 0.8 renames a temporary file with mode 0600, and transformers
    copies a model's code with its mode. A new file shows the right mode. Reading the umask would set it for a moment,
    and other threads would then write files that everybody can change.
    """
    probe = folder / f"{TEMPORARY_PREFIX}mode"
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        return stat.S_IMODE(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)
        probe.unlink()


def remove_folder(path: Path) -> None:
    """Deletes a folder; a crash midway leaves only a `.tmp-` name, never half a folder under its own name.

    A link, a pipe or a file in its place is deleted alone.
    """
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    if not path.name.startswith(TEMPORARY_PREFIX):
        temporary = path.with_name(f"{TEMPORARY_PREFIX}gone-{path.name}")
        remove_folder(temporary)  # rmtree would open a pipe and wait for a writer
        os.rename(path, temporary)
        path = temporary
    shutil.rmtree(path)


def clear_leftovers(folder: Path) -> None:
    """Deletes the temporary files and folders that a crash left behind."""
    for path in sorted(folder.glob(f"{TEMPORARY_PREFIX}*")):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def check_output(path: Path, option: str, *, folder: bool = False) -> None:
    """Refuse, before any work, a place where a file or a folder cannot be written. Raises FinetuneError.

    Args:
        option: The option that named the path, for the message: `--output`.
        folder: The output is a folder. The caller checks its present content.
    """
    kind = "folder" if folder else "file"
    try:
        if "\0" in str(path):
            raise ValueError("a name has no null character")
        there = path.stat() if path.exists() or path.is_symlink() else None
        if there is not None and not (stat.S_ISDIR if folder else stat.S_ISREG)(there.st_mode):
            what = "is a folder" if stat.S_ISDIR(there.st_mode) else kind_of_file(there.st_mode)
            if stat.S_ISREG(there.st_mode):
                what = "is a file"
            raise FinetuneError(f"{option}: {one_line(path, 200)} {what}; name a {kind} that may be written")
        above = next(parent for parent in (path, *path.parents) if parent.exists())
        if above != path and not above.is_dir():
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        place = above if above.is_dir() else above.parent
        with tempfile.TemporaryFile(dir=place):  # permission bits do not show a read-only disk or /proc
            pass
        # Lengths of the names to be made: only the file system knows its limit.
        for part in path.parts:
            if len(os.fsencode(part)) + len(TEMPORARY_PREFIX) + 12 > os.pathconf(place, "PC_NAME_MAX"):
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise FinetuneError(
            f"{option}: {one_line(path, 200)} cannot be written: {reason}; name another {kind}"
        ) from None


def json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """The text of a JSONL file."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append one JSON object per line, each in one write, so that a reader sees complete lines.

    Numbers keep their full precision. NaN and infinity, which JSON lacks, become null.
    """
    with library_errors(writing=path):
        descriptor = regular_descriptor(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)
    try:
        with library_errors(writing=path):
            for row in rows:
                line = (json.dumps(finite_values(row), ensure_ascii=False, allow_nan=False) + "\n").encode()
                written = os.write(descriptor, line)
                if written != len(line):  # the disk filled up within the line
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)


def read_lines(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """A JSONL file's complete lines, or those in its last bytes. Torn ones, from a crash or a damaged disk, are passed
    over."""
    return [row for row, _ in _lines(path, last_bytes) if row is not None]


def torn_lines(path: Path) -> int:
    """How many lines cannot be read; without one at the file's end that is still being written, or was at a crash."""
    return sum(row is None and line.endswith(b"\n") for row, line in _lines(path))


def cut_lines(path: Path, last_step: int) -> int:
    """Keeps, bit for bit, the lines up to `last_step`: those that were there when that step's checkpoint was written.

    A line without an integer `step` is kept, a torn line is dropped. Returns the number of torn lines, as `torn_lines`
    counts them.
    """
    if not path.exists():
        return 0
    kept, torn = list[bytes](), 0
    for row, line in _lines(path):
        if row is None:
            torn += line.endswith(b"\n")
        elif not isinstance(step := row.get("step"), int) or step <= last_step:
            kept.append(line)
    content = b"".join(kept).decode("utf-8")
    if content != path.read_bytes().decode("utf-8", errors="replace"):
        write_text(path, content)
    return torn


def _lines(path: Path, last_bytes: int | None = None) -> Iterator[tuple[dict[str, Any] | None, bytes]]:
    """Each line and its value; None if it is torn."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if last_bytes is None and size > MOST_LINES_BYTES:
            raise FinetuneError(f"{path}: is larger than a run's; take the file of the run itself")
        if last_bytes is not None and (start := size - last_bytes) > 0:
            file.seek(start - 1)
            file.readline()  # the end of the line before
        for line in file:
            row = None
            with suppress(ValueError, RecursionError):
                row = json.loads(line)
            yield (row if line.endswith(b"\n") and isinstance(row, dict) else None), line


def finite_values(value: Any) -> Any:
    """A value for JSON, which has no NaN and no infinity: they become null."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return None
    if isinstance(value, (str, int)) or value is None:
        return value
    if isinstance(value, Mapping):
        return {key: finite_values(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_values(entry) for entry in value]
    return value


LOCK = ".lock"  # in a folder: the process that writes in it holds the lock
LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW  # a lock's content is written: never through a link
_one_thread = threading.Lock()  # a record lock excludes other processes alone


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Within the block, no other thread or process is in one for the same `path`, which is made."""
    with _one_thread, open(regular_descriptor(path, LOCK_FLAGS), "wb", buffering=0) as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def lock(path: Path, *, wait_seconds: float) -> int:
    """Lock `path` for the life of this process; returns the open descriptor.

    A POSIX record lock: the kernel drops it when the process ends, also by SIGKILL. A forked child that outlives the
    process does not inherit it (it would inherit flock's). The lock excludes other processes, but not this one.

    Raises:
        BlockingIOError: another living process still holds it after `wait_seconds` (a run that was asked to stop saves
            first, and its launcher may have returned to the prompt before).
    """
    descriptor = regular_descriptor(path, LOCK_FLAGS)
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


@contextmanager
def making(target: Path) -> Iterator[Path]:
    """A name beside `target` for the folder that becomes it. Nothing has that name before, and nothing afterwards.

    Raises FinetuneError if another process makes `target` now: both would write into one folder.
    """
    temporary = target.with_name(f"{TEMPORARY_PREFIX}{target.name}")
    held, file = None, temporary.with_name(f"{temporary.name}.lock")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        held = lock(file, wait_seconds=0)
    except BlockingIOError as error:
        raise FinetuneError(f"{target}: {error.strerror} is writing it; wait until it has ended") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # a file system without locks
            raise
    try:
        remove_folder(temporary)
        yield temporary
    finally:
        remove_folder(temporary)
        file.unlink(missing_ok=True)
        if held is not None:
            os.close(held)


def is_locked(path: Path) -> bool:
    """Whether a living process holds the file's lock. Do not call it in the process that holds it: that drops it."""
    try:
        with open_regular(path, follow=False) as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        return False
    return False


@contextmanager
def loading_in_this_thread() -> Iterator[None]:
    """Have transformers read weights in this thread, one parameter after another.

    A dispatch mode does not see the operations of other threads. And four threads hold four parameters in 16 bits.
    """
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
