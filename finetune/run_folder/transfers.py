"""Files between rank 0's folder and machines that do not see it, in chunks over the process group."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from finetune.paths import open_regular
from finetune.strategies.pieces import Ranks

CHUNK_BYTES = 32 * 2**20  # of host memory, on both sides


def send_file(path: Path, size: int, target: int, ranks: Ranks) -> None:
    """Send a file's `size` bytes to the rank that calls `receive_file`. Raises OSError after the last chunk."""
    file: BinaryIO | None = None
    failure: OSError | None = None
    for chunk in _chunks(size):
        try:
            if failure is None:
                file = file or open_regular(path)
                if file.readinto(chunk.numpy()) != len(chunk):  # type: ignore[attr-defined]
                    raise OSError(f"{path}: has less than {size} bytes")
        except OSError as error:
            failure = error
        dist.send(chunk, target, group=ranks.group)  # after a failure too: the other rank waits for every chunk
    if file is not None:
        file.close()
    if failure is not None:
        raise failure


def receive_file(path: Path, size: int, source: int, ranks: Ranks) -> str:
    """Write what the rank `source` sends. Returns its SHA-256. Raises OSError after the last chunk."""
    failure: OSError | None = None
    digest = hashlib.sha256()
    try:
        path.write_bytes(b"")
    except OSError as error:
        failure = error
    for chunk in _chunks(size):
        dist.recv(chunk, source, group=ranks.group)
        digest.update(chunk.numpy())
        if failure is None:
            try:
                with open(path, "ab") as file:
                    file.write(chunk.numpy())
            except OSError as error:
                failure = error
    if failure is not None:
        raise failure
    return digest.hexdigest()


def _chunks(size: int) -> Iterator[torch.Tensor]:
    """One buffer, cut to each chunk's bytes."""
    buffer = torch.empty(min(size, CHUNK_BYTES), dtype=torch.uint8)
    for start in range(0, size, CHUNK_BYTES):
        yield buffer[: min(CHUNK_BYTES, size - start)]


def collect_pieces(folder: Path, written: Sequence[Mapping[str, Mapping[str, Any]]], ranks: Ranks) -> None:
    """Move the files that ranks have written on machines apart into rank 0's folder. Every rank calls it.

    Args:
        folder: Each rank's own, rank 0's on rank 0.
        written: Each rank's files by group, with size and hash.

    Raises OSError, when all files are moved.
    """
    failure: OSError | None = None
    for rank in sorted(ranks.apart):
        for facts in written[rank].values():
            if "file" not in facts:
                continue
            path = folder / facts["file"]
            try:
                if ranks.rank == rank:
                    send_file(path, facts["bytes"], 0, ranks)
                    path.unlink()
                elif ranks.rank == 0 and receive_file(path, facts["bytes"], rank, ranks) != facts["sha256"]:
                    raise OSError(f"{path}: is not what rank {rank} wrote")
            except OSError as error:
                failure = failure or error
    if failure is not None:
        raise failure
