"""Every run is planned beside it; what the plan says is held against what the run measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from finetune.planner.run_planner import (
    batches_of,
    fitting_changes,
    planned,
    read_request,
    request_for,
)
from finetune.recipe.schema import Recipe
from finetune.train import main
from finetune.training.memory_report import describe_memory
from finetune.training.planner_process import PLANNER_SWITCH, RESULT_FILE, PlanRequest, planner_process
from tests.support.recipes import merged, tiny, write_recipe
from tests.support.tiny import write_chats

pytestmark = pytest.mark.usefixtures("forget_the_last_run")
LENGTHS = [30, 45, 60, 80, 25, 100, 40, 55, 70, 35, 65, 50]
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, tiny_llama: Path) -> Write:
    """Writes a recipe whose run folder is beside it."""

    def written(**changed: Any) -> Path:
        plain: dict[str, Any] = {
            "lora": {"r": 4},
            "data": {"max_length": 128},
            "training": {"global_batch_size": 4, "max_steps": 2, "per_device_batch_size": 2},
            "samples": {"count": 0},
            "output_dir": str(tmp_path / "run"),
        }
        chats = write_chats(tmp_path / "chats.jsonl", LENGTHS)
        return write_recipe(tmp_path, merged(tiny(tiny_llama, chats, **plain), changed))

    return written


def receipt(recipe: Path) -> dict[str, Any]:
    return dict(json.loads((recipe.parent / "run" / "receipt.json").read_text("utf-8")))


REQUEST = PlanRequest(
    recipe="{}", documents=(((7, 5), (9,)),), flat=True, nodes=1, ranks_of_node=1, device="cpu", memory=2**30
)


def test_a_request_survives_json() -> None:
    assert read_request(json.loads(json.dumps(asdict(REQUEST)))) == REQUEST


def test_batches_are_the_runs_own_but_for_what_stands_in_them() -> None:
    (flat,) = batches_of(REQUEST)
    assert flat["document_lengths"] == (7, 5, 9)
    assert flat["position_ids"].tolist() == [[*range(7), *range(5), *range(9)]]
    (padded,) = batches_of(replace(REQUEST, flat=False))
    assert padded["input_ids"].shape == (2, 12)
    assert "cu_seq_lens" not in padded


def test_another_recipe_has_the_runs_rows_as_it_deals_and_cuts_them(write: Write) -> None:
    recipe = Recipe.model_validate_json(write().read_text())
    assert request_for(REQUEST, recipe).documents == REQUEST.documents
    shorter = recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_length": 10})})
    assert request_for(REQUEST, shorter).documents == (((7, 3), (9,)),)
    fewer = recipe.training.model_copy(update={"per_device_batch_size": 1})
    assert request_for(REQUEST, recipe.model_copy(update={"training": fewer})).documents == (((7, 5),),)


@pytest.mark.slow
def test_changes_are_planned_again(write: Write) -> None:
    recipe = write(training={"per_device_batch_size": 2})
    asks = replace(REQUEST, recipe=recipe.read_text(), documents=(((100,), (90,)),), memory=2**40)
    needed = planned(asks)[2]
    found = {change["change"]: change["needed_bytes"] for change in fitting_changes(asks)}
    assert list(found) == ["training.per_device_batch_size=1", "data.max_length=64"], "all is recomputed already"
    assert all(0 < nbytes < needed for nbytes in found.values())
    assert fitting_changes(replace(asks, memory=min(found.values()) - 1)) == []


def test_what_cannot_be_planned_is_an_answer() -> None:
    plan, why, needed = planned(REQUEST)
    assert plan is None
    assert needed == 0
    assert why is not None
    assert why.startswith("the planner failed: ValidationError")


def test_a_planner_that_dies_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLANNER_SWITCH, "on")
    monkeypatch.setattr(sys, "executable", "false")
    with planner_process(REQUEST, tmp_path) as planner:
        assert planner.result(60) == {"plan": None, "why": "the planner ended with 1", "changes": None}
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with planner_process(REQUEST, tmp_path) as planner:
        assert "could not be started: " in planner.result()["why"]
    assert list(tmp_path.iterdir()) == []


def slow_planner(folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: int) -> None:
    """Instead of the planner a process that takes so long and answers nothing."""
    script = folder / "slow"
    script.write_text(f"#!/bin/sh\nsleep {seconds}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def test_one_that_is_not_done_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_planner(tmp_path, monkeypatch, seconds=60)
    monkeypatch.setenv(PLANNER_SWITCH, "on")
    began = time.monotonic()
    with planner_process(REQUEST, tmp_path) as planner:
        assert planner.result()["why"] == "the planner has not answered yet"
        assert planner.result(0.1, with_changes=True)["plan"] is None
    assert time.monotonic() - began < 5


def test_one_is_waited_for_where_that_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_planner(tmp_path, monkeypatch, seconds=1)
    monkeypatch.setenv(PLANNER_SWITCH, "wait")
    with planner_process(REQUEST, tmp_path) as planner:
        assert planner.result()["why"] == "the planner has not answered yet"  # where the run is in its midst
        assert planner.result(0.01)["why"] == "the planner ended with 0"


def test_it_can_be_turned_off_and_other_ranks_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLANNER_SWITCH, "off")
    with planner_process(REQUEST, tmp_path) as planner:
        assert planner.result()["why"] == "FINETUNE_PLANNER=off"
    (tmp_path / RESULT_FILE).write_text('{"plan": {"fits": true}, "why": null, "changes": []}')
    with planner_process(None, tmp_path) as planner:
        assert planner.result()["plan"] == {"fits": True}
    assert (tmp_path / RESULT_FILE).exists(), "it is rank 0's to take away"


TRAINER = """
import sys, time
from pathlib import Path
import psutil
from finetune.training.planner_process import PlannerProcess, PlanRequest
PlannerProcess(Path(sys.argv[1])).start(PlanRequest("{}", (((7,),),), True, 1, 1, "cpu", 1))
print(psutil.Process().children()[0].pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_no_planner_outlives_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed as the kernel kills, when memory is short."""
    monkeypatch.setenv(PLANNER_SWITCH, "on")
    with subprocess.Popen([sys.executable, "-c", TRAINER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        planner = psutil.Process(int(run.stdout.readline()))
        try:
            end = time.monotonic() + 60
            while os.sched_getscheduler(planner.pid) != os.SCHED_IDLE:  # it has begun, and asked the kernel for its end
                assert time.monotonic() < end
                time.sleep(0.01)
        finally:
            run.kill()
    psutil.wait_procs([planner], timeout=20)
    assert not planner.is_running() or planner.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"lora": None, "data": {"packing": False}, "training": {"activation_checkpointing": False}},
        {"training": {"mixed_precision": "bf16", "per_device_batch_size": 4}},
    ],
    ids=["lora", "full, padded", "bf16"],
)
def test_the_plan_is_the_run_to_the_byte(
    changed: dict[str, Any], write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLANNER_SWITCH, "wait")
    if "data" in changed:
        changed["data"]["train"] = json.loads(write().read_text())["data"]["train"]
    recipe = write(**changed)
    assert main([str(recipe)]) == 0
    memory = receipt(recipe)["memory"]
    assert memory["why"] is None
    assert set(memory["measured"]["phases"]) == {"load", "forward", "backward", "step"}
    for name in ("forward", "backward", "step"):
        there, here = memory["measured"]["phases"][name], memory["planned"]["phases"][name]
        assert (here["peak_bytes"], here["end_bytes"]) == (there["peak_bytes"], there["end_bytes"]), name
    process = memory["measured"]["process_peak_bytes"] / 2**30
    assert describe_memory(memory).startswith("memory: tensors ")
    assert describe_memory(memory).endswith(f"(+0.00%); the process {process:.3f}")
    assert not (recipe.parent / "run" / RESULT_FILE).exists()
