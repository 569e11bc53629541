"""Float32 weights that are computed with in bfloat16: cast once an optimizer step, by an operation that autograd keeps.

Autocast alone casts each weight again in every micro-batch, and leaves the embeddings in float32, and with them all
hidden states between layers. Here the layers have bfloat16 copies, which autograd knows as casts of the float32 weights:
backward casts each gradient to float32 and adds it to that of its weight, where DDP reduces it. The copies take 2 bytes
a weight from a step's first forward to its last backward. FSDP2 and DeepSpeed's engine have such copies of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from finetune.model.dtypes import COMPUTE
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import Strategy

T = TypeVar("T")
Noted = Callable[[str, Tensor], None]  # a weight's name, and its copy


class CastWeights:
    """The copies of a model's float32 weights, for as long as they are needed."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, noted: Noted | None = None) -> None:
        """
        Args:
            model: Unwrapped; its parameters keep their names, and are what the optimizer has.
            dtype: Of the copies; None: there are none, the model computes with its weights as they are.
            noted: Called with each copy as it is made; the planner's.
        """
        self._around = _Around(model)
        self._dtype, self._noted = dtype, noted

    def during(self, work: Callable[[], T], casting: AbstractContextManager[Any] | None = None) -> T:
        """What `work` returns, which finds the copies in place of the parameters. `casting` is entered while they are
        made. Forward and backward belong into one `work`: backward may compute a layer's forward again."""
        if self._dtype is None:
            return work()
        with casting or nullcontext():
            copies = dict(map(self._copied, self._around.named_parameters()))
        done: T = torch.func.functional_call(self._around, copies, (work,))
        return done

    def _copied(self, named: tuple[str, nn.Parameter]) -> tuple[str, Tensor]:
        name, parameter = named
        copy = parameter.to(self._dtype) if parameter.dtype == torch.float32 else parameter
        if self._noted is not None:
            self._noted(name, copy)
        return name, copy


class _Around(nn.Module):
    """A model inside of a module whose forward is any work."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], T]) -> T:
        return work()


AS_THEY_ARE = CastWeights(nn.Module(), None)  # no copies, of any model


def cast_weights(
    recipe: Recipe, strategy: Strategy, unwrapped_model: nn.Module, noted: Noted | None = None
) -> CastWeights:
    """The copies that a run computes with: of all weights, where this recipe and strategy leave them in float32."""
    dtype = COMPUTE[recipe.training.mixed_precision] if strategy.casts_weights_once(recipe) else None
    return CastWeights(unwrapped_model, dtype, noted)
