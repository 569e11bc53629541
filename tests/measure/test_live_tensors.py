"""Tracked bytes are exact: every live storage once, frees and resizes seen, backward included."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import relu
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from finetune.measure.live_tensors import LiveTensors
from finetune.measure.phases import Phase, Phases
from finetune.wording import GIB

CPU = torch.device("cpu")
KB = 1024  # bytes of 256 float32


def phases(*existing: torch.Tensor) -> Phases:
    return Phases(CPU, enabled=True, existing=existing)


def one(measured: Phases) -> Phase:
    return measured.take()["it"]


def test_a_storage_has_one_python_object_for_its_life() -> None:
    """What the ledger rests on."""
    tensor = torch.zeros(8)
    assert tensor.untyped_storage() is tensor.view(2, 4).untyped_storage()


def test_storages_are_counted_once() -> None:
    base = torch.zeros(256)
    ledger = LiveTensors([base, base[:10], base.view(16, 16), base.detach()])
    assert ledger.live("cpu") == KB
    ledger.see({"more": [(torch.zeros(256, dtype=torch.bfloat16),)], "meta": torch.zeros(256, device="meta")})
    assert ledger.live("cpu") == KB  # the bfloat16 one is gone already
    assert ledger.peak("cpu") == KB + KB // 2


def test_a_view_keeps_its_storage_alive() -> None:
    base = torch.zeros(256)
    ledger = LiveTensors([base])
    row = base[0:1]
    del base
    assert ledger.live("cpu") == KB
    del row
    assert ledger.live("cpu") == 0


def test_an_end_in_another_thread_is_booked() -> None:
    tensors = [torch.zeros(256)]
    ledger = LiveTensors(tensors)
    thread = threading.Thread(target=tensors.clear)
    thread.start()
    thread.join()
    assert ledger.live("cpu") == 0


def test_resizes_are_booked_while_watched() -> None:
    """As FSDP2 frees and refills its gathered parameters."""
    tensor = torch.zeros(256)
    ledger = LiveTensors([tensor])
    before = torch.UntypedStorage.resize_
    with ledger.watch_resizes():
        tensor.untyped_storage().resize_(0)
        assert ledger.live("cpu") == 0
        tensor.untyped_storage().resize_(2 * KB)
        assert ledger.live("cpu") == 2 * KB
    assert torch.UntypedStorage.resize_ == before


def test_a_phase_has_its_own_peak() -> None:
    weight = torch.zeros(256)
    measured = phases(weight)
    with measured("it"):
        temporary = weight + 1  # KB
        kept = temporary.bfloat16()  # KB / 2
        del temporary
    first = one(measured)
    assert (first.allocated_bytes, first.peak_bytes) == (KB + KB // 2, 2 * KB + KB // 2)
    with measured("it"):
        kept.add_(1)
    second = one(measured)
    assert (second.allocated_bytes, second.peak_bytes) == (KB + KB // 2, KB + KB // 2)
    assert (second.host_allocated_bytes, second.host_peak_bytes) == (KB + KB // 2, KB + KB // 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recompute", [False, True])
def test_backward_is_seen(recompute: bool) -> None:
    """Two layers of 16 x 16 on 16 rows: each activation, weight and gradient is 1 KiB."""
    weights = [nn.Parameter(torch.eye(16)) for _ in range(2)]
    rows = torch.ones(16, 16)
    measured = phases(*weights, rows)

    def block(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return relu(hidden @ weight)  # the product dies in forward, relu keeps its own result

    with measured("it"):
        hidden = rows
        for weight in weights:
            hidden = checkpoint(block, hidden, weight, use_reentrant=False) if recompute else block(hidden, weight)
        loss = hidden.sum()
        del hidden
    forward = one(measured)
    # weights, rows, loss; without checkpointing both results, with it the input of the second block alone.
    assert forward.allocated_bytes == (2 + 1) * KB + 4 + (1 if recompute else 2) * KB
    with measured("it"):
        loss.backward()
    backward = one(measured)
    gc.collect()
    assert backward.allocated_bytes == (2 + 1 + 2) * KB + 4
    assert backward.peak_bytes > backward.allocated_bytes
    assert all(weight.grad is not None for weight in weights)


def test_a_fused_optimizer_step_is_weights_and_two_moments() -> None:
    weight = nn.Parameter(torch.zeros(256))
    weight.grad = torch.ones(256)
    measured = phases(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    with measured("it"):
        optimizer.step()
        optimizer.zero_grad()
    step = one(measured)
    assert (step.allocated_bytes, step.peak_bytes) == (3 * KB + 4, 4 * KB + 4)  # the count of steps is one float32


def test_loading_from_the_hub_library_is_seen(tiny_llama: Path) -> None:
    measured = phases()
    with measured("it"):
        model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    tensors = [*model.parameters(), *model.buffers()]
    assert one(measured).allocated_bytes == sum(tensor.numel() * 4 for tensor in tensors)


def test_off_is_nothing() -> None:
    measured = Phases(CPU, enabled=False, existing=[torch.zeros(256)])
    with measured("it"):
        kept = torch.zeros(256)
    assert measured.take() == {}
    assert measured.lines(step=1) == []
    assert measured._storages.live("cpu") == 0
    assert kept.numel() == 256


def test_lines_add_up_and_start_again() -> None:
    measured = phases()
    for _ in range(2):
        with measured("it"):
            kept = torch.zeros(256)
    (line,) = measured.lines(step=7)
    assert (line["kind"], line["step"], line["rank"], line["phase"]) == ("phase", 7, 0, "it")
    assert line["allocated_gib"] * GIB == KB
    assert line["peak_gib"] * GIB == 2 * KB  # the second was made before the first was let go
    assert line["collectives"] == line["bytes"] == {}
    assert kept.numel() == 256
    assert measured.lines(step=8) == []
