"""Trained weights and optimizer state by name: read from a model for a checkpoint, and loaded again, bitwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from finetune.errors import FinetuneError
from finetune.model.dtypes import dtype_name
from finetune.model.optimizer import allocate_state
from finetune.model.optimizers.blocks import BLOCKWISE, block_in, book_on, decode, encode
from finetune.recipe.optimizers import MOMENTS
from finetune.strategies.pieces import Stored, local_part

Readable = Mapping[str, Tensor | Stored]
_BOOKS = frozenset(("qmap1", "qmap2"))
_SCALES = frozenset(scales for _, scales in BLOCKWISE)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The trained parameters of the unwrapped model by name; frozen ones are loaded with the base model again."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def load_model(model: nn.Module, tensors: Readable) -> None:
    """Copies saved parameters into the trained parameters of the unwrapped model, in place and bitwise.

    Of sharded parameters each rank reads its own shard.

    Raises:
        FinetuneError: missing, unexpected, wrong-shaped, wrong-typed or non-finite tensors, all of them named.
    """
    parameters = model_tensors(model)
    mistakes = [f"missing: {name}" for name in parameters.keys() - tensors.keys()]
    mistakes += [f"unexpected: {name}" for name in tensors.keys() - parameters.keys()]
    parts: dict[str, Tensor] = {}
    for name in parameters.keys() & tensors.keys():
        saved, parameter = tensors[name], parameters[name]
        if (tuple(saved.shape), saved.dtype) != (tuple(parameter.shape), parameter.dtype):
            mistakes.append(f"{name}: {_kind(saved)} in the checkpoint, {_kind(parameter)} in the model")
        else:
            parts[name] = _shard_of(saved, parameter)
    _refuse("the checkpoint does not fit the model", [*sorted(mistakes), *_not_finite(parts)])
    with torch.no_grad():
        for name, parameter in parameters.items():
            local_part(parameter)[0].copy_(parts[name])


def _shard_of(saved: Tensor | Stored, parameter: Tensor) -> Tensor:
    """The elements of a saved tensor that this rank holds of `parameter`, in the shape of its shard."""
    local, start = local_part(parameter)
    if isinstance(saved, Stored):
        if not local.numel():
            return torch.empty(local.shape, dtype=saved.dtype)
        return saved.read(start, local.numel()).view(local.shape)
    return saved.reshape(-1)[start : start + local.numel()].view(local.shape)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as `parameter name:state key`, Python numbers as 0-dim tensors `...:int` or `...:float`.

    Parameter groups are not stored: the recipe and the schedule own their values. Accelerate's wrapper is fine.
    """
    named: dict[str, Tensor] = {}
    for name, parameter in _optimized(model, optimizer).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                named[f"{name}:{key}"] = value
            elif isinstance(value, (int, float)):
                wide = torch.int64 if isinstance(value, int) else torch.float64
                named[f"{name}:{key}:{type(value).__name__}"] = torch.tensor(value, dtype=wide)
            else:
                raise AssertionError(f"optimizer state {key} of {name} is a {type(value).__name__}, not a tensor")
    return named


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Readable) -> None:
    """Gives the optimizer the state that `optimizer_tensors` returned, bitwise; its present state is dropped.

    Not through load_state_dict, which casts state to its parameter's number format. State in the shape of a sharded
    parameter is sharded in the same way. Moments of one byte are bitwise those saved where they have the same blocks
    here; others are decoded and encoded again, each off by half a step of its code at most.

    Raises:
        FinetuneError: state of a parameter that is not optimized here, of another shape, or not finite.
    """
    parameters = _optimized(model, optimizer)
    mistakes, placed = [], {}
    for key, value in tensors.items():
        parameter, entry = parameters.get(key.partition(":")[0]), key.split(":")[1]
        if parameter is None:
            mistakes.append(f"unexpected: {key}")
        elif entry in MOMENTS and tuple(value.shape) != tuple(parameter.shape):
            mistakes.append(f"{key}: shape {tuple(value.shape)} in the checkpoint, {tuple(parameter.shape)} here")
        elif entry in _SCALES and not block_in(parameter.shape, value.shape):
            mistakes.append(f"{key}: shape {tuple(value.shape)} does not fit blocks of {tuple(parameter.shape)}")
        else:
            placed[key] = _state_for(parameter, value)
    _refuse("the checkpoint does not fit the optimizer", [*sorted(mistakes), *_not_finite(placed)])
    on_device = _step_on_device(optimizer)
    for parameter in parameters.values():
        optimizer.state.pop(parameter, None)
    named = {key.partition(":")[0] for key in placed}
    allocate_state(optimizer, [parameters[name] for name in named])
    for name in named:
        _put_into_own_blocks(name, parameters[name], optimizer.state[parameters[name]], placed)
    for key, value in placed.items():
        name, entry, *number = key.split(":")
        parameter = parameters[name]
        own = optimizer.state[parameter].get(entry)
        if isinstance(own, Tensor):  # in bitsandbytes' own pages and code books, or in blocks of rows
            local = local_part(own)[0]
            _refuse(key, [f"{_kind(value)} in the checkpoint, {_kind(local)} here"] * (_kind(value) != _kind(local)))
            local.copy_(value)
            continue
        if entry in _BOOKS:  # bitsandbytes', which blocks.py has too
            continue
        stays = bool(number) or (entry == "step" and id(parameter) not in on_device)
        moved = value.clone() if stays else value.to(parameter.device, copy=True)
        optimizer.state[parameter][entry] = moved.item() if number else _shaped_like(parameter, moved)


def _state_for(parameter: nn.Parameter, value: Tensor | Stored) -> Tensor:
    """This rank's shard of a parameter's state where the state has the parameter's shape, else all of the state."""
    if tuple(value.shape) == tuple(parameter.shape) and value.shape:
        return _shard_of(value, parameter)
    if isinstance(value, Stored):
        return value.read_all()
    return value


def _put_into_own_blocks(
    name: str, parameter: nn.Parameter, own: Mapping[str, object], placed: dict[str, Tensor]
) -> None:
    """Exchange this rank's part of the moments, and all of their scales, for what the allocated state `own` holds."""
    for (entry, scale_entry), signed in zip(BLOCKWISE, (True, False), strict=True):
        held, held_scales = own.get(entry), own.get(scale_entry)
        moment = placed.get(f"{name}:{entry}")
        if not isinstance(held, Tensor) or moment is None:
            continue
        scales = placed.pop(f"{name}:{scale_entry}", None)
        start, values = local_part(parameter)[1], moment.reshape(-1)
        block, book = 0, book_on(values.device, signed=signed)
        if scales is not None:
            block = block_in(parameter.shape, scales.shape)
            scales = scales.reshape(-1)[start // block : -(-(start + len(values)) // block)]
        held_block = block_in(parameter.shape, held_scales.shape) if isinstance(held_scales, Tensor) else 0
        if scales is not None and block != held_block:
            within = start % block  # of the first element, within its block
            values, scales = decode(pad(values, (within, 0)), scales, block, book)[within:], None
        if held_block and scales is None:
            values, scales = encode(values.to(torch.float32, copy=True), held_block, book)
        placed[f"{name}:{entry}"] = values.to(held.dtype).view(moment.shape)
        if isinstance(held_scales, Tensor) and scales is not None:
            placed[f"{name}:{scale_entry}"] = scales.view(local_part(held_scales)[0].shape)


def _shaped_like(parameter: nn.Parameter, state: Tensor) -> Tensor:
    """State of a sharded parameter as a sharded tensor, as the optimizer itself would allocate it.

    Not by `DTensor.from_local`, which would move state in host memory to the device of the mesh, the GPU.
    """
    if not isinstance(parameter, DTensor) or state.ndim != parameter.ndim:
        return state
    sharded = torch.empty_like(parameter, dtype=state.dtype, requires_grad=False)
    local_part(sharded)[0].copy_(state)
    return sharded


def _optimized(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    members = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in members}
    assert len(named) == len(members), "the optimizer holds parameters that are not the model's"
    return named


def _step_on_device(optimizer: torch.optim.Optimizer) -> set[int]:
    """Parameters whose step count must be on their device: fused and capturable kernels read it there."""
    groups = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
    return {id(parameter) for group in groups for parameter in group["params"]}


def _kind(tensor: Tensor | Stored) -> str:
    return f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"


def _not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    floats = {name: value for name, value in tensors.items() if value.is_floating_point()}
    return sorted(f"not finite: {name}" for name, value in floats.items() if not bool(torch.isfinite(value).all()))


def _refuse(headline: str, mistakes: Iterable[str]) -> None:
    lines = list(mistakes)
    if not lines:
        return
    more = f"\n  and {len(lines) - 5} more" if len(lines) > 5 else ""
    remedy = "\ntraining.resume=never starts over and keeps the old folder under another name"
    raise FinetuneError(f"{headline}:\n  " + "\n  ".join(lines[:5]) + more + remedy)
