"""A metric that is a Python function of the user's own, from a path given on the command line."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError

UserFunction = Callable[[str, str, Mapping[str, Any]], Any]


def load_function(text: str) -> tuple[str, UserFunction]:
    """PATH.py:NAME as the function's name and the function `NAME(answer, reference, row)`. Raises FinetuneError."""
    path_text, colon, name = text.rpartition(":")
    path = Path(path_text).expanduser()
    if not colon or path.suffix != ".py" or not name.isidentifier():
        raise FinetuneError(f"--scorer {text}: write a file and a function in it, as my_metric.py:score")
    if not path.is_file():
        raise FinetuneError(f"--scorer {text}: {path}: no such file")
    spec = importlib.util.spec_from_file_location("finetune_user_scorer", path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # any mistake in the user's file
        raise FinetuneError(f"--scorer {text}: the file fails: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise FinetuneError(f"--scorer {text}: {path} has no function {name}")
    return name, function


def call_function(function: UserFunction, answer: str, reference: str, row: Mapping[str, Any]) -> float:
    """The function's score. Raises ValueError, with its own error, if it raises or returns no number from 0 to 1."""
    try:
        score = function(answer, reference, row)
    except Exception as error:  # any mistake in the user's function
        raise ValueError(f"the function raised {type(error).__name__}: {error}") from error
    if not isinstance(score, bool | int | float) or not math.isfinite(score) or not 0 <= score <= 1:
        raise ValueError(f"the function returned {score!r}; return a number from 0 to 1, or a bool")
    return float(score)
