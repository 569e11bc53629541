"""Number formats by the names in recipes, receipts and files, and the formats that weights are stored in."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.quantizers.auto import AutoQuantizationConfig

from finetune.errors import FinetuneError
from finetune.recipe.schema import Recipe
from finetune.untrusted.config_sizes import MXFP4

# training.mixed_precision -> the format of the computation; None: that of the weights.
COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": None}


def dtype_name(dtype: torch.dtype) -> str:
    """As in a recipe: bfloat16, not torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


# Stored with scales, and read as bfloat16: what transformers computes with them as they are is not for training.
WIDENED = ("mxfp4", "fp8", "mxfp8")
BITSANDBYTES = ("load_in_4bit", "load_in_8bit")
FOUR_BIT = tuple(f"bnb_4bit_{key}" for key in ("quant_type", "use_double_quant", "compute_dtype", "quant_storage"))


def widening(config: PreTrainedConfig, recipe: Recipe) -> Any:
    """Arguments for `from_pretrained` that read weights stored in fewer bits as 16 bits; None for all others.

    Raises FinetuneError, in one line, if the weights' format cannot be trained or differs from the recipe's.
    """
    stored: dict[str, Any] = getattr(config, "quantization_config", None) or {}
    method = stored.get("quant_method", "bitsandbytes" if any(map(stored.get, BITSANDBYTES)) else None)
    if method is None:
        return None
    quantization = recipe.quantization.model_dump() if recipe.quantization else {}
    place = f"model.name_or_path: {recipe.model.name_or_path} is stored quantised ({method})"
    if method == "bitsandbytes":
        keys = (*BITSANDBYTES, *(FOUR_BIT if stored.get("load_in_4bit") else ()))
        if any(quantization.get(key) != stored.get(key) for key in keys):
            settings = ", ".join(f"{key}: {str(stored[key]).lower()}" for key in keys if stored.get(key) is not None)
            raise FinetuneError(f"{place}; set quantization: {{{settings}}}, or name the model in 16 bits")
        return None
    if method not in WIDENED:
        raise FinetuneError(f"{place}, which cannot be trained; name the model in 16 bits")
    if method == MXFP4 and quantization.get("load_in_4bit"):  # its experts stay as they are stored
        return None
    if quantization:
        raise FinetuneError(
            f"{place}, and 4 or 8 bits are made of 16; name the model in 16 bits, or leave quantization out"
        )
    return AutoQuantizationConfig.from_dict(stored | {"dequantize": True})
