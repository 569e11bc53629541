"""Standard output and error that never end a training: a closed pipe, a full disk or a narrow encoding loses lines.

`train.py ... | head -1`, a `tee` that was killed, an ssh pipe that is gone, a log on a full disk: what could not be
printed stands in metrics.jsonl all the same.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any, TextIO, cast


class LastingStream:
    """A text stream whose write and flush never raise; all else is the stream's own."""

    def __init__(self, stream: TextIO | None) -> None:
        """`stream` None: the process was started without one."""
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes what the stream takes; characters that its encoding lacks become question marks."""
        with suppress(OSError, ValueError):  # ValueError: closed
            try:
                _write(self._stream, text)
            except UnicodeEncodeError as error:
                _write(self._stream, text.encode(error.encoding, "replace").decode(error.encoding))
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            if self._stream is not None:
                self._stream.flush()

    def isatty(self) -> bool:
        with suppress(OSError, ValueError):
            return self._stream is not None and self._stream.isatty()
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _write(stream: TextIO | None, text: str) -> None:
    if stream is not None:
        stream.write(text)


def lasting(stream: TextIO | None) -> TextIO:
    """The stream as one that never raises."""
    return cast(TextIO, stream if isinstance(stream, LastingStream) else LastingStream(stream))


def keep_printing() -> None:
    """Make this process's standard output and error lasting, for every library that prints.

    Also at its end: Python flushes both once more when it leaves, and would answer a failure with exit code 120.
    """
    sys.stdout, sys.stderr = lasting(sys.stdout), lasting(sys.stderr)
