"""Packages beside the base install that a recipe needs, all named at once."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version

from packaging.version import Version

from finetune.recipe.optimizers import OPTIMIZERS
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import Strategy
from finetune.wording import install_command


@dataclass(frozen=True)
class NeededPackage:
    """A package, the recipe's place that needs it, and finetune's extra that installs it."""

    place: str
    module: str  # as it is imported
    extra: str
    title: str
    oldest: str = "0"  # the first version that trains correctly

    @property
    def is_here(self) -> bool:
        if importlib.util.find_spec(self.module) is None:
            return False
        return self.oldest == "0" or Version(version(self.module)) >= Version(self.oldest)


def engine_package(strategy: Strategy) -> NeededPackage:
    """DeepSpeed. 0.19.0 looks for infinite gradients only under fp16: a step that is not finite reaches ZeRO-3's
    weights.
    """
    place = f"accelerate_config: {strategy.name}"
    return NeededPackage(place, "deepspeed", "deepspeed", "DeepSpeed 0.19.8 or newer", "0.19.8")


def needed_packages(recipe: Recipe, strategy: Strategy, *, plan: bool = False) -> Iterator[NeededPackage]:
    """The packages that training this recipe imports; `plan`: those that its plan imports."""
    if strategy.uses_engine:
        yield engine_package(strategy)
    optim = recipe.training.optim
    if recipe.quantization is not None:
        yield NeededPackage("quantization", "bitsandbytes", "qlora", "bitsandbytes")
    elif OPTIMIZERS[optim].library(sharded=strategy.shards_optimizer_state) == "bitsandbytes":
        yield NeededPackage(f"training.optim: {optim}", "bitsandbytes", "qlora", "bitsandbytes")
    if plan:
        return
    files = [entry.data_files or [] for entry in recipe.data.sets]
    names = [name for entry in files for name in ([entry] if isinstance(entry, str) else entry)]
    if any(name.lower().endswith((".xlsx", ".xlsm")) for name in names):
        yield NeededPackage("data", "openpyxl", "excel", "openpyxl")


def missing_packages(recipe: Recipe, strategy: Strategy, *, plan: bool = False) -> str:
    """The packages that the recipe needs and that are not installed, all in one line with a remedy; else empty."""
    return missing_of(needed_packages(recipe, strategy, plan=plan))


def missing_of(needed: Iterable[NeededPackage]) -> str:
    """A line for those of these packages that are not installed; empty if all are."""
    missing = [package for package in needed if not package.is_here]
    if not missing:
        return ""
    command = install_command(*dict.fromkeys(package.extra for package in missing))
    if len(missing) == 1:
        (only,) = missing
        return f"{only.place}: {only.title} is not installed; install it in the checkout: {command}"
    names = " and ".join(f"{package.title} ({package.place})" for package in missing)
    return f"packages: {names} are not installed; install them in the checkout: {command}"
