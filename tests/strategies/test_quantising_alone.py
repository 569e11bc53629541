"""While rank 0 reads, the others wait for as long as it takes; where it quantises on a CPU, it has all cores."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from finetune.errors import FinetuneError
from finetune.launch.launcher import Launch
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import read_strategy
from finetune.strategies import assemble as assembling
from finetune.strategies.assemble import assemble
from finetune.strategies.late_quantising import load_unquantised
from tests.support.runs.launching import ALONE
from tests.support.runs.recipes import least_recipe

CORES, OWN = 6, 1  # of the machine; of a rank at other times
WAYS = ("fsdp2", "zero3", "fails")
PATIENCE_SECONDS, WORK_SECONDS = 1.0, 2.5
RANKS = {"world_size": 2, "local_world_size": 2, "on_cpu": True}
LAUNCH = replace(ALONE, words=("python",), threads_chosen=False, **RANKS)
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}


def rank_main(rank: int, folder: Path, results: Any) -> None:
    """One of two ranks whose group is far less patient than its first rank is slow; tries each of the ways."""
    store = dist.FileStore(str(folder / "store"), 2)  # type: ignore[attr-defined]  # exported, though not by mypy's rules
    for way in WAYS:
        store.set(f"{way} {rank}", "here")
        store.wait([f"{way} {other}" for other in (0, 1)])
        own = dist.PrefixStore(way, store)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=own, rank=rank, world_size=2, timeout=timedelta(seconds=PATIENCE_SECONDS))
        results.put((way, rank, *build_as(way, rank)))
        dist.destroy_process_group()


def build_as(way: str, rank: int) -> tuple[str | None, list[int], int]:
    """How this rank ended, the threads it built and quantised with, and those it has afterwards."""
    torch.set_num_threads(OWN)
    threads: list[int] = []

    def build(_: Recipe, device: torch.device, load: Any, **__: Any) -> nn.Module:
        assert (device.type, load) == ("meta" if rank else "cpu", load_unquantised)
        threads.append(torch.get_num_threads())
        if rank == 0 and dist.get_world_size() > 1:
            time.sleep(WORK_SECONDS)
        if rank == 0 and way == "fails":
            raise FinetuneError("weights: no such file")
        return nn.Linear(2, 2, device=device)

    backend: str | None = None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("finetune.strategies.accelerator.usable_cores", lambda: CORES)
        try:
            _load(way, build, replace(LAUNCH, rank=rank), patched, threads)
        except (FinetuneError, RuntimeError) as error:
            backend = f"{type(error).__name__}: {error}"
    return backend, threads, torch.get_num_threads()


def _load(way: str, build: Any, launch: Launch, patched: pytest.MonkeyPatch, threads: list[int]) -> None:
    """Up to what follows the quantising: `assemble` itself, without the engine."""

    def shard(*_: Any) -> None:
        threads.append(torch.get_num_threads())

    patched.setattr(assembling, "agree_on_structure", lambda _: None)  # of a model that is nowhere
    patched.setattr(assembling, "make_mesh", lambda *_: "mesh")
    patched.setattr(assembling, "_sharded", shard)
    patched.setattr(assembling, "waits_for_sharding", lambda _: True)
    patched.setattr(assembling, "decoder_parts", lambda model: model)
    patched.setattr(assembling, "filled_one_by_one", shard)
    patched.setattr(assembling, "partition", lambda *_: None)
    patched.setattr(assembling, "make_optimizer", lambda *_: None)
    patched.setattr(assembling, "prepare_zero", lambda *_: (dist.barrier(), None))  # an engine begins by meeting
    quantised = least_recipe(quantization=NF4)
    formats = {key: {"enabled": key == "bf16"} for key in ("bf16", "fp16")}
    plugin = SimpleNamespace(deepspeed_config=formats | {"zero_optimization": {}})
    plugin.set_deepspeed_weakref = lambda: None
    accelerator: Any = SimpleNamespace(
        device=torch.device("cpu"), num_processes=2, state=SimpleNamespace(deepspeed_plugin=plugin)
    )
    strategy = read_strategy("zero3" if way == "zero3" else "fsdp2")
    assemble(quantised, strategy, accelerator, build, launch=launch)


@pytest.mark.slow
def test_the_others_wait_for_who_reads(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=rank_main, args=(rank, tmp_path, results)) for rank in (0, 1)]
    for each in ranks:
        each.start()
    actual = {(way, rank): rest for way, rank, *rest in (results.get(timeout=120) for _ in range(2 * len(WAYS)))}
    for each in ranks:
        each.join(60)
    assert len(actual) == 2 * len(WAYS)
    missing = "FinetuneError: weights: no such file"
    for way in ("fsdp2", "zero3"):
        assert actual[way, 0] == actual[way, 1] == [None, [OWN, CORES], OWN]
    assert actual["fails", 0] == actual["fails", 1] == [missing, [OWN], OWN]


@pytest.mark.parametrize("way", ["fsdp2", "zero3"])
def test_who_quantises_has_the_cores(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, collective_timeout = dist.new_group, []

    def new_group(**options: Any) -> Any:
        collective_timeout.append(options["timeout"])
        return real(**options)

    monkeypatch.setattr(dist, "new_group", new_group)
    before = torch.get_num_threads()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert build_as(way, 0) == (None, [OWN, CORES], OWN)
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(before)
    assert collective_timeout == [assembling.WAITING]


def test_nothing_is_taken_without_quantisation_or_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: pytest.fail("cores were taken"))
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: pytest.fail("a group was made"))
    for quantization, launch in ((None, LAUNCH), (NF4, None)):
        recipe = least_recipe(quantization=quantization)
        with assembling.waiting_for_rank_0(recipe, launch) as group:
            assert group is None
        with assembling.cores_to_quantise(recipe, launch, torch.device("cpu")):
            pass
    with assembling.cores_to_quantise(least_recipe(quantization=NF4), LAUNCH, torch.device("cuda")):
        pass
