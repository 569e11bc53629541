"""Sharded tensors: how each rank writes its part, and how any range is read back.

A piece is a contiguous range of a flattened tensor. Full tensors, FSDP2's rows and ZeRO's partitions all are such
ranges, so any number of ranks can read a checkpoint that another number wrote.

    weight [4, 3] flattened:   0 1 2 | 3 4 5 | 6 7 8 | 9 10 11
    FSDP2 on two ranks:        rank 0: [0, 6)         rank 1: [6, 12)
    ZeRO on two ranks:         rank 0: [0, 5)         rank 1: [5, 12)
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from finetune.errors import FinetuneError

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Piece:
    """The elements [start, start + numel) of a flattened tensor with `shape`."""

    tensor: Tensor  # any shape; its elements in order
    shape: tuple[int, ...]
    start: int
    live: bool = False  # the next step changes it; else it is a copy


class Elsewhere(nn.Parameter):
    """A weight whose values another pipeline stage has: on meta, with neither bytes nor gradient.

    `trained`: it is trained there. `stage_device`: the device where this rank would have it.
    """

    trained: bool
    stage_device: torch.device

    @classmethod
    def of(cls, parameter: nn.Parameter, device: torch.device) -> Elsewhere:
        """In the place of a parameter that this rank gives up."""
        made = cls(torch.empty_like(parameter.detach(), device="meta"), requires_grad=False)
        made.trained, made.stage_device = parameter.requires_grad, device
        return made


def is_trained(parameter: Tensor) -> bool:
    """Whether a parameter is trained, on this rank or on another."""
    if isinstance(parameter, Elsewhere):
        return parameter.trained
    return parameter.requires_grad


class BrokenOff(Exception):
    """Work of several ranks was given up between two collectives."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that write a checkpoint or answer rows together; by default this process alone."""

    rank: int = 0
    world: int = 1
    group: dist.ProcessGroup | None = None  # all of them, where they gather; None: the default group
    broken_off: threading.Event | None = None  # once it is set, they gather no more
    # A rank whose machine does not see rank 0's folder -> the first rank on that machine, which receives its files.
    apart: Mapping[int, int] = field(default_factory=dict)

    def gather(self, thing: Any) -> list[Any]:
        """Each rank's object, in order, on every rank. Raises BrokenOff."""
        if self.broken_off is not None and self.broken_off.is_set():
            raise BrokenOff
        if self.world == 1:
            return [thing]
        things: list[Any] = [None] * self.world
        dist.all_gather_object(things, thing, group=self.group)  # pickles, but only between ranks of one program
        return things

    def rank_0_first(self, act: Callable[[], _Result]) -> _Result:
        """Run `act` on rank 0 alone, which writes files or decides for the others; return its result on every rank.

        Raises rank 0's FinetuneError on every rank.
        """
        result: _Result | FinetuneError | None = None
        if self.rank == 0:
            try:
                result = act()
            except FinetuneError as error:
                result = error
        result = self.gather(result)[0]
        if isinstance(result, FinetuneError):
            raise result
        return result


def all_ranks(group: dist.ProcessGroup | None = None, apart: Mapping[int, int] = MappingProxyType({})) -> Ranks:
    """The process group's ranks, or this process alone. They gather in `group`, which has all of them."""
    if not dist.is_initialized():
        return Ranks()
    return Ranks(dist.get_rank(), dist.get_world_size(), group, apart=apart)


def piece_to_write(value: Tensor | Piece, rank: int) -> Piece | None:
    """This rank's piece of a tensor: its rows of a sharded tensor; a full one belongs to rank 0. None on ranks with a
    copy.
    """
    if isinstance(value, Piece):
        return value
    if isinstance(value, DTensor):
        local, (first, _) = value.to_local(), row_range(value)
        writes = is_first_copy(value) and (local.numel() or rank == 0)
        if writes:
            return Piece(local.detach(), tuple(value.shape), first * math.prod(value.shape[1:]))
        return None
    if rank == 0:
        return Piece(value.detach(), tuple(value.shape), 0)
    return None


def local_part(parameter: Tensor) -> tuple[Tensor, int]:
    """This rank's shard, and the index of its first element in the flattened full tensor."""
    if isinstance(parameter, DTensor):
        return parameter.to_local(), row_range(parameter)[0] * math.prod(parameter.shape[1:])
    return parameter, 0


@dataclass(frozen=True)
class Stored:
    """A tensor in the files of a checkpoint, or this rank's piece of it in host memory."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[Path | Tensor, int, int], ...]  # file, first element, elements; in order

    @classmethod
    def in_memory(cls, name: str, piece: Piece) -> Stored:
        """A piece, to be read as if a file had it."""
        return cls(name, piece.shape, piece.tensor.dtype, ((piece.tensor, piece.start, piece.tensor.numel()),))

    def read(self, start: int, count: int) -> Tensor:
        """Elements [start, start + count) of the flattened tensor, on the CPU, [count]."""
        ranges = []
        for path, first, length in self.parts:
            begin, end = max(start, first), min(start + count, first + length)
            if begin < end:
                ranges.append(_elements(path, self.name, begin - first, end - first))
        if len(ranges) != 1:
            return torch.cat(ranges)
        return ranges[0]

    def read_all(self) -> Tensor:
        """The full tensor."""
        count = math.prod(self.shape)
        return (self.read(0, count) if count else torch.empty(0, dtype=self.dtype)).view(self.shape)


def _elements(path: Path | Tensor, name: str, begin: int, end: int) -> Tensor:
    """A range of a flattened tensor. Of a file no more than the rows around it is read."""
    if isinstance(path, Tensor):
        return path.reshape(-1)[begin:end]
    with safe_open(path, framework="pt") as file:
        rows = file.get_slice(name)
        shape = rows.get_shape()
        if not shape:
            scalar: Tensor = file.get_tensor(name)
            return scalar.reshape(-1)
        width = math.prod(shape[1:])
        first = begin // width
        read: Tensor = rows[first : -(-end // width)]
        return read.reshape(-1)[begin - first * width : end - first * width]


def covers(parts: Iterable[tuple[int, int]], elements: int) -> bool:
    """Whether ranges (first, length), in order, cover all elements, each once."""
    at = 0
    for first, length in parts:
        if first != at:
            return False
        at += length
    return at == elements


def shard_count(parameter: DTensor) -> int:
    """The number of shards in dimension 0."""
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


def full_numel(parameter: Tensor) -> int:
    """Elements of a parameter before ZeRO-3 partitioned it."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def full_shape(parameter: Tensor) -> torch.Size:
    """Shape of a parameter before ZeRO-3 partitioned it."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def local_shard(parameter: Tensor) -> Tensor:
    """The tensor that this rank stores for a parameter: its ZeRO-3 shard, or all of an unsharded one."""
    return parameter if getattr(parameter, "ds_persist", True) else parameter.ds_tensor  # type: ignore[attr-defined]


def reshard(model: nn.Module) -> None:
    """Free what is still gathered. After a forward without a backward, as in an evaluation, the head is. Its parameters
    are then not the ones that the optimizer updates.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gathered(named: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype | None, keep: bool) -> dict[str, Tensor]:
    """Full tensors in host memory, gathered one at a time; every rank calls it, the ranks with `keep` get them.

    A tensor under two names stays one tensor. Floating-point tensors are cast to `dtype` unless it is None.
    """
    result: dict[str, Tensor] = {}
    by_id: dict[int, Tensor] = {}
    for name, tensor in named:
        if id(tensor) not in by_id:
            full = tensor.detach()
            full = full.full_tensor() if isinstance(full, DTensor) else full
            cast = full.to("cpu", dtype if tensor.is_floating_point() else None) if keep else full.new_empty(0)
            by_id[id(tensor)] = cast
        result[name] = by_id[id(tensor)]
    if keep:
        return result
    return {}
