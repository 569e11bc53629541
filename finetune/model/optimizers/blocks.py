"""One-byte moments: blocks within a weight's rows, one scale per block, and a book with 256 values.

Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021. A block lies within a row, so a shard has the same
blocks as its rows in the full tensor, on any number of ranks. bitsandbytes has the same book, and blocks of 256
elements in the flattened tensor. They are the same blocks if rows are multiples of 256.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

LONGEST_BLOCK = 256  # elements, at most
SHORTEST_BLOCK = 8  # the scales of shorter ones would take more than half a byte an element
FEWEST = 4096  # elements of a tensor whose moments are in one byte; bitsandbytes' threshold too
BLOCKWISE = (("state1", "absmax1"), ("state2", "absmax2"))  # the first and second moment in a state, and their scales
SMALLEST = torch.finfo(torch.float32).tiny  # a divisor for zeros


class Book(NamedTuple):
    """The values for codes 0 to 255, ascending, float32 [256], and the edges between them [255]."""

    values: Tensor
    edges: Tensor


def block_length(shape: Sequence[int]) -> int:
    """Elements per block in a weight's moments; 0 if they stay in float32.

    The largest divisor of a row, up to 256: 256 for 4,096; 192 for 576; a whole row for an adapter's 16. Moments of
    vectors, of tensors under 4,096 elements and of rows without such a divisor stay in float32.
    """
    if len(shape) < 2 or math.prod(shape) < FEWEST:
        return 0
    row = shape[-1]
    longest = next(length for length in range(min(LONGEST_BLOCK, row), 0, -1) if row % length == 0)
    if longest >= SHORTEST_BLOCK:
        return longest
    return 0


def block_in(shape: Sequence[int], scales: Sequence[int]) -> int:
    """Elements per block in moments with this shape and scales with that shape; 0 if they do not fit.

    bitsandbytes' scales are flat, ours lie in rows.
    """
    block = LONGEST_BLOCK if len(scales) == 1 else shape[-1] // scales[-1]
    if block and math.prod(scales) == -(-math.prod(shape) // block):
        return block
    return 0


def book_on(device: torch.device, *, signed: bool) -> Book:
    """The book for first moments (signed), or for second ones.

    Seven powers of ten, the larger ones in finer steps, 0 and 1. A positive second moment is never 0: a root of 0
    beside a non-zero mean would make an update of 1 / epsilon (the zero-point problem in Li et al., Memory Efficient
    Optimizers with 4-bit States, 2023; docs/log.md). So the first edge in its book is 0, not halfway.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        count = 2**exponent * (1 if signed else 2)
        middles = [10.0 ** (exponent - 6) * (0.1 + 0.9 * (step + 0.5) / count) for step in range(count)]
        values += middles + [-value for value in middles] * signed
    values.sort()
    edges = [(low + high) / 2 for low, high in pairwise(values)]
    if not signed:
        edges[0] = 0.0
    return Book(*(torch.tensor(numbers, dtype=torch.float32, device=device) for numbers in (values, edges)))


def encode(values: Tensor, block: int, book: Book) -> tuple[Tensor, Tensor]:
    """Codes, int32 [elements], and scales, float32 [blocks], for float32 [elements], whose memory is reused.

    A scale is its block's largest magnitude. The last block may be shorter. A code is the nearest value's.
    """
    blocks = _blocks(values, block)  # [blocks, block]
    scales = torch.linalg.vector_norm(blocks, ord=math.inf, dim=1).clamp_min_(SMALLEST)
    scaled = blocks.div_(scales[:, None]).view(-1)[: len(values)]
    return torch.bucketize(scaled, book.edges, out_int32=True), scales


def decode(codes: Tensor, scales: Tensor, block: int, book: Book) -> Tensor:
    """float32 [elements] of codes, uint8 [elements], and scales, float32 [blocks]."""
    blocks = _blocks(book.values.index_select(0, codes.int()), block)
    return blocks.mul_(scales[:, None]).view(-1)[: len(codes)]


def _blocks(values: Tensor, block: int) -> Tensor:
    """[elements] as [blocks, block], the last one filled with zeros."""
    missing = -len(values) % block
    return (pad(values, (0, missing)) if missing else values).view(-1, block)
