"""Trained weights and optimizer state by name: read from a model for a checkpoint, and loaded bitwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from finetune.errors import FinetuneError, NothingTrained
from finetune.model.dtypes import dtype_name
from finetune.model.optimizer import allocate_state
from finetune.recipe.optimizers import MOMENTS
from finetune.run_folder.tensor_checks import checksums
from finetune.strategies.assemble import Assembled
from finetune.strategies.pieces import Piece, Stored, all_ranks, local_part, reshard

Readable = Mapping[str, Tensor | Stored]
_BOOKS = frozenset(("qmap1", "qmap2"))
_SCALES = frozenset(("absmax1", "absmax2"))  # of one-byte moments: model/optimizers/blocks.py


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The unwrapped model's trained parameters by name. Frozen ones are loaded with the base model again."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def load_model(model: nn.Module, tensors: Readable) -> None:
    """Copy saved parameters into the unwrapped model's trained parameters, in place and bitwise.

    Each rank reads its own shards.

    Raises:
        FinetuneError: missing, unexpected, wrong-shaped, wrong-typed or non-finite tensors, with their names.
    """
    parameters = model_tensors(model)
    mistakes = [f"missing: {name}" for name in parameters.keys() - tensors.keys()]
    mistakes += [f"unexpected: {name}" for name in tensors.keys() - parameters.keys()]
    own_shards: dict[str, Tensor] = {}
    for name in parameters.keys() & tensors.keys():
        saved, parameter = tensors[name], parameters[name]
        if (tuple(saved.shape), saved.dtype) != (tuple(parameter.shape), parameter.dtype):
            mistakes.append(f"{name}: {_kind(saved)} in the checkpoint, {_kind(parameter)} in the model")
        else:
            own_shards[name] = _shard_of(saved, parameter)
    # Refuse before the first copy: a model with some new and some old weights must not train.
    _refuse("the checkpoint does not fit the model", [*sorted(mistakes), *_not_finite(own_shards)])
    with torch.no_grad():
        for name, parameter in parameters.items():
            local_part(parameter)[0].copy_(own_shards[name])


def _shard_of(saved: Tensor | Stored, parameter: Tensor) -> Tensor:
    """The saved tensor's elements for this rank's shard of `parameter`, in the shard's shape."""
    local, start = local_part(parameter)
    if isinstance(saved, Stored):
        if not local.numel():  # FSDP2 gives no rows to the last ranks of a small tensor
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
                dtype = torch.int64 if isinstance(value, int) else torch.float64
                named[f"{name}:{key}:{type(value).__name__}"] = torch.tensor(value, dtype=dtype)
            else:
                raise AssertionError(f"optimizer state {key} of {name} is a {type(value).__name__}, not a tensor")
    return named


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Readable) -> None:
    """Give the optimizer the state from `optimizer_tensors`, bitwise. Its present state is dropped.

    load_state_dict is not used, because it casts state to the parameter's number format. State in a sharded parameter's
    shape is sharded in the same way. One-byte moments keep their bits if they have the same blocks here. Other blocks
    are decoded and encoded again: each moment is then off by half a step of its code at most.

    Raises:
        FinetuneError: state for a parameter that is not optimized here, with another shape, or not finite.
    """
    from finetune.model.optimizers.blocks import block_in

    parameters = _optimized(model, optimizer)
    mistakes, placed = [], {}
    # Keys: layers.0.weight:exp_avg, or layers.0.weight:step:int for a Python number.
    for key, value in tensors.items():
        parameter, entry = parameters.get(key.partition(":")[0]), key.split(":")[1]
        if parameter is None:
            mistakes.append(f"unexpected: {key}")
        elif entry in MOMENTS and tuple(value.shape) != tuple(parameter.shape):
            mistakes.append(f"{key}: shape {tuple(value.shape)} in the checkpoint, {tuple(parameter.shape)} here")
        elif entry in _SCALES and not block_in(parameter.shape, value.shape):
            mistakes.append(f"{key}: shape {tuple(value.shape)} does not fit blocks of {tuple(parameter.shape)}")
        elif tuple(value.shape) == tuple(parameter.shape) and value.shape:
            placed[key] = _shard_of(value, parameter)
        else:
            placed[key] = value.read_all() if isinstance(value, Stored) else value
    _refuse("the checkpoint does not fit the optimizer", [*sorted(mistakes), *_not_finite(placed)])
    # Fused and capturable kernels read a parameter's step count on the device; the others read it on the CPU.
    groups = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
    step_on_device = {id(parameter) for group in groups for parameter in group["params"]}
    # Free the present state before the new one is allocated.
    for parameter in parameters.values():
        optimizer.state.pop(parameter, None)
    named = {key.partition(":")[0] for key in placed}
    allocate_state(optimizer, [parameters[name] for name in named])
    for name in named:
        if "state1" in optimizer.state[parameters[name]]:
            _put_into_own_blocks(name, parameters[name], optimizer.state[parameters[name]], placed)
    for key, value in placed.items():
        name, entry, *number = key.split(":")
        parameter = parameters[name]
        own = optimizer.state[parameter].get(entry)
        if isinstance(own, Tensor):
            # Allocated already: in bitsandbytes' own pages and code books, or in blocks of rows.
            local = local_part(own)[0]
            if _kind(value) != _kind(local):
                _refuse(key, [f"{_kind(value)} in the checkpoint, {_kind(local)} here"])
            local.copy_(value)
        elif entry in _BOOKS:
            continue  # bitsandbytes' code books, saved by its optimizer. blocks.py has the same ones.
        elif number:
            optimizer.state[parameter][entry] = value.item()
        elif entry == "step" and id(parameter) not in step_on_device:
            optimizer.state[parameter][entry] = _sharded_like(parameter, value.clone())
        else:
            optimizer.state[parameter][entry] = _sharded_like(parameter, value.to(parameter.device, copy=True))


def _put_into_own_blocks(
    name: str, parameter: nn.Parameter, own: Mapping[str, object], placed: dict[str, Tensor]
) -> None:
    """Convert the saved moments and scales in `placed` to the format of the allocated state `own`.

    A one-byte moment is value = book[code] * scale, with one scale per block of elements. Moments in `placed` are this
    rank's shard. Scales are those of the whole parameter. Example with blocks of 4 and a shard of elements 6 to 11:

        element   0 1 2 3 | 4 5 6 7 | 8 9 10 11     scales 1 and 2 of the parameter's 0, 1, 2
        shard                   6 7   8 9 10 11     pad 6 % 4 = 2 elements in front, decode, drop them again
    """
    from finetune.model.optimizers.blocks import BLOCKWISE, block_in, book_on, decode, encode

    for (entry, scale_entry), signed in zip(BLOCKWISE, (True, False), strict=True):
        own_moment, own_scales = own.get(entry), own.get(scale_entry)
        moment = placed.get(f"{name}:{entry}")
        if not isinstance(own_moment, Tensor) or moment is None:
            continue
        scales = placed.pop(f"{name}:{scale_entry}", None)
        start, values = local_part(parameter)[1], moment.reshape(-1)
        # Block sizes in elements; 0: moments without blocks, in a float format.
        saved_block, own_block = 0, 0
        book = book_on(values.device, signed=signed)
        if scales is not None:
            saved_block = block_in(parameter.shape, scales.shape)
            scales = scales.reshape(-1)[start // saved_block : -(-(start + len(values)) // saved_block)]
        if isinstance(own_scales, Tensor):
            own_block = block_in(parameter.shape, own_scales.shape)
        if scales is not None and saved_block != own_block:
            offset = start % saved_block  # the first element's place in its block
            values, scales = decode(pad(values, (offset, 0)), scales, saved_block, book)[offset:], None
        if own_block and scales is None:
            values, scales = encode(values.to(torch.float32, copy=True), own_block, book)
        placed[f"{name}:{entry}"] = values.to(own_moment.dtype).view(moment.shape)
        if isinstance(own_scales, Tensor) and scales is not None:
            placed[f"{name}:{scale_entry}"] = scales.view(local_part(own_scales)[0].shape)


def _sharded_like(parameter: nn.Parameter, state: Tensor) -> Tensor:
    """Shard a sharded parameter's state in the same way, as the optimizer itself would allocate it.

    `DTensor.from_local` is not used: it would move state in host memory to the mesh's device, the GPU.
    """
    if not isinstance(parameter, DTensor) or state.ndim != parameter.ndim:
        return state
    sharded = torch.empty_like(parameter, dtype=state.dtype, requires_grad=False)
    local_part(sharded)[0].copy_(state)
    return sharded


def _optimized(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    members = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in members}
    # named_parameters lists a tied parameter once, as param_groups do.
    assert len(named) == len(members), "the optimizer holds parameters that are not the model's"
    return named


def _kind(tensor: Tensor | Stored) -> str:
    return f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"


def _not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    floats = {name: value for name, value in tensors.items() if value.is_floating_point()}
    return sorted(f"not finite: {name}" for name, value in floats.items() if not bool(torch.isfinite(value).all()))


def _refuse(headline: str, mistakes: Iterable[str]) -> None:
    lines = list(mistakes)
    if not lines:
        return
    listed = lines[:5]
    if len(lines) > 5:
        listed.append(f"and {len(lines) - 5} more")
    remedy = "training.resume=never starts over and keeps the old folder under another name"
    raise FinetuneError(f"{headline}:\n  " + "\n  ".join(listed) + f"\n{remedy}")


def trained_checksums(parts: Assembled) -> dict[str, str]:
    """A checksum over each trained tensor's bits, equal for any number of ranks. Every rank calls it."""
    if parts.engine is not None:
        from finetune.strategies.zero_state import trained_masters

        named: Mapping[str, Tensor | Piece] = trained_masters(parts.engine)
    else:
        reshard(parts.unwrapped_model)
        named = parts.to_write(model_tensors(parts.unwrapped_model))
    return checksums(named, all_ranks())


def refuse_unchanged(now: Mapping[str, str], start: Mapping[str, str]) -> list[str]:
    """The names with the start's checksums. Raises NothingTrained if these are all names."""
    unchanged = sorted(name for name, checksum in now.items() if start.get(name) == checksum)
    # A single tensor may rightly stay, for example an expert that no token reached. All of them may not.
    if start and len(unchanged) == len(start):
        raise NothingTrained(
            f"training: its steps changed no bit of the {len(start)} trained tensors, first {unchanged[0]}; nothing is "
            "exported or pushed; look at grad_norm and learning_rate in metrics.jsonl, and raise "
            "training.learning_rate, or train weights in float32 (training.pure_bf16: false)"
        )
    return unchanged


def describe_change(unchanged: list[str], start: Mapping[str, str]) -> str:
    """A line that names the unchanged tensors; empty if all changed."""
    if not unchanged:
        return ""
    names = ", ".join(unchanged[:3])
    if len(unchanged) > 3:
        names += f" and {len(unchanged) - 3} more"
    return f"unchanged by training: {len(unchanged)} of {len(start)} trained tensors: {names}"
