"""A finished run is planned from its own folder; the plan is held against what the run measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune.cli.main import main as cli
from finetune.launch.plan_request import PlanRequest
from finetune.planner import plan_of_run
from finetune.planner.run_plans import (
    PLAN_FILE,
    batches_of,
    fitting_changes,
    planned,
    request_for,
    request_of_run,
)
from finetune.recipe.schema import Recipe
from finetune.train import main
from finetune.training.memory_report import describe_memory
from tests.support.models.tiny import write_chats
from tests.support.runs.recipes import merged, tiny, write_recipe

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
    recipe={}, documents=((7, 5), (9,)), micro_batches=1, flat=True, nodes=1, ranks_of_node=1, device="cpu",
    memory=2**30,
)  # fmt: skip


def test_batches_are_the_runs_own_but_for_what_stands_in_them(write: Write) -> None:
    asks = replace(REQUEST, recipe=json.loads(write().read_text()))
    (flat,) = batches_of(asks)
    assert flat["document_lengths"] == (7, 5, 9)
    assert flat["position_ids"].tolist() == [[*range(7), *range(5), *range(9)]]
    (padded,) = batches_of(replace(asks, flat=False))
    assert padded["input_ids"].shape == (2, 12)
    assert "cu_seq_lens" not in padded
    assert len(batches_of(replace(asks, micro_batches=3))) == 3


def test_another_recipe_has_the_runs_rows_as_it_deals_and_cuts_them(write: Write) -> None:
    recipe = Recipe.model_validate_json(write().read_text())
    assert request_for(REQUEST, recipe).documents == REQUEST.documents
    shorter = recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_length": 10})})
    assert request_for(REQUEST, shorter).documents == ((7, 3), (9,))
    fewer = recipe.training.model_copy(update={"per_device_batch_size": 1})
    assert request_for(REQUEST, recipe.model_copy(update={"training": fewer})).documents == ((7, 5),)


@pytest.mark.slow
def test_changes_are_planned_again(write: Write) -> None:
    recipe = json.loads(write(training={"per_device_batch_size": 2}).read_text())
    asks = replace(REQUEST, recipe=recipe, documents=((100,), (90,)), memory=2**40)
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


# ---- folders of runs that were never trained


def write_run(write: Write, worst_step: dict[str, Any] | None, **more: Any) -> Path:
    run = write().parent / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text((run.parent / "recipe.yaml").read_text())
    phases = {name: {"peak_bytes": 100, "end_bytes": 50} for name in ("forward", "backward", "step")}
    memory = {"worst_step": worst_step, "measured": {"phases": phases}}
    facts = {"strategy": "single", "world_size": 1, **({"memory": memory} if worst_step else {}), **more}
    (run / "receipt.json").write_text(json.dumps(facts))
    return run


def test_a_plan_is_made_once_for_a_receipt(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[PlanRequest] = []

    def ask(request: PlanRequest, timeout: float) -> dict[str, Any]:
        asked.append(request)
        return {"plan": {"number": len(asked)}, "why": None, "changes": None}

    monkeypatch.setattr("finetune.planner.run_plans.ask_planner", ask)
    run, notes = write_run(write, REQUEST.facts()), list[str]()
    assert plan_of_run(run, notes.append) == plan_of_run(run, notes.append) == ({"number": 1}, None)
    assert len(notes) == 1
    assert "planning its memory" in notes[0]
    assert asked[0].documents == REQUEST.documents
    (run / PLAN_FILE).write_text("{")
    assert plan_of_run(run) == ({"number": 2}, None), "a damaged file is made again"
    receipt = json.loads((run / "receipt.json").read_text())
    receipt["memory"]["worst_step"]["documents"] = [[5]]
    (run / "receipt.json").write_text(json.dumps(receipt))
    assert plan_of_run(run) == ({"number": 3}, None), "another receipt"
    (run / PLAN_FILE).unlink()
    (run / PLAN_FILE).mkdir()  # as little to be written as a folder of another user
    assert [plan_of_run(run), plan_of_run(run)] == [({"number": 4}, None), ({"number": 5}, None)]


def test_recomputation_is_what_ran(write: Write) -> None:
    run = write_run(write, REQUEST.facts(), recomputation={"runs": "selective"})
    request = request_of_run(run, json.loads((run / "receipt.json").read_text()))
    assert request.recipe["training"]["activation_checkpointing"] == "selective"


@pytest.mark.parametrize(
    "changes",
    [
        {"documents": [[10**9]]},
        {"documents": [[7]] * 3},
        {"documents": [[-7]]},
        {"documents": 7},
        {"micro_batches": 10**9},
        {"nodes": True},
        {"width": 10**9},
        {"more": 1},
    ],
    ids=str,
)
def test_a_receipt_that_no_run_wrote_is_the_reason(changes: dict[str, Any], write: Write) -> None:
    plan, why = plan_of_run(write_run(write, REQUEST.facts() | changes))
    assert plan is None
    assert str(why).startswith("its files are not those of a run: ")


def test_a_report_without_a_plan_says_why(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(write, None)
    (run / "metrics.jsonl").write_text("")
    assert cli(["report", str(run)]) == 0
    assert f"{run}: not planned: its receipt has no memory section" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"lora": None, "data": {"packing": False}, "training": {"activation_checkpointing": False}},
        {"training": {"mixed_precision": "bf16", "per_device_batch_size": 4}},
        {"lora": None, "training": {"per_device_batch_size": "auto", "global_batch_size": 4}},
    ],
    ids=["lora", "full, padded", "bf16", "rows by auto"],
)
def test_the_plan_is_the_run_to_the_byte(
    changed: dict[str, Any], write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    if "data" in changed:
        changed["data"]["train"] = json.loads(write().read_text())["data"]["train"]
    recipe = write(**changed)
    assert main([str(recipe)]) == 0
    run, memory = recipe.parent / "run", receipt(recipe)["memory"]
    assert not (run / PLAN_FILE).exists(), "a run itself plans nothing"
    assert set(memory["measured"]["phases"]) == {"load", "forward", "backward", "step"}
    process = memory["measured"]["process_peak_bytes"] / 2**30
    assert describe_memory(memory).endswith(f", the process {process:.3f}")
    capsys.readouterr()
    assert cli(["plan", "--audit", str(run), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["worst_error"] == 0.0
    plan = json.loads((run / PLAN_FILE).read_text())["plan"]
    assert plan["held_bytes"] == receipt(recipe)["worst_step_first"]["held_bytes"] > 0
    assert receipt(recipe)["rows"].get("runs") == (4 if "auto" in str(changed) else None)
    for name in ("forward", "backward", "step"):
        ran, expected = memory["measured"]["phases"][name], plan["phases"][name]
        assert (expected["peak_bytes"], expected["end_bytes"]) == (ran["peak_bytes"], ran["end_bytes"]), name
    assert cli(["report", str(run)]) == 0
    said = capsys.readouterr()
    assert "planning" not in said.err, "it was stored"
    assert ">planned<" in (run / "report.html").read_text("utf-8")
