"""Pinned host memory is planned as torch's allocator hands it out: in powers of two, and kept once it is freed."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from finetune.measure.host_memory import pinned_bytes
from finetune.measure.live_tensors import LiveTensors
from finetune.planner.trace.fake_device import pretend_device
from finetune.planner.trace.fake_model import no_data
from finetune.planner.trace.flops import count_operations
from finetune.planner.trace.pinned_memory import pinned_memory
from finetune.planner.trace.recorder import Recorder
from finetune.planner.trace.trace import trace
from finetune.recipe.loader import load_recipe
from finetune.recipe.strategy import Strategy, read_strategy
from tests.support.memory.memory_arithmetic import host_bytes, host_bytes_at_save
from tests.support.memory.planned import Case
from tests.support.models.tiny import save_tiny
from tests.support.runs.recipe_plans import plan_of
from tests.support.runs.recipe_results import recipes

MIB, GIB = 2**20, 2**30
SIZES = {"hidden_size": 48, "intermediate_size": 136, "num_hidden_layers": 3}  # no powers of two
NEEDS_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
FULL = Case("full", "bf16", 1, packed=True, tied=False, micro_steps=2)
SMALL = 20_000  # bytes of batches and of DeepSpeed's own counters


def rounded(nbytes: float) -> int:
    return int(2 ** math.ceil(math.log2(nbytes)))


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [(0, 0), (1, 1), (3, 4), (4096, 4096), (4097, 8192), (224 * MIB, 256 * MIB), (128_256 * 4096 * 4, 2 * GIB)],
)
def test_torch_rounds_up_to_a_power_of_two(nbytes: int, expected: int) -> None:
    assert pinned_bytes(nbytes) == expected


def test_offloaded_8b_by_hand() -> None:
    """float32: q and o 64 MiB, k and v 16, three of the MLP 224 that take 256, two tables 1.96 GiB that take 2."""
    layer = 2 * 64 + 2 * 16 + 3 * 256
    assert layer == 928
    weights = 32 * layer * MIB + 2 * 2 * GIB
    assert weights / GIB == 33
    moments = 2 * 4 * 8_030_261_248
    asked = load_recipe(recipes()["llama3_8b_full_fsdp2_offload_1x24gb"]).recipe
    norms = 65 * 4096 * 4
    assert host_bytes(asked) == 2 * (weights + norms) + moments
    assert round(host_bytes(asked) / 1e9) == 135


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "llama3_8b_full_fsdp2_offload_1x24gb",
        pytest.param("llama3_3b_full_zero2_offload_2x24gb", marks=NEEDS_DEEPSPEED),
        pytest.param("llama3_zero3_offload", marks=NEEDS_DEEPSPEED),
    ],
)
def test_the_plan_has_what_the_header_states(name: str) -> None:
    """Two ways to the same bytes: the trainer's own code on tensors without data, and arithmetic."""
    recipe = load_recipe(recipes()[name]).recipe
    planned = plan_of(recipes()[name])
    assert planned.node * planned.host["step"] == pytest.approx(host_bytes(recipe), rel=0.001)
    assert planned.node * planned.host["save"] == pytest.approx(host_bytes_at_save(recipe), rel=0.001)


Pin = Callable[[torch.device], Tensor]
PINS: dict[str, Pin] = {
    "a tensor": lambda _: torch.empty(3, 100).pin_memory(),
    "a factory": lambda _: torch.empty(3, 100, pin_memory=True, device="cpu"),
    "zeros": lambda _: torch.zeros(3, 100, pin_memory=True, device="cpu"),
    "a gradient": lambda gpu: torch.empty(3, 100, device=gpu).to(torch.device("cpu"), non_blocking=True),
    "in bf16": lambda _: torch.empty(3, 100, dtype=torch.bfloat16).pin_memory(),
    "a number": lambda gpu: torch.empty((), device=gpu).to("cpu", non_blocking=True),
    "columns": lambda _: torch.empty(100, 3).t().pin_memory(),
}
OTHERS: dict[str, Pin] = {
    "waits": lambda gpu: torch.empty(3, 100, device=gpu).to("cpu"),
    "copied again": lambda _: torch.empty(3, 100).pin_memory().clone(),
    "to the GPU": lambda gpu: torch.empty(3, 100).pin_memory().to(gpu, non_blocking=True),
    "on the host": lambda _: torch.empty(3, 100).to(torch.float64, non_blocking=True),
}


def recorded(act: Callable[[LiveTensors, torch.device], Any]) -> Any:
    """What `act` returns, in a trace that pretends a GPU."""
    gpu = pretend_device()
    with no_data(0.0, masks=False) as mode:
        recorder = Recorder(gpu, mode)
        with count_operations(recorder.phases, pinned_memory(recorder), fake_mode=mode), recorder.phases("load"):
            return act(recorder.ledger, gpu)


@pytest.mark.parametrize("how", [*PINS, *OTHERS])
def test_what_is_pinned_is_rounded(how: str) -> None:
    def act(_: LiveTensors, gpu: torch.device) -> tuple[int, int, torch.Size, bool]:
        tensor = (PINS | OTHERS)[how](gpu)
        pinned = tensor.device.type == "cpu" and tensor.is_pinned()
        return tensor.untyped_storage().nbytes(), tensor.nbytes, tensor.shape, pinned

    taken, asked, shape, pinned = recorded(act)
    assert taken == (rounded(asked) if how in PINS else asked)
    assert pinned == (how in PINS)
    assert math.prod(shape) in (1, 300)


def test_a_freed_block_is_kept_and_taken_again() -> None:
    def act(ledger: LiveTensors, _: torch.device) -> list[int]:
        live = []

        def note() -> None:
            torch.empty(0)  # the allocator is asked for something
            live.append(ledger.live("cpu"))

        first = torch.empty(300, pin_memory=True, device="cpu")  # 1,200 bytes take 2,048
        note()
        del first
        note()
        again = torch.empty(500, pin_memory=True, device="cpu")  # 2,000 take the same block
        note()
        more = torch.empty(600, pin_memory=True, device="cpu")  # 2,400 do not
        note()
        del again, more
        note()
        return live

    assert recorded(act) == [2048, 2048, 2048, 2048 + 4096, 2048 + 4096]


def peaks(folder: Path, strategy: Strategy, ranks: int) -> dict[str, int]:
    timeline = trace(FULL.recipe(folder), strategy, FULL.batches(), ranks=ranks, gpu=True).timeline
    return {name: phase.peak.nbytes for name, phase in timeline.phases("cpu").items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("pinned")
    save_tiny(found / "untied", tie_word_embeddings=False, **SIZES)
    return found


def sizes_of(folder: Path) -> list[int]:
    """Elements of each weight."""
    from safetensors import safe_open

    with safe_open(folder / "untied" / "model.safetensors", framework="pt") as weights:
        return [math.prod(weights.get_slice(name).get_shape()) for name in weights.keys()]  # noqa: SIM118  # no mapping


@pytest.mark.slow
def test_fsdp2_pins_each_weight_and_each_gradient(folder: Path) -> None:
    sizes, found = sizes_of(folder), peaks(folder, read_strategy("fsdp2_offload"), 1)
    pinned, moments = sum(rounded(4 * size) for size in sizes), 8 * sum(sizes)
    assert pinned > 1.1 * 4 * sum(sizes)
    assert found["step"] == pytest.approx(2 * pinned + moments, abs=SMALL)
    # The second step's forward still has the blocks of the first one's gradients.
    assert found["forward"] == pytest.approx(2 * pinned + moments, abs=SMALL)


@pytest.mark.slow
@NEEDS_DEEPSPEED
def test_zero2_pins_flat_masters_gradients_and_weights(folder: Path) -> None:
    sizes, found = sizes_of(folder), peaks(folder, read_strategy("zero2_offload"), 2)
    own = sum(sizes) / 2
    expected = 2 * rounded(4 * own) + rounded(2 * own) + rounded(2 * max(sizes)) + 8 * own
    assert found["step"] == pytest.approx(expected, abs=SMALL)


@pytest.mark.slow
@NEEDS_DEEPSPEED
def test_a_file_that_pins_nothing_is_planned_as_it_is(folder: Path, tmp_path: Path) -> None:
    """The remedy where room is short."""
    text = Path("accelerate_configs/zero2_offload.yaml").read_text("utf-8")
    changed = tmp_path / "unpinned.yaml"
    changed.write_text(text.rstrip() + "\n  offload_optimizer_pin_memory: false\n", "utf-8")
    sizes = sizes_of(folder)
    own = sum(sizes) / 2
    found = peaks(folder, read_strategy(str(changed)), 2)
    assert found["step"] == pytest.approx((4 + 4 + 2 + 8) * own + 2 * max(sizes), abs=SMALL)
