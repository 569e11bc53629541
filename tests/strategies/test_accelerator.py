"""A launch that would not run what the recipe asks for is refused, before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config import config_args

from finetune.errors import EnvironmentMismatch, RecipeError
from finetune.launch.launcher import Launch
from finetune.measure import host_memory
from finetune.recipe.strategy import CONFIG_FOLDER, read_strategy
from finetune.strategies.accelerator import use_all_cores
from finetune.strategies.machine import launch_notes
from finetune.training import session
from tests.support.runs.launching import ALONE, check_launch
from tests.support.runs.recipes import least_recipe
from tests.support.stand_ins.pretend_cuda import pretended_cuda

recipe = partial(least_recipe, lora=None)
TWO = replace(ALONE, world_size=2, on_cpu=True)


@pytest.fixture(autouse=True)
def no_default_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "default_config.yaml"
    monkeypatch.setattr(config_args, "default_config_file", str(path))
    return path


def test_what_fits_is_let_through() -> None:
    assert check_launch(recipe(), ALONE).kind == "single"
    assert check_launch(recipe(accelerate_config="ddp"), TWO).kind == "ddp"
    cpu = CONFIG_FOLDER / "cpu_2proc.yaml"
    assert check_launch(recipe(accelerate_config="ddp"), replace(TWO, config_file=cpu)).kind == "ddp"


@pytest.mark.parametrize(
    ("changes", "launch", "words"),
    [
        ({}, TWO, ["single", "2", "accelerate_config=ddp"]),
        ({"accelerate_config": "ddp"}, ALONE, ["ddp", "one", "--num_processes 2"]),
        ({}, replace(ALONE, requested_processes=2), ["2 processes", "one process", "cpu_2proc"]),
        ({}, replace(ALONE, config_file=CONFIG_FOLDER / "fsdp2.yaml"), ["single", "fsdp", "--config_file"]),
        ({"accelerate_config": "fsdp2"}, replace(TWO, config_file=CONFIG_FOLDER / "ddp.yaml"), ["fsdp", "ddp"]),
        (
            {"accelerate_config": "fsdp2"},
            replace(TWO, config_file=CONFIG_FOLDER / "fsdp2_offload.yaml"),
            ["fsdp2.yaml", "False there, True here for fsdp_config.fsdp_offload_params"],
        ),
        ({"training": {"optim": "paged_adamw_8bit"}}, ALONE, ["paged_adamw_8bit", "adamw"]),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], launch: Launch, words: list[str]) -> None:
    with pytest.raises(EnvironmentMismatch) as caught:
        check_launch(recipe(**changes), launch)
    assert caught.value.exit_code == 4
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_recipe_without_gpus_is_refused(tmp_path: Path) -> None:
    launch = replace(ALONE, words=("accelerate", "launch", "finetune/train.py", "recipes/llama3_fsdp.yaml"))
    changes: dict[str, Any] = {"accelerate_config": "fsdp2", "budget": {"gpus": 4, "gpu_memory_gb": 24}}
    gated = {"name_or_path": "meta-llama/Never-Downloaded"}
    with pytest.raises(EnvironmentMismatch, match=r"4 GPU.*24 GB.*budget\.gpus=0") as caught:
        check_launch(recipe(**changes, model=gated), launch)
    assert "finetune rehearse recipes/llama3_fsdp.yaml" in str(caught.value)
    assert "nor the weights of meta-llama/Never-Downloaded" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(EnvironmentMismatch, match="this machine has none; run it"):
        check_launch(recipe(**changes, model={"name_or_path": str(tmp_path)}), launch)


def test_a_gpu_recipe_goes_on_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    made_for_one = recipe(budget={"gpus": 1, "gpu_memory_gb": 80})
    with pytest.raises(EnvironmentMismatch, match="this machine has none"):
        check_launch(made_for_one, ALONE)
    with pretended_cuda(monkeypatch):
        assert check_launch(made_for_one, ALONE).kind == "single"


def test_a_recipe_made_for_gpus_runs_on_a_cpu_that_was_asked_for() -> None:
    made_for_gpus = recipe(accelerate_config="ddp", budget={"gpus": 4, "gpu_memory_gb": 24})
    assert check_launch(made_for_gpus, TWO).kind == "ddp"


def test_a_stray_default_config_is_named(no_default_config: Path) -> None:
    no_default_config.write_text(yaml.safe_dump({"distributed_type": "FSDP", "num_processes": 1}))
    with pytest.raises(EnvironmentMismatch, match="default config in the cache") as caught:
        check_launch(recipe(), ALONE)
    assert str(no_default_config) in str(caught.value)
    assert str(no_default_config) in launch_notes(ALONE, read_strategy("single"))[0]
    assert check_launch(recipe(), replace(ALONE, words=("python",))).kind == "single"
    assert launch_notes(replace(ALONE, words=("python",)), read_strategy("single")) == []


def test_a_number_of_processes_that_was_not_launched_is_named() -> None:
    two = read_strategy("cpu_2proc")
    (note,) = launch_notes(ALONE, two)
    assert "num_processes: 2 changes nothing: 1 were launched" in note
    assert launch_notes(TWO, two) == launch_notes(ALONE, read_strategy("ddp")) == []


def test_an_unreadable_strategy_is_a_recipe_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="accelerate_config"):
        read_strategy(str(tmp_path / "missing.yaml"))
    odd = tmp_path / "odd.yaml"
    odd.write_text("distributed_type: MAGIC\n")
    with pytest.raises(RecipeError, match="distributed_type"):
        read_strategy(str(odd))


def test_a_machines_cores_are_shared_by_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(host_memory, "usable_cores", lambda: 12)
    launch = replace(TWO, threads_chosen=False, world_size=8, local_world_size=4, nodes=2)
    use_all_cores(launch, torch.device("cpu"))
    use_all_cores(replace(launch, threads_chosen=True), torch.device("cpu"))
    assert chosen == [3]


def test_so_are_they_where_ranks_on_gpus_work_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers set one thread; AdamW over 8B weights in host memory takes half a minute by one."""
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(host_memory, "usable_cores", lambda: 64)
    launch = replace(ALONE, threads_chosen=False, world_size=16, local_world_size=8, nodes=2)
    gpu = torch.device("cuda", 0)
    use_all_cores(launch, gpu)
    use_all_cores(replace(launch, threads_chosen=True), gpu, offloaded=True)
    assert chosen == []
    use_all_cores(launch, gpu, offloaded=True)
    use_all_cores(replace(launch, local_world_size=100), gpu, offloaded=True)
    assert chosen == [8, 1]


def test_a_task_of_srun_has_the_cores_that_it_is_bound_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not so the ranks that a launcher starts inside of one task, nor a task that sees the cores of all."""
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(host_memory, "usable_cores", lambda: 16)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "16")
    task = replace(ALONE, words=("srun", "python"), threads_chosen=False, world_size=8, local_world_size=8)
    use_all_cores(task, torch.device("cpu"))
    use_all_cores(replace(task, words=("torchrun",)), torch.device("cpu"))
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "2")
    use_all_cores(task, torch.device("cpu"))
    assert chosen == [16, 2, 2]


def test_a_session_tells_that_its_strategy_is_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to where the ranks have met: what the session says of itself."""
    calls: list[bool] = []

    def shared_out(*_: Any, offloaded: bool) -> None:
        calls.append(offloaded)
        raise InterruptedError

    monkeypatch.setattr(session, "build_accelerator", lambda *_: SimpleNamespace(device=torch.device("cuda", 0)))
    monkeypatch.setattr(session, "use_all_cores", shared_out)
    offloaded = ("fsdp2_offload", "zero2_offload", "zero3_offload", "zero3_nvme")
    for name in (*offloaded, "single", "fsdp2", "zero3"):
        checked = SimpleNamespace(launch=ALONE, strategy=read_strategy(name))
        start = SimpleNamespace(choices=SimpleNamespace(recipe=recipe(), checked=checked))
        with pytest.raises(InterruptedError), session.process_group(start):  # type: ignore[arg-type]
            raise AssertionError("not reached")
    assert calls == [True] * 4 + [False] * 3
