"""The optimizer that a recipe names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from finetune.recipe import Recipe


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW over what is trained: betas 0.9 and 0.999, epsilon 1e-8, decay on matrices alone.

    Biases and norms are vectors and are not decayed, as in transformers' Trainer. The learning rate of each step is
    written into the groups by the loop.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decay = recipe.training.weight_decay
    groups: list[dict[str, Any]] = [{"params": trained}]
    if decay:  # else one group: the fused kernel runs once for each
        groups = [
            {"params": [p for p in trained if _dimensions(p) >= 2], "weight_decay": decay},
            {"params": [p for p in trained if _dimensions(p) < 2], "weight_decay": 0.0},
        ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=recipe.training.learning_rate,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        fused=True,  # one kernel for all parameters; on a CPU too
    )


def _dimensions(parameter: nn.Parameter) -> int:
    """Of the whole parameter: ZeRO-3 leaves an empty vector in its place."""
    return len(getattr(parameter, "ds_shape", parameter.shape))
