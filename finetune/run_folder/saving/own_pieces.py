"""One rank's part of a checkpoint: its pieces of each tensor group, in place or copied to host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from finetune.measure.host_memory import pinned_bytes
from finetune.model.dtypes import dtype_name
from finetune.strategies.pieces import Piece, piece_to_write

Tensors = Mapping[str, Tensor | Piece]


@dataclass(frozen=True)
class OwnPieces:
    """This rank's pieces of one tensor group."""

    tensors: Mapping[str, Tensor]  # name -> the elements; names of the same tensor have one entry
    entries: Mapping[str, dict[str, Any]]  # name -> shape of the whole, dtype, first element, number of elements
    aliases: Mapping[str, str]  # name -> the name whose tensor it shares
    copies: frozenset[str]  # names of tensors that are copies already: no step changes them


def own_pieces(groups: Mapping[str, Tensors], rank: int) -> dict[str, OwnPieces]:
    """This rank's pieces by group; views, nothing is copied.

    Args:
        groups: Group -> name -> tensor, on any device, with any shape (0-dim too) and layout, or this rank's piece.
    """
    return {group: _of_group(named, rank) for group, named in groups.items()}


def _of_group(named: Tensors, rank: int) -> OwnPieces:
    pieces = {name: piece for name, value in named.items() if (piece := piece_to_write(value, rank)) is not None}
    distinct: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, piece in pieces.items():
        tensor = piece.tensor.detach()
        pointer = tensor.untyped_storage().data_ptr()
        key = (pointer, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if tensor.numel() and key in first:
            aliases[name] = first[key]
            continue
        first[key] = name
        distinct[name] = tensor
    entries = {
        name: {
            "shape": pieces[name].shape,
            "dtype": dtype_name(tensor.dtype),
            "start": pieces[name].start,
            "n": tensor.numel(),
        }
        for name, tensor in distinct.items()
    }
    copies = frozenset(name for name in distinct if isinstance(named[name], Piece) and not pieces[name].live)
    return OwnPieces(distinct, entries, aliases, copies)


def unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, contiguous, each in its own storage: safetensors refuses views into one storage."""
    result: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if pointer in storages else tensor.contiguous()
        storages.add(pointer)
    return result


class HostCopies:
    """Copies of a rank's pieces in host memory.

    GPU tensors' copies are in pinned memory. It is allocated at the first copy and reused, because pinning takes longer
    than copying. Copies of tensors in host memory live as long as the result.

    Args:
        on_gpu: Whether a tensor is on a GPU.
    """

    def __init__(self, on_gpu: Callable[[Tensor], bool] = lambda tensor: tensor.is_cuda) -> None:
        self._on_gpu = on_gpu
        self._pinned: dict[tuple[str, str], Tensor] = {}

    def bytes_to_allocate(self, pieces: Mapping[str, OwnPieces]) -> int:
        """Host memory in bytes that `copied` would allocate."""
        sizes = (
            (tensor.nbytes, self._on_gpu(tensor))
            for group, own in pieces.items()
            for name, tensor in own.tensors.items()
            if name not in own.copies and self._known(group, name, tensor) is None
        )
        return sum(pinned_bytes(nbytes) if pinned else nbytes for nbytes, pinned in sizes)

    def copied(self, pieces: Mapping[str, OwnPieces]) -> dict[str, OwnPieces]:
        """The pieces with tensors that no step changes. A GPU's are complete when its kernels so far are."""
        return {
            group: replace(own, tensors={name: self._copy(group, name, own) for name in own.tensors})
            for group, own in pieces.items()
        }

    def _copy(self, group: str, name: str, own: OwnPieces) -> Tensor:
        tensor = own.tensors[name]
        if name in own.copies:
            return tensor
        copy = self._known(group, name, tensor)
        if copy is None:
            copy = self._allocate(tensor)
            if self._on_gpu(tensor):
                self._pinned[group, name] = copy
        return copy.copy_(tensor, non_blocking=True)

    def _allocate(self, tensor: Tensor) -> Tensor:
        if self._on_gpu(tensor):
            with suppress(RuntimeError):  # WSL pins half of the memory at most; other memory is copied to more slowly
                return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def _known(self, group: str, name: str, tensor: Tensor) -> Tensor | None:
        """The pinned memory of an earlier copy, where it fits."""
        known = self._pinned.get((group, name))
        fits = known is not None and (known.shape, known.dtype) == (tensor.shape, tensor.dtype)
        if fits:
            return known
        return None
