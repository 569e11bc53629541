"""FSDP2: a model whose weights are sharded over the ranks, filled from rank 0 one tensor at a time.

Accelerate's own preparation would hold each 4-bit model whole on every GPU, and finds an optimizer's parameters again
by their address, which empty shards share. So the model is sharded here by torch's public `fully_shard` and handed to
`Accelerator.prepare` as one that is sharded already.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.errors import EnvironmentMismatch
from finetune.recipe.strategy import Strategy

SHARDS = "shards"  # the mesh dimension over which a tensor is cut
COPIES = "copies"  # HSDP: the dimension over which the cut tensors are repeated


def make_mesh(strategy: Strategy, device: torch.device) -> DeviceMesh:
    """The ranks in order: [shards], or [copies, shards] under HSDP, where a node holds one copy unless the file tells.

    Raises EnvironmentMismatch when the ranks cannot be laid out so.
    """
    world = dist.get_world_size()
    if not strategy.replicates:
        return init_device_mesh(device.type, (world,), mesh_dim_names=(SHARDS,))
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    copies = strategy.replica_count(world, per_node)
    if not strategy.can_replicate(world, per_node):
        raise EnvironmentMismatch(
            f"accelerate_config: {strategy.name} shards within a node and repeats between nodes; {world} ranks make "
            f"{copies} such copies; launch on several nodes, set parallelism_config_dp_replicate_size, or take fsdp2"
        )
    return init_device_mesh(device.type, (copies, world // copies), mesh_dim_names=(COPIES, SHARDS))


def shard_model(
    decoder: PreTrainedModel,
    strategy: Strategy,
    mesh: DeviceMesh,
    device: torch.device,
    compute_dtype: torch.dtype | None,
) -> None:
    """Shard a model in place and fill it from rank 0, whose weights lie in host memory; elsewhere they are on meta.

    Args:
        decoder: The transformers model, adapters in its layers; the same structure on every rank.
        mesh: From `make_mesh`.
        device: Of the computation. Under CPU offload the shards stay in host memory.
        compute_dtype: Weights are gathered in it, gradients reduced in float32; None leaves each tensor as it is.
    """
    full = {name: tensor.detach() for name, tensor in _named_tensors(decoder)} if dist.get_rank() == 0 else {}
    with ties_kept(decoder):
        _empty(decoder)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=compute_dtype and torch.float32)
    offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if strategy.offloaded else OffloadPolicy()
    for unit, reshard in _units(decoder, strategy.reshard_after_forward):
        fully_shard(unit, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=reshard)
    with ties_kept(decoder):
        _fill(decoder, full, device, on_host=strategy.offloaded)


def reshard(whole: nn.Module) -> None:
    """Back to shards: the unit of the head stays gathered after a forward without a backward, as in an evaluation, and
    its parameters are not the optimizer's then."""
    for module in whole.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def reduced_in(whole: nn.Module) -> set[torch.dtype]:
    """Number formats other than their own that gradients are reduced in, by the policy of each sharded unit.

    torch has no public name for a unit's policy; tests/strategies/test_receipt.py sees another one refused.
    """
    units = [module for module in whole.modules() if isinstance(module, FSDPModule)]
    policies = [unit._get_fsdp_state()._mp_policy for unit in units]
    return {dtype for policy in policies if (dtype := policy.reduce_dtype or policy.param_dtype) is not None}


def _units(decoder: PreTrainedModel, reshard: bool) -> Iterator[tuple[nn.Module, bool]]:
    """What is gathered together, innermost first: each decoder layer, embeddings, the head, then the rest: small.

    The head needs no second gathering in backward, which starts where forward ended. Tied to the embeddings it belongs
    to the rest, which is there from the first to the last.
    """
    for layer in [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]:
        yield layer, reshard
    embeddings, head = decoder.get_input_embeddings(), decoder.get_output_embeddings()
    if embeddings.weight is not head.weight:
        yield embeddings, reshard
        yield head, False
    yield decoder, False


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _empty(module: nn.Module) -> None:
    """Move to meta. Not by `Module.to`, which torch 2.13 cannot do to a planner's tensors without data."""
    for name, parameter in list(module.named_parameters()):
        hollow = torch.empty_like(parameter.detach(), device="meta")
        put(module, name, nn.Parameter(hollow, requires_grad=parameter.requires_grad))
    for name, buffer in list(module.named_buffers()):
        put(module, name, torch.empty_like(buffer, device="meta"))


@contextmanager
def ties_kept(module: nn.Module) -> Iterator[None]:
    """Parameters that two modules share are shared afterwards too, though each was replaced."""
    first: dict[int, str] = {}
    ties = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            ties[name] = owner
    yield
    for name, owner in ties.items():
        put(module, name, module.get_parameter(owner))


def put(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter or buffer, by its dotted name."""
    path, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(path), leaf, tensor)


def _fill(whole: nn.Module, full: Mapping[str, Tensor], device: torch.device, *, on_host: bool) -> None:
    """Real shards in place of those on meta: rank 0 cuts each tensor and sends every rank its part."""
    for name, parameter in list(whole.named_parameters()):
        assert isinstance(parameter, DTensor), f"{name} was not sharded"
        local = _scattered(parameter, full.get(name), device)
        sharded = DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        # Not the part before: from_local takes what lies in host memory to the mesh's device.
        placed: Tensor = sharded.cpu() if on_host else sharded
        put(whole, name, nn.Parameter(placed, requires_grad=parameter.requires_grad))
    for name, buffer in list(whole.named_buffers()):
        here = full[name].to(device) if name in full else torch.empty_like(buffer, device=device)
        dist.broadcast(here, src=0)
        put(whole, name, here)


def _scattered(parameter: DTensor, full: Tensor | None, device: torch.device) -> Tensor:
    """This rank's rows of a tensor that rank 0 holds: dimension 0 is cut as torch.chunk cuts it."""
    world = dist.get_world_size()
    shards = shard_count(parameter)
    rows = -(-parameter.shape[0] // shards)  # of every shard but the last ones
    padded = torch.empty((rows, *parameter.shape[1:]), dtype=parameter.dtype, device=device)
    parts = None if full is None else _parts(full.to(device), rows, shards) * (world // shards)
    dist.scatter(padded, parts, src=0)
    first, last = row_range(parameter)
    return padded[: last - first]


def _parts(whole: Tensor, rows: int, shards: int) -> list[Tensor]:
    """So many parts of `rows` rows: views, what is left, padded, and one tensor of zeros for all who get none."""
    full = len(whole) // rows
    parts = views(whole[: full * rows].contiguous(), rows) if full else []
    if full * rows < len(whole):
        last = whole.new_zeros((rows, *whole.shape[1:]))
        last[: len(whole) - full * rows] = whole[full * rows :]
        parts.append(last)
    empty = shards - -(-len(whole) // rows)
    return parts + [whole.new_zeros((rows, *whole.shape[1:]))] * empty if empty else parts


def views(whole: Tensor, rows: int) -> list[Tensor]:
    """`rows` rows each. A function of its own for the planner, which needs one of 512 and not the time they take."""
    return list(whole.split(rows))


def shard_count(parameter: DTensor) -> int:
    """Into how many parts dimension 0 is cut."""
    assert parameter.placements[-1] == Shard(0), parameter.placements
    assert all(placement == Replicate() for placement in parameter.placements[:-1]), parameter.placements
    return parameter.device_mesh.size(-1)


def row_range(parameter: DTensor) -> tuple[int, int]:
    """This rank's rows [first, end) of dimension 0."""
    rows = -(-parameter.shape[0] // shard_count(parameter))
    first = min(parameter.device_mesh.get_local_rank(-1) * rows, parameter.shape[0])
    return first, min(first + rows, parameter.shape[0])


def is_first_copy(parameter: DTensor) -> bool:
    """Whether this rank's shard is the one to be saved: under HSDP each copy has it."""
    mesh = parameter.device_mesh
    return mesh.ndim == 1 or mesh.get_local_rank(0) == 0


def gathered(named: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype | None, keep: bool) -> dict[str, Tensor]:
    """Whole tensors in host memory, gathered one at a time; every rank takes part, those with `keep` get them.

    A tensor under two names stays one tensor. `dtype` is that of floating-point tensors; None leaves them.
    """
    found: dict[str, Tensor] = {}
    seen: dict[int, Tensor] = {}
    for name, tensor in named:
        if id(tensor) not in seen:
            whole = tensor.detach()
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            cast = whole.to("cpu", dtype if tensor.is_floating_point() else None) if keep else whole.new_empty(0)
            seen[id(tensor)] = cast
        found[name] = seen[id(tensor)]
    return found if keep else {}
