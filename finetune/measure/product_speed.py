"""Times small products on this CPU in each number format: its flags may name a format that is emulated or disabled."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

SIZE = 256  # 34 MFLOP a product: 0.2 ms where it is fast, 40 ms where bfloat16 is emulated
TIMES = 7


def product_seconds(formats: Sequence[torch.dtype]) -> list[float]:
    """Seconds in each format for a linear layer's three products, one in forward and two in backward, on one thread.

    The three differ: with AVX2 alone oneDNN takes 2, 37 and 1 ms in bfloat16, and 0.3 ms for each in float32. The
    formats take turns and the least of TIMES counts, because other processes may use the same cores. Draws no random
    number. Takes 10 ms if products are fast, 0.3 s if one is emulated.
    """
    least = [float("inf")] * len(formats)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        operands = [torch.full((SIZE, SIZE), 0.5, dtype=dtype) for dtype in formats]
        for _ in range(TIMES):
            for index, square in enumerate(operands):
                began = time.perf_counter()
                square @ square.T, square @ square, square.T @ square
                least[index] = min(least[index], time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)
    return least
