"""One line for the end of the terminal's output, below what the launcher has to say.

torchrun and `accelerate launch` answer a rank's end with a traceback and a report of about 40 lines, and read no
message of a rank that was killed. So the line is said at once, and again when the launcher is gone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

from finetune.launcher import under_launcher

_WAIT_SECONDS = 60  # torchrun ends ranks that do not leave after 30
_WHEN_IT_IS_GONE = f"""
import os, select, sys
try:
    launcher = os.pidfd_open(int(sys.argv[1]))
    select.select([launcher], [], [], {_WAIT_SECONDS})
except OSError:
    pass
os.write(2, os.fsencode(sys.argv[2]))
"""


def say_last(line: str) -> None:
    """Writes the line to standard error, and under a launcher once more when that has ended.

    A small process in a session of its own does the second: it holds this one's standard error for that long. Linux.
    """
    text = f"\n{line}\n"
    sys.stdout.flush()
    with suppress(OSError):
        os.write(2, text.encode(errors="replace"))
    if not under_launcher() or not hasattr(os, "pidfd_open"):
        return
    subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _WHEN_IT_IS_GONE, str(os.getppid()), text],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # torchrun ends a rank's whole process group
    )
