"""GPUs as people name them, in every verb that takes `--gpus`: `4x24GB`, `2x8xH100`, `H100:8`, `24GB`, `cpu`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from finetune.errors import FinetuneError
from finetune.recipe.schema import Budget
from finetune.wording import counted


class _Model(NamedTuple):
    """A GPU's memory, and what it computes."""

    gb: float  # as its maker states it
    mib: int  # the total that nvidia-smi shows
    float8: bool = False  # has products in float8: from compute capability 8.9 on


MODELS = {
    "T4": _Model(16, 15_360),
    "L4": _Model(24, 23_034, float8=True),
    "A10G": _Model(24, 23_028),
    "RTX3090": _Model(24, 24_576),
    "RTX4090": _Model(24, 24_564, float8=True),
    "L40S": _Model(48, 46_068, float8=True),
    "A100-40GB": _Model(40, 40_960),
    "A100": _Model(80, 81_920),
    "H100": _Model(80, 81_559, float8=True),
    "H200": _Model(141, 143_771, float8=True),
    "B200": _Model(180, 183_359, float8=True),
    "RTX5090": _Model(32, 32_607, float8=True),
    "RTXPRO6000": _Model(96, 97_887, float8=True),
}
PROGRAM_SHARE = 0.99  # share of nvidia-smi's total that a program can have; the driver keeps the rest
FORMS = "write 2x24GB, 2x8x80GB (nodes x GPUs x memory), 4xL4, 2x8xH100, H100:8, 24GB or cpu"
# One number before the memory or the name: GPUs. Two: nodes, and GPUs of each. GiB is read as GB.
_FORM = re.compile(
    r"(?:(\d{1,5})X)?(?:(\d{1,5})X)?(?:(\d{1,5}(?:\.\d+)?)GI?B|([A-Z][A-Z0-9-]*)(?::(\d{1,5}))?)", re.ASCII
)


@dataclass(frozen=True)
class Gpus:
    """The GPUs in each node, and the bytes that one GPU offers a program."""

    count: int
    memory: int
    name: str
    nodes: int = 1

    @property
    def gb(self) -> float:
        """One GPU's memory in GB as its vendor states it. Recipes' budgets use it too."""
        if self.name in MODELS:
            return MODELS[self.name].gb
        return self.memory / 1e9

    @property
    def lacks_float8(self) -> bool:
        """Whether this GPU is known to have no products in float8. Of one that is named by its memory nobody knows."""
        return self.name in MODELS and not MODELS[self.name].float8


def parse_gpus(text: str, nodes: int | None = None) -> Gpus | None:
    """GPUs by memory (GB as 10^9 bytes, as vendors state it) or by name; None for `cpu`.

    Raises FinetuneError for other text, an unknown name, a 0, and for `nodes` that contradict the text.

    Args:
        nodes: The value of `--nodes`, if given.
    """
    words = text.strip().upper().replace(" ", "")
    if words == "CPU":
        if nodes is not None:
            raise FinetuneError(f"--nodes: {nodes}: --gpus cpu is one machine without GPUs; leave --nodes out")
        return None
    if re.fullmatch(r"(?:\d+X)*\d+(?:\.\d+)?", words, re.ASCII):  # 8, or 2x24
        raise FinetuneError(f"--gpus: {text}: a number alone may be GPUs or GB; {FORMS}")
    match = _FORM.fullmatch(words)
    if match is None or (match[1] and match[5]):  # 2xH100:8 counts GPUs twice
        raise FinetuneError(f"--gpus: {text!r} does not name GPUs; {FORMS}")
    first, second, gb, name, last = match.groups()  # 2x8x80GB: 2, 8, 80; H100:8: name H100, last 8
    if name and name not in MODELS:
        raise FinetuneError(f"--gpus: {text}: not a GPU known here ({', '.join(MODELS)}); {FORMS}")
    if not all(float(number) for number in (first or 1, second or 1, gb or 1, last or 1)):
        raise FinetuneError(f"--gpus: {text}: each number must be above 0; {FORMS}")
    if nodes is not None and second and nodes != int(first):
        raise FinetuneError(f"--nodes: {nodes}: --gpus {text} says {counted(int(first), 'node')}; leave --nodes out")
    count, node_count = int(second or first or last or 1), nodes or 1
    if second:
        node_count = int(first)
    if name:
        return Gpus(count, int(MODELS[name].mib * 2**20 * PROGRAM_SHARE), name, node_count)
    return _gpus_by_memory(count, float(gb), node_count)


def _gpus_by_memory(count: int, gb: float, nodes: int) -> Gpus:
    return Gpus(count, round(gb * 1e9), f"{gb:g} GB", nodes)


def gpus_of(budget: Budget) -> Gpus | None:
    """The GPUs that a recipe is made for; None for a CPU."""
    if not budget.gpus or not budget.gpu_memory_gb:
        return None
    return _gpus_by_memory(budget.gpus, budget.gpu_memory_gb, budget.nodes)


def budget_of(gpus: Gpus | None) -> Budget:
    """The recipe's section for these GPUs."""
    if gpus is None:
        return Budget()
    return Budget(gpus=gpus.count, gpu_memory_gb=gpus.gb, nodes=gpus.nodes)
