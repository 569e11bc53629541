"""Tensors that hold no data, and the trainer's model on them.

torch's fake tensors have shapes, number formats, devices and storages, and every operation on them gives what the real
one would give, without computing it. So a 405B model's step runs on a laptop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode  # torch's documentation names it by this path alone
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.batches import MicroBatch
from finetune.fsdp import put, ties_kept
from finetune.model import build_model
from finetune.quantized import plain_quantized_weights
from finetune.recipe import Recipe


class _HostReads(TorchDispatchMode):
    """Answers each read of a value to the host, of which there is none."""

    def __init__(self, answer: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates no constructor here
        self._answer = answer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._answer
        return func(*args, **(kwargs or {}))


@contextmanager
def no_data(host_reads: float) -> Iterator[FakeTensorMode]:
    """Every tensor made in the block is without data, and every value read to the host is `host_reads`."""
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    with mode, _HostReads(host_reads):
        yield mode


def dataless_build(recipe: Recipe, *, whole_quantized: bool) -> Callable[..., nn.Module]:
    """The trainer's `build_model`, to be called inside `no_data`; its structure is built here, from the configuration.

    `whole_quantized`: 4-bit layers get the plain weights they have after loading. A strategy that shards makes them
    plain by itself.
    """
    model = build_model(recipe, torch.device("meta"))
    quantization = recipe.quantization
    if whole_quantized and quantization is not None:
        plain_quantized_weights(model)

    def build(_: Recipe, device: torch.device, **__: Any) -> nn.Module:
        fill(model, device)
        if quantization is not None and quantization.bnb_4bit_use_double_quant:
            # bitsandbytes keeps the code book that it quantised scales by, for good, beside each layer's copy.
            model.scales_code_book = torch.empty(256, device=device)
        return model

    return build


def fill(model: nn.Module, device: torch.device) -> None:
    """Tensors without data on `device`, in place of those on meta."""
    with ties_kept(model):
        for name, parameter in list(model.named_parameters()):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            put(model, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    for name, buffer in list(model.named_buffers()):
        put(model, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))
    # Accelerate moves models to a device that these are on; torch 2.13 cannot swap a fake tensor with references.
    stay: Any = lambda *_, **__: model  # noqa: E731
    model.to = stay


def without_data(mode: FakeTensorMode, batch: MicroBatch) -> MicroBatch:
    """The batch's shapes and formats, and what of it is no tensor."""
    made: Any = {
        key: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for key, value in batch.items()
    }
    return made  # type: ignore[no-any-return]
