"""`finetune plan` of every recipe of recipes/ on its own budget, and README's table of recipes and GiB made of them.

python benchmarks/plan_recipes.py [--all] [--table] [RECIPE ...]       (ten seconds each)

What stands in the results for the present text of a recipe is not planned again, unless --all says so. --table plans
nothing and writes the table alone. tests/planner/test_recipe_plans.py holds the three to each other.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import known, recipes, sha256_of, write_result
from finetune.cli.recipe_list import budget_text, purpose_of
from finetune.errors import FinetuneError
from finetune.planner.command import plan_by_trace
from finetune.planner.constants import GIB
from finetune.recipe.gpus import gpus_of
from finetune.recipe.loader import load_recipe

ROOT = Path(__file__).resolve().parent.parent
NAME = "plan_recipes"
README = ROOT / "README.md"
HEAD = "| recipe | made for | GiB planned | what |\n|---|---|---|---|\n"


def plan(path: Path) -> dict[str, Any]:
    """One plan; a row of the results."""
    recipe = load_recipe(path).recipe
    gpus = gpus_of(recipe.budget)
    run_in_forks = time.process_time()
    try:
        planned = plan_by_trace(recipe, gpus)
    except FinetuneError as error:
        return {"sha256": sha256_of(path), "fits": None, "refused": str(error)}
    row = {"sha256": sha256_of(path), "fits": planned.fits, "needed_bytes": planned.needed}
    row |= {"upper_bytes": getattr(planned, "upper", planned.needed), "gpu_bytes": gpus.memory if gpus else None}
    return row | {"phase": planned.peak[0], "cpu_seconds": round(time.process_time() - run_in_forks, 1)}


def table(rows: dict[str, dict[str, Any]]) -> str:
    """README's table: smallest budgets first, as it stood."""
    lines = []
    for name, path in recipes().items():
        budget = load_recipe(path).recipe.budget
        row = rows.get(name, {})
        gib = f"{row['needed_bytes'] / GIB:.1f}" if row.get("needed_bytes") else "-"
        size = budget.gpus * budget.nodes * budget.gpu_memory_gb, budget.gpus * budget.nodes
        purpose = purpose_of(path.read_text("utf-8"))
        lines.append((size, name, f"| `{name}` | {budget_text(budget)} | {gib} | {purpose} |\n"))
    return HEAD + "".join(line for _, _, line in sorted(lines))


def in_readme() -> str:
    """The table as it stands there."""
    text = README.read_text("utf-8")
    begin = text.index("| recipe | made for |")
    return text[begin : text.index("\n\n", begin) + 1]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="RECIPE", help="names or files; default: every recipe")
    parser.add_argument("--all", action="store_true", help="also those whose result stands")
    parser.add_argument("--table", action="store_true", help="write README's table from the results alone")
    arguments = parser.parse_args()
    every, rows = recipes(), known(NAME)
    for name in [] if arguments.table else [Path(name).stem for name in arguments.names] or list(every):
        if not arguments.all and rows.get(name, {}).get("sha256") == sha256_of(every[name]):
            continue
        rows[name] = row = plan(every[name])
        print(f"{name:<44} {row.get('refused') or round(row['needed_bytes'] / GIB, 1)}", flush=True)
        write_result(
            NAME, {"what": "finetune plan of every recipe, on its budget", "recipes": dict(sorted(rows.items()))}
        )
    README.write_text(README.read_text("utf-8").replace(in_readme(), table(rows)), "utf-8")
    bad = [name for name, row in rows.items() if not row["fits"]]
    print("does not fit, or cannot be planned: " + ", ".join(bad) if bad else "every recipe fits its budget")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
