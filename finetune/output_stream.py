"""Standard output and error that never end a training: on a closed pipe or a full disk lines are lost instead.

`train.py ... | head -1`, a killed `tee`, a broken ssh connection, a log on a full disk: the figures of lines that could
not be printed are in metrics.jsonl.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any, TextIO, cast


class LastingStream:
    """A text stream whose write and flush never raise; other attributes are those of the wrapped stream."""

    def __init__(self, stream: TextIO | None) -> None:
        """`stream` None: the process was started without one."""
        self._stream = stream

    def write(self, text: str) -> int:
        """Write what the stream accepts; characters that its encoding lacks become question marks."""
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
    """The stream, wrapped so that it never raises."""
    return cast(TextIO, stream if isinstance(stream, LastingStream) else LastingStream(stream))


def keep_printing() -> None:
    """Wrap this process's standard output and error, for every library that prints.

    It holds at the process's end too: Python flushes both streams then, and would exit with 120 where that fails.
    """
    sys.stdout, sys.stderr = lasting(sys.stdout), lasting(sys.stderr)
