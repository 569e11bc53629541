"""While rank 0 opens a base that will be quantised, the other ranks wait for as long as it takes."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from finetune.errors import FinetuneError
from finetune.recipe.schema import Recipe
from finetune.strategies import late_quantising
from tests.support.models.tiny import tiny_model
from tests.support.runs.launching import ALONE
from tests.support.runs.recipes import least_recipe

PATIENCE_SECONDS, WORK_SECONDS = 1.0, 2.5
LAUNCH = replace(ALONE, words=("python",), world_size=2, local_world_size=2, on_cpu=True)
CPU = torch.device("cpu")
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}


def rank_main(rank: int, folder: Path, results: Any) -> None:
    """One of two ranks whose own group gives up long before rank 0 is done; the second time rank 0 fails."""
    store = dist.FileStore(str(folder / "store"), 2)  # type: ignore[attr-defined]  # exported, though not by mypy's rules

    def build(_: Recipe, device: torch.device, load: Any) -> nn.Module:
        assert (device.type, load.func) == ("meta" if rank else "cpu", late_quantising.load_unquantised)
        if rank == 0:
            time.sleep(WORK_SECONDS)
        if rank == 0 and way == "fails":
            raise FinetuneError("weights: no such file")
        return tiny_model().to(device)

    for way in ("builds", "fails"):
        store.set(f"{way} {rank}", "here")
        store.wait([f"{way} {other}" for other in (0, 1)])
        own = dist.PrefixStore(way, store)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=own, rank=rank, world_size=2, timeout=timedelta(seconds=PATIENCE_SECONDS))
        ended = ""
        try:
            late_quantising.build_on_rank_0(least_recipe(quantization=NF4), build, replace(LAUNCH, rank=rank), CPU)
        except (FinetuneError, RuntimeError) as error:
            ended = f"{type(error).__name__}: {error}"
        results.put((way, rank, ended))
        dist.destroy_process_group()


@pytest.mark.slow
def test_the_others_wait_for_who_reads(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=rank_main, args=(rank, tmp_path, results)) for rank in (0, 1)]
    for each in ranks:
        each.start()
    found = {(way, rank): ended for way, rank, ended in (results.get(timeout=120) for _ in range(4))}
    for each in ranks:
        each.join(60)
    missing = "FinetuneError: weights: no such file"
    assert found == {("builds", 0): "", ("builds", 1): "", ("fails", 0): missing, ("fails", 1): missing}


def test_the_group_to_wait_in_is_patient_and_made_for_quantised_bases_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(dist, "new_group", lambda **options: made.append(options["timeout"]))
    monkeypatch.setattr(dist, "destroy_process_group", lambda _: None)
    for quantization, launch in ((None, LAUNCH), (NF4, None), (NF4, LAUNCH)):
        with late_quantising.waiting_for_rank_0(least_recipe(quantization=quantization), launch):
            pass
    assert made == [late_quantising.TIME_FOR_RANK_0]
