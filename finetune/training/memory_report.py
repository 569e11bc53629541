"""A run's memory, planned beside measured: question and receipt, and what is said when memory ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from finetune.launch.launcher import Launch
from finetune.measure.out_of_memory import does_not_fit, memory_of, of_memory
from finetune.measure.phases import GIB, Phase, Phases, peak_bytes
from finetune.recipe.schema import Recipe
from finetune.run_folder.watchdog import Progress
from finetune.tokens.mixture import Rows
from finetune.training.planner_process import PlannerProcess, PlanRequest
from finetune.training.run import BatchPlan
from finetune.training.worst_step import longest_rows, micro_steps_to_try

MEASURED = ("load", "forward", "backward", "step", "save")
PATIENCE = 60  # seconds for a planner that has not answered when the run ends


def question(recipe: Recipe, launch: Launch, plan: BatchPlan, rows: Rows) -> PlanRequest:
    """What rank 0 asks of the planner: its worst step, on its own device."""
    mine = longest_rows(rows, plan)[:: launch.world_size]
    documents = tuple(tuple(len(ids) for ids, _ in rows.documents(int(row))) for row in mine)
    on_cpu = launch.on_cpu or not torch.cuda.is_available()
    device = torch.device("cpu") if on_cpu else torch.device("cuda", launch.local_rank)
    return PlanRequest(
        recipe=recipe.model_dump_json(),
        documents=(documents,) * micro_steps_to_try(plan),
        flat=plan.flat,
        nodes=launch.nodes,
        ranks_of_node=launch.local_world_size,
        device="cpu" if on_cpu else torch.cuda.get_device_name(device),
        memory=memory_of(device).total,
    )


def memory_facts(answer: Mapping[str, Any], phases: Mapping[str, Phase], device: torch.device) -> dict[str, Any]:
    """The receipt's `memory`: the plan, or why there is none, beside what rank 0 measured; all in bytes.

    Measured by phase are CUDA's allocated bytes, on a CPU the bytes of all tensors. A process's peak on a CPU is its
    resident set, libraries and all, which no plan foretells.
    """
    on_gpu = device.type == "cuda"
    measured = {name: phase for name, phase in phases.items() if name in MEASURED}
    return {
        "planned": answer["plan"],
        "why": answer["why"],
        "measured": {
            "by": "CUDA's allocator" if on_gpu else "live tensors",
            "phases": {
                name: {"peak_bytes": phase.peak_bytes, "end_bytes": phase.allocated_bytes}
                for name, phase in measured.items()
            },
            "process_peak_bytes": peak_bytes(device),
            "reserved_bytes": torch.cuda.max_memory_reserved(device) if on_gpu else None,
        },
    }


def describe_memory(facts: Mapping[str, Any]) -> str:
    """The largest measured phase beside the plan of it, in one line."""
    phases = facts["measured"]["phases"]
    name, found = max(phases.items(), key=lambda entry: entry[1]["peak_bytes"])
    measured = f"memory: {found['peak_bytes'] / GIB:.3f} GiB at the peak of {name}"
    if facts["planned"] is None:
        return f"{measured}; not planned: {facts['why']}"
    planned = facts["planned"]["phases"][name]["peak_bytes"]
    return f"{measured}, planned {planned / GIB:.3f} ({planned / found['peak_bytes'] - 1:+.2%})"


@contextmanager
def memory_told(
    recipe: Recipe, device: torch.device, progress: Progress, phases: Phases, foretold: PlannerProcess, command: str
) -> Iterator[None]:
    """Around a training: an allocation that fails becomes DoesNotFit, with plan, measurement and what would take less.

    Where other ranks wait for this one, its watch goes on beating meanwhile.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not of_memory(error):
            raise
        memory = memory_of(device)
        answer = foretold.settled(wait_seconds=PATIENCE)
        raise does_not_fit(
            recipe,
            error,
            doing=progress.phase,
            phase=phases.current,
            memory=memory,
            foretold=answer,
            command=command,
            step=progress.step,
        ) from error
