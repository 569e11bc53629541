"""Standard output and error: on a closed pipe or a full disk lines are lost and no training ends; in a file or a pipe
no line is broken; and a terminal obeys this program, never a stranger's text.

`train.py ... | head -1`, a killed `tee`, a broken ssh connection, a log on a full disk: the figures of lines that could
not be printed are in metrics.jsonl.
"""

from __future__ import annotations

import io
import logging
import os
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console


UNBROKEN = 100_000  # columns
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# What a terminal obeys, or what makes it show letters in another order than they stand in: control characters, the
# second set of them, overrides of direction, other ends of lines, half a letter.
_OBEYED = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
# What this program and rich write themselves: colours, a line erased or drawn again, the cursor hidden.
_OURS = r"\r\n?|\x1b\[[0-9;]*m|\x1b\[[0-9]*[AK]|\x1b\[\?25[lh]"
_FILTER = re.compile(rf"({_OURS})|[{_OBEYED}]")
_HARMFUL = re.compile(rf"[{_OBEYED}]")
_SPLIT_LINES = re.compile(rf"[{_OBEYED}\t\n]+")


def printable(text: str) -> str:
    """The text with characters that a terminal would obey or hide replaced, one column for each character."""
    return "".join(character if character.isprintable() else REPLACEMENT for character in text)


def without_controls(text: str) -> str:
    """Text with several lines, for a terminal. Line ends and tabs stay; control sequences are replaced."""
    return _HARMFUL.sub(REPLACEMENT, text)


def has_controls(text: str) -> bool:
    """Whether a name holds characters that no terminal, log or command line should get: controls, tabs, line ends."""
    return _SPLIT_LINES.search(text) is not None


def one_line(text: object, length: int = 300) -> str:
    """A stranger's words in one line of a message: a library's exception, a name."""
    words = without_controls(" ".join(str(text).split()))
    if len(words) <= length:
        return words
    return words[: length - 3] + "..."


def wrapped(text: str, stream: TextIO) -> str:
    """The text, broken between words if the stream is a terminal, which itself would break inside words.

    Indented lines and lines with a command stay whole, so that they can be copied.
    """
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    lines: list[str] = []
    for line in text.split("\n"):
        if len(line) <= width or line.startswith(" ") or "finetune " in line:
            lines.append(line)
        else:
            lines += textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def obeyed_by_none(text: str) -> str:
    """The text in a form that a terminal may show: it obeys only this program's own sequences."""
    return _FILTER.sub(lambda match: match[1] or REPLACEMENT, text)


class PlainStream:
    """A text stream that writes `obeyed_by_none(text)`. Its other attributes are the wrapped stream's."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        written: int = self._stream.write(obeyed_by_none(text))
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class LastingStream:
    """A text stream whose write and flush never raise. Its other attributes are the wrapped stream's."""

    def __init__(self, stream: TextIO | None) -> None:
        """`stream` None: the process was started without one."""
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text; characters that the stream's encoding lacks become question marks."""
        text = obeyed_by_none(text)
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


def open_missing_streams() -> None:
    """Give a process that was started without standard input, output or error (a daemon, `>&-`) the null device.

    For a missing stream Python has None, and the next opened file would take the stream's number. Children would then
    write their lines into that file. So call this first.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free, so this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  # for good


def keep_printing() -> None:
    """Wrap this process's standard output and error, for every library that prints.

    It holds at the process's end too: Python flushes both streams then, and would exit with 120 where that fails.
    """
    sys.stdout, sys.stderr = lasting(sys.stdout), lasting(sys.stderr)


@contextmanager
def plain_output() -> Iterator[None]:
    """Within, a terminal obeys nothing of standard output and error but this program's own colours."""
    before = sys.stdout, sys.stderr
    for stream in before:
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a letter shows its number, no traceback
            stream.reconfigure(errors="backslashreplace")
    plain = tuple(cast(TextIO, stream and PlainStream(stream)) for stream in before)
    sys.stdout, sys.stderr = plain
    try:
        yield
    finally:
        if (sys.stdout, sys.stderr) == plain:  # a training has wrapped them for good, by `keep_printing`
            sys.stdout, sys.stderr = before


@contextmanager
def silenced() -> Iterator[None]:
    """Discard libraries' prints while small models are built and loaded; exceptions still pass."""
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
