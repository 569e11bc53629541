"""Number formats by the names that recipes, receipts and files use."""

from __future__ import annotations

import torch

# training.mixed_precision -> the format of the computation; None: that of the weights.
COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": None}


def dtype_name(dtype: torch.dtype) -> str:
    """As in a recipe: bfloat16, not torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
