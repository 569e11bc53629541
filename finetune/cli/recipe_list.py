"""Lists the recipes that come with the package, and those that fit given GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.base.location import online_name
from finetune.errors import EnvironmentMismatch, RecipeError
from finetune.paths import RECIPES
from finetune.recipe.gpus import budget_of, parse_gpus
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Budget, Recipe
from finetune.wording import counted


@dataclass(frozen=True)
class Listed:
    """A listed recipe, with the facts to choose by."""

    name: str
    path: Path
    model: str  # the model's name, without publisher and -Instruct
    method: str
    strategy: str
    budget: Budget
    purpose: str  # the header's first line

    def as_json(self) -> dict[str, Any]:
        return vars(self) | {"path": str(self.path), "budget": self.budget.model_dump(mode="json")}


@dataclass(frozen=True)
class Found:
    """The matching recipes, in the order to show them."""

    recipes: list[Listed]
    left_out: list[str]  # a reason for each invalid file
    hint: str = ""  # if no recipe matches: the available ones


def find_recipes(gpus: str | None = None, model: str | None = None, folder: Path = RECIPES) -> Found:
    """The recipes in a folder that fit into `gpus` and belong to `model`, by name or size.

    With GPUs the largest comes first, because it fits them best; otherwise the smallest. Raises FinetuneError for text
    that does not name GPUs, and EnvironmentMismatch if the package was installed without its recipes.
    """
    available = None if gpus is None else budget_of(parse_gpus(gpus))
    if not folder.is_dir():
        raise EnvironmentMismatch(
            f"recipes: not beside the installed package ({folder}); install it again in the checkout: pip install -e ."
        )
    every, left_out = [], []
    for path in sorted(folder.glob("*.yaml")):
        try:
            every.append(_read(path))
        except RecipeError as error:
            mistakes = counted(len(error.mistakes), "mistake")
            left_out.append(f"{path}: left out, finetune check finds {mistakes} in it")
    if not every:
        return Found([], left_out, f"no recipes in {folder}")
    of_model = every
    if model is not None:
        # A part of the model's or the recipe's name. 3b is not a part of 13b, nor 1 of 3.1.
        part = re.compile(rf"(?<![0-9.]){re.escape(model.strip())}(?![0-9.])", re.IGNORECASE)
        of_model = [listed for listed in every if part.search(listed.model) or part.search(listed.name)]
        if not of_model:
            names = ", ".join(sorted({listed.model for listed in every}))
            return Found([], left_out, f"no recipe for a model called {model}; there are: {names}")
    fitting = []
    for listed in of_model:
        budget, room = listed.budget, available or listed.budget
        enough_gpus = budget.gpus <= room.gpus and budget.nodes <= room.nodes
        if not budget.gpus or (enough_gpus and budget.gpu_memory_gb <= room.gpu_memory_gb):
            fitting.append(listed)
    if not fitting:
        smallest = min(of_model, key=_total_memory)
        headline = "no recipe fits" if not model else f"no recipe for {model} fits"
        made_for = budget_text(smallest.budget)
        return Found([], left_out, f"{headline} into {gpus}; the smallest is {smallest.name}, for {made_for}")
    fitting.sort(key=lambda listed: listed.name)
    fitting.sort(key=_total_memory, reverse=available is not None)
    return Found(fitting, left_out)


def _read(path: Path) -> Listed:
    recipe = load_recipe(path).recipe
    name_or_path = recipe.model.name_or_path
    # A packaged model is listed by the published model that it was made from.
    published = online_name(name_or_path)
    return Listed(
        name=path.stem,
        path=path,
        model=published.rstrip("/").rpartition("/")[2].replace("-Instruct", ""),
        method=method_of(recipe),
        strategy=Path(recipe.accelerate_config).stem,
        budget=recipe.budget,
        purpose=purpose_of(path.read_text(encoding="utf-8")),
    )


def method_of(recipe: Recipe) -> str:
    """full, lora, qlora, or int8 for adapters over an int8 base: the words in recipes' names."""
    if recipe.quantization is not None:
        if recipe.quantization.load_in_4bit:
            return "qlora"
        return "int8"
    if recipe.lora is None:
        return "full"
    return "lora"


def purpose_of(text: str) -> str:
    """The header's first line that is not for the editor; empty if there is none."""
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if "yaml-language-server" not in line:
            return line.lstrip("# ").rstrip()
    return ""


def budget_text(budget: Budget) -> str:
    """`4 x 24 GB`, or `2 x 8 x 80 GB` with two nodes."""
    if not budget.gpus:
        return "CPU"
    text = f"{budget.gpus} x {budget.gpu_memory_gb:g} GB"
    if budget.nodes > 1:
        return f"{budget.nodes} x {text}"
    return text


def _total_memory(listed: Listed) -> tuple[float, int]:
    """All GPUs' memory together, GB, then their number."""
    count = listed.budget.gpus * listed.budget.nodes
    return count * listed.budget.gpu_memory_gb, count


def as_table(recipes: Sequence[Listed]) -> str:
    """Two lines for each recipe: its facts in columns, and its purpose below them."""
    head = ("recipe", "model", "method", "strategy", "made for")
    rows = [(r.name, r.model, r.method, r.strategy, budget_text(r.budget)) for r in recipes]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [_line(head, widths)]
    for row, listed in zip(rows, recipes, strict=True):
        lines += [_line(row, widths), f"    {listed.purpose}"]
    return "\n".join(lines)


def _line(cells: Iterable[str], widths: Iterable[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
