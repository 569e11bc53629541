"""Every recipe of recipes/ trained as it is written, or those named; its model a tiny one, its data the loopback Hub's.

python benchmarks/train_recipes.py [--all] [--jobs 2] [RECIPE ...]        (half a minute each)

A rehearsal proves the machinery on shrunken settings; this proves the settings. What stands in the results for the
recipe as it is now and went well is not done again, unless --all says so. Results are written after each recipe.
tests/proofs/test_as_written.py holds them to the recipes.
"""

from __future__ import annotations

import datetime
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.every_recipe import EveryRecipe
from tests.support.runs.as_written import train_as_written
from tests.support.runs.recipe_results import sha256_of

NAME = "train_recipes"
WHAT = "every recipe as written, its model tiny and random, its data the loopback Hub's; sha256 is of its file"


def train(path: Path) -> dict[str, Any]:
    """One training in a folder of its own; a row of the results."""
    with tempfile.TemporaryDirectory(prefix="finetune-as-written-") as folder:
        row = train_as_written(path, Path(folder))
    return row | {"date": datetime.date.today().isoformat()}


def stands(row: dict[str, Any] | None, path: Path) -> bool:
    """Whether a result is of this very text, and went well."""
    return bool(row and row["ok"] and row["sha256"] == sha256_of(path))


def last_words(row: dict[str, Any]) -> str:
    return row.get("reason") or f"{row['steps']} steps, {row['loss_before']:.4f} to {row['loss_after']:.4f}"


if __name__ == "__main__":
    every = EveryRecipe(NAME, WHAT, train, stands, last_words)
    sys.exit(every.main((__doc__ or "").splitlines()[0]))
