"""A metric that is a Python function of the user's own: loaded and called in a process of its own (own_scorer.py)."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.library_errors import class_and_words
from finetune.output_stream import one_line

UserFunction = Callable[[str, str, Mapping[str, Any]], Any]
ROUNDING = 1e-6  # of a score: ten times 0.1 is 0.9999999999999999, and float32 writes 0.7 as 0.69999999


def load_function(text: str) -> UserFunction:
    """PATH.py:NAME as the function `NAME(answer, reference, row)`. Raises FinetuneError."""
    path_text, colon, name = text.rpartition(":")
    path = Path(os.path.expanduser(path_text))
    if not colon or path.suffix != ".py" or not name.isidentifier():
        raise FinetuneError(f"--scorer {text}: write a file and a function in it, as my_metric.py:score")
    if not path.is_file():
        raise FinetuneError(f"--scorer {text}: {path}: no such file")
    spec = importlib.util.spec_from_file_location("finetune_user_scorer", path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses and pickle look there
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # any mistake in the user's file
        raise FinetuneError(f"--scorer {text}: the file fails: {class_and_words(error, 200)}") from error
    function: UserFunction | None = getattr(module, name, None)
    if not callable(function):
        raise FinetuneError(f"--scorer {text}: {path} has no function {name}")
    return function


def call_function(function: UserFunction, answer: str, reference: str, row: Mapping[str, Any]) -> float:
    """The function's score. Raises ValueError, with its own error, if it raises or returns no number from 0 to 1."""
    try:
        score = function(answer, reference, row)
        if hasattr(score, "item"):  # a number of numpy or torch
            score = score.item()
        right = isinstance(score, bool | int | float) and math.isfinite(score) and 0 <= score <= 1 + ROUNDING
        shown = "" if right else repr(score)
    except BaseException as error:  # any mistake in the user's function
        raise ValueError(f"the function raised {class_and_words(error, 200)}") from error
    if not right:
        raise ValueError(f"the function returned {one_line(shown[:400], 80)}; return a number from 0 to 1, or a bool")
    return min(1.0, float(score))
