"""Two gloo ranks, launched: the plan of the run, its bytes and its collectives, against what the run counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.files import read_lines
from finetune.planner import plan_of_run
from finetune.planner.plan_recipe import plan_recipe
from finetune.planner.trace.step_work import StepWork
from finetune.planner.trace.trace import STEPS, trace
from finetune.recipe.loader import load_recipe
from finetune.recipe.strategy import read_strategy
from tests.support.memory.planned import Case, models
from tests.support.models.tiny import save_tiny, write_chats
from tests.support.runs.cells import launch
from tests.support.runs.recipes import tiny, write_recipe

MICRO_STEPS = 2


def write_measured(folder: Path) -> Path:
    """A training of three bfloat16 steps that measures its phases."""
    model = save_tiny(folder / "model", num_hidden_layers=3)
    chats = write_chats(folder / "chats.jsonl", [90, 95, 100, 85] * 4)
    content: dict[str, Any] = {
        "lora": None,
        "data": {"max_length": 128},
        "training": {"global_batch_size": 2 * MICRO_STEPS, "max_steps": 3, "mixed_precision": "bf16"},
        "samples": {"count": 0},
        "measure_phases": True,
        "output_dir": str(folder / "run"),
    }
    return write_recipe(folder, tiny(model, chats, **content))


def counted(run: Path) -> dict[str, dict[str, tuple[int, int]]]:
    """Calls and bytes of the last step on rank 0, by phase and collective."""
    lines = [line for line in read_lines(run / "metrics.jsonl") if line["kind"] == "phase" and line["rank"] == 0]
    last = [line for line in lines if line["step"] == lines[-1]["step"] and line["phase"] in TIMES]
    assert len(last) == len(TIMES)
    return {
        line["phase"]: {name: (calls, line["bytes"][name]) for name, calls in line["collectives"].items()}
        for line in last
    }


TIMES = {"forward": MICRO_STEPS, "backward": MICRO_STEPS, "step": 1}


def sent(work: StepWork, times: dict[str, int]) -> dict[str, dict[str, tuple[int, int]]]:
    return {
        phase: {
            name: (times[phase] * each.calls, times[phase] * each.payload_bytes)
            for name, each in work.collectives.get(phase, {}).items()
        }
        for phase in times
    }


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "gatherings"), [("fsdp2", MICRO_STEPS), ("fsdp2_grad_op", 1)])
def test_weights_that_stay_gathered_are_gathered_once_a_step(strategy: str, gatherings: int, tmp_path: Path) -> None:
    """By counts of a traced run."""
    folder = models(tmp_path)
    case = Case("full", "bf16", 0, packed=True, tied=False, micro_steps=MICRO_STEPS)
    traced = trace(case.recipe(folder), read_strategy(strategy), case.batches(), ranks=2)
    units = 3 + 1 + 1 + 1  # layers, embeddings, head, and the last norm
    assert traced.measured["forward"].collectives["all_gather"].calls == STEPS * gatherings * units
    assert traced.measured["backward"].collectives["reduce_scatter"].calls == STEPS * MICRO_STEPS * units


PROGRAM = """
import sys
from tests.support.runs import cells
from tests.support.memory import planned
planned.let_go_at_once()
sys.exit(cells.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp2_grad_op", "ddp"])
def test_the_plan_is_the_run(strategy: str, tmp_path: Path) -> None:
    recipe = write_measured(tmp_path)
    words = [f"accelerate_config={strategy}"]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    assert launch([recipe], ranks=2, words=words, program=str(program), timeout=600) == [0]
    memory: dict[str, Any] = json.loads((tmp_path / "run" / "receipt.json").read_text("utf-8"))["memory"]
    plan, why = plan_of_run(tmp_path / "run")
    assert plan is not None, why
    if strategy.startswith("fsdp2"):  # the memory of the others is held to runs in test_planned_engines.py
        for name in ("forward", "backward", "step"):
            there, here = memory["measured"]["phases"][name], plan["phases"][name]
            assert (here["peak_bytes"], here["end_bytes"]) == (there["peak_bytes"], there["end_bytes"]), name
    work = plan_recipe(load_recipe(recipe, words).recipe, None, ranks=2).work
    assert work is not None
    once = {"ddp": {"backward": 1}, "fsdp2_grad_op": {"forward": 1}}
    times = TIMES | once.get(strategy, {})
    assert sent(work, times) == counted(tmp_path / "run")
