"""GPUs as people name them: `4x24GB`, `H100:8`, `2xL4`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from finetune.errors import FinetuneError, RecipeError
from finetune.recipe.schema import Budget

# What nvidia-smi gives as total, in MiB, of which the driver keeps some.
NAMED = {
    "T4": 15_360,
    "L4": 23_034,
    "A10G": 23_028,
    "RTX3090": 24_576,
    "RTX4090": 24_564,
    "L40S": 46_068,
    "A100-40GB": 40_960,
    "A100": 81_920,
    "H100": 81_559,
    "H200": 143_771,
}
DRIVER = 0.99  # the share of it that programs get
FORMS = "write 4x24GB, H100:8 or 8xH100"


@dataclass(frozen=True)
class Gpus:
    """GPUs of each machine, and the bytes one of them gives to a program."""

    count: int
    memory: int
    name: str
    nodes: int = 1


def read_gpus(text: str, nodes: int = 1) -> Gpus:
    """Parse `4x24GB`, `24GB`, `H100:8`, `8xH100`. GB as makers state them: 10^9 bytes. Raises FinetuneError."""
    words = text.strip().upper().replace(" ", "")
    by_size = re.fullmatch(r"(?:(\d+)X)?(\d+(?:\.\d+)?)GI?B", words)
    by_name = re.fullmatch(r"(?:(\d+)X)?([A-Z][A-Z0-9-]*?)(?::(\d+))?", words)
    if by_size:
        count, memory, name = int(by_size[1] or 1), int(float(by_size[2]) * 1e9), f"{by_size[2]} GB"
    elif by_name and by_name[2] in NAMED:
        count, name = int(by_name[1] or by_name[3] or 1), by_name[2]
        memory = int(NAMED[name] * 2**20 * DRIVER)
    else:
        raise FinetuneError(f"--gpus: {text}: is no GPU known here; {FORMS}, of {', '.join(NAMED)}")
    if count < 1 or nodes < 1:
        raise FinetuneError(f"--gpus: {text}: no GPU is named; {FORMS}")
    return Gpus(count, memory, name, nodes)


def gpus_of(budget: Budget) -> Gpus | None:
    """What the recipe is made for; None where that is a CPU."""
    if not budget.gpus or not budget.gpu_memory_gb:
        return None
    return Gpus(budget.gpus, int(budget.gpu_memory_gb * 1e9), f"{budget.gpu_memory_gb:g} GB", budget.nodes)


# 2x24GB, 24gb (one GPU), 2x8x80 (two nodes of eight), cpu.
_GPUS = re.compile(r"(?:(?:(?P<nodes>\d{1,5})x)?(?P<gpus>\d{1,5})x)?(?P<gb>\d{1,5}(?:\.\d+)?)(?:gb)?|cpu", re.ASCII)


def parse_gpus(text: str) -> Budget:
    """`2x24GB` as a budget; one number alone is one GPU, three are nodes, GPUs of each and memory, `cpu` is none.

    Raises RecipeError for anything else, and where one of the numbers is 0.
    """
    match = _GPUS.fullmatch(text.strip().lower().replace(" ", ""))
    if match is None:
        raise _no_budget(text)
    if match["gb"] is None:
        return Budget()
    nodes, gpus, gb = int(match["nodes"] or 1), int(match["gpus"] or 1), float(match["gb"])
    if not nodes or not gpus or not gb:
        raise _no_budget(text)
    return Budget(gpus=gpus, gpu_memory_gb=gb, nodes=nodes)


def _no_budget(text: str) -> RecipeError:
    return RecipeError([f"--gpus: {text!r} is no budget; write 2x24GB, 2x8x80GB for two nodes of eight, or cpu"])
