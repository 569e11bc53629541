"""Tensors without data, and the trainer's model on them.

torch's fake tensors have shapes, number formats, devices and storages. Every operation on them returns fakes with the
real result's shapes and formats, without computing. So a 405B model's step runs on a laptop.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # torch's documentation names only this path
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import _sharding_prop
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from finetune.model.build import build_model
from finetune.model.quantization import empty_int8_weights, plain_quantized_weights
from finetune.recipe.schema import Recipe
from finetune.strategies import fsdp
from finetune.strategies.fsdp import replace_tensor, ties_kept

OnParameter = Callable[[nn.Parameter], None]


# Answers to a read on the host, by number format: those that let a training go on.
ANSWERS = {
    torch.int32: 1,  # torch's pipeline stages: are all shapes given?
    torch.uint8: 0,  # DeepSpeed's ranks: has a gradient overflowed?
}


class _Answers(TorchDispatchMode):
    """Answers each read of a fake tensor's value, and operations that torch's fakes refuse and GPUs compute.

    `any` is answered no (DeepSpeed: is a norm not finite?), formats in ANSWERS as it says, and everything else with
    `answer`. So `all` is answered yes (transformers: are these one document's positions?). torch's device meshes are
    real tensors.
    """

    def __init__(self, answer: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates no constructor here
        self._answer = answer
        self._latest_any: Callable[[], Any] = lambda: None  # the latest result of `any`, while it lives

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            if args[0] is self._latest_any():
                return 0
            return ANSWERS.get(args[0].dtype, self._answer)
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            return _experts_product(*args[:3], **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.any.default:
            self._latest_any = weakref.ref(result)
        return result


def _experts_product(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None = None) -> torch.Tensor:
    """An empty result for `grouped_mm` in float32 or float16.

    transformers asks it of every GPU from Ampere on (integrations/moe.py), but torch 2.13's fake operation knows
    bfloat16 alone.

    [tokens, in] x [experts, in, out] -> [tokens, out]; [in, tokens] x [tokens, out] -> [experts, in, out]; with the
    experts in `left`: [experts, out, in] x [in, tokens] -> [out, tokens].
    """
    if left.ndim == right.ndim == 2:
        assert offs is not None
        return left.new_empty(len(offs), left.shape[0], right.shape[1])
    first = -2 if right.ndim == 2 else 0
    return left.new_empty(*left.shape[first:-1], right.shape[-1])


class SharedFakeMode(FakeTensorMode):
    """A mode that copies of its tensors share (peft copies modules).

    A copied mode would own the same weak references to storages, and torch frees each owner's.
    """

    def __deepcopy__(self, _: dict[int, Any]) -> SharedFakeMode:
        return self


@contextmanager
def no_data(host_reads: float, *, masks: bool) -> Iterator[FakeTensorMode]:
    """Every tensor created in the block is without data, and every value read to the host is `host_reads`, not 0.

    transformers reads from position ids whether a row has several documents, and if so builds a mask. `masks` is the
    answer. The patched names are not documented: tests/planner/test_planned.py watches them.
    """
    mode = SharedFakeMode(allow_non_fake_inputs=False)
    # DTensor infers shapes by running operations on fakes. It gets a mode of its own, so that they are not counted.
    patches: list[AbstractContextManager[Any]] = [
        mock.patch.object(masking_utils, "is_tracing", constant_function(masks)),
        mock.patch.object(_sharding_prop, "detect_fake_mode", constant_function(None)),
        # Views of all ranks' shards, though rank 0 reads its own alone. 512 for each parameter take most of a minute.
        mock.patch.object(_fsdp_param, "_chunk_with_empty", first_chunk),
        mock.patch.object(fsdp, "views", lambda whole, rows: [whole[:rows]]),
    ]
    with warnings.catch_warnings(), ExitStack() as stack:
        # Accelerate matches the optimizer's parameters by their addresses; assemble.py does that itself.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        for context in (*patches, mode, _Answers(host_reads)):
            stack.enter_context(context)
        yield mode


def constant_function(answer: Any) -> Callable[..., Any]:
    """A function with one answer. A mock would keep its arguments alive, tensors too."""
    return lambda *_, **__: answer


def first_chunk(tensor: torch.Tensor, chunks: int, dim: int) -> list[torch.Tensor]:
    """torch.chunk's first chunk alone, which is rank 0's."""
    return [tensor.narrow(dim, 0, -(-tensor.shape[dim] // chunks))]


def dataless_build(recipe: Recipe, *, dtype: torch.dtype | None = None) -> Callable[..., nn.Module]:
    """The trainer's `build_model`, to be called inside `no_data`; the modules are built here, from the configuration.

    Args:
        dtype: All weights' number format, as in `build_model`.

    Returns:
        A function that calls its argument `on_parameter` with each parameter as soon as it has its tensor.
    """
    model = build_model(recipe, torch.device("meta"), dtype=dtype)
    quantization = recipe.quantization
    if quantization is not None and quantization.load_in_8bit:
        empty_int8_weights(model)
    elif quantization is not None:  # plain weights, as 4-bit layers have after loading
        plain_quantized_weights(model)

    def build(_: Recipe, device: torch.device, on_parameter: OnParameter | None = None, **__: Any) -> nn.Module:
        fill_with_fakes(model, device, on_parameter)
        if quantization is not None and quantization.load_in_4bit and quantization.bnb_4bit_use_double_quant:
            # bitsandbytes keeps the code book for scales [256] float32 for good, in addition to each layer's copy.
            model.scales_code_book = torch.empty(256, device=device)
        return model

    return build


def fill_with_fakes(model: nn.Module, device: torch.device, on_parameter: OnParameter | None = None) -> None:
    """Replace the parameters and buffers on meta by fake tensors on `device`."""
    with ties_kept(model):
        for name, parameter in list(model.named_parameters()):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            filled = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            replace_tensor(model, name, filled)
            if on_parameter is not None:
                on_parameter(filled)
    for name, buffer in list(model.named_buffers()):
        replace_tensor(model, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))
    # Accelerate moves models to the device that they are on. torch 2.13 cannot swap a fake tensor with references.
    unmoved: Any = model
    unmoved.to = lambda *_, **__: model


@contextmanager
def host_pages() -> Iterator[None]:
    """Allocate bitsandbytes' paged state in host memory.

    CUDA moves a page to the GPU when it is used; torch's allocator does not see that.
    """
    import bitsandbytes.functional as functional

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, **_: Any) -> torch.Tensor:
        page: Any = torch.zeros(shape, dtype=dtype, device="cpu")
        page.is_paged = True
        return page  # type: ignore[no-any-return]

    ignored = constant_function(None)
    with mock.patch.multiple(functional, get_paged=get_paged, fill=ignored, prefetch_tensor=ignored):
        yield
