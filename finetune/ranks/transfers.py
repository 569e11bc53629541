"""Files between rank 0's folder and machines that do not see it, in chunks over the process group."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from finetune.paths import open_regular
from finetune.strategies.pieces import Ranks

BYTES_AT_ONCE = 32 * 2**20  # of host memory, on both sides


def move_files(folder: Path, moves: Iterable[tuple[str, int, int, int]], ranks: Ranks) -> dict[str, str]:
    """Copy files from ranks' folders to others'. Every rank calls it with its own `folder`.

    Args:
        moves: (name, bytes, source rank, target rank) of each file, in the same order on every rank.

    Returns the SHA-256 of what this rank received, by name. Raises its first OSError after the last file, because other
    ranks wait for every chunk.
    """
    received: dict[str, str] = {}
    failure: OSError | None = None
    for name, size, source, target in moves:
        if ranks.rank not in (source, target):
            continue
        sends, digest = ranks.rank == source, hashlib.sha256()
        problem: OSError | None = None
        file: Any = None  # unbuffered where it is written: closing it raises nothing
        buffer = torch.empty(min(size, BYTES_AT_ONCE), dtype=torch.uint8)
        try:
            file = open_regular(folder / name) if sends else open(folder / name, "wb", buffering=0)  # noqa: SIM115
        except OSError as error:
            problem = error
        for start in range(0, size, BYTES_AT_ONCE):
            chunk = buffer[: min(BYTES_AT_ONCE, size - start)]
            if not sends:
                dist.recv(chunk, source, group=ranks.group)
                digest.update(chunk.numpy().data)
            try:
                if problem is None:
                    done = file.readinto(chunk.numpy().data) if sends else file.write(chunk.numpy().data)
                    if done != len(chunk):
                        raise OSError(errno.ENOSPC, f"{done} of {len(chunk)} bytes")
            except OSError as error:
                problem = error
            if sends:
                dist.send(chunk, target, group=ranks.group)
        if file is not None:
            file.close()
        failure = failure or problem
        received[name] = digest.hexdigest()
    if failure is not None:
        raise failure
    return received
