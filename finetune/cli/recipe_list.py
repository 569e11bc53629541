"""Lists the recipes that come with the package, and those that fit given GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import EnvironmentMismatch, RecipeError
from finetune.model.packaged import ONLINE_REPOSITORIES, PREFIX
from finetune.paths import RECIPES
from finetune.recipe.gpus import budget_of, parse_gpus
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Budget, Recipe
from finetune.wording import counted


@dataclass(frozen=True)
class Listed:
    """The facts by which a recipe is chosen."""

    name: str
    path: Path
    model: str  # its name, without publisher and -Instruct
    method: str
    strategy: str
    budget: Budget
    purpose: str  # the first sentence of the header

    def as_json(self) -> dict[str, Any]:
        return vars(self) | {"path": str(self.path), "budget": self.budget.model_dump(mode="json")}


@dataclass(frozen=True)
class Found:
    """The recipes asked for, in the order to show them; for each invalid file, why it is left out."""

    recipes: list[Listed]
    left_out: list[str]
    hint: str = ""  # where no recipe was found: which there are


def find_recipes(gpus: str | None = None, model: str | None = None, folder: Path = RECIPES) -> Found:
    """The recipes in a folder that fit into `gpus` and belong to `model`, by name or size.

    With GPUs, the nearest fit comes first, that is the largest; otherwise the smallest. Raises FinetuneError for text
    that does not name GPUs, and EnvironmentMismatch if the package was installed without its recipes.
    """
    room = None if gpus is None else budget_of(parse_gpus(gpus))
    every, left_out = _read_all(folder)
    of_model = [listed for listed in every if model is None or _is_called(listed, model)]
    fitting = [listed for listed in of_model if room is None or _fits(listed.budget, room)]
    fitting.sort(key=lambda listed: listed.name)
    fitting.sort(key=_size, reverse=room is not None)
    none_at_all = "" if every else f"no recipes in {folder}"
    return Found(fitting, left_out, none_at_all or ("" if fitting else _hint(every, of_model, gpus, model)))


def _read_all(folder: Path) -> tuple[list[Listed], list[str]]:
    if not folder.is_dir():
        raise EnvironmentMismatch(
            f"recipes: not beside the installed package ({folder}); install it again: pip install --force-reinstall "
            "--no-deps finetune, or pip install -e . in a checkout"
        )
    every, left_out = [], []
    for path in sorted(folder.glob("*.yaml")):
        try:
            every.append(_read(path))
        except RecipeError as error:
            count = len(error.mistakes)
            left_out.append(f"{path}: left out, finetune check finds {counted(count, 'mistake')} in it")
    return every, left_out


def _read(path: Path) -> Listed:
    recipe = load_recipe(path).recipe
    return Listed(
        name=path.stem,
        path=path,
        model=_model(recipe.model.name_or_path),
        method=method_of(recipe),
        strategy=Path(recipe.accelerate_config).stem,
        budget=recipe.budget,
        purpose=purpose_of(path.read_text(encoding="utf-8")),
    )


def method_of(recipe: Recipe) -> str:
    """full, lora, qlora, or int8 for adapters over an int8 base: as names of recipes have it."""
    if recipe.quantization is not None:
        if recipe.quantization.load_in_4bit:
            return "qlora"
        return "int8"
    if recipe.lora is None:
        return "full"
    return "lora"


def purpose_of(text: str) -> str:
    """The first line of a recipe's header that is not for the editor; empty where there is none."""
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if "yaml-language-server" not in line:
            return line.lstrip("# ").rstrip()
    return ""


def budget_text(budget: Budget) -> str:
    """`2 x 24 GB`; with several nodes their number before it."""
    if not budget.gpus:
        return "CPU"
    nodes = f"{budget.nodes} x " if budget.nodes > 1 else ""
    return f"{nodes}{budget.gpus} x {budget.gpu_memory_gb:g} GB"


def _model(name_or_path: str) -> str:
    published = ONLINE_REPOSITORIES.get(name_or_path.removeprefix(PREFIX), name_or_path)
    return published.rstrip("/").rpartition("/")[2].replace("-Instruct", "")


def _is_called(listed: Listed, model: str) -> bool:
    """Whether this is a part of the model's or the recipe's name; 3b is not a part of 13b, nor 1 of 3.1."""
    part = re.compile(rf"(?<![0-9.]){re.escape(model.strip())}(?![0-9.])", re.IGNORECASE)
    return any(part.search(name) for name in (listed.model, listed.name))


def _fits(budget: Budget, room: Budget) -> bool:
    if not budget.gpus:
        return True
    return budget.gpus <= room.gpus and budget.nodes <= room.nodes and budget.gpu_memory_gb <= room.gpu_memory_gb


def _size(listed: Listed) -> tuple[float, int]:
    """Memory of all GPUs together, then their number."""
    count = listed.budget.gpus * listed.budget.nodes
    return count * listed.budget.gpu_memory_gb, count


def _hint(every: Sequence[Listed], of_model: Sequence[Listed], gpus: str | None, model: str | None) -> str:
    """The available recipes, if none was found."""
    if not of_model:
        return f"no recipe for a model called {model}; there are: {', '.join(sorted({each.model for each in every}))}"
    least = min(of_model, key=_size)
    headline = f"no recipe{f' for {model}' if model else ''}"
    return f"{headline} fits into {gpus}; the smallest is {least.name}, for {budget_text(least.budget)}"


def as_table(recipes: Sequence[Listed]) -> str:
    """Two lines a recipe: its facts in columns, and its purpose below them."""
    head = ("recipe", "model", "method", "strategy", "made for")
    rows = [(r.name, r.model, r.method, r.strategy, budget_text(r.budget)) for r in recipes]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [_line(head, widths)]
    for row, listed in zip(rows, recipes, strict=True):
        lines += [_line(row, widths), f"    {listed.purpose}"]
    return "\n".join(lines)


def _line(cells: Iterable[str], widths: Iterable[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
