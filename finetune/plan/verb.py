"""`finetune plan`: from a recipe's file to what is shown. Heavy imports come late: mistakes are told at once."""

from __future__ import annotations

import gc
import io
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from finetune.errors import DoesNotFit
from finetune.plan.gpus import gpus_of, read_gpus
from finetune.recipe_file import load_recipe


@contextmanager
def _unswept() -> Iterator[None]:
    """Imports leave a million objects for good, which the garbage collector need not look at, now or later: a second
    of ten."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def plan_in_words(recipe: Path, overrides: Sequence[str], gpus: str | None, nodes: int) -> tuple[dict[str, Any], str]:
    """The plan as JSON, with `ok` whether it fits, and as text. Raises FinetuneError."""
    loaded = load_recipe(recipe, overrides).recipe
    wanted = read_gpus(gpus, nodes) if gpus else gpus_of(loaded.budget)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # speaks of kernels it would like to download
    with redirect_stdout(io.StringIO()):  # DeepSpeed, where it is installed, speaks when accelerate looks at it
        with _unswept():
            from finetune.plan.job import as_json, plan_recipe
            from finetune.plan.pace import pace_json, pace_lines
            from finetune.plan.report import describe

        planned = plan_recipe(loaded, wanted)
    code = 0 if planned.fits else DoesNotFit.exit_code
    told = {"ok": planned.fits, "exit_code": code, **as_json(planned), **pace_json(planned)}
    return told, "\n".join([describe(planned), "", *pace_lines(planned)])
