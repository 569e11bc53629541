"""Attention over one document after another, as one operator. torch.compile would make a graph for each number of
documents and each of their lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# Query, key, value, sinks, the documents' ends in host memory, scale, window and cap to [1, tokens, heads, head_dim].
Attend = Callable[..., Tensor]
INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor ends, float scale, int? window, float? cap"


def document_operator(name: str, attend: Attend) -> Attend:
    """Register `attend` as a torch operator called `name`, with the same values and gradients.

    Backward computes it again, because an operator may keep only its inputs and outputs.
    """

    def computed(*given: Any) -> Tensor:
        with torch.autocast(given[0].device.type, enabled=False):
            return attend(*given).contiguous()  # as it is described to the compiler, and so the gradients

    def differentiated(on_device: AbstractContextManager[Any], slope: Tensor, *given: Any) -> list[Tensor]:
        # On a GPU, autograd computes each device's gradients in one thread of its own. That thread runs the outer
        # backward and waits for this one, so this backward must not be queued for it: this thread computes it alone.
        with on_device, torch.autograd.set_multithreading_enabled(False):
            leaves = [tensor.detach().requires_grad_() for tensor in given[:4] if tensor is not None]
            output = computed(*leaves, *[None] * (4 - len(leaves)), *given[4:])
            return [tensor.contiguous() for tensor in torch.autograd.grad(output, leaves, slope)]

    # In a thread of its own: inside of an operator torch records nothing for a backward.
    thread = ThreadPoolExecutor(max_workers=1)

    def gradients(slope: Tensor, *given: Any) -> list[Tensor]:
        on_device: AbstractContextManager[Any] = nullcontext()
        if slope.device.type == "cuda":  # a new thread would use GPU 0, and its default stream
            on_device = torch.cuda.stream(torch.cuda.current_stream(slope.device))
        return thread.submit(differentiated, on_device, slope, *given).result()

    forward = torch.library.custom_op(f"finetune::{name}", computed, mutates_args=(), schema=f"({INPUTS}) -> Tensor")
    backward = torch.library.custom_op(
        f"finetune::{name}_backward", gradients, mutates_args=(), schema=f"(Tensor slope, {INPUTS}) -> Tensor[]"
    )

    @forward.register_fake
    def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])

    @backward.register_fake
    def _(slope: Tensor, *given: Any) -> list[Tensor]:
        return [tensor.new_empty(tensor.shape) for tensor in given[:4] if tensor is not None]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:5])
        ctx.rest = inputs[5:]

    def through(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        slopes: list[Tensor] = backward(slope, *ctx.saved_tensors, *ctx.rest)
        return (*slopes, *[None] * (8 - len(slopes)))

    forward.register_autograd(through, setup_context=keep)
    return forward
