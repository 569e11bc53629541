"""One-dimensional .npy files of unknown length, written piece by piece, and read back checked and memory-mapped."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

_HEADER_BYTES = 128  # numpy pads the header of a one-dimensional array to this, whatever its length


class ArrayWriter:
    """Appends values to an .npy file; the header, which holds the length, is written at the end."""

    def __init__(self, file: Path, dtype: str) -> None:
        self._dtype = np.dtype(dtype)
        self._stream = file.open("wb")
        self._stream.write(b"\0" * _HEADER_BYTES)
        self._digest = hashlib.blake2b(digest_size=16)
        self._length = 0

    def append(self, values: Any) -> None:
        """One value or an array of them."""
        piece = np.atleast_1d(np.asarray(values, dtype=self._dtype))
        raw = piece.tobytes()
        self._stream.write(raw)
        self._digest.update(raw)
        self._length += len(piece)

    def close(self) -> str:
        """Finish the file; returns the digest that `read_array` asks for."""
        self._stream.seek(0)
        described = {"descr": npy.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self._length,)}
        npy.write_array_header_1_0(self._stream, described)
        assert self._stream.tell() == _HEADER_BYTES, "numpy's header has another size"
        self._stream.close()
        return self._digest.hexdigest()

    def abandon(self) -> None:
        """Give up on the file; nothing happens after `close`."""
        self._stream.close()


def read_array(file: Path, digest: str) -> np.ndarray:
    """The array, memory-mapped and read-only. Raises OSError or ValueError when it is not what was written."""
    with file.open("rb") as stream:
        stream.seek(_HEADER_BYTES)
        found = hashlib.blake2b(digest_size=16)
        while piece := stream.read(2**20):
            found.update(piece)
    if found.hexdigest() != digest:
        raise ValueError(f"{file} is not what was written")
    if file.stat().st_size == _HEADER_BYTES:  # an empty file cannot be mapped
        empty: np.ndarray = np.load(file)
        return empty
    array: np.ndarray = np.load(file, mmap_mode="r")
    return array
