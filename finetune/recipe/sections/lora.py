"""Low-rank adapters: which modules get one, and how it begins."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from finetune.recipe import cross_checks
from finetune.recipe.sections.base import Count, Section

INITS = "peft's initialisation: true, gaussian, orthogonal, olora, pissa."


class Lora(Section):
    """Low-rank adapters; the keys are peft's own."""

    r: Count = Field(16, description="Rank.")
    lora_alpha: float = Field(32, gt=0, description="Scale; the update is multiplied by lora_alpha / r.")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the adapter's input.")
    target_modules: str | Annotated[list[str], Field(min_length=1)] = Field(
        "all-linear", description="Layers that get an adapter: all-linear, a pattern, or a list of names."
    )
    modules_to_save: list[str] = Field([], description="Further modules trained in full and saved with the adapter.")
    use_rslora: bool = Field(False, description="Scale by lora_alpha / sqrt(r).")
    use_dora: bool = Field(False, description="Train magnitude and direction separately (DoRA).")
    # Not pissa_niter_[n]: peft draws another part of the base when it loads such an adapter, which fits none again.
    init_lora_weights: bool | Literal["gaussian", "orthogonal", "olora", "pissa"] = Field(True, description=INITS)

    @model_validator(mode="after")
    def layers_by_name(self) -> Lora:
        cross_checks.check_target_modules(self)
        return self
