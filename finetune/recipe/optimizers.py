"""The optimizers a recipe can name, and what the kit has to know of each. No torch here.

A new optimizer is an entry in OPTIMIZERS and a word of `Optimizer`; model/optimizer.py builds those that are not
bitsandbytes'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Optimizer = Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"]


@dataclass(frozen=True)
class OptimizerSpec:
    """What is known of an optimizer before it is built."""

    title: str  # for messages
    moments: tuple[str, ...]  # entries of its state that have their parameter's shape
    moment_bytes: int | None  # of an element of a moment; None: as wide as the trained weight
    works_on_shards: bool  # updates DTensors and flat partitions, element by element
    bitsandbytes_class: str | None = None  # None: torch's
    paged: bool = False  # its state is in CUDA's managed memory, which a CPU has not
    unpaged: Optimizer | None = None  # the same without pages
    smaller: Optimizer | None = None  # the same with a smaller state
    other_names: tuple[str, ...] = ()  # in the configurations of other tools, besides its own

    def state_bytes(self, weight_bytes: int) -> int:
        """Bytes of the moments of one trained weight that is `weight_bytes` wide."""
        return len(self.moments) * (self.moment_bytes or weight_bytes)

    def state_dtypes(self, weight_dtype: str) -> tuple[str, ...]:
        """Number formats that the moments may have; with 8 bits, float32 for those of fewer than 4,096 elements."""
        return {None: (weight_dtype,), 1: ("float32", "uint8")}.get(self.moment_bytes, ("float32",))


_TORCH, _BITSANDBYTES = ("exp_avg", "exp_avg_sq"), ("state1", "state2")
OPTIMIZERS: dict[Optimizer, OptimizerSpec] = {
    "adamw": OptimizerSpec(
        title="AdamW",
        moments=_TORCH,
        moment_bytes=None,
        works_on_shards=True,
        smaller="adamw_8bit",
        other_names=(
            *("AdamW", "adamw_hf", "adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_torch_xla"),
            "adamw_torch_npu_fused",
        ),
    ),
    "adamw_8bit": OptimizerSpec(
        title="AdamW",
        moments=_BITSANDBYTES,
        moment_bytes=1,
        works_on_shards=False,
        bitsandbytes_class="AdamW8bit",
        other_names=("adamw_bnb_8bit", "AdamW8bit"),
    ),
    "paged_adamw_8bit": OptimizerSpec(
        title="AdamW",
        moments=_BITSANDBYTES,
        moment_bytes=1,
        works_on_shards=False,
        bitsandbytes_class="PagedAdamW8bit",
        paged=True,
        unpaged="adamw_8bit",
        other_names=("PagedAdamW8bit",),
    ),
    "paged_adamw_32bit": OptimizerSpec(
        title="AdamW",
        moments=_BITSANDBYTES,
        moment_bytes=4,
        works_on_shards=False,
        bitsandbytes_class="PagedAdamW32bit",
        paged=True,
        unpaged="adamw",
        other_names=("paged_adamw", "PagedAdamW", "PagedAdamW32bit"),
    ),
}
DEFAULT: Optimizer = "adamw"  # takes the place of one that is not offered, or that has no sharded state
OPTIMIZER_NAMES: dict[str, Optimizer] = {
    word: name for name, spec in OPTIMIZERS.items() for word in (name, *spec.other_names)
}
# In whatever state: entries of their parameter's shape.
MOMENTS = frozenset(entry for spec in OPTIMIZERS.values() for entry in spec.moments)
