"""The optimizers that a recipe can name, and the facts that the kit needs about each. No torch here.

A new optimizer is an entry in OPTIMIZERS and a word in `Optimizer` (sections/training.py). model/optimizer.py builds
those that are not bitsandbytes', and the replacements under shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Literal

from finetune.recipe.sections.training import Optimizer

if TYPE_CHECKING:
    from finetune.recipe.schema import Recipe, Training


@dataclass(frozen=True)
class OptimizerSpec:
    """The facts about an optimizer before it is built."""

    moments: tuple[str, ...]  # state entries with their parameter's shape
    moment_bytes: int | None  # bytes of a moment's element; None: as wide as the trained weight
    works_on_shards: bool  # updates DTensors, by elements or by blocks within their rows
    bitsandbytes_class: str | None = None  # for full tensors; None: torch's optimizer
    unpaged: Optimizer | None = None  # the same optimizer without state in CUDA's managed memory; None: it has none
    smaller: Optimizer | None = None  # the same optimizer with smaller moments
    other_names: str = ""  # other tools' names for it
    title: str = "AdamW"  # for messages

    @property
    def paged(self) -> bool:
        """Whether its state is in CUDA's managed memory. A CPU has none."""
        return self.unpaged is not None

    def library(self, *, sharded: bool) -> str:
        """The library that computes the update: torch, bitsandbytes for full tensors, or this kit for shards."""
        if self.bitsandbytes_class is None:
            return "torch"
        if sharded:
            return "finetune"
        return "bitsandbytes"

    def state_bytes(self, weight_bytes: int) -> int:
        """Bytes of moments for one trained weight with `weight_bytes`."""
        return len(self.moments) * (self.moment_bytes or weight_bytes)  # AdamW on float32: 2 x 4 = 8

    def state_dtypes(self, weight_dtype: str) -> tuple[str, ...]:
        """The moments' possible number formats."""
        if self.moment_bytes is None:
            return (weight_dtype,)
        if self.moment_bytes == 1:
            return ("float32", "uint8")  # moments under 4,096 elements are float32
        return ("float32",)


def _bitsandbytes(
    class_name: str, moment_bytes: int, other_names: str, unpaged: Optimizer | None = None
) -> OptimizerSpec:
    """bitsandbytes' kernels update full tensors alone (0.50). For shards, the kit has its own unpaged optimizer."""
    names, on_shards = f"{class_name} {other_names}", unpaged is None
    return OptimizerSpec(("state1", "state2"), moment_bytes, on_shards, class_name, unpaged, other_names=names)


_TORCH = "AdamW adamw_hf adamw_torch adamw_torch_fused adamw_apex_fused adamw_torch_xla adamw_torch_npu_fused"
OPTIMIZERS: dict[Optimizer, OptimizerSpec] = {
    "adamw": OptimizerSpec(("exp_avg", "exp_avg_sq"), None, True, smaller="adamw_8bit", other_names=_TORCH),
    "adamw_8bit": _bitsandbytes("AdamW8bit", 1, "adamw_bnb_8bit"),
    "paged_adamw_8bit": _bitsandbytes("PagedAdamW8bit", 1, "", "adamw_8bit"),
    "paged_adamw_32bit": _bitsandbytes("PagedAdamW32bit", 4, "paged_adamw PagedAdamW", "adamw"),
}
DEFAULT: Optimizer = "adamw"  # also replaces another tool's optimizer that is not offered
OPTIMIZER_NAMES: dict[str, Optimizer] = {
    word: name for name, spec in OPTIMIZERS.items() for word in (name, *spec.other_names.split())
}
# State entries with their parameter's shape, under any optimizer.
MOMENTS = frozenset(entry for spec in OPTIMIZERS.values() for entry in spec.moments)


def for_shards(name: Optimizer) -> Optimizer:
    """The optimizer itself if it updates shards, else its replacement there."""
    spec = OPTIMIZERS[name]
    if spec.works_on_shards:
        return name
    return spec.unpaged or DEFAULT


Method = Literal["full", "lora", "qlora"]
# Adapters' and all weights' usual learning rate, below so many weights of the model: docs/recipes.md#learning-rates.
# Models of 3.7 billion weights are called 4B.
# LoRA's best rate is about ten times the best rate for full training (Biderman et al., LoRA Learns Less and Forgets
# Less, 2024). Adapters on a quantised base use the same rates as on any other base (Dettmers et al., QLoRA, 2023).
USUAL_RATES = {0.5e9: (2e-3, 1e-4), 3.6e9: (5e-4, 2e-5), 10e9: (3e-4, 1e-5), 25e9: (2e-4, 1e-5), 1e15: (1e-4, 5e-6)}
# For preferences a tenth or less: TRL's DPOConfig and KTOConfig take 1e-6 by default, the alignment-handbook's recipes
# 5e-7 for all weights and 5e-6 for adapters of 7B. docs/preferences.md measures 135M.
USUAL_PREFERENCE_RATES = {0.5e9: (1e-4, 1e-5), 1e15: (5e-6, 1e-6)}
TYPICAL_WEIGHTS = 12e9  # for a model that is not known: its rates are safe for every size


def checkpoint_bytes(training: Training, trained: int) -> int:
    """Bytes of a checkpoint's tensors. `trained`: trained weights, over all ranks."""
    width = 2 if training.pure_bf16 else 4
    return trained * (width + OPTIMIZERS[training.optim].state_bytes(width))


# (least, most) learning rate. Beyond the limits a method learns nothing, or it diverges.
RATE_LIMITS = {"full": (1e-6, 1e-4), "adapters": (1e-5, 2e-3)}
PREFERENCE_RATE_LIMITS = {"full": (5e-8, 1e-5), "adapters": (5e-7, 5e-4)}


def usual_rate(weights: float | None, method: Method, objective: str = "supervised") -> float:
    """The learning rate under AdamW with which to begin.

    Args:
        weights: The model's, roughly; None: not known.
    """
    rates = USUAL_RATES if objective == "supervised" else USUAL_PREFERENCE_RATES
    adapters, full = next(rate for most, rate in rates.items() if (weights or TYPICAL_WEIGHTS) < most)
    return full if method == "full" else adapters


LEAST_SIMPO_BETA = 1.0  # below it, a margin of 1 by the token is a reward below simpo_gamma


def far_rate(recipe: Recipe) -> Iterator[str]:
    """A line for a learning rate far outside the usual range of the method and the objective, and for SimPO's beta."""
    method: Method = "full"
    if recipe.lora is not None:
        method = "lora" if recipe.quantization is None else "qlora"
    words = {"full": "full training", "lora": "LoRA", "qlora": "QLoRA"}[method]
    rate, objective, limits = recipe.training.learning_rate, recipe.training.objective, RATE_LIMITS
    if recipe.preferences is not None:
        limits, words = PREFERENCE_RATE_LIMITS, f"{objective.upper()} by {words}"
    least, most = limits["full" if method == "full" else "adapters"]
    if not least <= rate <= most:
        side = "below" if rate < least else "above"
        problem = f"{decimal(rate)} is far {side} what {words} takes, {decimal(least)} to {decimal(most)}"
        usual = decimal(usual_rate(None, method, objective))
        yield f"training.learning_rate: {problem}; set training.learning_rate={usual}"
    if recipe.training.objective == "dpo" and recipe.dpo.loss_type == "simpo" and recipe.dpo.beta < LEAST_SIMPO_BETA:
        problem = f"{decimal(recipe.dpo.beta)} is a beta for DPO; simpo's rewards are by the token and take 2 to 10"
        yield f"dpo.beta: {problem}; set dpo.beta=2"


def decimal(number: float) -> str:
    """0.00001 instead of 1e-05, because YAML reads 1e-05 as text; 1e+300 unchanged."""
    text = format(Decimal(repr(number)), "f").removesuffix(".0")
    if len(text) > 20:
        return repr(number)
    return text
