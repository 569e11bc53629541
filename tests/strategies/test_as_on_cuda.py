"""What a start asks of Accelerate, DeepSpeed and the planner on a machine with GPUs, told by a machine without."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetune.finished_run import best_device
from finetune.launch.gpu_environment import libraries_on_gpu
from finetune.launch.plan_request import PlanRequest
from finetune.probe.remembered import device_kind, precision_on
from finetune.recipe.strategy import read_strategy
from finetune.strategies import accelerator as accelerators
from finetune.strategies import zero_requirements
from finetune.strategies.accelerator import build_accelerator, scale_losses_on_cpu
from finetune.strategies.machine import device_of, gpu_problems
from finetune.strategies.zero_requirements import compile_ahead, compile_engine, engine_problems
from finetune.training.memory_report import describe_memory, memory_facts
from finetune.training.start import own_gpus, receipt_of_run
from tests.support.runs import launching
from tests.support.runs.one_rank import as_before, let_deepspeed_choose_the_cpu
from tests.support.runs.recipes import least_recipe

GPU, CPU = torch.device("cuda", 1), torch.device("cpu")
TWO = replace(launching.ALONE, world_size=2, local_world_size=2, rank=1, local_rank=1)


class Asked(Exception):
    """What Accelerate was asked for."""


def number_of(device: Any) -> int:
    """As torch.cuda takes it: a number, a name or a device."""
    return device if isinstance(device, int) else torch.device(device).index


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, as far as torch is asked for their number, names and abilities."""
    let_deepspeed_choose_the_cpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, number_of(device)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Card {number_of(device)}")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # set by a start on a CPU, and to be put back
    monkeypatch.delenv("DS_ACCELERATOR")


def asked_of_accelerate(monkeypatch: pytest.MonkeyPatch, name: str, **changes: Any) -> dict[str, Any]:
    def accelerator(**settings: Any) -> None:
        raise Asked(settings)

    monkeypatch.setattr(accelerators, "Accelerator", accelerator)
    with as_before(), pytest.raises(Asked) as asked:
        build_accelerator(least_recipe("x", **changes), read_strategy(name), TWO)
    settings: dict[str, Any] = asked.value.args[0]
    return settings


@pytest.mark.usefixtures("gpus")
def test_ranks_on_gpus_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, backend in {"ddp": None, "fsdp2": None, "fsdp2_offload": "cpu:gloo,cuda:nccl"}.items():
        settings = asked_of_accelerate(monkeypatch, name)
        _, group = settings["kwargs_handlers"]
        assert (settings["cpu"], settings["deepspeed_plugin"]) == (False, None)
        # None: Accelerate's own choice, nccl. Gradients in host memory are reduced there, so both are needed.
        assert group.to_kwargs().get("backend") == backend, name
        assert (settings["fsdp_plugin"] is not None) == (name != "ddp")


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"])
def test_the_engine_overlaps_and_pins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    settings = asked_of_accelerate(monkeypatch, name, training={"per_device_batch_size": 1})
    section = settings["deepspeed_plugin"].deepspeed_config["zero_optimization"]
    assert (settings["cpu"], section["overlap_comm"]) == (False, True)
    offloaded = {key: value["pin_memory"] for key, value in section.items() if key.startswith("offload_")}
    assert offloaded == (dict.fromkeys(offloaded, True) if "offload" in name else {})
    assert bool(offloaded) == ("offload" in name)


@pytest.mark.usefixtures("gpus")
def test_a_rank_computes_on_its_own_gpu() -> None:
    assert device_of(TWO) == GPU
    assert device_of(replace(TWO, on_cpu=True)) == CPU
    assert best_device().type == "cuda"


@pytest.mark.parametrize(
    ("seen", "ranks", "expected"),
    [
        (1, 4, [0, 0, 0, 0]),  # srun --gpus-per-task=1, a container for each rank
        (2, 4, [0, 1, 0, 1]),  # two sockets, each with half of the GPUs
        (4, 4, [0, 1, 2, 3]),
        (8, 4, [0, 1, 2, 3]),
        (1, 1, [0]),
    ],
)
@pytest.mark.usefixtures("gpus")
def test_ranks_compute_on_the_gpus_that_they_see(
    seen: int, ranks: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device with another number is an error at its first use, as torch.cuda.mem_get_info has it."""

    def mem_get_info(device: Any) -> tuple[int, int]:
        if number_of(device) >= seen:
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")
        return 1 << 30, 1 << 34

    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    for rank in range(ranks):
        launch = replace(launching.ALONE, world_size=ranks, local_world_size=ranks, rank=rank, local_rank=rank)
        assert device_of(launch) == torch.device("cuda", expected[rank])
        list(gpu_problems(least_recipe("x"), launch))
        # The first that asks for the GPU's memory.
        own_gpus(launch, {})


@pytest.mark.usefixtures("gpus")
def test_auto_counts_no_memory_that_others_hold_and_counts_alike_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A desktop holds 1.5 GB of a 24 GB card. This process's own context (0.5 GB) is in the plan already."""
    total, context = 24 << 30, 500_000_000
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    recipe = least_recipe("x", output_dir=str(tmp_path / "run"), training={"resume": "auto"})

    def counted(held: int, **receipt: Any) -> int:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total - context - held, total))
        if receipt:
            Path(recipe.run_dir).mkdir(exist_ok=True)
            (Path(recipe.run_dir) / "receipt.json").write_text(json.dumps(receipt))
        gpus = own_gpus(launching.ALONE, receipt_of_run(recipe))
        assert gpus is not None
        return int(gpus.memory)

    assert counted(0) == total
    assert counted(1_500_000_000) == total - 1_500_000_000
    assert counted(9_000_000_000, counted_memory=total - 1_500_000_000) == total - 1_500_000_000
    assert counted(9_000_000_000, batch={}) == total  # a run of 1.0
    assert counted(0, counted_memory=80 << 30) == total  # resumed on a smaller card


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero2", "zero3"])
def test_libraries_take_the_gpu_that_the_rank_sees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's engine and torch's device mesh set the device by LOCAL_RANK as it stands."""
    if name.startswith("zero"):
        pytest.importorskip("deepspeed")
    seen: list[str] = []

    def accelerator(**_: Any) -> Any:
        seen.append(os.environ["LOCAL_RANK"])
        return SimpleNamespace(mixed_precision="no", device=GPU)

    monkeypatch.setattr(accelerators, "Accelerator", accelerator)
    monkeypatch.setattr(accelerators, "_compare", lambda *_: None)
    for count, expected in ((1, "0"), (2, "1")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        with as_before():
            os.environ["LOCAL_RANK"] = "1"
            recipe = least_recipe("x", training={"per_device_batch_size": 1})
            build_accelerator(recipe, read_strategy(name), TWO)
            assert seen.pop() == os.environ["LOCAL_RANK"] == expected


def test_a_rank_that_meets_no_other_speaks_by_its_own_number() -> None:
    environment, seen = {"LOCAL_RANK": "1"}, []
    with suppress(RuntimeError), libraries_on_gpu(0, environment):
        seen.append(dict(environment))
        raise RuntimeError("rendezvous")
    assert (seen, environment) == ([{"LOCAL_RANK": "0"}], {"LOCAL_RANK": "1"})
    alone: dict[str, str] = {}
    with libraries_on_gpu(0, alone):
        assert alone == {}


@pytest.mark.usefixtures("gpus")
def test_a_probe_is_remembered_for_the_very_card() -> None:
    assert device_kind(GPU) == "Card 1 9.1"
    assert device_kind(torch.device("cuda", 0)) != device_kind(GPU)
    assert device_kind(CPU) == "cpu"


@pytest.mark.usefixtures("gpus")
def test_the_engine_is_not_asked_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    strategy, compiled = read_strategy("zero2"), []
    monkeypatch.setattr(zero_requirements, "compile_ahead", lambda *asked: compiled.append(asked))
    assert list(engine_problems(strategy, on_cpu=False)) == []
    compile_engine(strategy, on_cpu=False)
    assert compiled == [], "what gloo ranks of one machine share"
    (problem,) = engine_problems(strategy, on_cpu=True)
    assert problem.endswith("hide them with CUDA_VISIBLE_DEVICES=")


@pytest.mark.usefixtures("gpus")
def test_the_engines_parts_are_compiled_for_where_they_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    compile_ahead("NoSuchBuilder", ("none",), on_cpu=False)
    assert "DS_ACCELERATOR" not in os.environ
    compile_ahead("NoSuchBuilder", ("none",), on_cpu=True)
    assert os.environ["DS_ACCELERATOR"] == "cpu"


def test_a_probe_computes_as_the_run_does_there() -> None:
    for training, expected in (
        ({"mixed_precision": "bf16"}, torch.bfloat16),
        ({"mixed_precision": "fp16"}, torch.float16),
        ({"mixed_precision": "no"}, None),
        ({"pure_bf16": True, "mixed_precision": "bf16"}, torch.bfloat16),
    ):
        recipe = least_recipe("x", training=training)
        assert precision_on(recipe, GPU) == expected
        assert precision_on(recipe, CPU) is None


def test_memory_is_told_by_cudas_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5 << 30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 6 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4 << 30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 << 30, 76 << 30))
    phases: Any = {"step": SimpleNamespace(peak_bytes=4 << 30, allocated_bytes=3 << 30)}
    request = PlanRequest({}, ((7,),), 1, flat=True, nodes=1, ranks_of_node=1, device="some GPU", memory=1)
    facts = memory_facts(request, phases, GPU)
    assert facts["measured"]["by"] == "CUDA's allocator"
    assert facts["measured"]["reserved_bytes"] == 6 << 30
    assert facts["measured"]["outside_bytes"] == 1 << 30, "76 in all, 70 free, 5 reserved"
    assert "CUDA's allocator 6.000" in describe_memory(facts)
    on_cpu = memory_facts(request, phases, CPU)["measured"]
    assert (on_cpu["by"], on_cpu["reserved_bytes"], on_cpu["outside_bytes"]) == ("live tensors", None, None)


def test_a_gpus_losses_are_scaled_by_accelerate() -> None:
    accelerator: Any = SimpleNamespace(mixed_precision="fp16", device=GPU)
    scale_losses_on_cpu(accelerator)
    assert vars(accelerator) == {"mixed_precision": "fp16", "device": GPU}
