"""CUDA's peaks are those of the process, whichever phase reset the allocator's own; the allocator is a stand-in."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from finetune.launch.plan_request import PlanRequest
from finetune.measure.metrics import StepRecord, Window
from finetune.measure.phases import (
    Phases,
    give_back_cached_memory,
    memory_of,
    peak_allocated,
    peak_bytes,
    peak_reserved,
    restart_peak,
)
from finetune.training.memory_report import memory_facts
from finetune.wording import GIB

REQUEST = PlanRequest({}, ((7,),), 1, flat=True, nodes=1, ranks_of_node=1, device="some GPU", memory=GIB)
FRESH = count(40)  # a GPU that no test has seen: the peaks are kept for the life of a process


class Allocator:
    """As torch.cuda counts: peaks since the last reset."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.device = torch.device("cuda", next(FRESH))
        self.allocated = self.reserved = self.most_allocated = self.most_reserved = 0
        patch.setattr(torch.cuda, "memory_allocated", lambda device: self.allocated)
        patch.setattr(torch.cuda, "memory_reserved", lambda device: self.reserved)
        patch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.most_allocated)
        patch.setattr(torch.cuda, "max_memory_reserved", lambda device: self.most_reserved)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: self.reset())
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 80 * GIB))
        patch.setattr(torch.cuda, "current_device", lambda: self.device.index)

    def reset(self) -> None:
        self.most_allocated, self.most_reserved = self.allocated, self.reserved

    def take(self, gib: int) -> None:
        """Allocate, or free, and cache nothing."""
        self.allocated += gib * GIB
        self.reserved = self.allocated + GIB
        self.most_allocated = max(self.most_allocated, self.allocated)
        self.most_reserved = max(self.most_reserved, self.reserved)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    return Allocator(monkeypatch)


def test_a_peak_outlives_its_reset(allocator: Allocator) -> None:
    device = allocator.device
    allocator.take(9)
    allocator.take(-6)
    restart_peak(device)
    assert allocator.most_allocated == 3 * GIB, "the phase that begins counts its own"
    assert (peak_allocated(device), peak_reserved(device)) == (9 * GIB, 10 * GIB)
    restart_peak(device)
    allocator.take(4)
    assert peak_allocated(device) == 9 * GIB, "two resets later too"
    allocator.take(5)
    assert (peak_allocated(device), peak_reserved(device)) == (12 * GIB, 13 * GIB)


def test_gpus_have_their_own(allocator: Allocator) -> None:
    other = torch.device("cuda", next(FRESH))
    allocator.take(5)
    restart_peak(allocator.device)
    allocator.take(-5)
    allocator.reset()
    assert (peak_allocated(allocator.device), peak_allocated(other)) == (5 * GIB, 0)
    assert peak_allocated(torch.device("cuda")) == 5 * GIB, "the present one"


def run_phases(allocator: Allocator, phases: Phases) -> None:
    for name, peak in (("load", 20), ("forward", 12), ("step", 7)):
        with phases(name):
            allocator.take(peak)
            allocator.take(-peak)


def test_the_run_reports_the_largest_phase_and_each_phase_its_own(allocator: Allocator) -> None:
    phases = Phases(allocator.device, enabled=True, watch=False)
    run_phases(allocator, phases)
    seen = phases.take()
    assert {name: phase.peak_bytes // GIB for name, phase in seen.items()} == {"load": 20, "forward": 12, "step": 7}
    assert peak_bytes(allocator.device) == 20 * GIB
    window = Window()
    window.records.append(StepRecord(1, 0.1, 1.0, 1.0, 1e-3, 10, 10, 1.0, 0.0))
    assert window.flush(allocator.device)["peak_memory_gib"] == 20
    assert memory_of(allocator.device).peak == 20 * GIB, "what an out-of-memory error says"
    measured = memory_facts(REQUEST, seen, allocator.device)["measured"]
    assert (measured["process_peak_bytes"], measured["reserved_bytes"]) == (20 * GIB, 21 * GIB)


def test_cached_memory_is_given_back_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append("cache"))
    give_back_cached_memory(torch.device("cpu"))
    assert not emptied
    give_back_cached_memory(torch.device("cuda", 0))
    assert emptied == ["cache"]
