"""How long this CPU takes for small products in a number format: what it says it has may be emulated, or held back."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

SIZE = 256  # 34 MFLOP a product: 0.2 ms where it is fast, 40 ms where bfloat16 is emulated
TIMES = 7


def product_seconds(formats: Sequence[torch.dtype]) -> list[float]:
    """For each format the seconds of the three products of a linear layer: forward, and two of backward, on one thread.

    They are not alike: with AVX2 alone oneDNN takes 2, 37 and 1 ms for those in bfloat16, and each takes 0.3 ms in
    float32. The formats take turns and the least of TIMES counts, since other processes may use the same cores. No
    random number is drawn. Takes 10 ms where products are fast, 0.3 s
    where one is emulated.
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
