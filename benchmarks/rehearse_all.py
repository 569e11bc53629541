"""`finetune rehearse` on every recipe of recipes/, or on those named: what was seen, and in how many seconds.

python benchmarks/rehearse_all.py [--all] [--jobs 2] [RECIPE ...]        (under a minute each)

What stands in the results for the recipe as it is now, went well and was quick enough is not done again, unless
--all says so. Results are written after each recipe, so that an interrupted call goes on where it was. Seconds are of
a machine that does nothing else but --jobs rehearsals.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import PACKAGES, version_of
from benchmarks.every_recipe import EveryRecipe
from tests.support.runs.recipe_results import sha256_of, stands

ROOT = Path(__file__).resolve().parent.parent
NAME = "rehearse"
WHAT = "finetune rehearse: every recipe, shrunken, on the CPU; sha256 is of the recipe's file"


def rehearse(path: Path) -> dict[str, Any]:
    """One rehearsal in a process of its own; a row of the results."""
    row: dict[str, Any] = {"sha256": sha256_of(path)}
    command = [sys.executable, "-m", "finetune.cli.main", "rehearse", str(path.relative_to(ROOT)), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    try:
        report = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        report = {"ok": False, "mistakes": [done.stderr[-2000:]]}
    for key in ("ok", "seconds", "strategy", "processes", "steps", "differs", "mistakes"):
        if key in report:
            row[key] = report[key]
    row["ok"] = row["ok"] and done.returncode == 0
    row.setdefault("seconds", None)
    versions = {package: version_of(package) for package in (*PACKAGES, "bitsandbytes", "deepspeed")}
    return row | {"versions": versions, "date": datetime.date.today().isoformat()}


def last_words(row: dict[str, Any]) -> str:
    seen: list[str] = row.get("mistakes") or [step["seen"] for step in row.get("steps", [])] or ["nothing said"]
    return seen[-1]


if __name__ == "__main__":
    every = EveryRecipe(NAME, WHAT, rehearse, stands, last_words)
    sys.exit(every.main((__doc__ or "").splitlines()[0]))
