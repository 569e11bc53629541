"""What formats make of a real model's weights and gradients: how many become 0 or infinite, how far off the rest is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from finetune.planner import layer_of
from lectures.formats.bits import ABSMAX
from lectures.real_model import RealModel

LOSS_SCALE = 2.0**16  # torch's GradScaler begins with it
EVERY = 3  # of its layers, every third is looked at
LOWEST, HIGHEST = -150, 128  # float32's exponents of two, its subnormal numbers among them
Round = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Rounded:
    """Numbers that were brought into a format and back."""

    zero: float  # shares of those that were not 0
    infinite: float
    error: float  # root of the mean square, over that of the numbers; infinite ones left out


def float16(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float16).float()


def scaled_float16(tensor: Tensor) -> Tensor:
    """As gradients of a scaled loss are kept, and divided again in float32."""
    return (tensor * LOSS_SCALE).to(torch.float16).float() / LOSS_SCALE


def bfloat16(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16).float()


def plain_int8(tensor: Tensor) -> Tensor:
    """Rounded to whole numbers, without a scale."""
    return tensor.round().clamp(-ABSMAX - 1, ABSMAX)


def int8_by_rows(tensor: Tensor) -> Tensor:
    """A scale for each row of a matrix, from its largest absolute value, as LLM.int8() stores weights."""
    scale = tensor.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / ABSMAX
    return (tensor / scale).round() * scale


def nf4(tensor: Tensor) -> Tensor:
    """Blocks of 64 with a scale each, by bitsandbytes."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    packed, state = quantize_4bit(tensor.contiguous(), blocksize=64, quant_type="nf4")
    return dequantize_4bit(packed, state).float()


WEIGHTS: Mapping[str, Round] = {
    "bfloat16": bfloat16,
    "float16": float16,
    "int8, a scale a row": int8_by_rows,
    "NF4, a scale for 64": nf4,
    "int8, no scale": plain_int8,
}
GRADIENTS: Mapping[str, Round] = {"bfloat16": bfloat16, "float16": float16, "float16, loss x 65,536": scaled_float16}


def rounded(tensors: Iterable[Tensor], to: Round) -> Rounded:
    """Of all these tensors together."""
    zero = infinite = count = 0
    squares = errors = 0.0
    for tensor in tensors:
        back = to(tensor)
        finite = back.isfinite()
        count += int(tensor.count_nonzero())
        zero += int(((back == 0) & (tensor != 0)).sum())
        infinite += int((~finite).sum())
        errors += float(((back - tensor)[finite].double() ** 2).sum())
        squares += float((tensor.double() ** 2).sum())
    return Rounded(zero / count, infinite / count, (errors / squares) ** 0.5)


def by_exponent(tensors: Iterable[Tensor]) -> Tensor:
    """How many numbers there are in each power of two, from 2^LOWEST on; zeros left out. int64."""
    total = torch.zeros(HIGHEST - LOWEST + 1, dtype=torch.int64)
    for tensor in tensors:
        exponents = torch.frexp(tensor[tensor != 0]).exponent.long() - 1  # its mantissa is below 1, ours from 1 on
        total += torch.bincount(exponents.clamp(LOWEST, HIGHEST) - LOWEST, minlength=len(total))
    return total


def watched(real: RealModel) -> Sequence[nn.Parameter]:
    """The matrices of every third layer: what quantisation reaches, and enough of it."""
    layers = [(layer_of(name), parameter) for name, parameter in real.model.named_parameters()]
    return [each for layer, each in layers if each.dim() == 2 and layer is not None and layer % EVERY == 0]


def gradients(real: RealModel) -> Sequence[Tensor]:
    """Of the mean loss of the first step's first micro-batch, of the same matrices."""
    real.mean_loss(real.steps[0][0]).backward()
    return [parameter.grad for parameter in watched(real) if parameter.grad is not None]
