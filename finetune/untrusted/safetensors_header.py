"""A safetensors file's header: names, number formats, shapes, and byte ranges that cover the whole file.

8 bytes: the header's length, little-endian | the header: JSON, {name: {dtype, shape, data_offsets}} | the data
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from finetune.library_errors import library_errors
from finetune.output_stream import has_controls, one_line
from finetune.paths import open_regular
from finetune.untrusted.json_files import kind_by_head, parse_document, unreadable

LENGTH_BYTES = 8
# A tensor takes about 120 bytes. Kimi K2 has most: its experts' 138,240 matrices and scales would need 16 to 32 MiB in
# one file (a test counts them). safetensors itself allows 100 MB.
MOST_HEADER = 32 * 2**20
MOST_DIMENSIONS = 16
MOST_LETTERS = 500  # in a name
# Bits of one element, by the format's name in files.
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    "F4": 4,
}
FLOATS = ("F64", "F32", "F16", "BF16")  # formats of weights that are not quantised


@dataclass(frozen=True)
class TensorFacts:
    """One tensor of a file."""

    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, TensorFacts]:
    """A file's tensors by name. Raises FinetuneError, in one line, if the file is not whole and consistent."""
    with library_errors(reading=path), open_regular(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        head = file.read(LENGTH_BYTES)
        length = int.from_bytes(head, "little")
        if not size or len(head) < LENGTH_BYTES or length > min(MOST_HEADER, size - LENGTH_BYTES):
            if what := kind_by_head(head + file.read(56)):
                raise _no_safetensors(path, f"is {what}")
            if not size:
                raise _no_safetensors(path, "is empty")
            if length > size - LENGTH_BYTES:
                raise _no_safetensors(path, f"has {size:,} bytes, and its header alone would be {length:,}")
            most = f"{MOST_HEADER / 2**20:.0f} MiB, the names of 250,000 tensors, are read"
            problem = f"has a header of {length:,} bytes, and at most {most}"
            raise unreadable(path, problem, "store it in several files")
        content = file.read(length)
    header = parse_document(path, content, unique=True)
    if not isinstance(header, dict):
        raise _no_safetensors(path, "has a header that is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _no_safetensors(path, "has __metadata__ that is not texts by name")
    ranges = [_range(path, name, entry) for name, entry in header.items()]
    at, nbytes = 0, size - LENGTH_BYTES - length
    for begin, end in sorted(ranges):
        if begin != at:
            raise _no_safetensors(path, "has tensors that overlap, or bytes between them that belong to none")
        at = end
    if at != nbytes:
        raise _no_safetensors(path, f"has {nbytes:,} bytes of data, and its header names {at:,}")
    try:  # safetensors refuses some JSON that Python reads: half a letter (`\ud800`) in a text
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise _no_safetensors(path, f"cannot be read by safetensors: {one_line(error, 200)}") from None
    return {name: TensorFacts(entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}


def read_metadata(path: Path) -> dict[str, str]:
    """The texts in a file's header; empty without any. The file has passed `read_header`."""
    with safe_open(path, framework="numpy") as file:
        return dict(file.metadata() or {})


def add_metadata(path: Path, texts: Mapping[str, str]) -> None:
    """Add texts to the header of a file of ours; its tensors stay as they are.

    safetensors would write them in another order each time. Equal runs have equal files.
    """
    aside = path.with_name(f".tmp-{path.name}")
    with path.open("rb") as file, aside.open("wb") as changed:
        header = json.loads(file.read(int.from_bytes(file.read(LENGTH_BYTES), "little")))
        header["__metadata__"] = dict(sorted({**header.get("__metadata__", {}), **texts}.items()))
        content = json.dumps(header, separators=(",", ":")).encode()
        content += b" " * (-len(content) % 8)  # the data begin at a multiple of 8
        changed.write(len(content).to_bytes(LENGTH_BYTES, "little") + content)
        shutil.copyfileobj(file, changed, 2**24)
    os.replace(aside, path)


def _no_safetensors(path: Path, what: str) -> Exception:
    return unreadable(path, f"{what}; it is not a whole safetensors file")


def _range(path: Path, name: str, entry: Any) -> tuple[int, int]:
    """(begin, end) of a tensor's bytes in the data, which must match its format and shape."""
    shown = one_line(name, 80)
    if has_controls(name) or len(name) > MOST_LETTERS:  # messages and written files would repeat it
        raise _no_safetensors(path, f"has a tensor whose name is no module's, {shown}")
    if not isinstance(entry, Mapping) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _no_safetensors(path, f"has a header in which {shown} has no dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _no_safetensors(path, f"stores {shown} in a number format that is not known, {one_line(dtype, 20)}")
    if not _counts(shape) or len(shape) > MOST_DIMENSIONS or not _counts(offsets) or len(offsets) != 2:
        raise _no_safetensors(path, f"has a header in which the shape or place of {shown} is no list of counts")
    begin, end = offsets
    if (bits := math.prod(shape) * BITS[dtype]) != 8 * (end - begin):
        stated = "x".join(map(str, shape)) or "1"
        raise _no_safetensors(path, f"has {end - begin:,} bytes for {shown}, {stated} of {dtype}: {bits / 8:,.0f}")
    return begin, end


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**62 for value in values)
