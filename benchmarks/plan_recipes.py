"""`finetune plan` of every recipe of recipes/ on its own budget; writes docs/recipes.md's table and recipes' headers.

python benchmarks/plan_recipes.py [--all] [--table] [RECIPE ...]       (ten seconds each)

What stands in the results for the recipe as it is now is not planned again, unless --all says so. --table plans
nothing and writes table and headers alone. tests/planner/test_recipe_plans.py holds them to each other.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import write_result
from tests.support.runs.recipe_plans import GIB, NAME, PAGE, on_page, plan, table, with_plan
from tests.support.runs.recipe_results import known, name_of, recipes, sha256_of

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="RECIPE", help="names or files; default: every recipe")
    parser.add_argument("--all", action="store_true", help="also those whose result stands")
    parser.add_argument("--table", action="store_true", help="write docs/recipes.md and headers from the results alone")
    arguments = parser.parse_args()
    every, rows = recipes(), known(NAME)
    for name in [] if arguments.table else [name_of(word) for word in arguments.names] or list(every):
        if not arguments.all and rows.get(name, {}).get("sha256") == sha256_of(every[name]):
            continue
        rows[name] = row = plan(every[name])
        print(f"{name:<44} {row.get('refused') or round(row['needed_bytes'] / GIB, 1)}", flush=True)
        write_result(
            NAME, {"what": "finetune plan of every recipe, on its budget", "recipes": dict(sorted(rows.items()))}
        )
    PAGE.write_text(PAGE.read_text("utf-8").replace(on_page(), table(rows)), "utf-8")
    for name, row in rows.items():
        if row.get("needed_bytes"):
            every[name].write_text(with_plan(every[name].read_text("utf-8"), row), "utf-8")
    bad = [name for name, row in rows.items() if not row["fits"]]
    print("does not fit, or cannot be planned: " + ", ".join(bad) if bad else "every recipe fits its budget")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
