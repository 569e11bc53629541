"""Will it fit, and how fast will it be? The trainer's own step, run on tensors without data.

    plan(recipe, gpus)            one rank's memory by phase and component, by a trace
    pick(model, gpus, note)       the best recipe for a model on these GPUs, and its plan
    explain(recipe, gpus)         a plan's arithmetic, in the recipe's own figures
    plan_of_run(run)              the plan for a finished run's worst step
    audit(runs, note)             those plans against the runs' measurements

    plan_in_words, pick_in_words  the verb `finetune plan`: JSON and text

Other packages import from here alone. This module imports nothing heavy: its functions do, when they are called.

May import: training and what is below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.planner.arithmetic import NF4 as NF4
    from finetune.planner.command import PlanOptions as PlanOptions
    from finetune.planner.depth.fork import run_in_forks as run_in_forks
    from finetune.planner.plan_recipe import Plan as Plan
    from finetune.planner.remedies import changed as changed
    from finetune.planner.roofline import CHIPS as CHIPS
    from finetune.planner.roofline import HOST_MEMORY as HOST_MEMORY
    from finetune.planner.roofline import PCIE_MACHINE as PCIE_MACHINE
    from finetune.planner.roofline import StepTime as StepTime
    from finetune.planner.roofline import compute_seconds as compute_seconds
    from finetune.planner.roofline import not_overlapped as not_overlapped
    from finetune.planner.roofline import step_time as step_time
    from finetune.planner.run_plans import AuditRow as AuditRow
    from finetune.planner.trace.fake_device import pretend_device as pretend_device
    from finetune.planner.trace.step_work import StepWork as StepWork
    from finetune.planner.trace.timeline import layer_of as layer_of
    from finetune.planner.trace.trace import STEPS as STEPS
    from finetune.planner.trace.worst_batches import worst_batches as worst_batches
    from finetune.recipe.gpus import Gpus
    from finetune.recipe.schema import Recipe
    from finetune.tokens.batches import MicroBatch

# Parts of the planner that lectures and benchmarks use by themselves, by module. Imported at first use.
_PARTS = {
    "NF4": "arithmetic",
    "PlanOptions": "command",
    "run_in_forks": "depth.fork",
    "Plan": "plan_recipe",
    "changed": "remedies",
    "CHIPS": "roofline",
    "HOST_MEMORY": "roofline",
    "PCIE_MACHINE": "roofline",
    "StepTime": "roofline",
    "compute_seconds": "roofline",
    "not_overlapped": "roofline",
    "step_time": "roofline",
    "AuditRow": "run_plans",
    "pretend_device": "trace.fake_device",
    "StepWork": "trace.step_work",
    "layer_of": "trace.timeline",
    "STEPS": "trace.trace",
    "worst_batches": "trace.worst_batches",
}
PLAN_OF_RUN_SECONDS = 600  # a plan of the largest recipes takes about two minutes


def __getattr__(name: str) -> Any:
    if name not in _PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PARTS[name]}"), name)


def plan(
    recipe: Recipe,
    gpus: Gpus | None,
    *,
    batches: Sequence[MicroBatch] | None = None,
    ranks: int | None = None,
    must_fit: bool = False,
) -> Plan:
    """Plan one rank by a trace; in a pipeline the stage that needs most. It takes seconds.

    Args:
        gpus: None for a CPU.
        batches: One step's micro-batches, by default the largest that the recipe allows.
        ranks: Processes on a CPU, by default one.
        must_fit: Raise DoesNotFit as soon as it is certain, after about half the time.

    Raises FinetuneError: the trainer would refuse the recipe, or a library fails on tensors without data.
    """
    from finetune.planner.command import plan_by_trace

    return plan_by_trace(recipe, gpus, batches=batches, ranks=ranks, must_fit=must_fit)


def pick(model: str, gpus: Gpus, note: Callable[[str], None] = lambda line: None) -> tuple[Recipe, Plan]:
    """The best recipe for a model on these GPUs, and its plan. Raises DoesNotFit if no variant fits.

    Args:
        note: Receives one line for each variant that was planned; a plan takes seconds.
    """
    from finetune.planner.candidates import for_model
    from finetune.planner.command import pick_recipe

    return pick_recipe(for_model(model), gpus, note)


def explain(recipe: Recipe, gpus: Gpus | None) -> str:
    """Paragraphs in the recipe's figures: bytes per weight, optimizer state, sharding, recomputation, loss."""
    from finetune.model.known_configs import planned_config
    from finetune.planner.arithmetic import explain_plan

    return explain_plan(recipe, planned_config(recipe.model.name_or_path, recipe.model.revision)[0], gpus)


def plan_of_run(
    run: Path, note: Callable[[str], None] = lambda line: None, timeout: float = PLAN_OF_RUN_SECONDS
) -> tuple[Mapping[str, Any] | None, str | None]:
    """A run's plan as JSON, or None and the reason. The first call stores the plan in the run's folder.

    Never raises for a plan that cannot be made.

    Args:
        note: Receives one line before a plan is made, because that takes seconds to minutes.
        timeout: Seconds to wait for a new plan.
    """
    from finetune.planner import run_plans

    return run_plans.plan_of_run(run, note, timeout)


def audited(run: Path, receipt: Mapping[str, Any], plan: Mapping[str, Any]) -> Iterator[AuditRow]:
    """One row for each phase that was both planned and measured, from a run's folder, its receipt and its plan."""
    from finetune.planner import run_plans

    return run_plans.audited(run, receipt, plan)


def audit(runs: Sequence[Path], note: Callable[[str], None]) -> tuple[dict[str, Any], str]:
    """`finetune plan --audit`: the table of planned and measured bytes, as JSON and as text.

    Raises FinetuneError for a folder that is not a run.
    """
    from finetune.planner.run_plans import audit_in_words

    return audit_in_words(runs, note)


def plan_in_words(
    words: Sequence[str], options: PlanOptions, model: str | None, note: Callable[[str], None]
) -> tuple[dict[str, Any], str]:
    """`finetune plan WORDS`: JSON, in which `ok` says whether the recipe fits, and text.

    Words with `=` are overrides, the others recipe files. Several recipes are compared. Without a recipe, LoRA on
    `model` is planned. Raises FinetuneError.
    """
    from finetune.planner import command

    return command.plan_in_words(words, options, model, note)


def pick_in_words(
    words: Sequence[str], model: str | None, options: PlanOptions, file: Path | None, note: Callable[[str], None]
) -> tuple[dict[str, Any], str]:
    """`finetune plan --pick`: `pick` as JSON and as text, written to `file` if one is named. Raises FinetuneError.

    `words` may name a recipe, with overrides: its model, data and settings are kept.
    """
    from finetune.planner import command

    return command.pick_in_words(words, model, options, file, note)
