"""One rank's part of a checkpoint: its pieces of each tensor group, in place or copied to host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

    tensors: Mapping[str, Tensor]  # name -> the elements; a tensor with several names has one entry
    entries: Mapping[str, dict[str, Any]]  # name -> the unsharded shape, dtype, first element, number of elements
    aliases: Mapping[str, str]  # another name for a tensor -> its name in `tensors`
    copies: frozenset[str]  # names of tensors that are copies already: no step changes them


def own_pieces(groups: Mapping[str, Tensors], rank: int) -> dict[str, OwnPieces]:
    """This rank's pieces by group. They are views: nothing is copied.

    Args:
        groups: Group -> name -> tensor, on any device, with any shape (0-dim too) and layout, or this rank's piece.
    """
    return {group: _group_pieces(named, rank) for group, named in groups.items()}


def _group_pieces(named: Tensors, rank: int) -> OwnPieces:
    pieces = {name: piece for name, value in named.items() if (piece := piece_to_write(value, rank)) is not None}
    distinct: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first_names: dict[tuple[object, ...], str] = {}
    # Tied weights are one tensor with two names: the same storage, place in it, shape and strides.
    for name, piece in pieces.items():
        tensor = piece.tensor.detach()
        pointer = tensor.untyped_storage().data_ptr()
        key = (pointer, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if tensor.numel() and key in first_names:  # empty tensors all have pointer 0
            aliases[name] = first_names[key]
            continue
        first_names[key] = name
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
        if pointer in storages:
            result[name] = tensor.clone()
        else:
            result[name] = tensor.contiguous()
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
        total = 0
        for group, own in pieces.items():
            for name, tensor in own.tensors.items():
                if name in own.copies or self._reusable(group, name, tensor) is not None:
                    continue
                # torch rounds pinned allocations up.
                total += pinned_bytes(tensor.nbytes) if self._on_gpu(tensor) else tensor.nbytes
        return total

    def copied(self, pieces: Mapping[str, OwnPieces]) -> dict[str, OwnPieces]:
        """Copies of the pieces, which no step changes. A GPU's copies are complete when its present kernels are."""
        return {
            group: replace(own, tensors={name: self._copy(group, name, own) for name in own.tensors})
            for group, own in pieces.items()
        }

    def _copy(self, group: str, name: str, own: OwnPieces) -> Tensor:
        tensor = own.tensors[name]
        if name in own.copies:
            return tensor
        copy = self._reusable(group, name, tensor)
        if copy is None and self._on_gpu(tensor):
            try:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            except RuntimeError:  # WSL pins half of the memory at most. A copy to other memory is slower.
                copy = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._pinned[group, name] = copy
        elif copy is None:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        return copy.copy_(tensor, non_blocking=True)

    def _reusable(self, group: str, name: str, tensor: Tensor) -> Tensor | None:
        """An earlier copy's pinned memory, if it fits."""
        earlier = self._pinned.get((group, name))
        if earlier is not None and (earlier.shape, earlier.dtype) == (tensor.shape, tensor.dtype):
            return earlier
        return None
