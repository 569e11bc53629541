"""Model and optimizer, built, sharded where the strategy shards, and prepared by Accelerate."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from finetune.errors import FinetuneError
from finetune.launch.launcher import Launch
from finetune.launch.rendezvous import collective_timeout
from finetune.model.build import build_model, decoder_parts, structure_alone
from finetune.model.dtypes import COMPUTE
from finetune.model.optimizer import make_optimizer
from finetune.model.quantization import plain_quantized_weights
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import Strategy
from finetune.strategies.accelerator import cores_for
from finetune.strategies.fsdp import gathered, gathered_by_forward, make_mesh, reshard, shard_model
from finetune.strategies.zero import engine_dtype, fit_swap, loading_unsharded, prepare_zero
from finetune.strategies.zero_state import full_weights, zero_gathers

# How long the ranks wait for the one that quantises: longer than it takes. If it dies, the watchdog ends the job.
WAITING = timedelta(days=7)


@dataclass(frozen=True)
class Assembled:
    """The parts that training works with."""

    model: Any  # called by the loop: wrapped, or sharded
    unwrapped_model: nn.Module  # with adapters and original parameter names: saved, exported, and used for generation
    optimizer: Any
    gathered_in: torch.dtype | None = None  # dtype of gathered weights, where their masters have another
    engine: Any = None  # DeepSpeed's, which holds the masters

    def trained_weights(self, *, dtype: torch.dtype | None, keep: bool) -> dict[str, torch.Tensor]:
        """The trained weights, unsharded and in host memory, on the ranks with `keep`; every rank calls it."""
        if self.engine is not None:
            return full_weights(self.engine, dtype=dtype, keep=keep)
        reshard(self.unwrapped_model)  # gathered parameters are in the format of the computation
        named = self.unwrapped_model.named_parameters(remove_duplicate=False)
        return gathered([(name, tensor) for name, tensor in named if tensor.requires_grad], dtype=dtype, keep=keep)

    def bytes_gathered(self, strategy: Strategy, forwards: int) -> int:
        """Bytes of weights, unsharded, that every rank gathers in as many forwards without a backward."""
        if not strategy.shards_parameters:
            return 0
        if self.engine is not None:
            return forwards * zero_gathers(self.unwrapped_model)
        each, first = gathered_by_forward(decoder_parts(self.unwrapped_model), strategy, self.gathered_in)
        return forwards * each + first


def assemble(
    recipe: Recipe,
    strategy: Strategy,
    accelerator: Accelerator,
    build: Callable[..., nn.Module] = build_model,
    mesh: DeviceMesh | None = None,
    *,
    launch: Launch | None,
) -> Assembled:
    """Model and optimizer of a run, before any checkpoint. Raises what `build_model` raises, on all ranks.

    The planner passes its own `build`, which returns the same model on fake tensors, and the ranks' `mesh`, which
    cannot be made of fake tensors. `launch` decides how many cores quantising uses; None: those it has.
    """
    if strategy.shards_modules:
        mesh = mesh or make_mesh(strategy, accelerator.device, collective_timeout(recipe))
        return _sharded(recipe, strategy, accelerator, _build_on_rank_0(recipe, build, launch), mesh)
    if strategy.uses_engine:
        return _under_zero(recipe, strategy, accelerator, build, launch)
    unwrapped = build(recipe, accelerator.device)
    model, optimizer = prepare_silenced(accelerator, unwrapped, make_optimizer(unwrapped, recipe))
    return Assembled(model, unwrapped, optimizer)


def _sharded(
    recipe: Recipe, strategy: Strategy, accelerator: Accelerator, unwrapped: nn.Module, mesh: DeviceMesh
) -> Assembled:
    """Shard the weights, which rank 0 alone has read into host memory, over the ranks.

    The loop calls the decoder inside peft's model, because peft calls its forward past the hooks that gather weights.
    """
    plain_quantized_weights(unwrapped)
    decoder = decoder_parts(unwrapped)
    decoder.generation_config = _broadcast_from_rank_0(getattr(decoder, "generation_config", None))
    compute = COMPUTE[recipe.training.mixed_precision]
    shard_model(decoder, strategy, mesh, accelerator.device, compute)
    optimizer = make_optimizer(unwrapped, recipe)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    model, prepared = prepare_silenced(accelerator, decoder, optimizer)
    # Accelerate finds an optimizer's parameters again by address, which is 0 for every shard without a row.
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = parameters
    return Assembled(model, unwrapped, prepared, gathered_in=compute)


def _under_zero(
    recipe: Recipe,
    strategy: Strategy,
    accelerator: Accelerator,
    build: Callable[..., nn.Module],
    launch: Launch | None,
) -> Assembled:
    """The engine keeps float32 masters, so the model is loaded in the number format that it computes in.

    Under ZeRO-3 transformers shards each tensor while it loads, rank 0 alone reading; a quantised model is loaded
    unsharded into host memory and sharded one tensor at a time.
    """
    plugin = accelerator.state.deepspeed_plugin
    dtype = engine_dtype(plugin.deepspeed_config)
    fit_swap(plugin, lambda: structure_alone(recipe, dtype), accelerator.num_processes)
    on_host = strategy.shards_parameters and recipe.quantization is not None
    device = torch.device("cpu") if on_host else accelerator.device
    if on_host:
        ranks = 1 if launch is None else launch.local_world_size
        with loading_unsharded(plugin), quantising(recipe, launch, working=ranks) as waiting:
            unwrapped = build(recipe, device, dtype=dtype)
            if waiting is not None:
                dist.barrier(waiting)
    else:
        unwrapped = build(recipe, device, dtype=dtype)
    engine, optimizer = prepare_zero(accelerator, unwrapped, make_optimizer(unwrapped, recipe))
    compute = COMPUTE[recipe.training.mixed_precision]
    return Assembled(engine, unwrapped, optimizer, gathered_in=compute, engine=engine)


def _build_on_rank_0(recipe: Recipe, build: Callable[..., nn.Module], launch: Launch | None) -> nn.Module:
    """The model, with its weights on rank 0 and without elsewhere; when rank 0 fails, so do all."""
    model, failure = None, None
    with quantising(recipe, launch, working=1) as waiting:
        try:
            model = build(recipe, torch.device("cpu" if dist.get_rank() == 0 else "meta"))
        except FinetuneError as error:
            failure = error
        refusal = _broadcast_from_rank_0(None if failure is None else (type(failure), str(failure)), waiting)
    if refusal is not None:
        kind, text = refusal
        raise kind(text)
    if failure is not None:
        raise failure
    assert model is not None
    return model


@contextmanager
def quantising(recipe: Recipe, launch: Launch | None, *, working: int) -> Iterator[dist.ProcessGroup | None]:
    """Where the recipe quantises in host memory: the machine's cores for `working` ranks, and a group to wait in.

    bitsandbytes 0.50 has no kernel for it there: 84 ns an element and thread, 96 minutes of 70B by one, and the ranks'
    own group gives up after 30. Gloo's waits without spinning on a core.
    """
    if recipe.quantization is None or launch is None:
        yield None
        return
    group = dist.new_group(backend="gloo", timeout=WAITING)
    try:
        with cores_for(launch, working):
            yield group
    finally:
        dist.destroy_process_group(group)


def _broadcast_from_rank_0(thing: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Rank 0's object, on every rank; pickled, but only between ranks of one program."""
    things = [thing]
    dist.broadcast_object_list(things, src=0, group=group)
    return things[0]


def prepare_silenced(accelerator: Accelerator, *parts: Any) -> Any:
    """`accelerator.prepare`, without a deprecation warning that a user cannot act on."""
    with warnings.catch_warnings():
        # torch 2.13 renames broadcast_buffers; 2.11 knows only this name, and buffers here never change.
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
        return accelerator.prepare(*parts)
