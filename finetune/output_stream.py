"""Standard output and error: on a closed pipe or a full disk lines are lost and no training ends; in a file or a pipe
no line is broken.

`train.py ... | head -1`, a killed `tee`, a broken ssh connection, a log on a full disk: the figures of lines that could
not be printed are in metrics.jsonl.
"""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console


UNBROKEN = 100_000  # columns


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


def rich_console() -> Console:
    """rich's console on standard output; where that is no terminal, no line is broken."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else UNBROKEN)


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


@contextmanager
def silenced() -> Iterator[None]:
    """Discard what libraries print while small models are built and loaded; exceptions still pass."""
    from transformers.utils import logging as transformers_logging

    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
