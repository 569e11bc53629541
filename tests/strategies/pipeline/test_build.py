"""The optimizer of a stage: what it updates, and how it rounds."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn

from finetune.model.optimizer import make_optimizer
from finetune.model.optimizers.rounded_adamw import places_of
from finetune.strategies.pipeline.build import staged_optimizer
from tests.support.runs.recipes import least_recipe


def test_a_stage_rounds_its_weights_as_the_whole_model_does() -> None:
    """By their place among all: of tied embeddings, which two stages have, both copies stay equal."""
    recipe = least_recipe(training={"pure_bf16": True, "mixed_precision": "bf16"}, lora=None)
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).bfloat16()
    stage = deepcopy(whole)
    stage[0].requires_grad_(False)
    optimizer = make_optimizer(whole, recipe)
    of_stage = staged_optimizer(stage, recipe, places_of(optimizer, whole))
    for weight, own in zip(whole.parameters(), stage.parameters(), strict=True):
        weight.grad = torch.randn_like(weight)
        own.grad = weight.grad.clone() if own.requires_grad else None
    before = stage[1].weight.clone()
    optimizer.step()
    of_stage.step()
    assert not torch.equal(stage[1].weight, before)
    for name in ("weight", "bias"):
        assert torch.equal(getattr(stage[1], name), getattr(whole[1], name))
