"""Random bits that depend on their use alone: not on a generator, a device or the number of ranks.

A key is made from (seed, step, tensor, use, chunk). A bit pattern comes from the key and the element's index in its
chunk. So copies of a weight on several ranks are rounded alike, shards like the full tensor, and a resumed run like an
uninterrupted one.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BITS_64, _BITS_32 = (1 << 64) - 1, (1 << 32) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: the step of SplitMix64


def key_of(*numbers: int) -> int:
    """64 bits that depend on all these numbers and their order.

    The finaliser of SplitMix64 mixes each one in (Steele, Lea and Flood, Fast Splittable Pseudorandom Number
    Generators, 2014).
    """
    key = 0
    for number in numbers:
        key = (key ^ (number & _BITS_64)) + _GOLDEN & _BITS_64
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & _BITS_64
        key = (key ^ key >> 27) * 0x94D049BB133111EB & _BITS_64
        key ^= key >> 31
    return key


def random_bits(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """int32 [count], all bits random, for elements `first`, `first + 1`, ... under this key.

    The index is multiplied by one half of the key, made odd, and added to the other half. Then comes lowbias32, a
    32-bit hash (Wellons, Prospecting for Hash Functions, 2018). Products wrap around, as int32 products do in torch.
    """
    bits = torch.arange(first, first + count, dtype=torch.int32, device=device)
    multiplier, offset = multiplier_and_offset(key)
    bits.mul_(multiplier).add_(offset)
    _shifted_xor_(bits, 16).mul_(_signed(0x7FEB352D))
    _shifted_xor_(bits, 15).mul_(_signed(0x846CA68B))
    return _shifted_xor_(bits, 16)


def multiplier_and_offset(key: int) -> tuple[int, int]:
    """The key's halves as int32: the index is multiplied by the first one and added to the second."""
    return _signed(key & _BITS_32 | 1), _signed(key >> 32)


def hashed(numbers: Tensor) -> Tensor:
    """lowbias32 of int32 numbers, as in `random_bits`, without writing in place: for a compiler."""
    bits = (numbers ^ numbers >> 16 & 0xFFFF) * _signed(0x7FEB352D)
    bits = (bits ^ bits >> 15 & 0x1FFFF) * _signed(0x846CA68B)
    return bits ^ bits >> 16 & 0xFFFF


def _shifted_xor_(bits: Tensor, places: int) -> Tensor:
    """bits ^ (bits >> places) in place, with zeros shifted in: int32's own shift brings the sign."""
    return bits.bitwise_xor_((bits >> places).bitwise_and_((1 << 32 - places) - 1))


def _signed(number: int) -> int:
    """The int32 of the same 32 bits."""
    if number >> 31:
        return number - (1 << 32)
    return number
