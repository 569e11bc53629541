"""Checks of trained tensors: whether they are finite, and checksums that show whether training changed them.

Sharded tensors are checked in place, each rank its own piece.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from finetune.strategies.pieces import Piece, Ranks, piece_to_write

CHUNK = 2**22  # elements of one pass: 32 MiB of int64 besides the tensor
# 2^64 / golden ratio, and a second odd number (splitmix64's): spread neighbouring positions over all 64 bits.
GOLDEN, MIXED = -7046029254386353131, -4658895280553007687


def not_finite(tensors: Mapping[str, Tensor | Piece], rank: int) -> list[str]:
    """Names of tensors with a NaN or an infinity in this rank's piece. Integers have none.

    `tensors` are unsharded, sharded, or pieces. An unsharded one is checked on rank 0.
    """
    pieces = {name: piece_to_write(value, rank) for name, value in tensors.items()}
    return [name for name, piece in pieces.items() if piece is not None and not _finite(piece.tensor)]


def _finite(tensor: Tensor) -> bool:
    largest = largest_magnitude(tensor)
    return largest is None or math.isfinite(largest)


def largest_magnitude(tensor: Tensor) -> Tensor | None:
    """The largest magnitude, shape []. None for integers and for no elements.

    It is finite if all elements are, and NaN if one is. This is one reduction without a copy of the tensor, because a
    save calls it when memory is nearly full.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return None
    norm: Tensor = torch.linalg.vector_norm(tensor.detach(), math.inf)
    return norm


def first_not_finite(path: Path) -> str | None:
    """The first tensor in a safetensors file with a NaN or an infinity, by name; None: all are finite."""
    with safe_open(path, framework="pt") as file:
        names: list[str] = sorted(file.keys())
        for name in names:
            if not_finite({name: file.get_tensor(name)}, 0):
                return name
    return None


def checksums(tensors: Mapping[str, Tensor | Piece], ranks: Ranks) -> dict[str, str]:
    """A checksum over each tensor's bits, 16 hexadecimal digits. Every rank calls it.

    It sums each element's bits times an odd number that follows from the position, modulo 2^64. Sums over shards add
    up, so the checksum is equal for any number of ranks. A change in one element always changes the sum, because no odd
    number divides a power of two. One pair in 2^64 among different tensors agrees.
    """
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
    sums = {}
    for name, value in tensors.items():
        piece = piece_to_write(value, ranks.rank)
        if piece is not None:
            bits = piece.tensor.detach().contiguous().view(integers[piece.tensor.element_size()])
            flat, firsts = bits.reshape(-1), range(0, bits.numel(), CHUNK)
            sums[name] = sum(int(_weighed(flat[first : first + CHUNK], piece.start + first)) for first in firsts)
    total: dict[str, int] = {}
    for partial in ranks.gather(sums):
        for name, number in partial.items():
            total[name] = (total.get(name, 0) + number) % 2**64
    return {name: f"{number:016x}" for name, number in total.items()}


def _weighed(bits: Tensor, first: int) -> Tensor:
    """Sum of the integers times their positions' odd numbers, modulo 2^64: int64 arithmetic wraps around."""
    position = torch.arange(first + 1, first + 1 + bits.numel(), device=bits.device)
    mixed = position * GOLDEN
    mixed = (mixed ^ (mixed >> 29)) * MIXED | 1
    return (bits.to(torch.int64) * mixed).sum()
