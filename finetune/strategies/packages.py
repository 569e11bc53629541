"""Packages beside the base install that a recipe needs, all named at once."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

from finetune.errors import EnvironmentMismatch
from finetune.recipe.optimizers import OPTIMIZERS
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import Strategy


@dataclass(frozen=True)
class NeededPackage:
    """A package, the recipe's place that needs it, and finetune's extra that installs it."""

    place: str
    module: str  # as it is imported
    extra: str
    title: str

    @property
    def is_here(self) -> bool:
        return importlib.util.find_spec(self.module) is not None


def needed_packages(recipe: Recipe, strategy: Strategy, *, plan: bool = False) -> Iterator[NeededPackage]:
    """The packages that training this recipe imports; `plan`: those that its plan imports."""
    if strategy.uses_engine:
        yield NeededPackage(f"accelerate_config: {strategy.name}", "deepspeed", "deepspeed", "DeepSpeed")
    optim = recipe.training.optim
    if recipe.quantization is not None:
        yield NeededPackage("quantization", "bitsandbytes", "qlora", "bitsandbytes")
    elif OPTIMIZERS[optim].library(sharded=strategy.shards_optimizer_state) == "bitsandbytes":
        yield NeededPackage(f"training.optim: {optim}", "bitsandbytes", "qlora", "bitsandbytes")
    if plan:
        return
    files = [entry.data_files for entry in recipe.data.sets]
    names = [name for each in files for name in ([each] if isinstance(each, str) else each or [])]
    if any(name.lower().endswith((".xlsx", ".xlsm")) for name in names):
        yield NeededPackage("data", "openpyxl", "excel", "openpyxl")
    scored = recipe.eval.generate
    if scored.every is not None and any(choice.name == "chrf" for choice in scored.choices):
        yield NeededPackage("eval.generate.metrics: chrf", "sacrebleu", "eval", "sacrebleu")


def check_packages(recipe: Recipe, strategy: Strategy, *, plan: bool = False) -> None:
    """Refuse a recipe that needs packages which are not installed, all in one line. Raises EnvironmentMismatch."""
    missing = [needed for needed in needed_packages(recipe, strategy, plan=plan) if not needed.is_here]
    if not missing:
        return
    what = " and ".join(f"{each.title} ({each.place})" for each in missing)
    extras = ",".join(dict.fromkeys(each.extra for each in missing))
    # DeepSpeed is a source package; the variable keeps it from compiling when it is installed.
    command = f"{'DS_BUILD_OPS=0 ' if 'deepspeed' in extras else ''}pip install 'finetune[{extras}]'"
    if len(missing) == 1:
        (only,) = missing
        raise EnvironmentMismatch(f"{only.place}: {only.title} is not installed; install it with: {command}")
    raise EnvironmentMismatch(f"packages: {what} are not installed; install them with: {command}")
