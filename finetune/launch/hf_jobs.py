"""Hugging Face Jobs: the machines that it lends, each billed by the minute."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.errors import FinetuneError
from finetune.launch.plan import LaunchPlan
from finetune.wording import counted


@dataclass(frozen=True)
class Flavour:
    """A machine that HF Jobs lends."""

    name: str  # of `hf jobs run --flavor`
    gpu: str = ""  # empty: none
    memory_gb: int = 0  # of one GPU, as its maker states it
    computes_float8: bool = False


# By memory, then by price. Without T4s, which have no bfloat16. `hf jobs hardware` lists them.
_FLAVOURS: dict[int, tuple[Flavour, ...]] = {
    0: (Flavour("cpu-upgrade"),),
    1: (
        Flavour("l4x1", "L4", 24, True),
        Flavour("a10g-small", "A10G", 24),
        Flavour("l40sx1", "L40S", 48, True),
        Flavour("a100-large", "A100", 80),
        Flavour("rtx-pro-6000", "RTXPRO6000", 96, True),
        Flavour("h200", "H200", 141, True),
    ),
    2: (
        Flavour("a10g-largex2", "A10G", 24),
        Flavour("rtx-pro-6000x2", "RTXPRO6000", 96, True),
        Flavour("h200x2", "H200", 141, True),
    ),
    4: (
        Flavour("l4x4", "L4", 24, True),
        Flavour("a10g-largex4", "A10G", 24),
        Flavour("l40sx4", "L40S", 48, True),
        Flavour("a100x4", "A100", 80),
        Flavour("rtx-pro-6000x4", "RTXPRO6000", 96, True),
        Flavour("h200x4", "H200", 141, True),
    ),
    8: (
        Flavour("l40sx8", "L40S", 48, True),
        Flavour("a100x8", "A100", 80),
        Flavour("rtx-pro-6000x8", "RTXPRO6000", 96, True),
        Flavour("h200x8", "H200", 141, True),
    ),
}


def flavour_of(plan: LaunchPlan) -> Flavour:
    """The first flavour with the budget's GPUs. Raises FinetuneError if there is none."""
    float8, needed = plan.loaded.recipe.model.load_in_fp8, 0.0
    if plan.gpus:
        needed = plan.loaded.recipe.budget.gpu_memory_gb
    for flavour in _FLAVOURS.get(plan.gpus, ()):
        if flavour.memory_gb >= needed and (flavour.computes_float8 or not float8):
            return flavour
    raise FinetuneError(
        f"budget: HF Jobs has no machine with {counted(plan.gpus, 'GPU', 'GPUs')} of {needed:g} GB; it has 1, 2, 4 or "
        "8 of up to 141 GB, so set budget.gpus to one of these"
    )
