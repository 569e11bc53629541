"""The table of errors: what each error of a library or a disk becomes in one line."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import DataError, EnvironmentMismatch, FinetuneError
from finetune.library_errors import library_errors

FILE = Path("/none/file")


class PanicException(BaseException):
    """Named as the class of a panic in Rust, which is no Exception."""


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


@pytest.mark.parametrize(
    ("error", "around", "kind", "said"),
    [
        (
            OSError(errno.EACCES, "Permission denied"),
            {"writing": FILE},
            EnvironmentMismatch,
            "written: Permission denied;",
        ),
        (OSError("the pipe is gone"), {"writing": FILE}, EnvironmentMismatch, "written: the pipe is gone;"),
        (RuntimeError("i/o (os error 28)"), {"writing": FILE, "kept": "a is kept; "}, EnvironmentMismatch, "full ("),
        (RuntimeError("i/o (os error 13)"), {"writing": FILE}, EnvironmentMismatch, "written: Permission denied;"),
        (
            OSError(errno.EACCES, "Permission denied"),
            {"reading": FILE},
            FinetuneError,
            "read: Permission denied; check",
        ),
        (OSError("no number"), {"reading": FILE, "kind": DataError}, DataError, "read: no number; check the file"),
        (
            KeyError("rope"),
            {"line": "x: refused", "remedy": "drop it"},
            FinetuneError,
            "x: refused: KeyError: 'rope'; drop it",
        ),
        (PanicException("range end"), {"line": "x: refused"}, FinetuneError, "x: refused: range end"),
    ],
)
def test_each_error_becomes_its_line(
    error: BaseException, around: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind) as caught, library_errors(**around):
        raise error
    assert type(caught.value) is kind
    assert said in str(caught.value)
    assert "Success" not in str(caught.value)
    assert os.strerror(0) not in str(caught.value)


@pytest.mark.parametrize("error", [FinetuneError("ours"), OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt()])
def test_others_pass(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, library_errors("x: refused", writing=FILE):
        raise error
    assert caught.value is error


def test_without_a_line_an_error_passes() -> None:
    with pytest.raises(KeyError), library_errors(writing=FILE):
        raise KeyError("rope")
