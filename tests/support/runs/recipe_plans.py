"""The plan of a recipe on its own budget, and the table in docs/recipes.md that shows the plans."""

from __future__ import annotations

import re
import textwrap
import time
from pathlib import Path
from typing import Any

from finetune.cli.recipe_list import budget_text, purpose_of
from finetune.closed_form.recomputation import choose_recomputation
from finetune.errors import FinetuneError
from finetune.model.known_configs import config_if_known
from finetune.planner.plan_recipe import Plan, plan_recipe
from finetune.recipe.gpus import gpus_of
from finetune.recipe.loader import load_recipe
from tests.support.runs.cells import ROOT
from tests.support.runs.recipe_results import recipes, sha256_of

NAME = "plan_recipes"  # of the results
PAGE = ROOT / "docs" / "recipes.md"
HEAD = "| recipe | made for | GiB planned | what |\n|---|---|---|---|\n"
GIB = 2**30
# In a recipe's header: what the plan needs, of which budget, and what the allocator may reserve for it.
IN_HEADER = re.compile(
    r"# (?P<place>Each GPU|GPU|Memory): (?P<need>[\d.]+) GB planned(?: of (?P<budget>\d+)(?P<cards> \([^)]*\)))?"
    r"(?:, [\d.]+ reserved at most)?, peak in \w+"
)
WIDTH = 120


def plan_of(path: Path) -> Plan:
    """The plan on the recipe's own budget, with the recomputation that `auto` chooses."""
    asked = load_recipe(path).recipe
    gpus = gpus_of(asked.budget)
    config = config_if_known(asked.model)
    return plan_recipe(choose_recomputation(asked, config, gpus).recipe if gpus else asked, gpus)


def plan(path: Path) -> dict[str, Any]:
    """One plan as a row of the results."""
    gpus = gpus_of(load_recipe(path).recipe.budget)
    began = time.process_time()
    try:
        planned = plan_of(path)
    except FinetuneError as error:
        return {"sha256": sha256_of(path), "fits": None, "refused": str(error)}
    row = {"sha256": sha256_of(path), "fits": planned.fits, "needed_bytes": planned.needed}
    row |= {"upper_bytes": getattr(planned, "upper", planned.needed), "gpu_bytes": gpus.memory if gpus else None}
    return row | {"phase": planned.peak[0], "cpu_seconds": round(time.process_time() - began, 1)}


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The page's table: smallest budgets first, as it stood."""
    lines = []
    for name, path in recipes().items():
        budget = load_recipe(path).recipe.budget
        row = rows.get(name, {})
        gib = f"{row['needed_bytes'] / GIB:.1f}" if row.get("needed_bytes") else "-"
        size = budget.gpus * budget.nodes * budget.gpu_memory_gb, budget.gpus * budget.nodes
        purpose = purpose_of(path.read_text("utf-8"))
        lines.append((size, name, f"| `{name}` | {budget_text(budget)} | {gib} | {purpose} |\n"))
    return HEAD + "".join(line for _, _, line in sorted(lines))


def with_plan(text: str, row: dict[str, Any]) -> str:
    """A recipe's text with the plan's figures in its header; as it is where the header states no plan."""
    lines = text.splitlines()
    first = next((index for index, line in enumerate(lines) if re.match(r"# (Each GPU|GPU|Memory): ", line)), None)
    if first is None:
        return text
    last = next(index for index, line in enumerate(lines) if index > first and re.match(r"# [A-Z]\w+: |(?!#)", line))
    paragraph = "# " + " ".join(line.removeprefix("# ") for line in lines[first:last])
    stated = IN_HEADER.match(paragraph)
    assert stated is not None, f"write {row['needed_bytes'] / 1e9:.1f} GB planned, peak in {row['phase']}"
    words = f"# {stated['place']}: {row['needed_bytes'] / 1e9:.1f} GB planned"
    if stated["budget"]:
        upper = f"{row['upper_bytes'] / 1e9:.1f} reserved at most"
        words += f" of {row['gpu_bytes'] / 1e9:g}{stated['cards']}, {upper}"
    words += f", peak in {row['phase']}{paragraph[stated.end() :]}"
    lines[first:last] = textwrap.wrap(words, WIDTH, subsequent_indent="# ", break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def on_page() -> str:
    """The table as it stands there."""
    text = PAGE.read_text("utf-8")
    begin = text.index("| recipe | made for |")
    return text[begin : text.index("\n\n", begin) + 1]
