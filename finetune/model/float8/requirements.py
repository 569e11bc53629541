"""The needs of `training.mixed_precision: fp8` from the machine: torchao, and a GPU that multiplies float8."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping

from finetune.errors import EnvironmentMismatch
from finetune.recipe.schema import Recipe

EMULATION_SWITCH = "FINETUNE_FLOAT8"  # =emulate: each product of rounded numbers in float32, on any device
ADA = (8, 9)  # the first compute capability with products of float8
REMEDY = "set training.mixed_precision: bf16"


def check_float8(recipe: Recipe, *, on_cpu: bool) -> None:
    """Refuse float8 on a CPU, and where torchao is not installed. Raises EnvironmentMismatch."""
    if not recipe.training.float8:
        return
    if on_cpu and not emulated():
        raise EnvironmentMismatch(
            "training.mixed_precision: fp8: a CPU has no products of float8; "
            f"{REMEDY}, or compute them in float32, slower than bf16, with {EMULATION_SWITCH}=emulate"
        )
    if importlib.util.find_spec("torchao") is None:
        raise EnvironmentMismatch(
            "training.mixed_precision: fp8: torchao is not installed; "
            f"install it with: pip install 'finetune[lowbit]', or {REMEDY}"
        )


def check_capability(capability: tuple[int, int], name: str) -> None:
    """Refuse float8 on a GPU that has no products of it. Raises EnvironmentMismatch."""
    if capability < ADA and not emulated():
        raise EnvironmentMismatch(
            "training.mixed_precision: fp8: products of float8 begin with compute capability 8.9 (Ada, Hopper), "
            f"{name} has {capability[0]}.{capability[1]}; {REMEDY}"
        )


def emulated(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether products of float8 are computed in float32 from operands that are rounded to float8."""
    return environment.get(EMULATION_SWITCH) == "emulate"
