"""Build the Accelerator that a recipe and its Accelerate config ask for, or raise an error.

The only file that knows Accelerate's plugins. Where a launch does not fit them, the libraries silently do something
else, so everything is compared after building: strategy, world size, precision.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, check_cuda_p2p_ib_support
from torch import nn

from finetune.errors import EnvironmentMismatch
from finetune.launch.gpu_environment import gpu_of_rank, libraries_on_gpu
from finetune.launch.launcher import Launch
from finetune.launch.rendezvous import collective_timeout
from finetune.measure.host_memory import cores_each
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import KIND_OF_TYPE, Strategy
from finetune.strategies.machine import computes_on_cpu

# A launcher's variables for a single process. Engines that shard need a process group even for one rank.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def build_accelerator(recipe: Recipe, strategy: Strategy, launch: Launch) -> Accelerator:
    """The Accelerator for this recipe, compared with the request.

    Accumulation stays 1: the loop collects a step's micro-batches itself and divides once. Raises EnvironmentMismatch
    if strategy, world size or precision in force differ from the recipe.
    """
    on_cpu = computes_on_cpu(launch)
    if not on_cpu and launch.world_size > 1:
        go_around_peers(launch)
    process_group = InitProcessGroupKwargs(timeout=collective_timeout(recipe))
    if strategy.shards_optimizer_state:
        for key, value in ALONE.items():
            os.environ.setdefault(key, value)
    if strategy.shards_modules and on_cpu:
        # Make Accelerate accept an FSDP plugin on gloo ranks. Version 1.15 turns only MULTI_GPU and similar types into
        # FSDP (accelerate/state.py), and would silently use DDP instead. tests/proofs/test_strategies.py checks it.
        PartialState(cpu=True, **process_group.to_kwargs())
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # not public
    if strategy.shards_modules and strategy.offloaded and not on_cpu:
        process_group.backend = "cpu:gloo,cuda:nccl"  # the norm of gradients in host memory is reduced there
    zero = None
    quiet: AbstractContextManager[Any] = nullcontext()
    if strategy.uses_engine:
        from finetune.strategies.zero import zero_plugin
        from finetune.strategies.zero_requirements import silenced_deepspeed, zero_environment

        quiet = silenced_deepspeed()
        zero_environment(recipe, on_cpu=on_cpu)
        process_group.backend = "gloo" if on_cpu else None
        zero = zero_plugin(recipe, strategy, world_size=launch.world_size, on_cpu=on_cpu)
    fsdp = None
    if strategy.shards_modules:  # mixed precision, units and loading are fsdp.py's
        fsdp = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=strategy.reshard_after_forward,
            cpu_offload=strategy.offloaded,
            auto_wrap_policy="no_wrap",  # the model comes sharded
            state_dict_type="SHARDED_STATE_DICT",
            cpu_ram_efficient_loading=False,  # rank 0 alone reads the weights all the same: fsdp.py
            activation_checkpointing=False,
        )
    on_gpu = nullcontext() if on_cpu else libraries_on_gpu(gpu_of_rank(launch.local_rank))
    with quiet, on_gpu:
        accelerator = Accelerator(
            mixed_precision=recipe.training.mixed_precision,
            # With cpu=True Accelerate would drop the plugin of an engine on gloo ranks.
            cpu=zero is None and on_cpu,
            fsdp_plugin=fsdp,
            deepspeed_plugin=zero,
            kwargs_handlers=[
                DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False),
                process_group,
            ],
            step_scheduler_with_optimizer=False,
        )
    scale_losses_on_cpu(accelerator)
    _compare(recipe, strategy, launch, accelerator)
    return accelerator


def go_around_peers(launch: Launch) -> None:
    """Where GPUs cannot reach each other's memory, tell NCCL before it asks: RTX 40 cards under an old driver.

    `accelerate launch` sets these for its ranks; under torchrun, srun and `finetune train` Accelerate would raise an
    error that names them.
    """
    missing = [name for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE") if name not in os.environ]
    if not missing or check_cuda_p2p_ib_support():
        return
    os.environ.update(dict.fromkeys(missing, "1"))
    if launch.is_main:
        print(
            f"these GPUs' driver gives them no way to each other's memory: {'=1 and '.join(missing)}=1 set, so copies "
            "between them pass through the host; a driver from 550.40.07 on is faster",
            file=sys.stderr,
        )


def _compare(recipe: Recipe, strategy: Strategy, launch: Launch, accelerator: Accelerator) -> None:
    """Compare what Accelerate built with the request. Raises EnvironmentMismatch."""
    in_force = {
        "strategy": KIND_OF_TYPE.get(accelerator.distributed_type.value, "ddp"),  # MULTI_CPU among others
        "world size": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "dynamo_backend": accelerator.state.dynamo_plugin.backend.value,
    }
    request = {
        "strategy": "ddp" if strategy.schedule else strategy.kind,  # Accelerate has ranks, and no word for stages
        "world size": launch.world_size,
        "mixed_precision": recipe.training.mixed_precision,
        "gradient_accumulation_steps": 1,
        "dynamo_backend": "NO",
    }
    differing = [
        f"{key}: asked {request[key]}, runs {in_force[key]}" for key in request if request[key] != in_force[key]
    ]
    if differing:
        raise EnvironmentMismatch(f"launch: {'; '.join(differing)}; correct the launcher's settings and environment")


@contextmanager
def accumulating(accelerator: Accelerator, strategy: Strategy, model: nn.Module) -> Iterator[None]:
    """The context for every micro-batch in a step except the last.

    Unsharded gradients are reduced once, after the last micro-batch. Sharded ones are reduced each time, unless all of
    them fit unsharded (closed_form/recomputation.py). In float32 an 8B model's take 30 GiB on each GPU, its adapters'
    0.2.
    Weights that stay gathered from forward to backward stay so until the last backward, so they are gathered once a
    step. At the peak, where backward begins, all of them are there anyway.
    """
    with ExitStack() as stack:
        if strategy.shards_modules:
            from finetune.strategies.fsdp import gradients_kept, weights_kept

            if strategy.gathers_once:
                stack.enter_context(weights_kept(model))
            if strategy.keeps_gradients:
                stack.enter_context(gradients_kept(model))
        elif not strategy.uses_engine:  # DeferredStepEngine sees to it itself
            stack.enter_context(accelerator.no_sync(model))
        yield


def silence_libraries(launch: Launch) -> None:
    """Take progress bars and notices that are not about this run off the terminal; errors stay."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if not launch.is_main:
        transformers_logging.set_verbosity_error()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # logs missing optional kernels
    if not torch.cuda.is_available():  # saving imports DeepSpeed if installed, which would log that it found no GPU
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def use_all_cores(launch: Launch, device: torch.device, *, offloaded: bool = False) -> None:
    """Share the cores out between ranks that work on the host, unless the user chose. Launchers set one thread.

    Needed on a CPU and with offload. AdamW then moves 28 bytes per weight: 225 GB for 8B, 20 to 30 s with 1 thread.
    """
    if (device.type == "cpu" or offloaded) and not launch.threads_chosen:
        torch.set_num_threads(cores_each(launch.local_world_size, launch.words))


# fp16 with dynamic loss scaling. float16 ends at 65,504 and begins at 6e-8, so the loss is multiplied by a scale before
# backward and the gradients are divided by it before they are clipped. If a gradient overflows, the update is skipped
# and the scale halved. After 2,000 steps without an overflow it is doubled. Without fp16 there is no scaler.

# A scale below 1 would only push small gradients out of float16: gradients that overflow at 1 overflow at any scale.
FLOOR = 1.0


def scale_losses_on_cpu(accelerator: Accelerator) -> None:
    """Give fp16 on a CPU the autocast and the scaler that a GPU gets.

    accelerate 1.15 accepts mixed_precision="fp16" on a CPU and reports it, but silently computes in float32
    without a scaler. DeepSpeed has its own scaler and refuses a CPU.
    """
    if accelerator.mixed_precision != "fp16" or accelerator.device.type != "cpu":
        return
    if accelerator.distributed_type != DistributedType.DEEPSPEED and accelerator.scaler is None:
        accelerator.native_amp = True  # what prepare() looks at before it wraps forward
        accelerator.scaler = torch.amp.GradScaler("cpu")


def loss_scale(accelerator: Accelerator) -> torch.Tensor:
    """The scale in force, float64 [1] on the device, not read to the host; 1 without scaling."""
    one = torch.ones(1, dtype=torch.float64, device=accelerator.device)
    if accelerator.scaler is None:
        return one
    scale: torch.Tensor = accelerator.scaler.scale(one)
    return scale


def kind_of_scaling(accelerator: Accelerator) -> str | None:
    """`dynamic`, `static` (a strategy file's loss_scale), or None without scaling."""
    if accelerator.scaler is None:
        return None
    if getattr(accelerator.scaler, "static", False):
        return "static"
    return "dynamic"


def lowest_scale(accelerator: Accelerator) -> float:
    """The scaler's lowest scale. A static scale is its own lowest."""
    return float(getattr(accelerator.scaler, "floor", FLOOR))


def scaler_state(accelerator: Accelerator) -> dict[str, Any] | None:
    """Scale and growth count for a checkpoint, as JSON; None without scaling. Waits for the device."""
    if accelerator.scaler is None:
        return None
    state: dict[str, Any] = accelerator.scaler.state_dict()
    return state


def load_scaler_state(accelerator: Accelerator, saved: Mapping[str, Any] | None) -> None:
    """Continue with the scale that `scaler_state` gave."""
    if accelerator.scaler is not None and saved is not None:
        accelerator.scaler.load_state_dict(dict(saved))


def holds_on_all(accelerator: Accelerator, holds: bool) -> bool:
    """Whether something holds on every rank. A collective: every rank calls it."""
    ranks = accelerator.reduce(torch.tensor(int(holds), device=accelerator.device), reduction="sum")
    return bool(int(ranks) == accelerator.num_processes)
