"""The one call that has a model's adapters, norms and gates computed here."""

from __future__ import annotations

from torch import nn

from finetune.architecture.own_layers.lora_linear import Unpack, compute_adapters
from finetune.architecture.own_layers.norm_and_gate import compute_norms_and_gates


def compute_layers(model: nn.Module, unpack: Unpack, *, adapters_by_peft: str | None = None) -> None:
    """Have them computed here, wherever a layer allows it. The arguments are those of `compute_adapters`."""
    compute_adapters(model, unpack, by_peft=adapters_by_peft)
    compute_norms_and_gates(model)
