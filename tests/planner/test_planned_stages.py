"""The stages of a pipeline: planned equals tracked on every gloo rank, to the byte; and what the plan says of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from finetune.cli.main import main
from finetune.planner import plan_recipe as plan_module
from finetune.planner.depth import trace_to_depth
from finetune.planner.memory_table import plan_json
from finetune.planner.plan_recipe import Plan, plan_recipe
from finetune.planner.roofline import roofline_json
from finetune.recipe.gpus import parse_gpus
from finetune.recipe.sections.pipelines import SCHEDULES
from tests.support.memory.planned import Case, differences, models, planned, tracked_on_each_rank
from tests.support.models.tiny import save_tiny
from tests.support.runs.recipes import least, least_recipe, write_recipe

LAYERS = 5  # three and two of them, or one to two
BACKWARD = "backward"  # the phase of forwards and backwards, which alternate


def case(method: str, precision: str, checkpointing: int | str, micro_steps: int, *, tied: bool) -> Case:
    return Case(method, precision, checkpointing, packed=True, tied=tied, micro_steps=micro_steps, one_width=True)


SAMPLE = [case("full", "bf16", 0, 3, tied=True), case("lora", "bf16", 1, 2, tied=False)]
# Accumulated or recomputed, in full or by adapters; one micro-batch; 1F1B orders as many as there are stages.
GRID = [
    case("full", "float32", 0, 5, tied=False),
    case("full", "bf16", 1, 4, tied=True),
    case("lora", "bf16", 0, 6, tied=True),
    case("lora", "pure_bf16", 1, 4, tied=False),
]

FOUR_BITS = case("qlora", "bf16", 1, 4, tied=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models(tmp_path_factory.mktemp("stages"), LAYERS)


ONE_RUN = [schedule for schedule in SCHEDULES if schedule != "interleaved_1f1b"]


def assert_planned_to_the_byte(some: list[Case], folder: Path, schedule: str, stages: int) -> None:
    found = {}
    for each, real in zip(some, tracked_on_each_rank(some, folder, schedule, stages), strict=True):
        for rank, there in enumerate(real):
            here = planned(each, folder, schedule, stages, rank=rank)
            # When they save, ranks tell each other in pickled bytes what they wrote.
            found[str(each), rank] = list(differences(here, there, ("load", "save"), list(there)))
            assert {BACKWARD, "step"} <= there.keys()
    assert len(found) == len(some) * stages
    assert {which: wrong for which, wrong in found.items() if wrong} == {}


@pytest.mark.slow
def test_two_stages_are_planned_to_the_byte(folder: Path) -> None:
    assert_planned_to_the_byte(SAMPLE, folder, "gpipe", 2)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "stages"), list(product(ONE_RUN, (2, 4))))
def test_every_stage_is_planned_to_the_byte(schedule: str, stages: int, folder: Path) -> None:
    """24 configurations, 72 stages."""
    assert_planned_to_the_byte(GRID, folder, schedule, stages)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), [("interleaved_1f1b", 2), ("1f1b_ddp2", 4)])
def test_runs_in_turn_and_pipelines_beside_each_other_are_planned_to_the_byte(
    strategy: str, ranks: int, folder: Path
) -> None:
    """10 configurations; two runs of layers on each of two stages, and two stages of each of two pipelines."""
    even = [replace(each, micro_steps=each.micro_steps - each.micro_steps % 2) for each in (*GRID, FOUR_BITS)]
    assert_planned_to_the_byte(even, folder, strategy, ranks)


@pytest.mark.slow
def test_a_plan_has_every_stage_and_is_the_largest(folder: Path) -> None:
    """Activations by schedule: GPipe keeps four micro-batches, 1F1B two and one, naive one."""
    sections: dict[str, Any] = {
        "data": {"max_length": 64},
        "training": {"global_batch_size": 4, "per_device_batch_size": 1, "activation_checkpointing": False},
    }
    kept = {}
    for schedule in ONE_RUN:
        recipe = least_recipe(folder / "untied", accelerate_config=schedule, lora=None, **sections)
        plan = plan_recipe(recipe, parse_gpus("2xRTX4090"))
        assert [each.stage for each in plan.stages] == [0, 1]
        assert [each.stage_layers for each in plan.stages] == [(range(3),), (range(3, 5),)]
        largest = max(plan.stages, key=lambda each: max(each.needed, each.upper))
        assert (plan.stage, plan.needed, plan.phases) == (largest.stage, largest.needed, largest.phases)
        kept[schedule] = plan.stages[0].phases[BACKWARD].peak.parts["activations"]
        assert plan.stages[0].phases[BACKWARD].peak.parts.get("logits and loss", 0) == 0
        assert plan.stages[1].phases[BACKWARD].peak.parts["logits and loss"] > 0
        facts, time = plan_json(plan), roofline_json(plan)["pipeline"]
        assert [each["layers"] for each in facts["stages"]] == [[0, 2], [3, 4]]
        alive = {"gpipe": [4, 4], "1f1b": [2, 1], "naive": [1, 1]}[schedule]
        assert [each["micro_batches_alive"] for each in facts["stages"]] == alive
        assert facts["needed_bytes"] == max(each["needed_bytes"] for each in facts["stages"])
        assert time["bubble_share_of_equal_stages"] == pytest.approx(0.5 if schedule == "naive" else 0.2)
        halves = zip(time["forward_seconds"], time["backward_seconds"], strict=True)
        busy = 4 * sum(forward + backward for forward, backward in halves)
        assert time["step_seconds"] > busy / (2 * (1 - time["bubble_share"])), "the update comes after it"
    assert kept["gpipe"] == pytest.approx(4 * kept["naive"], rel=0.15)
    assert kept["1f1b"] == pytest.approx(2 * kept["naive"], rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "gpus"), [("interleaved_1f1b", 2), ("1f1b_ddp2", 4)])
def test_a_plan_of_runs_in_turn_and_of_pipelines_beside_each_other(
    strategy: str, gpus: int, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight micro-batches: all of them in the one pipeline, half in each of two, whose gradients are added up after."""
    training = {"global_batch_size": 8, "per_device_batch_size": 1, "activation_checkpointing": False}
    content: dict[str, Any] = {"accelerate_config": strategy, "lora": None, "training": training}
    page = str(write_recipe(tmp_path, least(folder / "untied", data={"max_length": 64}, **content)))
    assert main(["plan", page, "--gpus", f"{gpus}xRTX4090", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    interleaved, time = strategy == "interleaved_1f1b", facts["pipeline"]
    assert [each["layers"] for each in facts["stages"]] == (
        [[[0, 0], [2, 3]], [[1, 1], [4, 4]]] if interleaved else [[0, 2], [3, 4]]
    )
    assert [each["micro_batches_alive"] for each in facts["stages"]] == ([5, 3] if interleaved else [2, 1])
    assert (time["schedule"], time["micro_batches"]) == (("interleaved_1f1b", 8) if interleaved else ("1f1b", 4))
    assert time["bubble_share_of_equal_stages"] == pytest.approx(1 / 17 if interleaved else 1 / 5)
    assert time["tokens_per_second"] == pytest.approx(8 * 64 / time["step_seconds"])
    summed = facts["communication"]["backward"].get("all_reduce", {"bytes": 0})["bytes"]
    held = facts["phases"]["step"]["parts"]["gradients"]
    assert summed == (0 if interleaved else held)
    assert main(["plan", page, "--gpus", f"{gpus}xRTX4090"]) == 0
    text = capsys.readouterr().out
    assert ("each stage is there 2 times, in as many pipelines" in text) != interleaved
    assert ("in either of its runs of layers" in text) == interleaved


@pytest.mark.slow
def test_of_a_deep_model_each_stage_has_its_layers_and_the_largest_is_the_plan(tmp_path: Path) -> None:
    """Seven layers are more than the five at most that are traced where layers repeat."""
    recipe = least_recipe(
        save_tiny(tmp_path, num_hidden_layers=7),
        accelerate_config="gpipe",
        lora=None,
        data={"max_length": 64},
        training={"global_batch_size": 2, "per_device_batch_size": 1},
    )
    plan = plan_recipe(recipe, None, ranks=2)
    assert [each.stage_layers for each in plan.stages] == [(range(4),), (range(4, 7),)]
    needed = [each.needed for each in plan.stages]
    assert plan.needed == needed[plan.stage or 0] == max(needed) > min(needed)


@pytest.mark.slow
def test_the_verb_prints_each_stage_and_the_bubble(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content: dict[str, Any] = {
        "accelerate_config": "gpipe",
        "lora": None,
        "data": {"max_length": 64},
        "training": {"global_batch_size": 4, "per_device_batch_size": 1},
    }
    page = str(write_recipe(tmp_path, least(folder / "untied", **content)))
    assert main(["plan", page, "--gpus", "2xRTX4090"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"stage [01] of 2, which needs most", text)
    assert "20.0% if every stage took as long" in text
    rows = [line.split() for line in text.splitlines() if re.match(r"[01] +\d to \d", line)]
    assert [[*row[:5], row[-1]] for row in rows] == [
        ["0", "0", "to", "2", "4", "yes"],
        ["1", "3", "to", "4", "4", "yes"],
    ]


def test_how_many_stages_there_are_has_to_be_said(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And 1F1B cannot order fewer micro-batches than stages: nothing is traced."""
    training = {"global_batch_size": 4, "per_device_batch_size": 1}
    page = str(write_recipe(tmp_path, least(folder / "untied", accelerate_config="1f1b", training=training)))
    assert main(["plan", page, "--gpus", "8xRTX4090"]) == 4
    assert "4 micro-batches a step are fewer than the 8 stages" in capsys.readouterr().err
    assert main(["plan", page]) == 4
    assert "accelerate_config: 1f1b: how many stages? add --gpus 2x24GB" in capsys.readouterr().err


@pytest.mark.slow
def test_a_stage_of_many_micro_batches_is_planned_from_few(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte, and with the same messages and operations, as the trace of all five."""
    training = {"global_batch_size": 5, "per_device_batch_size": 1, "activation_checkpointing": False}
    content: dict[str, Any] = {"accelerate_config": "naive", "lora": None, "training": training}
    recipe = least_recipe(folder / "untied", data={"max_length": 64}, **content)
    traced = note_few(monkeypatch)
    of_few = plan_recipe(recipe, None, ranks=2, stage=1)
    assert traced == [(3, 4, 5)]
    monkeypatch.setattr(trace_to_depth, "steps_alike", lambda *_: None)
    of_all = plan_recipe(recipe, None, ranks=2, stage=1)
    assert memory(of_few) == memory(of_all)
    assert of_few.work.collectives == of_all.work.collectives
    assert of_few.work.operations == pytest.approx(of_all.work.operations)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "gpus", "lora"),
    [("1f1b", 2, {"r": 4}), ("naive", 2, None), ("interleaved_1f1b", 2, None), ("1f1b_ddp2", 4, None)],
)
def test_a_step_of_many_micro_batches_is_planned_from_few(
    strategy: str, gpus: int, lora: dict[str, int] | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte, and with the same messages and operations, as the trace of all sixteen (eight in each of two
    pipelines). Adapters, which are cast once a step, are those of a thin model, and times not quite equal."""
    training = {"global_batch_size": 16, "per_device_batch_size": 1, "activation_checkpointing": False}
    content: dict[str, Any] = {"accelerate_config": strategy, "lora": lora, "training": training}
    recipe = least_recipe(folder / "untied", data={"max_length": 64}, **content)
    traced = note_few(monkeypatch)
    monkeypatch.setattr(plan_module, "run_in_forks", in_this_process)
    of_few = plan_recipe(recipe, parse_gpus(f"{gpus}xRTX4090"))
    assert len(traced) == 2
    assert all(more < count for _, more, count in traced)
    monkeypatch.setattr(trace_to_depth, "steps_alike", lambda *_: None)
    of_all = plan_recipe(recipe, parse_gpus(f"{gpus}xRTX4090"))
    for few, every in zip(of_few.stages, of_all.stages, strict=True):
        assert memory(few) == memory(every)
        assert few.host == every.host
        assert few.work.collectives == every.work.collectives
        assert few.reserved == pytest.approx(every.reserved, rel=0.02)
    time_of_few, time_of_all = (roofline_json(plan)["pipeline"] for plan in (of_few, of_all))
    assert time_of_few.pop("schedule") == time_of_all.pop("schedule")
    assert time_of_few.keys() == time_of_all.keys()
    for name, value in time_of_few.items():
        assert value == pytest.approx(time_of_all[name], rel=5e-3 if lora else 1e-6), name


def note_few(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """The two numbers of micro-batches that are traced from now on, and of how many."""
    noted, trace_few = list[tuple[int, int, int]](), trace_to_depth._of_few_micro_batches

    def traced(request: Any, place: Path, few: int, more: int) -> Any:
        noted.append((few, more, len(request.batches)))
        return trace_few(request, place, few, more)

    monkeypatch.setattr(trace_to_depth, "_of_few_micro_batches", traced)
    return noted


def memory(plan: Plan) -> dict[str, tuple[dict[str, int], int]]:
    return {name: (phase.peak.parts, phase.end_bytes) for name, phase in plan.phases.items()}


@contextmanager
def in_this_process(functions: Mapping[int, Callable[[], Any]]) -> Iterator[Callable[[int], Any]]:
    yield lambda name: functions[name]()
