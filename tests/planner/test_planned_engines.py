"""DDP and DeepSpeed on two gloo ranks: planned equals tracked, to the byte."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from torch.nn import functional

from finetune.measure.host_memory import pinned_bytes
from finetune.planner.trace.fake_device import DEVICE_NAME
from finetune.planner.trace.stand_ins import without_disks
from finetune.planner.trace.trace import trace
from finetune.recipe.strategy import read_strategy
from tests.support.memory.planned import Case, differences, models, planned, tracked_on_ranks

SOME = [
    Case("full", "bf16", 0, packed=True, tied=True, micro_steps=1),
    Case("full", "float32", 1, packed=False, tied=True, micro_steps=2),
    Case("lora", "bf16", 2, packed=True, tied=False, micro_steps=1),
    Case("lora", "bf16", 0, packed=False, tied=True, micro_steps=1),
]
# DeepSpeed takes these only where nothing is offloaded, and where weights are not cut.
PURE = Case("full", "pure_bf16", 0, packed=True, tied=True, micro_steps=1)
FOUR_BIT = Case("qlora", "bf16", 1, packed=True, tied=False, micro_steps=2)

NEEDS_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models(tmp_path_factory.mktemp("planned"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "some"),
    [
        ("ddp", [*SOME, PURE, FOUR_BIT]),
        pytest.param("zero1", [*SOME, PURE], marks=NEEDS_DEEPSPEED),
        pytest.param("zero2", [*SOME, PURE, FOUR_BIT], marks=NEEDS_DEEPSPEED),
        pytest.param("zero2_offload", SOME, marks=NEEDS_DEEPSPEED),
        pytest.param("zero3", [*SOME, PURE], marks=NEEDS_DEEPSPEED),
        pytest.param("zero3_offload", SOME, marks=NEEDS_DEEPSPEED),
    ],
)
def test_engines_are_planned_to_the_byte(strategy: str, some: list[Case], folder: Path) -> None:
    real = tracked_on_ranks(some, folder, strategy)
    # When they save, ranks tell each other in pickled bytes what they wrote.
    found = {
        str(case): list(differences(planned(case, folder, strategy, 2), there, ("load", "save")))
        for case, there in zip(some, real, strict=True)
    }
    assert {case: wrong for case, wrong in found.items() if wrong} == {}


@NEEDS_DEEPSPEED
@pytest.mark.slow
def test_a_trace_of_zero3_leaves_torchs_own_product(folder: Path) -> None:
    before = functional.linear
    planned(SOME[0], folder, "zero3", 2)
    assert functional.linear is before


@NEEDS_DEEPSPEED
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "stage"), [("zero1", 1), ("zero2", 2), ("zero3", 3)])
def test_what_each_stage_cuts(strategy: str, stage: int, folder: Path) -> None:
    """The textbook, of 8 ranks: parameters, gradients, masters and moments, each whole or an eighth."""
    case = SOME[0]
    parts = trace(case.recipe(folder), read_strategy(strategy), case.batches(), ranks=8).timeline.phases("cpu")
    step = parts["step"].peak.parts
    weights = 143_808 * 4  # in float32
    # Stage 1 keeps all gradients, in bf16 and in float32; stage 3 has its part once more, flat, while it updates.
    gradients = {1: weights * 3 / 2, 2: weights / 8, 3: weights / 4}
    expected = {
        "parameters": weights / 2 if stage < 3 else weights / 16,
        "gradients": gradients[stage],
        "masters": weights / 8,
        "optimizer state": weights / 4,
    }
    # Partitions are rounded up, and vectors stay whole under stage 3.
    assert {name: step[name] for name in expected} == pytest.approx(expected, rel=0.01)


@pytest.mark.thorough
@pytest.mark.sample(1)
@NEEDS_DEEPSPEED
@pytest.mark.parametrize("gpu", [False, True])
def test_where_offloaded_state_is(gpu: bool, folder: Path) -> None:
    """Half of the moments on each of two ranks; masters and moments are in host memory, gradients where they arise."""
    case = SOME[0]
    traced = trace(case.recipe(folder), read_strategy("zero2_offload"), case.batches(), ranks=2, gpu=gpu).timeline
    device = traced.phases(DEVICE_NAME if gpu else "cpu")["step"].peak.parts
    host = traced.phases("cpu")["step"].peak.parts
    masters = 143_808 * 2
    assert host["optimizer state"] == pytest.approx(143_808 * 4, rel=0.01)
    assert host["masters"] == pytest.approx(pinned_bytes(masters) if gpu else masters, rel=0.01)
    assert ("optimizer state" in device, "masters" in device) == (not gpu, not gpu)
    assert device["parameters"] >= 143_808 * 2


@NEEDS_DEEPSPEED
def test_a_plan_writes_no_disk() -> None:
    kept = without_disks(read_strategy("zero3_nvme"))
    assert set(kept.offload_devices.values()) == {"cpu"}
    assert without_disks(read_strategy("zero2")).settings == read_strategy("zero2").settings
