"""`finetune rehearse` on every recipe of recipes/, or on those named: what was seen, and in how many seconds.

python benchmarks/rehearse_all.py [--all] [--jobs 2] [RECIPE ...]        (under a minute each)

What stands in the results for the present text of a recipe, went well and was quick enough is not done again, unless
--all says so. Results are written after each recipe, so that an interrupted call goes on where it was. Seconds are of
a machine that does nothing else but --jobs rehearsals.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import PACKAGES, version_of, write_result
from tests.support.recipe_results import known, recipes, sha256_of, stands

ROOT = Path(__file__).resolve().parent.parent
NAME = "rehearse"


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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="RECIPE", help="names or files; default: every recipe")
    parser.add_argument("--all", action="store_true", help="also those whose result stands")
    parser.add_argument("--jobs", type=int, default=1, help="rehearsals at a time")
    arguments = parser.parse_args()
    every, rows = recipes(), known(NAME)
    asked = [Path(name).stem for name in arguments.names] or list(every)
    if unknown := [name for name in asked if name not in every]:
        parser.error(f"no recipe of recipes/: {', '.join(unknown)}")
    todo = [name for name in asked if arguments.all or not stands(rows.get(name), every[name])]
    print(f"{len(todo)} to rehearse, {len(asked) - len(todo)} stand", flush=True)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        running = {pool.submit(rehearse, every[name]): name for name in todo}
        for done in as_completed(running):
            name = running[done]
            rows[name] = row = done.result()
            write(rows)
            last = (row.get("mistakes") or [step["seen"] for step in row.get("steps", [])] or ["nothing said"])[-1]
            print(f"{'ok' if row['ok'] else 'FAILED':>6} {row['seconds']} s  {name}  {last}", flush=True)
    write(rows)
    bad = [name for name in every if not stands(rows.get(name), every[name])]
    print(f"{len(every) - len(bad)} of {len(every)} recipes stand" + (f"; not: {', '.join(bad)}" if bad else ""))
    return int(bool(set(bad) & set(asked)))


def write(rows: dict[str, dict[str, Any]]) -> None:
    what = "finetune rehearse: every recipe, shrunken, on the CPU; sha256 is of the recipe's file"
    write_result(NAME, {"what": what, "recipes": dict(sorted(rows.items()))})


if __name__ == "__main__":
    sys.exit(main())
