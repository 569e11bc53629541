"""Three linear layers with adapters by peft: two of one input, and one of what they make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

INPUTS, INNER, RANK = 64, 128, 4  # whole blocks of 4-bit weights, which bitsandbytes needs on a CPU


class Block(nn.Module):
    """Two layers of the same input, and one of what they make; the last thing that is computed is a product."""

    def __init__(self, bias: bool, make: Callable[..., nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.gate, self.up = make(INPUTS, INNER, bias=bias), make(INPUTS, INNER, bias=bias)
        self.down = make(INNER, INPUTS, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.down(torch.tanh(self.gate(hidden)) * self.up(hidden))
        return result


def adapted(base: nn.Module, **settings: Any) -> Any:
    """By peft, with matrices that are all far from zero."""
    config: dict[str, Any] = {"r": RANK, "lora_alpha": 32, "target_modules": ["gate", "up", "down"]} | settings
    model = get_peft_model(base, LoraConfig(**config)).train()
    return shaken(model)


def shaken(model: nn.Module) -> nn.Module:
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64).to(parameter.dtype)
    return model
