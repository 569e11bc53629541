"""Float32 weights that are computed with in 16 bits: cast once an optimizer step.

Autocast alone casts each weight again in every micro-batch, and leaves the embeddings in float32, and with them all
hidden states between layers. Here the layers have 16-bit copies of the weights: as soon as backward has the gradient
of one, it is cast to float32 and added to that of its weight, where DDP reduces it. The copies take 2 bytes a weight
from a step's first forward to its last backward. FSDP2 and DeepSpeed's engine have such copies of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from finetune.model.dtypes import COMPUTE
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import Strategy

Done = TypeVar("Done")
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

    def during(self, work: Callable[[], Done], casting: AbstractContextManager[Any] | None = None) -> Done:
        """What `work` returns, which finds the copies in place of the parameters. `casting` is entered while they are
        made. Forward and backward belong into one `work`: backward may compute a layer's forward again."""
        if self._dtype is None:
            return work()
        with casting or nullcontext():
            copies = dict(map(self._copied, self._around.named_parameters()))
        done: Done = torch.func.functional_call(self._around, copies, (work,))
        return done

    def _copied(self, named: tuple[str, nn.Parameter]) -> tuple[str, Tensor]:
        name, parameter = named
        if parameter.dtype != torch.float32:
            return name, parameter
        copy = cast = parameter.to(self._dtype)
        if cast.requires_grad:
            # A leaf, whose gradient is passed on at once. Autograd would run the casts, which are older than all else
            # in its graph, at the end of backward, with the gradients of all weights waiting there in bfloat16.
            copy = cast.detach().requires_grad_()
            copy.register_post_accumulate_grad_hook(partial(_pass_on, cast))
        if self._noted is not None:
            self._noted(name, copy)
        return name, copy


def _pass_on(cast: Tensor, copy: Tensor) -> None:
    """The gradient of a copy, cast and added to that of the weight by a backward of its own, which DDP notices."""
    gradient, copy.grad = copy.grad, None
    torch.autograd.backward(cast, gradient)


class _Around(nn.Module):
    """A model inside of a module whose forward is any work."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Done]) -> Done:
        return work()


AS_THEY_ARE = CastWeights(nn.Module(), None)  # no copies, of any model


def cast_weights(
    recipe: Recipe, strategy: Strategy, unwrapped_model: nn.Module, noted: Noted | None = None
) -> CastWeights:
    """The copies that a run computes with: of all weights, where this recipe and strategy leave them in float32."""
    dtype = COMPUTE[recipe.training.mixed_precision] if strategy.casts_weights_once(recipe) else None
    return CastWeights(unwrapped_model, dtype, noted)
