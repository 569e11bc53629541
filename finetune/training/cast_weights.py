"""Float32 weights that are computed with in 16 bits: cast once per optimizer step.

Autocast alone casts each weight again in every micro-batch. It also leaves the embeddings in float32, and with them
all hidden states between layers. Here the layers have 16-bit copies of the weights:

    master weight (float32)  --cast-->  copy (bf16)  --forward, backward-->  copy.grad (bf16)
            ^                                                                    |
            +--- added in float32, at once; DDP reduces it there ---------------+

The copies take 2 bytes per weight from a step's first forward to its last backward. FSDP2 and DeepSpeed's engine make
their own copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from finetune.model.dtypes import COMPUTE
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import Strategy

NoteCopy = Callable[[str, Tensor], None]  # a weight's name, and its copy


class CastWeights:
    """The copies of a model's float32 weights, for as long as they are needed."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, note_copy: NoteCopy | None = None) -> None:
        """
        Args:
            model: Unwrapped; its parameters are what the optimizer has.
            dtype: The copies' number format; None: no copies, the model computes with its weights.
            note_copy: Called with each copy as it is made; the planner's.
        """
        self._model, self._dtype, self._note_copy = model, dtype, note_copy

    @contextmanager
    def cast(self, casting: AbstractContextManager[Any] | None = None) -> Iterator[None]:
        """Within the block the model computes with the copies.

        Forward and backward belong into one block: backward may compute a layer's forward again. `casting` is entered
        while the copies are made.
        """
        if self._dtype is None:
            yield
            return
        with casting or nullcontext():
            copies = {id(parameter): self._copy(name, parameter) for name, parameter in self._model.named_parameters()}
        # Each place that holds a parameter gets its copy; a tied weight has several. torch.func.functional_call does
        # the same for one forward, but backward's recomputation runs after it. `_parameters` is not public: no public
        # name puts a tensor in a parameter's place and keeps the order of parameters
        # (tests/training/test_cast_weights.py).
        places = [
            (module._parameters, name, parameter)
            for module in self._model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        try:
            for parameters, name, parameter in places:
                parameters[name] = copies[id(parameter)]  # type: ignore[assignment]  # a tensor, as in functional_call
            yield
        finally:
            for parameters, name, parameter in places:
                parameters[name] = parameter

    def _copy(self, name: str, parameter: nn.Parameter) -> Tensor:
        if parameter.dtype != torch.float32:
            return parameter
        copy = cast = parameter.to(self._dtype)
        if cast.requires_grad:
            # A leaf, whose gradient is passed on at once. Autograd would run the casts last, because they are older
            # than everything else in its graph: all weights' gradients would wait there in bfloat16.
            copy = cast.detach().requires_grad_()
            copy.register_post_accumulate_grad_hook(partial(_pass_on_gradient, cast))
        if self._note_copy is not None:
            self._note_copy(name, copy)
        return copy


def _pass_on_gradient(cast: Tensor, copy: Tensor) -> None:
    """Cast a copy's gradient and add it to the weight's, in a separate backward, so that DDP notices it."""
    gradient, copy.grad = copy.grad, None
    torch.autograd.backward(cast, gradient)


AS_THEY_ARE = CastWeights(nn.Module(), None)  # no copies, for any model


def cast_weights(
    recipe: Recipe, strategy: Strategy, unwrapped_model: nn.Module, note_copy: NoteCopy | None = None
) -> CastWeights:
    """The copies that a run computes with: of all weights, where this recipe and strategy leave them in float32."""
    dtype = COMPUTE[recipe.training.mixed_precision] if strategy.casts_weights_once(recipe) else None
    return CastWeights(unwrapped_model, dtype, note_copy)
