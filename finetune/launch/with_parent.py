"""A command that ends when the process that started it ends, even by SIGKILL: `with_parent.py PARENT COMMAND...`.

`accelerate launch` and its ranks outlive the process that started them. Started through this file, `accelerate launch`
gets SIGTERM from the kernel when that process ends, and passes it on. The file runs as a script on the standard library
alone, so it starts in milliseconds and needs no import path.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # prctl(2); exec keeps it, fork does not


def with_parent(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` until this process ends."""
    return [sys.executable, "-I", __file__, str(os.getpid()), *command]


def die_with_parent(number: signal.Signals) -> bool:
    """Ask the kernel to send this signal when the parent process dies; returns whether the kernel agreed."""
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) == 0)


def main(words: Sequence[str]) -> None:
    parent, *command = words
    die_with_parent(signal.SIGTERM)
    if os.getppid() != int(parent):  # it died before prctl() took effect
        raise SystemExit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
