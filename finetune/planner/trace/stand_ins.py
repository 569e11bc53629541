"""DeepSpeed's engine on tensors without data. Its own code runs, for rank 0 among any number of ranks.

The engine is Python over torch's operations, so it can be traced like the rest. Only its compiled parts cannot. An NVMe
offload is traced as one to host memory. DDP's reducer is C++ too; `Replica` replaces it. The update of the
kit's own optimizers is compiled on a GPU; `fuse_update` makes it one operation.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn import functional

from finetune.architecture import loss
from finetune.closed_form.constants import DDP_BUCKET, DDP_FIRST_BUCKET
from finetune.model.optimizers.blockwise_adamw import BlockwiseAdamW
from finetune.model.optimizers.fused_update import FusedBlocks, FusedUpdate
from finetune.model.optimizers.rounded_adamw import RoundedAdamW
from finetune.recipe.strategy import Strategy
from finetune.strategies.assemble import Assembled

SHARED_MEMORY = "deepspeed_shm_comm"  # compiled on first use; communication of ranks on one machine


def fuse_update(optimizer: torch.optim.Optimizer) -> None:
    """The update of the kit's own optimizers in one operation, as their kernels on a GPU: it reads and writes, and
    allocates nothing."""
    if isinstance(optimizer, RoundedAdamW | BlockwiseAdamW):
        optimizer.update_range = FusedUpdate(_fused_update)
    if isinstance(optimizer, BlockwiseAdamW):
        optimizer.update_blocks = FusedBlocks(_update_blocks)


@contextmanager
def few_chunks() -> Iterator[None]:
    """The loss of the first two chunks of tokens and the last one. Chunks between allocate and free as the second."""
    whole = loss.token_chunks

    def token_chunks(*place: Any) -> list[Tensor | slice]:
        chunks = [*whole(*place)]
        return [*chunks[:2], *chunks[2:][-1:]]

    with mock.patch.object(loss, "token_chunks", token_chunks):
        yield


def _update_blocks(weight: Tensor, codes: Any, scales: Any, gradient: Tensor, *_: Any) -> None:
    _fused_blocks(weight, *codes, *scales, gradient)


@torch.library.custom_op("finetune::fused_blocks", mutates_args=("weight", "first", "second", "scales1", "scales2"))
def _fused_blocks(
    weight: Tensor, first: Tensor, second: Tensor, scales1: Tensor, scales2: Tensor, gradient: Tensor
) -> None:
    raise AssertionError("a trace computes nothing")


@torch.library.custom_op("finetune::fused_update", mutates_args=("weight", "average", "square"))
def _fused_update(
    weight: Tensor, average: Tensor, square: Tensor, gradient: Tensor, keys: Tensor, first: Tensor, factors: Tensor
) -> None:
    raise AssertionError("a trace computes nothing")


for _operator in (_fused_blocks, _fused_update):
    _operator.register_fake(lambda *_: None)


@contextmanager
def engine_without_ranks(device: torch.device) -> Iterator[None]:
    """Make DeepSpeed compute on `device`. Its process-wide state is reset afterwards."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # DeepSpeed 0.19 compiles a function when it is imported, by a call that torch 2.13 deprecates.
        warnings.filterwarnings("ignore", message="`torch.jit.", category=DeprecationWarning)
        import deepspeed
        from deepspeed.accelerator import get_accelerator, set_accelerator
        from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator, stage3

        before = get_accelerator()
        # The third stage replaces torch's functional.linear permanently.
        stack.enter_context(mock.patch.object(functional, "linear", functional.linear))
        stack.enter_context(mock.patch.dict(deepspeed.ops.__compatible_ops__, {SHARED_MEMORY: False}))
        for module in (stage3, partition_parameters, partitioned_param_coordinator):
            stack.enter_context(mock.patch.object(module, "assert_ints_same_as_other_ranks"))
        if device.type != "cpu":
            set_accelerator(_computing_on(device))
        try:
            yield
        finally:
            set_accelerator(before)
            if deepspeed.comm.is_initialized():
                deepspeed.comm.destroy_process_group()


def _computing_on(device: torch.device) -> Any:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class Pretended(CPU_Accelerator):  # type: ignore[misc]  # DeepSpeed is not typed
        """A device that is not the host: always idle, with all number formats and ample memory."""

        def device_name(self, device_index: int | None = None) -> str:
            return device.type

        def current_device_name(self) -> str:
            return str(device)

        def device(self, device_index: int | None = None) -> torch.device:
            return device

        def on_accelerator(self, tensor: torch.Tensor) -> bool:
            return tensor.device.type == device.type

        def is_fp16_supported(self) -> bool:
            return True

        def pin_memory(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return tensor.pin_memory()  # as on CUDA; without CUDA it does nothing

    return Pretended()


def without_disks(strategy: Strategy) -> Strategy:
    """The strategy with NVMe offload replaced by host memory: a plan writes no files."""
    if "nvme" not in strategy.offload_devices.values():
        return strategy
    section = strategy.section("deepspeed_config")
    kept = {key: "cpu" if value == "nvme" else value for key, value in section.items() if "nvme_path" not in key}
    return replace(strategy, settings={**strategy.settings, "deepspeed_config": kept})


def as_on_gpus(accelerator: Accelerator, strategy: Strategy) -> None:
    """Apply the engine's settings that differ on GPUs (strategies/zero.py), where the strategy does not set them.

    Communication overlaps with computation, and offloaded tensors are pinned.
    """
    zero, chosen = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"], strategy.engine_settings
    zero["overlap_comm"] = chosen.get("zero_optimization", {}).get("overlap_comm", True)
    if "offload_optimizer" in zero:
        zero["offload_optimizer"]["pin_memory"] = chosen.get("offload_optimizer", {}).get("pin_memory", True)
    if "offload_param" in zero:
        zero["offload_param"]["pin_memory"] = chosen.get("offload_param", {}).get("pin_memory", True)


def partitioner(accelerator: Accelerator, *, adapters: bool) -> Callable[[nn.Parameter], None]:
    """A callback that keeps this rank's part of each parameter as stage 3 loads it.

    Adapters are made afterwards. The engine partitions them.
    """
    import deepspeed

    config = dict(accelerator.state.deepspeed_plugin.deepspeed_config)

    def keep_part(parameter: nn.Parameter) -> None:
        if not (adapters and parameter.requires_grad):
            deepspeed.zero.Init(module=nn.ParameterList([parameter]), config_dict_or_path=config)

    return keep_part


def engine_parts(parts: Assembled) -> dict[str, list[torch.Tensor | None]]:
    """The tensors that a DeepSpeed engine holds now, by component; empty for other strategies."""
    if parts.engine is None:
        return {}
    optimizer: Any = parts.engine.optimizer
    groups = parts.engine.basic_optimizer.param_groups
    # Stage 3 gives its optimizer one part of the masters at a time.
    masters = getattr(optimizer, "fp32_partitioned_groups_flat", [part for group in groups for part in group["params"]])
    gradients = [master.grad for master in masters]
    gradients += [getattr(parameter, "grad_accum", None) for parameter in parts.unwrapped_model.parameters()]  # stage 1
    gradients += getattr(optimizer, "fp32_groups_gradients_flat", [])  # stage 1, bf16
    gradients.append(getattr(optimizer, "grad_partitions_flat_buffer", None))  # stage 3
    gradients += [part for kept in getattr(optimizer, "averaged_gradients", {}).values() for part in kept or ()]
    buckets: list[torch.Tensor | None] = []
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        buckets += bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]  # one under stage 3
    return {"masters": masters, "gradients": gradients, "communication buffers": buckets}


class Replica(nn.Module):
    """Replaces `torch.nn.parallel.DistributedDataParallel` in a trace."""

    def __init__(self, module: nn.Module, **_: Any) -> None:
        super().__init__()
        self.module = module
        self.reducing = True
        self._views: dict[nn.Parameter, torch.Tensor] = {}
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for bucket in _buckets(reversed(trained)):
            sizes = [parameter.numel() for parameter in bucket]
            flat = bucket[0].new_empty(sum(sizes))
            for parameter, view in zip(bucket, flat.split(sizes), strict=True):
                self._views[parameter] = view.view_as(parameter)
                parameter.register_post_accumulate_grad_hook(self._ready)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do not reduce gradients, as DDP's `no_sync`."""
        self.reducing = False
        try:
            yield
        finally:
            self.reducing = True

    @torch.no_grad()
    def _ready(self, parameter: torch.Tensor) -> None:
        if self.reducing:
            assert parameter.grad is not None
            view = self._views[parameter]  # type: ignore[index]
            parameter.grad = view.copy_(parameter.grad)


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """DDP's buckets: each has one number format, and is full from a size on."""
    full_bytes: dict[torch.dtype, int] = {}
    unfinished: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        dtype = parameter.dtype
        bucket = unfinished.setdefault(dtype, [])
        bucket.append(parameter)
        if sum(member.numel() for member in bucket) * parameter.itemsize >= full_bytes.get(dtype, DDP_FIRST_BUCKET):
            full_bytes[dtype] = DDP_BUCKET
            yield unfinished.pop(dtype)
    yield from unfinished.values()


class _Handle:
    """A finished send or receive. gloo's handle holds the tensor until it is dropped, NCCL's until it is waited for."""

    def __init__(self, tensor: torch.Tensor, *, gloo: bool) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._gloo = gloo

    def wait(self) -> None:
        if not self._gloo:
            self._tensor = None


@contextmanager
def sends_of_a_pipeline(*, gloo: bool) -> Iterator[None]:
    """Sends and receives without communication. Their handles hold the same tensors as a backend's."""

    def holding(call: Callable[..., Any]) -> Callable[..., _Handle]:
        def begin(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> _Handle:
            call(tensor, *args, **kwargs)
            return _Handle(tensor, gloo=gloo)

        return begin

    with ExitStack() as stack:
        for name in ("isend", "irecv"):
            begin = holding(getattr(dist, name))
            for module in (dist, distributed_c10d):  # the second lists the operations that a pipeline may use
                stack.enter_context(mock.patch.object(module, name, begin))
        yield
