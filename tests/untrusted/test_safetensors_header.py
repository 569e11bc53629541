"""What is read of a safetensors file's header is what the library reads, and one byte off is refused."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from finetune.errors import FinetuneError
from finetune.untrusted import safetensors_header
from finetune.untrusted.safetensors_header import BITS, MOST_HEADER, read_header

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


@pytest.mark.slow
def test_the_largest_header_is_near_what_the_largest_model_needs(tmp_path: Path) -> None:
    """Kimi K2 in one file, by its published sizes: 60 layers of 384 experts of 2,048 x 7,168, a scale for 128 x 128."""
    header: dict[str, object] = {}
    at = 0

    def add(name: str, dtype: str, rows: int, columns: int, size: int) -> None:
        nonlocal at
        end = at + rows * columns * size
        header[name] = {"dtype": dtype, "shape": [rows, columns], "data_offsets": [at, end]}
        at = end

    for layer in range(1, 61):
        for expert in range(384):
            for matrix, rows, columns in (("gate", 2048, 7168), ("up", 2048, 7168), ("down", 7168, 2048)):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{matrix}_proj.weight"
                add(name, "F8_E4M3", rows, columns, 1)
                add(f"{name}_scale_inv", "F32", rows // 128, columns // 128, 4)
    needed = len(json.dumps(header, separators=(",", ":")))
    assert len(header) == 138_240
    assert needed < MOST_HEADER < 2 * needed


def test_a_longer_header_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", MOST_HEADER + 1))
    with open(path, "r+b") as file:
        file.truncate(8 + 2 * MOST_HEADER)  # a file with a hole: the header would be in it
    monkeypatch.setattr(safetensors_header, "parse_document", None)
    with pytest.raises(FinetuneError) as caught:
        read_header(path)
    most = "at most 32 MiB, the names of 250,000 tensors, are read; store it in several files"
    assert str(caught.value) == f"{path}: has a header of {MOST_HEADER + 1:,} bytes, and {most}"
