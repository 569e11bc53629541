"""Folders and files of this checkout that are used by their path; paths as a user writes them; files as they are."""

from __future__ import annotations

import errno
import gzip
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO

PACKAGE = Path(__file__).resolve().parent
CHECKOUT = PACKAGE.parent  # PYTHONPATH needs it for `import finetune`; a checkout has docs/ here too
# recipes/, accelerate_configs/ and data/: a wheel contains them (setup.py), a checkout has them at its top.
SHIPPED = PACKAGE / "shipped" if (PACKAGE / "shipped").is_dir() else CHECKOUT
RECIPES = SHIPPED / "recipes"
TRAIN_SCRIPT = PACKAGE / "train.py"  # what `accelerate launch` is given

BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # UTF-8's
_KINDS = {
    stat.S_IFIFO: "is a pipe, not a file",
    stat.S_IFSOCK: "is a socket, not a file",
    stat.S_IFCHR: "is a device, not a file",
    stat.S_IFBLK: "is a device, not a file",
}


def kind_of_file(mode: int) -> str:
    """The kind of a path that is neither file nor folder, as text: `is a pipe, not a file`."""
    return _KINDS.get(stat.S_IFMT(mode), "is not a file")


def in_home(text: str) -> str:
    """`~/models/x` with the user's home folder, because no shell expands it in a recipe. Other texts stay as they
    are.

    Raises ValueError, one line, if nobody has that home: a folder named `~name` would be made here.
    """
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        whose = text.partition("/")[0]
        raise ValueError(f"{whose!r} is no user's home folder here; write the whole path, or './{whose}' for a name")
    return expanded


def from_here(path: Path) -> str:
    """Make a path inside the current folder relative, so that scripts also work in a copy elsewhere."""
    absolute, folder = path.absolute(), Path.cwd()
    return str(absolute.relative_to(folder) if absolute.is_relative_to(folder) else absolute)


def regular_descriptor(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file; `flags` are those of os.open.

    Raises OSError, for a pipe or a device too: reading one may never end, and opening a pipe without a writer waits
    forever. With O_NOFOLLOW for a link too: writing through one would change a file elsewhere.
    """
    if flags & os.O_NOFOLLOW and os.path.islink(path):
        raise OSError(errno.ELOOP, f"{os.path.basename(path)} is a link, not a file", str(path))
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind == stat.S_IFREG:
        return descriptor
    os.close(descriptor)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    name = f"{os.path.basename(path)} " if flags & os.O_NOFOLLOW else ""  # of a lock, whose folder the message names
    raise OSError(errno.EINVAL, f"{name}{kind_of_file(kind)}", str(path))


def open_regular(path: str | os.PathLike[str], *, follow: bool = True) -> BufferedReader:
    """Open a file for reading; with `follow` a link to a file too. Raises OSError as `regular_descriptor`."""
    return open(regular_descriptor(path, os.O_RDONLY | (0 if follow else os.O_NOFOLLOW)), "rb")


@contextmanager
def open_bytes(file: Path) -> Iterator[IO[bytes]]:
    """A file's bytes, decompressed if its name ends with .gz. Raises OSError, also for a pipe or a device."""
    with open_regular(file) as stored, gzip.open(stored, "rb") if file.suffix == ".gz" else stored as stream:
        yield stream  # type: ignore[misc]  # gzip's stream reads bytes like any other


def read_regular(path: str | os.PathLike[str], most: int, *, follow: bool = True) -> bytes:
    """A file's bytes. Raises OSError as `open_regular` does, and where there are more than `most`."""
    with open_regular(path, follow=follow) as file:
        # The size first: a sparse file of a terabyte takes no disk, and reading it takes all memory.
        large = os.fstat(file.fileno()).st_size > most
        content = b"" if large else file.read(most + 1)
    if large or len(content) > most:
        raise OSError(errno.EFBIG, f"is larger than {most / 2**20:,.0f} MiB", str(path))
    return content


def leaves_folder(path: Path, folder: Path) -> bool:
    """Whether a path inside `folder` is a link, or goes through one, that leads out of it."""
    return not path.resolve().is_relative_to(folder.resolve())
