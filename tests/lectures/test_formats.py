"""The lecture `formats`: bits against struct and numpy, the notes' fields, rounding against numpy, a real curve."""

from __future__ import annotations

import math
import random
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch

from lectures.formats import rounding
from lectures.formats.bits import (
    FLOAT_FORMATS,
    binary_digits,
    fields_of,
    fraction_bits,
    int8_of,
    meaning,
    range_rows,
    sum_of_updates,
)
from lectures.formats.lecture import NOTED
from tests.support.lectures import held

DRAW = random.Random(0)
NUMBERS = [0.1, -0.1, 0.0, 1.0, 3.14159, 65504.0, 6e-8, 1e-5, *(DRAW.gauss(0, 10) for _ in range(200))]


def word_of(number: float, name: str) -> str:
    """The bits by Python's struct; of bfloat16 by rounding float32's word to its upper half, ties to even."""
    if name == "float16":
        return f"{struct.unpack('>H', struct.pack('>e', number))[0]:016b}"
    word = struct.unpack(">I", struct.pack(">f", number))[0]
    if name == "float32":
        return f"{word:032b}"
    return f"{(word + 0x7FFF + (word >> 16 & 1)) >> 16:016b}"


@pytest.mark.parametrize("name", FLOAT_FORMATS)
def test_fields_are_the_numbers_bits(name: str) -> None:
    assert len(NUMBERS) == 208
    for number in NUMBERS:
        fields = fields_of(number, FLOAT_FORMATS[name])
        assert fields.sign + fields.exponent + fields.fraction == word_of(number, name), number
        if number and "1" in fields.exponent:
            assert abs(fields.value) == meaning(fields.exponent, fields.fraction)


def test_a_tenth_has_the_notes_exponents_and_its_own_fractions() -> None:
    """The notes' fraction fields are binary digits of 0.1 itself, cut; a float keeps those behind its leading 1."""
    for name, (exponent, fraction) in NOTED.items():
        fields = fields_of(0.1, FLOAT_FORMATS[name])
        assert fields.exponent == exponent
        assert binary_digits(0.1, len(fraction)) == fraction
        assert fields.fraction == f"{round((Fraction(1, 10) * 16 - 1) * 2 ** len(fraction)):0{len(fraction)}b}"
        assert meaning(exponent, fraction) == pytest.approx(0.0687, abs=5e-4)
    assert fields_of(0.1, torch.float16).fraction == "1001100110"
    assert fields_of(0.1, torch.bfloat16).fraction == "1001101"


def test_int8_has_a_scale() -> None:
    assert int8_of(0.1, 1.0).value == pytest.approx(13 / 127)
    assert int8_of(0.1, 1.0).fraction == f"{13:07b}"
    assert int8_of(-0.1, 1.0).sign == "1"
    assert int8_of(-0.1, 1.0).fraction == f"{128 - 13:07b}"


def test_ranges_are_numpys() -> None:
    rows = {name: cells for name, *cells in range_rows()}
    for name, kind in (("float32", np.float32), ("float16", np.float16)):
        info = np.finfo(kind)
        expected = (info.smallest_subnormal, info.smallest_normal, info.max, info.eps)
        assert rows[name][3:7] == [f"{float(each):.3g}" for each in expected]
        assert rows[name][:3] == ["1", str(info.nexp), str(info.nmant)]
    assert rows["bfloat16"][:3] == ["1", "8", "7"]
    assert fraction_bits(torch.bfloat16) == 7


def test_a_thousandth_is_lost_in_bfloat16() -> None:
    assert sum_of_updates(torch.bfloat16) == 1.0
    total = np.float16(1)
    for _ in range(1000):
        total = np.float16(total + np.float16(0.001))
    assert sum_of_updates(torch.float16) == pytest.approx(float(total), abs=2e-3)
    assert sum_of_updates(torch.float32) == pytest.approx(2, abs=1e-4)


def test_rounding_against_numpy() -> None:
    numbers = (
        np.random.default_rng(0).standard_normal((64, 128)) * 10.0 ** np.arange(-9, -1).repeat(8)[:, None]
    ).astype(np.float32)
    numbers[0, 0] = 0.0
    tensor = torch.from_numpy(numbers)
    back = numbers.astype(np.float16).astype(np.float32)
    found = rounding.rounded([tensor], rounding.float16)
    assert found.zero == pytest.approx(((back == 0) & (numbers != 0)).sum() / (numbers != 0).sum())
    assert found.infinite == 0
    assert found.error == pytest.approx(np.sqrt(((back - numbers) ** 2).sum() / (numbers**2).sum()), rel=1e-4)
    scale = np.abs(numbers).max(1, keepdims=True) / 127
    assert torch.allclose(rounding.int8_by_rows(tensor), torch.from_numpy(np.round(numbers / scale) * scale), rtol=1e-5)
    assert rounding.rounded([tensor * 1e9], rounding.float16).infinite > 0
    assert rounding.rounded([tensor], rounding.scaled_float16).zero < found.zero


def test_exponents_are_counted() -> None:
    counts = rounding.by_exponent([torch.tensor([1.0, 1.5, -2.0, 0.0, 2.0**-24])])
    assert {rounding.LOWEST + at: count for at, count in enumerate(counts.tolist()) if count} == {0: 2, 1: 1, -24: 1}


@pytest.mark.slow
def test_the_real_models_numbers_and_curves() -> None:
    facts = held("formats").facts
    weights, gradients = facts["rounded"]["weights"], facts["rounded"]["gradients"]
    # One rounding to 8 or 11 bits: a mean error of about 2^-p / sqrt(12) of an ulp, between a quarter and one half ulp.
    assert 2**-10 < weights["bfloat16"]["error"] < 2**-8
    assert weights["float16"]["error"] < 2**-11
    assert (
        weights["bfloat16"]["error"] < weights["int8, a scale a row"]["error"] < weights["NF4, a scale for 64"]["error"]
    )
    assert weights["int8, no scale"]["zero"] > 0.9, "a weight is below one half"
    assert gradients["float16"]["zero"] > gradients["float16, loss x 65,536"]["zero"]
    losses = facts["losses"]
    assert len({len(each) for each in losses.values()}) == 1
    # Of the first step, before any update: what the base's format alone changes.
    apart = {name: abs(each[0] - losses["fp32"][0]) for name, each in losses.items()}
    assert max(apart["bf16"], apart["fp16"], apart["int8 base"]) < apart["NF4 base"]
    skipped = facts["skipped"]
    assert skipped["fp16"] > 0, "its scale begins at 65,536"
    assert not any(count for name, count in skipped.items() if name != "fp16")
    assert all(math.isfinite(loss) for each in losses.values() for loss in each)
