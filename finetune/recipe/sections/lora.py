"""Low-rank adapters: the layers that get one, its rank, and its initial values."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from finetune.recipe.sections import lora_checks
from finetune.recipe.sections.base import Count, Section

INITS = "peft's initialisation: true, gaussian, orthogonal, olora, pissa."
Scale = Annotated[float, Field(gt=0)]


class Lora(Section):
    """Low-rank adapters; the keys are peft's own."""

    r: Count = Field(16, description="Rank.")
    lora_alpha: float = Field(32, gt=0, description="Scale; the update is multiplied by lora_alpha / r.")
    rank_pattern: dict[str, Count] = Field(
        {}, description="Other ranks by name or pattern: {q_proj: 8}; the first that fits the end of a path counts."
    )
    alpha_pattern: dict[str, Scale] = Field({}, description="Other lora_alpha, in the same way.")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the adapter's input.")
    target_modules: str | list[str] = Field(
        "all-linear", description="Layers that get an adapter: all-linear (experts too), a pattern, or a list of names."
    )
    target_parameters: list[str] | None = Field(
        None, description="Parameters too, as [mlp.experts.down_proj]; null: under all-linear those of the experts."
    )
    exclude_modules: str | list[str] = Field([], description="Layers that get none: a pattern, or a list of names.")
    modules_to_save: list[str] = Field([], description="Further modules trained in full and saved with the adapter.")
    use_rslora: bool = Field(False, description="Scale by lora_alpha / sqrt(r).")
    use_dora: bool = Field(False, description="Train magnitude and direction separately (DoRA).")
    # Not pissa_niter_[n]: peft draws another part of the base when it loads such an adapter, which fits none again.
    init_lora_weights: bool | Literal["gaussian", "orthogonal", "olora", "pissa"] = Field(True, description=INITS)
    loraplus_lr_ratio: float | None = Field(
        None, ge=1, description="LoRA+: B's learning rate over A's, which is learning_rate; null: one rate."
    )

    @model_validator(mode="after")
    def layers_by_name(self) -> Lora:
        lora_checks.check_lora(self)
        return self

    def rank_of(self, path: str) -> int:
        """The adapter's rank on the module or parameter with this path."""
        return lora_checks.by_pattern(self.rank_pattern, path, self.r)

    @property
    def takes_from_the_base(self) -> bool:
        """Whether the adapter begins as a part of the base, so that only peft can load it."""
        return lora_checks.takes_from_the_base(str(self.init_lora_weights))

    @property
    def names_single_layers(self) -> bool:
        """Whether some name holds a number, so that layers may get different adapters."""
        return lora_checks.names_single_layers(self)
