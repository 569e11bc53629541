"""CUDA's memory peaks in this process so far, across resets.

Each measured phase resets the allocator's peak, which would then be the last phase's alone: without loading, and with
measured phases without forward and backward. So the peak is kept before each reset.
"""

from __future__ import annotations

import torch

_kept: dict[int, tuple[int, int]] = {}  # by GPU: bytes allocated and reserved at their peaks before the last reset


def restart_peak(device: torch.device) -> None:
    """Start a new peak for the next phase. The peaks below keep the earlier ones."""
    _kept[_index(device)] = peak_allocated(device), peak_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)


def peak_allocated(device: torch.device) -> int:
    """Bytes of tensors at this process's peak so far."""
    return max(_kept.get(_index(device), (0, 0))[0], torch.cuda.max_memory_allocated(device))


def peak_reserved(device: torch.device) -> int:
    """Bytes that the allocator took of the GPU at this process's peak so far."""
    return max(_kept.get(_index(device), (0, 0))[1], torch.cuda.max_memory_reserved(device))


def give_back_cached_memory(device: torch.device) -> None:
    """Return cached memory without tensors to the GPU; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _index(device: torch.device) -> int:
    if device.index is None:
        return torch.cuda.current_device()
    return device.index
