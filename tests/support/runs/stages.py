"""The stages of a pipeline in one process, each with a model of its own, called one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from finetune.architecture import attention
from finetune.architecture.loss import put_loss_into_forward
from finetune.strategies.pipeline.holding import Holding, place_stage
from finetune.strategies.pipeline.layout import Parts, parts_of
from finetune.strategies.pipeline.ranks import StagePlace
from finetune.strategies.pipeline.stage import LayerRun, runs_of

CPU = torch.device("cpu")


def structure(model: PreTrainedModel) -> PreTrainedModel:
    """The same model on meta."""
    attention.register()
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(model.config, attn_implementation=attention.NAME, dtype=torch.bfloat16)
    assert isinstance(made, PreTrainedModel)
    return made


def taught(model: PreTrainedModel) -> PreTrainedModel:
    """The model with the kit's attention and loss."""
    attention.register()
    model.set_attn_implementation(attention.NAME)
    put_loss_into_forward(model)
    return model


class Chain:
    """The stages of a model that is made anew, alike, for each of them; they have the runs of layers in turn."""

    def __init__(self, make: Callable[[], PreTrainedModel], layers: Sequence[range], stages: int | None = None) -> None:
        count = stages or len(layers)
        self.parts: Parts = parts_of(structure(make()))
        self.models = [taught(make()) for _ in range(count)]
        self.holdings: list[Holding] = []
        self.trained: list[dict[str, nn.Parameter]] = []
        runs: dict[int, LayerRun] = {}
        for stage, model in enumerate(self.models):
            names = dict(model.named_parameters(remove_duplicate=False))
            run_of = {name: self.parts.run_of(name, layers) for name in names}
            holding, trained = place_stage(model, model, run_of, StagePlace(stage, count), CPU)
            self.holdings.append(holding)
            self.trained.append(trained)
            own = range(stage, len(layers), count)
            runs |= zip(own, runs_of(model, self.parts, layers, own, nullcontext, torch.float32), strict=True)
        self.runs = [runs[index] for index in range(len(layers))]

    def forward_and_backward(self, batch: dict[str, Any]) -> Tensor:
        """The loss of a micro-batch; gradients are left in the stages' weights."""
        given, outputs, inputs = torch.empty(1), [], []
        for run in self.runs:
            run.expect([batch])
            output = run(given)
            outputs.append(output)
            given = output.detach().requires_grad_()
            inputs.append(given)
        outputs[-1].backward()
        for output, after in zip(outputs[-2::-1], inputs[-2::-1], strict=True):
            output.backward(after.grad)
        return outputs[-1].detach()

    def gradients(self) -> dict[str, Tensor]:
        """By the model's own names; those of a weight that two stages have are added up."""
        total: dict[str, Tensor] = {}
        for model in self.models:
            for name, weight in model.named_parameters():
                if weight.grad is not None:
                    total[name] = total[name] + weight.grad if name in total else weight.grad
        return total


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
