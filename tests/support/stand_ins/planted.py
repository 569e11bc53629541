"""Faults planted in what a run chose for speed: in a backend of torch.compile, in the kit's own autograd.

In a run they are planted when the model is built: before, the probe would notice some, and remember it for other runs.

As a program it is tests/support/runs/cells.py with a fault planted on rank 1 alone; PLANTED names it, `where fault`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from finetune.architecture.compiled import layers as choice
from finetune.architecture.compiled.layers import CompiledLayers, compile_as_asked
from finetune.architecture.own_layers import lora_linear, norm_and_gate
from finetune.training import session
from tests.support.stand_ins.compiling import Counting

FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "zero": torch.zeros_like,
    "halved": lambda gradient: gradient / 2,
    # Of a matrix that is not square: the same numbers in another order.
    "transposed": lambda gradient: gradient.mT.reshape(gradient.shape) if gradient.ndim > 1 else gradient.flip(0),
    "negative": torch.neg,
    "nan": lambda gradient: gradient.flatten().index_fill(0, torch.tensor(0), float("nan")).view(gradient.shape),
    "a row missing": lambda gradient: torch.cat([torch.zeros_like(gradient[:1]), gradient[1:]]),
}


class Altered(torch.autograd.Function):
    """The tensor, whose gradient becomes another one."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return ctx.change(slope), None


def altered(tensor: Any, fault: str) -> Any:
    return Altered.apply(tensor, FAULTS[fault])  # type: ignore[no-untyped-call]


class Faulty:
    """A backend that runs each graph as it was traced, but for its fault.

    `output`: what is returned is multiplied by 1.1, with the right gradient. Another fault is in the gradients of the
    inputs that `where` names by their number of axes (parameters have one or two, hidden states three), or of the first
    such input alone. `dtype`: only in graphs that compute something in this format.
    """

    def __init__(
        self, fault: str, axes: int = 2, *, first_alone: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        self.fault, self.axes, self.first_alone, self.dtype = fault, axes, first_alone, dtype

    def __call__(self, graph: Any, inputs: Any) -> Any:
        values = [node.meta.get("example_value") for node in graph.graph.nodes]
        formats = {value.dtype for value in values if isinstance(value, Tensor)}
        if self.dtype is not None and self.dtype not in formats:
            return graph.forward

        def run(*given: Any) -> Any:
            if self.fault == "output":
                return tuple(
                    each + (0.1 * each).detach() if isinstance(each, Tensor) and each.is_floating_point() else each
                    for each in graph.forward(*given)
                )
            changed = list(given)
            for at, each in enumerate(given):
                if isinstance(each, Tensor) and each.requires_grad and each.ndim == self.axes:
                    changed[at] = altered(each, self.fault)
                    if self.first_alone:
                        break
            return graph.forward(*changed)

        return run


def plant_in_own(where: str, fault: str, patches: pytest.MonkeyPatch) -> None:
    """`where`: adapters, norms or gates; "output" multiplies the result by 1.1."""
    function: Any = {
        "adapters": lora_linear._KeptForBackward,
        "norms": norm_and_gate._Norm,
        "gates": norm_and_gate._Gate,
    }[where]
    if fault == "output":
        function = lora_linear._Product if where == "adapters" else function
        forward = function.forward
        patches.setattr(function, "forward", staticmethod(lambda *given: 1.1 * forward(*given)))
        return
    backward = function.backward

    def wrong(ctx: Any, *slopes: Tensor) -> Any:
        return tuple(each if each is None else FAULTS[fault](each) for each in backward(ctx, *slopes))

    patches.setattr(function, "backward", staticmethod(wrong))


def plant_in_run(planted: str, patches: pytest.MonkeyPatch) -> None:
    """A fault in coming runs of this process, `where fault`, whose layers are compiled as on a GPU; "": none."""
    where, _, fault = planted.partition(" ")
    backend = Faulty(fault) if where == "compiled" else Counting()
    patches.setattr(choice, "CompiledLayers", partial(CompiledLayers, backend=backend))
    patches.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    patches.setattr(choice, "NOT_BY_AUTO", ())  # the runs compute in float32

    def as_on_a_gpu(recipe: Any, strategy: Any, model: Any, device: torch.device, say: Any) -> CompiledLayers:
        if where and where != "compiled":
            plant_in_own(where, fault, patches)
        return compile_as_asked(recipe, strategy, model, torch.device("cuda", 0), say)

    patches.setattr(session, "compile_as_asked", as_on_a_gpu)


if __name__ == "__main__":  # a rank of a launcher
    from tests.support.runs import cells

    with pytest.MonkeyPatch.context() as patches:
        plant_in_run(os.environ["PLANTED"] if os.environ["RANK"] == "1" else "", patches)
        sys.exit(cells.main(sys.argv[1:]))
