"""Memory that is left: the machine's, or what the tightest control group leaves of it."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import psutil
import pytest

from finetune.measure.host_memory import available_bytes, bytes_below_peak, usable_cores

MIB = 2**20


def group(folder: Path, limit: str, used: int, cached: int = 0, *, version: int = 2) -> Path:
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {cached}\n")
    return folder


def own(folder: Path, line: str) -> Path:
    (folder / "own").write_text(f"{line}\n")
    return folder / "own"


def test_without_groups_it_is_the_machine_s(tmp_path: Path) -> None:
    nothing = available_bytes(tmp_path / "none", tmp_path / "none")
    assert nothing == pytest.approx(psutil.virtual_memory().available, rel=0.2)


@pytest.mark.parametrize(
    ("line", "version", "place"),
    [
        ("0::/a/b", 2, "a/b"),
        ("0::/a/b", 2, "a"),  # a limit above this process's own group
        ("0::/", 2, ""),  # as a container sees it
        ("4:cpu,memory:/a/b", 1, "memory/a/b"),
        ("4:cpu,memory:/elsewhere", 1, "memory"),  # as a container sees it
    ],
)
def test_a_limit_above_this_process_counts(line: str, version: int, place: str, tmp_path: Path) -> None:
    """The page cache that the kernel drops first is not in the way."""
    groups = tmp_path / "groups"
    for folder in (groups / "a" / "b", groups / "memory" / "a" / "b"):
        group(folder, "max" if version == 2 else str(2**62), 5 * MIB, version=version)
    group(groups / place, str(100 * MIB), 80 * MIB, 30 * MIB, version=version)
    assert available_bytes(groups, own(tmp_path, line)) == 50 * MIB


def test_another_controller_s_group_does_not_count(tmp_path: Path) -> None:
    group(tmp_path / "groups" / "memory" / "a", str(100 * MIB), 80 * MIB, version=1)
    assert available_bytes(tmp_path / "groups", own(tmp_path, "4:cpu:/a")) > 100 * MIB


def test_a_group_beyond_its_limit_leaves_nothing(tmp_path: Path) -> None:
    group(tmp_path / "groups", str(100 * MIB), 180 * MIB)
    assert available_bytes(tmp_path / "groups", own(tmp_path, "0::/")) == 0


@pytest.mark.thorough
def test_what_was_freed_may_be_needed_again(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\t    4096 kB\nVmRSS:\t    1024 kB\n")
    assert bytes_below_peak(tmp_path / "status") == 3 * MIB
    assert bytes_below_peak(tmp_path / "none") == 0
    large = mmap.mmap(-1, 256 * MIB)  # pages of its own, given back when it is closed; a heap may keep a tensor's
    large.write(b"1" * len(large))
    before = bytes_below_peak()
    large.close()
    assert bytes_below_peak() - before > 200 * MIB


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """64 physical cores of two threads each."""
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 128 if logical else 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(128)))
    return monkeypatch


def test_cores_are_the_physical_ones_or_those_of_the_binding(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nowhere = tmp_path / "none", tmp_path / "none"
    assert usable_cores(*nowhere) == 64
    for bound in (16, 1):  # taskset, Slurm
        machine.setattr(os, "sched_getaffinity", lambda _, bound=bound: set(range(40, 40 + bound)))
        assert usable_cores(*nowhere) == bound
    machine.setattr(psutil, "cpu_count", lambda logical: None)  # a virtual machine that does not tell
    assert usable_cores(*nowhere) == 1


@pytest.mark.parametrize(
    ("line", "place", "files", "cores"),
    [
        ("0::/a/b", "a/b", {"cpu.max": "1600000 100000"}, 16),
        ("0::/a/b", "a", {"cpu.max": "250000 100000"}, 3),  # above this process's own group; 2.5, rounded up
        ("0::/", "", {"cpu.max": "50000 100000"}, 1),  # as a container sees it
        ("0::/a/b", "a", {"cpu.max": "max 100000"}, 64),
        ("4:cpu,cpuacct:/a/b", "cpu/a/b", {"cpu.cfs_quota_us": "800000", "cpu.cfs_period_us": "100000"}, 8),
        ("4:cpu,cpuacct:/other", "cpu", {"cpu.cfs_quota_us": "200000", "cpu.cfs_period_us": "100000"}, 2),
        ("4:cpu,cpuacct:/a/b", "cpu/a/b", {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, 64),
        ("4:memory:/a/b", "cpu/a/b", {"cpu.cfs_quota_us": "100000", "cpu.cfs_period_us": "100000"}, 64),
        ("0::/a/b", "a/b", {"cpu.max": ""}, 64),
    ],
)
@pytest.mark.usefixtures("machine")
def test_a_quota_above_this_process_counts(
    line: str, place: str, files: dict[str, str], cores: int, tmp_path: Path
) -> None:
    folder = tmp_path / "groups" / place
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")
    assert usable_cores(tmp_path / "groups", own(tmp_path, line)) == cores
