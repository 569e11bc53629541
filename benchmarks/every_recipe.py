"""A job for every recipe of recipes/, or for those named on the command line, its results kept recipe by recipe."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import write_result
from tests.support.runs.recipe_results import known, name_of, recipes

Row = dict[str, Any]


@dataclass(frozen=True)
class EveryRecipe:
    """One benchmark over the recipes: what is run, and when its result need not be made again."""

    name: str  # of the results
    what: str  # the results say of themselves
    run: Callable[[Path], Row]  # with `ok` and `seconds`
    stands: Callable[[Row | None, Path], bool]  # whether a result is of what the recipe says now, and went well
    last_words: Callable[[Row], str]

    def main(self, description: str) -> int:
        """Parse the command line, run what does not stand, write the results after each recipe. Returns the exit code:
        1 where a recipe that was asked for does not stand at the end."""
        every, rows, arguments = recipes(), known(self.name), _arguments(description)
        asked = [name_of(word) for word in arguments.names] or list(every)
        if unknown := [name for name in asked if name not in every]:
            raise SystemExit(f"no recipe of recipes/: {', '.join(unknown)}")
        todo = [name for name in asked if arguments.all or not self.stands(rows.get(name), every[name])]
        print(f"{len(todo)} to run, {len(asked) - len(todo)} stand", flush=True)
        with ThreadPoolExecutor(arguments.jobs) as pool:
            running = {pool.submit(self.run, every[name]): name for name in todo}
            for done in as_completed(running):
                name = running[done]
                rows[name] = row = done.result()
                self._write(rows)
                verdict = "ok" if row["ok"] else "FAILED"
                print(f"{verdict:>6} {row['seconds']} s  {name}  {self.last_words(row)}", flush=True)
        self._write(rows)
        bad = [name for name in every if not self.stands(rows.get(name), every[name])]
        print(f"{len(every) - len(bad)} of {len(every)} recipes stand" + (f"; not: {', '.join(bad)}" if bad else ""))
        return int(bool(set(bad) & set(asked)))

    def _write(self, rows: dict[str, Row]) -> None:
        write_result(self.name, {"what": self.what, "recipes": dict(sorted(rows.items()))})


def _arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("names", nargs="*", metavar="RECIPE", help="names or files; default: every recipe")
    parser.add_argument("--all", action="store_true", help="also those whose result stands")
    parser.add_argument("--jobs", type=int, default=1, help="recipes at a time")
    return parser.parse_args()
