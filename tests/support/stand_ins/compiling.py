"""Backends of torch.compile for tests: one that counts its graphs, which takes seconds, and two that fail.

As a program it is tests/support/runs/cells.py with torch's own backend that traces forward and backward and makes no
code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs and torch's settings of them are this test's alone; a GPU, where one is asked for, is an A100."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    torch.compiler.reset()
    limit = torch._dynamo.config.recompile_limit
    yield
    torch._dynamo.config.recompile_limit = limit
    torch.compiler.reset()


class Counting:
    """A backend that runs each graph as it was traced, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        raise RuntimeError("no compiler for the backward\nand more lines")


def broken_forward(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no compiler here\nand more lines")


def broken_backward(graph: Any, inputs: Any) -> Any:
    return lambda *given: tuple(_Broken.apply(each) for each in graph.forward(*given))  # type: ignore[no-untyped-call]


if __name__ == "__main__":  # a rank of a launcher
    from finetune.architecture.compiled import layers as choice
    from finetune.architecture.compiled.layers import CompiledLayers
    from tests.support.runs import cells

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(choice, "CompiledLayers", partial(CompiledLayers, backend="aot_eager"))
        sys.exit(cells.main(sys.argv[1:]))
