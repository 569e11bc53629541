"""The memory and cores that a process may use: the machine's, within the limits of its control groups."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
OWN_STATUS = Path("/proc/self/status")
# Limit, use, and the line of memory.stat with the page cache that the kernel drops first, of versions 2 and 1.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(groups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int:
    """Bytes that could be allocated without swapping: on the machine, or within the tightest limit above this process.

    A container's limit is not in the machine's figures, and a process that exceeds it is killed.
    """
    left = [_left(folder) for folder in _own_groups(groups, own, "memory")]
    return max(0, min([int(psutil.virtual_memory().available), *(room for room in left if room is not None)]))


def pinned_bytes(nbytes: int) -> int:
    """Host memory in bytes that torch allocates for a pinned tensor with `nbytes`: the next power of two.

    `CachingHostAllocator` rounds each request, in torch 2.11 to 2.13 (ATen/core/CachingHostAllocator.h: PowerOf2Ceil).
    A matrix [14336, 4096] in float32 has 224 MiB and occupies 256.
    """
    if nbytes:
        return 1 << (nbytes - 1).bit_length()
    return 0


def usable_cores(groups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int:
    """How many cores this process may use, at least 1. The least of three numbers counts: the machine's physical cores,
    the cores that the process is bound to (taskset, Slurm, cpusets), and the tightest quota among the control groups
    above it (a container's `--cpus`)."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [_quota(folder) for folder in _own_groups(groups, own, "cpu")]
    physical = psutil.cpu_count(logical=False) or bound
    return max(1, min([physical, bound, *(cores for cores in quotas if cores is not None)]))


def cores_each(ranks: int, words: Sequence[str]) -> int:
    """One rank's equal share of those cores, at least 1. srun binds each task to its own cores.

    Args:
        ranks: On this machine.
        words: The launcher's command line.
    """
    cores, of_task = usable_cores(), os.environ.get("SLURM_CPUS_PER_TASK", "")
    if tuple(words[:1]) == ("srun",) and of_task.isdigit() and cores <= int(of_task):
        return cores
    return max(1, cores // ranks)


def bytes_below_peak(status: Path = OWN_STATUS) -> int:
    """How many bytes larger this process was before, and may be again; 0 if the kernel does not tell."""
    sizes = {}
    for line in _text(status).splitlines():
        key, _, value = line.partition(":")
        if key in ("VmHWM", "VmRSS"):
            sizes[key] = int(value.split()[0]) * 1024
    if len(sizes) == 2:
        return max(0, sizes["VmHWM"] - sizes["VmRSS"])
    return 0


def _own_groups(groups: Path, own: Path, controller: str) -> list[Path]:
    """Folders of this process's memory or cpu groups, and of all groups above them. In a container its own group is
    often the root. Version 1 has one folder per set of controllers, such as `cpu,cpuacct`, and one link per
    controller.
    """
    folders = [groups, groups / controller]
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        folder = (groups / controller if controllers else groups) / path.strip("/")
        while folder not in folders and folder.is_relative_to(groups):
            folders.append(folder)
            folder = folder.parent
    return folders


def _left(group: Path) -> int | None:
    """Bytes below a group's limit; None where it has none."""
    for limit, use, cached in _FILES:
        allowed, used = _text(group / limit).strip(), _text(group / use).strip()
        if allowed.isdigit() and used.isdigit():
            lines = dict(line.split(" ", 1) for line in _text(group / "memory.stat").splitlines() if " " in line)
            return int(allowed) - int(used) + int(lines.get(cached, 0))
    return None


def _quota(group: Path) -> int | None:
    """A group's quota in whole cores, rounded up: its microseconds in each period. None without a quota."""
    quota, _, period = _text(group / "cpu.max").strip().partition(" ")  # version 2
    if not quota:
        quota, period = (_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    if not (quota.isdigit() and period.isdigit() and int(period)):  # "max", and -1 in version 1
        return None
    return -(-int(quota) // int(period))


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError:
        return ""
