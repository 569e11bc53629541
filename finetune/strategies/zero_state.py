"""Trained weights and optimizer state that ZeRO sharded over the ranks, out of and into the engine.

Each rank owns one contiguous range of every flattened parameter, or none. So nothing is gathered for a save, and any
number of ranks can read what any other number wrote. Values are the float32 masters, bit for bit.

    one flat partition on rank 1:   | end of weight A | all of B | start of C |
    flat_ranges says:               A [700, 1000)      B [0, 50)  C [0, 150)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from finetune.model.optimizers.rounded_adamw import Range
from finetune.recipe.optimizers import DEFAULT, OPTIMIZERS
from finetune.strategies.pieces import Piece, Stored

ENGINE_MOMENTS = OPTIMIZERS[DEFAULT].moments  # of the only optimizer that zero_requirements.py lets through


class _Owned(NamedTuple):
    """This rank's range of one trained parameter, where the engine keeps it."""

    name: str
    shape: tuple[int, ...]
    start: int  # in the flattened parameter
    master: Tensor  # float32 view, [range]
    state: dict[str, Any]  # the optimizer's, of the flat partition that holds the master
    flat: Tensor  # that partition
    within: slice  # the range in it


def trained_masters(engine: Any) -> dict[str, Piece]:
    """This rank's range of each trained parameter, by name."""
    return {owned.name: Piece(_copy(owned.master), owned.shape, owned.start) for owned in _owned(engine, writing=False)}


def flat_ranges(engine: Any, places: Mapping[str, int]) -> Iterator[tuple[Tensor, Range]]:
    """The range of each parameter that each flat partition on this rank holds. `places`: parameters by name."""
    for owned in _owned(engine, writing=False):
        yield owned.flat, Range(places[owned.name], owned.start, owned.within.start, owned.within.stop)


def trained_pieces(engine: Any) -> dict[str, dict[str, Piece]]:
    """This rank's ranges: group `model` by parameter name, group `optimizer` by `name:exp_avg` and so on.

    The optimizer's group is empty before the first update. Its step counts come from rank 0 alone.
    """
    model: dict[str, Piece] = {}
    optimizer: dict[str, Piece] = {}
    for owned in _owned(engine, writing=False):
        model[owned.name] = Piece(_copy(owned.master), owned.shape, owned.start)
        for key in ENGINE_MOMENTS:
            if key in owned.state:
                moment = _copy(owned.state[key][owned.within])
                optimizer[f"{owned.name}:{key}"] = Piece(moment, owned.shape, owned.start)
    counts = [state["step"] for state in engine.basic_optimizer.state.values() if "step" in state]
    if counts and torch.distributed.get_rank() == 0:
        names = (name for name, parameter in engine.module.named_parameters() if parameter.requires_grad)
        optimizer |= {f"{name}:step": Piece(_copy(counts[0]).reshape(1), (), 0) for name in names}
    return {"model": model, "optimizer": optimizer}


def load_pieces(engine: Any, model: Mapping[str, Stored], optimizer: Mapping[str, Stored]) -> None:
    """Fill masters and moments with this rank's ranges, and from the masters the weights that the model computes with.

    An empty `optimizer` is the state before the first update.
    """
    for owned in _owned(engine, writing=True):
        piece = owned.start, owned.master.numel()
        owned.master.copy_(model[owned.name].read(*piece))
        for key in ENGINE_MOMENTS:
            into = owned.state[key][owned.within]
            into.copy_(optimizer[f"{owned.name}:{key}"].read(*piece)) if optimizer else into.zero_()
        owned.state["step"].fill_(float(optimizer[f"{owned.name}:step"].read(0, 1)) if optimizer else 0.0)
    _refresh(engine)


def load_masters_from(engine: Any, model: Mapping[str, Stored]) -> None:
    """Fill the masters alone with this rank's ranges, and from them the weights that the model computes with."""
    for owned in _owned(engine, writing=True):
        owned.master.copy_(model[owned.name].read(owned.start, owned.master.numel()))
    _refresh(engine)


def load_masters(engine: Any, weights: Mapping[str, Tensor]) -> None:
    """Give some parameters' masters these unsharded values, which the engine had rounded."""
    for owned in _owned(engine, writing=True):
        if owned.name in weights:
            flat = weights[owned.name].reshape(-1)
            owned.master.copy_(flat[owned.start : owned.start + owned.master.numel()])
    _refresh(engine)


def full_weights(engine: Any, *, dtype: torch.dtype | None, keep: bool) -> dict[str, Tensor]:
    """The trained parameters' masters, unsharded and in host memory, on the ranks with `keep`; every rank takes part.

    Gathered one at a time. A parameter under two names stays one tensor. `dtype` None leaves them float32.
    """
    from deepspeed.utils import safe_get_full_fp32_param

    result: dict[str, Tensor] = {}
    by_id: dict[int, Tensor] = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            continue
        if id(parameter) not in by_id:
            full = safe_get_full_fp32_param(parameter)
            by_id[id(parameter)] = full.to("cpu", dtype, copy=True) if keep else full.new_empty(0)
        result[name] = by_id[id(parameter)]
    if keep:
        return result
    return {}


def master_dtype(engine: Any) -> torch.dtype:
    """The number format of the values that the optimizer updates."""
    if engine.zero_optimization_stage() == 3:
        flat: Tensor = engine.optimizer.fp32_partitioned_groups_flat[0]
    else:
        flat = engine.basic_optimizer.param_groups[0]["params"][0]
    return flat.dtype


def _copy(values: Tensor) -> Tensor:
    return values.detach().to("cpu", copy=True)


def _owned(engine: Any, *, writing: bool) -> Iterator[_Owned]:
    """This rank's ranges one by one; each is valid until the next is requested."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    basic, optimizer = engine.basic_optimizer, engine.optimizer
    if engine.zero_optimization_stage() < 3:
        # Parameters end to end, split into equal partitions regardless of where parameters end.
        states = [_state(basic, group["params"][0], make=writing) for group in basic.param_groups]
        for parameter in engine.module.parameters():
            # Not public; deepspeed.utils gives full parameters only, by an all-reduce that turns -0 into 0.
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is None or not parameter.requires_grad:
                continue
            start, within = mapping.lp_fragment_address.start, mapping.hp_fragment_address
            yield _Owned(
                name=names[id(parameter)],
                shape=tuple(parameter.shape),
                start=start,
                master=mapping.hp_fragment.detach(),
                state=states[mapping.param_group_index],
                flat=basic.param_groups[mapping.param_group_index]["params"][0],
                within=slice(within.start, within.start + within.numel),
            )
        return
    # ZeRO-3: every parameter in equal ranges, the last ones padded; sub-groups share one flat partition. These are the
    # private methods of the engine's own update. Nothing public brings optimizer state from a disk into memory before
    # there is any, or the masters' values into the weights.
    rank = torch.distributed.get_rank()
    for index, parameters in enumerate(optimizer.fp16_groups):
        swapped = optimizer._swappable_optimizer_subgroup(index)
        if swapped:
            optimizer._optimizer_states_and_gradient_swap_in(index)
        flat = optimizer.fp32_partitioned_groups_flat[index]
        state = _state(basic, flat, make=writing)
        offset = 0
        for parameter in parameters:
            share = parameter.partition_numel()
            start = min(rank * share, parameter.ds_numel)
            length = min(share, parameter.ds_numel - start)
            if length:
                within = slice(offset, offset + length)
                shape = tuple(parameter.ds_shape)
                yield _Owned(names[id(parameter)], shape, start, flat.data[within], state, flat, within)
            offset += share
        if writing:
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        if swapped and writing:
            optimizer._optimizer_states_and_gradient_swap_out(index)
        elif swapped:
            optimizer._release_swap_buffers(index)


def _state(basic: torch.optim.Optimizer, flat: Tensor, *, make: bool) -> dict[str, Any]:
    """The optimizer's state of a flat partition; made, if asked, as AdamW's first update would begin it."""
    state: dict[str, Any] = basic.state.get(flat, {})
    if make and not state:
        state = basic.state[flat]
        place = flat.device if basic.defaults["fused"] else "cpu"  # fused kernels read it on the parameter's device
        state["step"] = torch.zeros((), dtype=torch.float32, device=place)
        state |= {key: torch.zeros_like(flat) for key in ENGINE_MOMENTS}
    return state


def _refresh(engine: Any) -> None:
    """Copy the masters into the weights that the model computes with."""
    if engine.zero_optimization_stage() < 3:
        engine.optimizer.update_lp_params()
        return
    # Layers that are still gathered from the latest forward, within stage3_max_live_parameters, would be used as they
    # are; what ZeRO-3 leaves unsharded (norms, biases) is gathered again.
    engine.empty_partition_cache()
    persistent = engine.optimizer.persistent_parameters
    if persistent:
        persistent[0].all_gather(persistent)
