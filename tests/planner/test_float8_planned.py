"""The plan of a training in float8: the run to the byte on a CPU, and no byte more than bfloat16 on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.model.float8.requirements import EMULATION_SWITCH
from finetune.planner.trace.trace import trace
from finetune.recipe.strategy import read_strategy
from tests.support.memory.planned import Case, differences, models, planned, tracked

pytest.importorskip("torchao", reason="torchao is not installed: pip install 'finetune[lowbit]'")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EMULATION_SWITCH, "emulate")


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("checkpointing", [0, 1])
def test_it_is_the_run_to_the_byte(checkpointing: int, tmp_path: Path) -> None:
    case, folder = Case("full", "fp8", checkpointing, packed=True, tied=False, micro_steps=2), models(tmp_path)
    assert list(differences(planned(case, folder), tracked(case, folder))) == []


def test_on_a_gpu_backward_is_left_as_many_bytes_as_in_bf16(tmp_path: Path) -> None:
    folder, kept, products = models(tmp_path), [], []
    for precision in ("bf16", "fp8"):
        case = Case("full", precision, 0, packed=True, tied=False, micro_steps=1)
        done = trace(case.recipe(folder), read_strategy("single"), case.batches(), gpu=True)
        kept.append(done.measured["forward"].allocated_bytes)
        products.append([(op, times) for op, times in done.operations.items() if op.kind == "product"])
    assert kept[0] == kept[1] > 0
    flops = [sum(op.flops * times for op, times in some) for some in products]
    assert flops[0] == flops[1] > 0
    in_float8 = sum(op.flops * times for op, times in products[1] if op.itemsize == 1)
    # Two of the three products of each weight in the layers, in both steps; the first layer's too.
    weights = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    assert in_float8 == 2 * 2 * 2 * 19 * weights
