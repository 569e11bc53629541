"""torch's 16-bit product that is added to float32 numbers, which CUDA alone has, on a CPU: importing this registers it.

It checks what CUDA's kernel checks (aten/src/ATen/native/cuda/Blas.cpp: _addmm_dtype_out_cuda), and computes in float32
as that does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
calls: list[tuple[int, ...]] = []  # the shape of each product's result, since a test has cleared it

_library = torch.library.Library("aten", "IMPL")


def addmm(
    total: Tensor, left: Tensor, right: Tensor, out_dtype: torch.dtype, *, beta: Any = 1, alpha: Any = 1, out: Tensor
) -> Tensor:
    assert left.dtype == right.dtype
    assert out_dtype == left.dtype or (out_dtype == torch.float32 and left.dtype in HALF)
    assert out.dtype == out_dtype
    assert total.dtype in (out_dtype, left.dtype)
    assert left.ndim == right.ndim == 2
    assert left.shape[1] == right.shape[0]
    assert out.shape == (left.shape[0], right.shape[1])
    calls.append(tuple(out.shape))
    return out.copy_(beta * total.float() + alpha * (left.float() @ right.float()))


_library.impl("addmm.dtype_out", addmm, "CPU")
