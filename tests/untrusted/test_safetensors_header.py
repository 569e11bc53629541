"""What is read of a safetensors file's header is what the library reads, and one byte off is refused."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from finetune.errors import FinetuneError
from finetune.untrusted.safetensors_header import BITS, read_header

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool, torch.int64, torch.uint8]


def written(folder: Path, seed: int) -> Path:
    draw, tensors = random.Random(seed), {}
    for index in range(draw.randint(1, 12)):
        shape = [draw.randint(0, 4) for _ in range(draw.randint(0, 3))]
        tensors[f"layer.{index}.é"] = torch.zeros(shape, dtype=draw.choice(DTYPES))
    save_file(tensors, folder / "a.safetensors", metadata={"format": "pt"} if seed % 2 else None)
    return folder / "a.safetensors"


@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_the_library_reads(tmp_path: Path, seed: int) -> None:
    path = written(tmp_path, seed)
    with safe_open(path, framework="pt") as file:
        theirs = {
            name: (file.get_slice(name).get_dtype(), tuple(file.get_slice(name).get_shape()))
            for name in file.keys()  # noqa: SIM118  # not a dict
        }
    assert {name: (facts.dtype, facts.shape) for name, facts in read_header(path).items()} == theirs


@pytest.mark.parametrize("seed", range(5))
def test_one_byte_more_or_less_is_refused_as_by_the_library(tmp_path: Path, seed: int) -> None:
    path = written(tmp_path, seed)
    content = path.read_bytes()
    for wrong in (content[:-1], content + b"\0", struct.pack("<Q", len(content)) + content[8:], content[:7]):
        path.write_bytes(wrong)
        with pytest.raises(FinetuneError, match=r"a\.safetensors: "):
            read_header(path)
        with pytest.raises(Exception, match=r".+"), safe_open(path, framework="pt"):
            pass


def test_bits_are_those_of_torch(tmp_path: Path) -> None:
    formats = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64}
    formats |= {"F32": torch.float32, "BF16": torch.bfloat16, "U16": torch.uint16, "I16": torch.int16}
    for name, dtype in formats.items():
        assert BITS[name] == 8 * dtype.itemsize
        save_file({"a": torch.zeros(3).to(dtype)}, tmp_path / "a.safetensors")
        assert read_header(tmp_path / "a.safetensors")["a"].dtype == name
