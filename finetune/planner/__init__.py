"""Will it fit, and how fast will it be? The trainer's own step, run on tensors without data.

    plan(recipe, gpus)                 one rank's memory by phase and component, by a trace
    plan_in_words, pick_in_words       the verb `finetune plan`: JSON and text
    plan_of_run(run), audited, audit   the plan for a finished run's worst step, and its error

Other packages import from here alone. This module imports nothing heavy: each part below is imported at first use.

May import: training and what is below it.
"""

from __future__ import annotations

import gc
import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.planner.arithmetic import NF4 as NF4
    from finetune.planner.command import PlanOptions as PlanOptions
    from finetune.planner.command import pick_in_words as pick_in_words
    from finetune.planner.command import plan_in_words as plan_in_words
    from finetune.planner.depth.fork import run_in_forks as run_in_forks
    from finetune.planner.plan_recipe import Plan as Plan
    from finetune.planner.plan_recipe import plan_recipe
    from finetune.planner.remedies import changed as changed
    from finetune.planner.roofline import CHIPS as CHIPS
    from finetune.planner.roofline import HOST_MEMORY as HOST_MEMORY
    from finetune.planner.roofline import PCIE_MACHINE as PCIE_MACHINE
    from finetune.planner.roofline import StepTime as StepTime
    from finetune.planner.roofline import compute_seconds as compute_seconds
    from finetune.planner.roofline import not_overlapped as not_overlapped
    from finetune.planner.roofline import step_time as step_time
    from finetune.planner.run_plans import audit as audit
    from finetune.planner.run_plans import audited as audited
    from finetune.planner.run_plans import plan_of_run as plan_of_run
    from finetune.planner.trace.fake_device import pretend_device as pretend_device
    from finetune.planner.trace.step_work import StepWork as StepWork
    from finetune.planner.trace.timeline import layer_of as layer_of
    from finetune.planner.trace.trace import STEPS as STEPS
    from finetune.planner.trace.worst_batches import worst_batches as worst_batches

    plan = plan_recipe

# The parts by module. Lectures and benchmarks use some of them by themselves.
_PARTS = {
    "arithmetic": "NF4",
    "command": "PlanOptions pick_in_words plan_in_words",
    "depth.fork": "run_in_forks",
    "plan_recipe": "Plan plan",
    "remedies": "changed",
    "roofline": "CHIPS HOST_MEMORY PCIE_MACHINE StepTime compute_seconds not_overlapped step_time",
    "run_plans": "audit audited plan_of_run",
    "trace.fake_device": "pretend_device",
    "trace.step_work": "StepWork",
    "trace.timeline": "layer_of",
    "trace.trace": "STEPS",
    "trace.worst_batches": "worst_batches",
}


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _PARTS.items() if name in names.split()), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with quick_imports():
        part = import_module(f"{__name__}.{module}")
    globals()[name] = getattr(part, "plan_recipe" if name == "plan" else name)
    return globals()[name]


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import without garbage collection, which would traverse a million permanent objects: one second in ten.

    Nothing is printed meanwhile: DeepSpeed, where it is installed, prints when Accelerate imports it.
    """
    gc.disable()
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        gc.freeze()
        gc.enable()
