"""What a piece of work opens for writing, starts and connects to, by Python's audit events.

An audit hook stays in a process for good, so there is one, which writes down events while somebody watches. What a
library does in C or Rust beside Python's own calls makes no event.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
STARTS = ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system", "os.fork", "os.forkpty", "os.startfile")
CONNECTS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "socket.bind")


@dataclass
class Watched:
    """Events of one piece of work."""

    written: set[Path] = field(default_factory=set)  # files that were opened for writing, folders that were made
    started: list[str] = field(default_factory=list)  # the first words of each process
    asked: list[str] = field(default_factory=list)  # addresses and names of hosts
    code: list[str] = field(default_factory=list)  # Python files that were compiled

    def outside(self, *folders: Path) -> set[Path]:
        """What was written and is in none of these folders."""
        return {path for path in self.written if not any(path.is_relative_to(folder.resolve()) for folder in folders)}


_now: list[Watched] = []


def _hear(event: str, words: tuple[Any, ...]) -> None:
    if not _now:
        return
    seen = _now[-1]
    if event == "open" and isinstance(words[0], str | bytes | os.PathLike):
        mode, flags = words[1], words[2]
        if (mode and set(str(mode)) & set("wxa+")) or (isinstance(flags, int) and flags & WRITING):
            seen.written.add(_path(words[0]))
    elif event == "os.mkdir":
        seen.written.add(_path(words[0]))
    elif event in ("os.rename", "os.link", "os.symlink"):
        seen.written.add(_path(words[1]))
    elif event in STARTS:
        seen.started.append(" ".join(map(str, words[1] or [])) if event == "subprocess.Popen" else event)
    elif event in CONNECTS:
        seen.asked.append(f"{event} {words[1:] if event == 'socket.connect' else words}")
    elif event == "exec" and hasattr(words[0], "co_filename"):
        seen.code.append(words[0].co_filename)


def _path(name: Any) -> Path:
    path = Path(os.path.abspath(os.fsdecode(name)))
    return path.parent.resolve() / path.name


@contextmanager
def watched() -> Iterator[Watched]:
    """Within, events are written down; caches of compiled Python and the null device are left out."""
    if not getattr(sys, "_finetune_watches", False):
        sys.addaudithook(_hear)
        sys._finetune_watches = True  # type: ignore[attr-defined]
    _now.append(Watched())
    try:
        yield _now[-1]
    finally:
        seen = _now.pop()
        left_out = {path for path in seen.written if "__pycache__" in path.parts or str(path).startswith("/dev/")}
        seen.written -= left_out
