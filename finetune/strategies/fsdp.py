"""FSDP2: a model whose weights are sharded over the ranks, filled from rank 0 one tensor at a time.

Accelerate's own preparation would hold each 4-bit model unsharded on every GPU. It would also find an optimizer's
parameters by their address, which empty shards share. So torch's public `fully_shard` shards the model here, and
`Accelerator.prepare` gets a model that is sharded already.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.errors import EnvironmentMismatch
from finetune.output_stream import printable
from finetune.recipe.strategy import Strategy
from finetune.strategies.pieces import row_range, shard_count

SHARDS = "shards"  # the mesh dimension over which a tensor is sharded
COPIES = "copies"  # HSDP: the dimension over which the shards are replicated

# Makes a weight and its buffers, by their names, on a device. None: nothing is to be made.
Late = Callable[[torch.device], dict[str, Tensor]] | None


def make_mesh(strategy: Strategy, device: torch.device, timeout: timedelta | None = None) -> DeviceMesh:
    """The ranks in order: [shards], or [copies, shards] under HSDP, one copy a node unless the file sets a number.

    Args:
        timeout: How long a rank waits for the others of its copy or its shard; None: the backend's own. [shards] is the
            process group that there is, with its own.
    """
    world = dist.get_world_size()
    if not strategy.replicates:
        return init_device_mesh(device.type, (world,), mesh_dim_names=(SHARDS,))
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    copies = strategy.replica_count(world, per_node)
    assert strategy.can_replicate(world, per_node), "the start refuses such ranks"
    # init_device_mesh ignores the recipe's timeout (NCCL's default is 600 s), so make the groups here.
    ranks = torch.arange(world).reshape(copies, world // copies)
    groups = []
    for lines in (ranks.T.tolist(), ranks.tolist()):  # every rank makes all groups, in the same order
        made = [dist.new_group(line, timeout=timeout) for line in lines]
        groups.append(next(group for group, line in zip(made, lines, strict=True) if dist.get_rank() in line))
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=(COPIES, SHARDS))


def shard_model(
    decoder: PreTrainedModel,
    strategy: Strategy,
    mesh: DeviceMesh,
    device: torch.device,
    compute_dtype: torch.dtype | None,
    late: dict[str, Late] | None = None,
) -> None:
    """Shard a model in place and fill it from rank 0, which has the weights in host memory. On other ranks they are on
    meta.

    Args:
        decoder: The transformers model, adapters in its layers; the same structure on every rank.
        mesh: From `make_mesh`.
        device: Computes the model. Under CPU offload the shards stay in host memory.
        compute_dtype: Weights are gathered in it, gradients reduced in float32; None leaves each tensor as it is.
        late: On rank 0, parameters by name whose values and buffers are made when their turn comes. It is empty
            afterwards, so that nothing keeps their sources.
    """
    check_units(decoder, strategy)
    full = {}
    if dist.get_rank() == 0:  # no other name for them: `_fill` frees each one in host memory when it is sent
        full = {name: tensor.detach() for name, tensor in chain(decoder.named_parameters(), decoder.named_buffers())}
    with ties_kept(decoder):
        _empty(decoder)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=compute_dtype and torch.float32)
    offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if strategy.offloaded else OffloadPolicy()
    for unit, reshard in _units(decoder, strategy.reshard_after_forward):
        fully_shard(unit, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=reshard)
    with ties_kept(decoder):
        _fill(decoder, full, late or {}, device, on_host=strategy.offloaded)


@contextmanager
def weights_kept(model: nn.Module) -> Iterator[None]:
    """Within, backward frees no gathered weights, so that the next forward finds them."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_backward(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_backward(True, recurse=False)


@contextmanager
def gradients_kept(model: nn.Module) -> Iterator[None]:
    """Within, backward does not reduce gradients. It sums them unsharded, in the number format of the reduction."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            unit.set_requires_gradient_sync(True, recurse=False)


def reduced_in(model: nn.Module) -> set[torch.dtype]:
    """Number formats other than their own that gradients are reduced in, by the policy of each sharded unit.

    torch has no public name for a unit's policy; tests/strategies/test_receipt.py sees another one refused.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    policies = [unit._get_fsdp_state()._mp_policy for unit in units]
    return {dtype for policy in policies if (dtype := policy.reduce_dtype or policy.param_dtype) is not None}


def check_units(decoder: nn.Module, strategy: Strategy) -> None:
    """Raises EnvironmentMismatch if the strategy's file names units that are not the model's decoder layers."""
    layers = {type(module).__name__ for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)}
    if strategy.unit_class is not None and strategy.unit_class not in layers:
        raise EnvironmentMismatch(
            f"accelerate_config: {strategy.path}: fsdp_transformer_layer_cls_to_wrap: "
            f"{printable(strategy.unit_class)}: the model's layers are {', '.join(sorted(layers))}; write that, "
            "or remove the line"
        )


def _units(decoder: PreTrainedModel, reshard: bool) -> Iterator[tuple[nn.Module, bool]]:
    """The modules that are gathered together, innermost first: each layer, embeddings, head, then the small rest.

    The head is not gathered again in backward, because backward starts where forward ended. A head tied to the
    embeddings belongs to the rest. The rest stays gathered from forward's beginning to backward's end.
    """
    for layer in [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]:
        yield layer, reshard
    embeddings, head = decoder.get_input_embeddings(), decoder.get_output_embeddings()
    if not set(embeddings.parameters()) & set(head.parameters()):  # peft's wrapper has its weights further inside
        yield embeddings, reshard
        yield head, False
    yield decoder, False


@contextmanager
def ties_kept(module: nn.Module) -> Iterator[None]:
    """Within, parameters may be replaced one by one. At the end, modules that shared a parameter share it again."""
    first: dict[int, str] = {}
    ties = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            ties[name] = owner
    yield
    for name, owner in ties.items():
        replace_tensor(module, name, module.get_parameter(owner))


def replace_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter or buffer, by its dotted name."""
    path, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(path), leaf, tensor)


def _empty(module: nn.Module) -> None:
    """Move to meta. Not by `Module.to`, which fails on a planner's fake tensors in torch 2.13. A function by itself, so
    that no name keeps the last tensor."""
    for name, parameter in list(module.named_parameters()):
        empty = torch.empty_like(parameter.detach(), device="meta")
        replace_tensor(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    for name, buffer in list(module.named_buffers()):
        replace_tensor(module, name, torch.empty_like(buffer, device="meta"))


def _fill(
    model: nn.Module, full: dict[str, Tensor], late: dict[str, Late], device: torch.device, *, on_host: bool
) -> None:
    """Replace shards on meta by real ones: rank 0 splits each tensor, sends every rank its shard and lets go of it."""
    for name, parameter in list(model.named_parameters()):
        assert isinstance(parameter, DTensor), f"{name} was not sharded"
        if (make := late.pop(name, None)) is not None:
            full |= make(device)
            del make  # and with it the weight's source
        local = _scattered(parameter, full.pop(name, None), device)
        sharded = DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        # Not before from_local, which moves a tensor in host memory to the mesh's device.
        placed: Tensor = sharded.cpu() if on_host else sharded
        replace_tensor(model, name, nn.Parameter(placed, requires_grad=parameter.requires_grad))
    for name, buffer in list(model.named_buffers()):
        value = full.pop(name).to(device) if name in full else torch.empty_like(buffer, device=device)
        dist.broadcast(value, src=0)
        replace_tensor(model, name, value)


def _scattered(parameter: DTensor, full: Tensor | None, device: torch.device) -> Tensor:
    """This rank's rows of a tensor that rank 0 has: [rows, ...], split along dimension 0 as torch.chunk does."""
    world = dist.get_world_size()
    shards, (first, last) = shard_count(parameter), row_range(parameter)
    rows = -(-parameter.shape[0] // shards)  # of every shard but the last ones
    padded = torch.empty((rows, *parameter.shape[1:]), dtype=parameter.dtype, device=device)
    parts = None if full is None else shard_parts(full.to(device), rows, shards) * (world // shards)
    dist.scatter(padded, parts, src=0)
    return padded[: last - first]


def shard_parts(tensor: Tensor, rows: int, shards: int) -> list[Tensor]:
    """Split a tensor [rows, ...] into one part per shard: views; the last shard is zero-padded; ranks without rows get
    zeros.
    """
    full = len(tensor) // rows
    parts = views(tensor[: full * rows].contiguous(), rows) if full else []
    if full * rows < len(tensor):
        last = tensor.new_zeros((rows, *tensor.shape[1:]))
        last[: len(tensor) - full * rows] = tensor[full * rows :]
        parts.append(last)
    empty = shards - -(-len(tensor) // rows)
    if empty:
        return parts + [tensor.new_zeros((rows, *tensor.shape[1:]))] * empty
    return parts


def views(tensor: Tensor, rows: int) -> list[Tensor]:
    """Views with `rows` rows each. The planner replaces this function, because it needs one of 512 views."""
    return list(tensor.split(rows))
