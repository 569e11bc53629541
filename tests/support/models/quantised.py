"""Quantised layers by the formats' definitions, and the recipe of tests that load them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from finetune.recipe.schema import Recipe
from tests.support.runs.recipes import least_recipe

# NF4's sixteen numbers as published (Dettmers et al. 2023, appendix E), and FP4's by sign, exponent and mantissa.
NF4_CODE = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
FP4_CODE = [0.0, 0.0052083333, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4]
FP4_CODE += [-number for number in FP4_CODE]


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
SIZES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # of the eight numbers of a sign in four bits (OCP's MX, table 5)
BLOCK = 32


def say_quantised(folder: Path, how: dict[str, Any]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": how}))


def in_mxfp4(folder: Path) -> dict[str, Tensor]:
    """Store the experts as gpt-oss's are: two numbers a byte, the lower half first, and a power of two for each 32."""
    tensors, worth = load_file(folder / "model.safetensors"), {}
    draw = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        codes = torch.randint(16, (experts, outputs, inputs // BLOCK, BLOCK), generator=draw)
        scales = torch.randint(119, 124, codes.shape[:3], generator=draw)
        numbers = SIZES[codes % 8] * (1 - 2 * (codes // 8)) * 2.0 ** (scales[..., None] - 127)
        worth[name] = numbers.view(experts, outputs, inputs).transpose(1, 2)
        packed = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        tensors |= {f"{name}_blocks": packed, f"{name}_scales": scales.to(torch.uint8)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    say_quantised(folder, MXFP4)
    return worth


def quantised_recipe(folder: Path, quantization: dict[str, Any] | None, dtype: str = "float32", **lora: Any) -> Recipe:
    """LoRA over the model in `folder`, quantised so; every second layer is recomputed."""
    training = {"activation_checkpointing": 2, "mixed_precision": "no"}
    sections = {"model": {"dtype": dtype}, "quantization": quantization, "lora": {"r": 4, **lora}}
    return least_recipe(folder, training=training, **sections)


def dequantised(layer: Any) -> Tensor:
    """The weight [out, in] that a layer stands for, written from the formats' definitions."""
    if hasattr(layer.weight, "CB"):  # one scale a row, in 127ths
        scales = layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB
        return layer.weight.data.float() * scales[:, None] / 127
    state = layer.weight.quant_state
    packed = layer.weight.data.flatten().view(torch.uint8)
    codes = torch.stack([packed >> 4, packed & 15], dim=1).flatten().long()  # [out * in], the high half first
    scales = state.absmax
    if state.nested:
        second = state.state2.absmax.repeat_interleave(256)[: len(scales)]
        scales = state.state2.code[scales.long()] * second + state.offset
    code = torch.tensor(NF4_CODE if state.quant_type == "nf4" else FP4_CODE)
    return (code[codes] * scales.repeat_interleave(64)[: len(codes)]).view(state.shape)
