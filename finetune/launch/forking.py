"""Whether a child of this process, forked, could train."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

ENGINE = "pt_autograd"  # how torch's autograd names its threads, which no fork carries over


def can_fork() -> bool:
    """Whether a child of this process could train: on Linux, as long as autograd has no threads here.

    A thread that has just started may have no name yet; then torch refuses to train in the child, which fails.
    """
    if not sys.platform.startswith("linux"):
        return False
    names = (_name_of(thread) for thread in Path("/proc/self/task").iterdir())
    return not any(name.startswith(ENGINE) for name in names)


def _name_of(thread: Path) -> str:
    with suppress(OSError):  # it has ended
        return (thread / "comm").read_text("utf-8")
    return ""
