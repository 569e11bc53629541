"""Every recipe of recipes/ trained as it is written, or those named; its model a tiny one, its data the loopback Hub's.

python benchmarks/train_recipes.py [--all] [--jobs 2] [RECIPE ...]        (half a minute each)

A rehearsal proves the machinery on shrunken settings; this proves the settings. What stands in the results for the
present text of a recipe and went well is not done again, unless --all says so. Results are written after each recipe.
tests/proofs/test_as_written.py holds them to the recipes.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import write_result
from tests.support.as_written import train_as_written
from tests.support.recipe_results import known, recipes, sha256_of

NAME = "train_recipes"


def train(path: Path) -> dict[str, Any]:
    """One training in a folder of its own; a row of the results."""
    with tempfile.TemporaryDirectory(prefix="finetune-as-written-") as folder:
        row = train_as_written(path, Path(folder))
    return row | {"date": datetime.date.today().isoformat()}


def stands(row: dict[str, Any] | None, path: Path) -> bool:
    """Whether a result is of this very text, and went well."""
    return bool(row and row["ok"] and row["sha256"] == sha256_of(path))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="RECIPE", help="names or files; default: every recipe")
    parser.add_argument("--all", action="store_true", help="also those whose result stands")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    arguments = parser.parse_args()
    every, rows = recipes(), known(NAME)
    asked = [Path(name).stem for name in arguments.names] or list(every)
    if unknown := [name for name in asked if name not in every]:
        parser.error(f"no recipe of recipes/: {', '.join(unknown)}")
    todo = [name for name in asked if arguments.all or not stands(rows.get(name), every[name])]
    print(f"{len(todo)} to train, {len(asked) - len(todo)} stand", flush=True)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        running = {pool.submit(train, every[name]): name for name in todo}
        for done in as_completed(running):
            name = running[done]
            rows[name] = row = done.result()
            write(rows)
            what = row.get("reason") or f"{row['steps']} steps, {row['loss_before']:.4f} to {row['loss_after']:.4f}"
            print(f"{'ok' if row['ok'] else 'FAILED':>6} {row['seconds']} s  {name}  {what}", flush=True)
    write(rows)
    bad = [name for name in every if not stands(rows.get(name), every[name])]
    print(f"{len(every) - len(bad)} of {len(every)} recipes stand" + (f"; not: {', '.join(bad)}" if bad else ""))
    return int(bool(set(bad) & set(asked)))


def write(rows: dict[str, dict[str, Any]]) -> None:
    what = "every recipe as written, its model tiny and random, its data the loopback Hub's; sha256 is of its file"
    write_result(NAME, {"what": what, "recipes": dict(sorted(rows.items()))})


if __name__ == "__main__":
    sys.exit(main())
