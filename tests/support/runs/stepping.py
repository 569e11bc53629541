"""What tests of the optimizer step share: a tiny float32 recipe, the weights before and after, reads of a device."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.overrides import TorchFunctionMode

from finetune.measure.phases import Phases
from finetune.recipe.schema import Recipe
from finetune.training.objectives.supervised import Supervised
from finetune.training.run import StepParts
from tests.support.runs.recipes import least_recipe

CPU = torch.device("cpu")
READS = {"item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy", "nonzero"}


def float32_recipe(folder: Path, **training: Any) -> Recipe:
    """All weights of the model in `folder`, in float32, every layer's activations kept; `training` goes over that."""
    plain = {"mixed_precision": "no", "activation_checkpointing": False}
    return least_recipe(folder, model={"dtype": "float32"}, lora=None, training=plain | training)


def step_parts(accelerator: Accelerator, model: nn.Module, optimizer: Any, **changes: Any) -> StepParts:
    """Parts of supervised steps on a CPU, clipped at a norm of 1 and not measured; `changes` go over that."""
    phases = Phases(CPU, enabled=False)
    plain: dict[str, Any] = {"objective": Supervised(), "phases": phases, "max_grad_norm": 1.0}
    return StepParts(accelerator=accelerator, model=model, optimizer=optimizer, **(plain | changes))


class CountReads(TorchFunctionMode):
    """Counts what would wait for a device: values read to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:
            self.reads[name] += 1
        return func(*args, **(kwargs or {}))


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]
