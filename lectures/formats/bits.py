"""A number in float32, float16, bfloat16 and int8: its fields as torch stores them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

import torch

from finetune.errors import FinetuneError

FLOAT_FORMATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
AS_INTEGERS = {4: torch.int32, 2: torch.int16}  # of as many bytes, to read a float's bits
ABSMAX = 127  # int8's largest magnitude in use: a tensor's largest absolute value becomes this
ADDED, TIMES = 0.001, 1000  # a thousand updates of a thousandth, onto a weight of 1


@dataclass(frozen=True)
class Fields:
    """A number as a format stores it."""

    sign: str
    exponent: str  # "" in an integer format
    fraction: str  # of int8 all bits but the sign, two's complement
    value: float  # what these bits mean


def fields_of(number: float, dtype: torch.dtype) -> Fields:
    """Sign, exponent and fraction bits of the number rounded to a floating format; IEEE 754's layout."""
    rounded = torch.tensor(number, dtype=torch.float64).to(dtype)
    bits = 8 * dtype.itemsize
    exponent = bits - 1 - fraction_bits(dtype)
    word = rounded.view(AS_INTEGERS[dtype.itemsize]).item() & (2**bits - 1)
    text = f"{word:0{bits}b}"
    return Fields(text[0], text[1 : 1 + exponent], text[1 + exponent :], rounded.item())


def fraction_bits(dtype: torch.dtype) -> int:
    """From the distance between 1 and the next number, 2 to minus that many."""
    return round(-math.log2(torch.finfo(dtype).eps))


def int8_of(number: float, largest: float) -> Fields:
    """The number in int8 with one scale for its tensor, whose largest absolute value is `largest`."""
    scale = largest / ABSMAX
    stored = torch.tensor(number / scale, dtype=torch.float64).round().clamp(-ABSMAX, ABSMAX).to(torch.int8)
    whole = int(stored.item())
    text = f"{whole & 0xFF:08b}"
    return Fields(text[0], "", text[1:], whole * scale)


def binary_digits(number: float, digits: int) -> str:
    """The first digits behind the point of the number's own binary expansion, cut and not rounded; of its decimal text,
    so that 0.1 is a tenth."""
    part = abs(Fraction(Decimal(repr(number)))) % 1
    return f"{math.floor(part * 2**digits):0{digits}b}"


def meaning(exponent: str, fraction: str) -> float:
    """The value of fields of a normal number: (1 + fraction) times 2 to the exponent less its bias."""
    bias = (1 << len(exponent) - 1) - 1
    return math.ldexp(1 + int(fraction, 2) / (1 << len(fraction)), int(exponent, 2) - bias)


def sum_of_updates(dtype: torch.dtype) -> float:
    """1 and a thousand times a thousandth, added one after another in this format."""
    total = torch.ones((), dtype=dtype)
    for _ in range(TIMES):
        total += ADDED
    return float(total)


def numbers_of(text: str) -> list[float]:
    """Numbers with commas between. Raises FinetuneError."""
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        raise FinetuneError(f"numbers: {text}: is not numbers; write numbers=0.1 or numbers=0.1,3.14") from None
    if not all(map(math.isfinite, numbers)):
        raise FinetuneError(f"numbers: {text}: must be finite; write numbers=0.1,3.14")
    return numbers


def range_rows() -> Iterable[tuple[str, ...]]:
    """A row for each floating format: bits, range and precision, from torch."""
    for name, dtype in FLOAT_FORMATS.items():
        info, fraction = torch.finfo(dtype), fraction_bits(dtype)
        figures = (info.smallest_normal * info.eps, info.smallest_normal, info.max, info.eps)
        bits = (str(1), str(info.bits - 1 - fraction), str(fraction))
        yield name, *bits, *(f"{figure:.3g}" for figure in figures), f"{sum_of_updates(dtype):.4f}"
