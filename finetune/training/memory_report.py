"""A run's memory, planned and measured: the request to the planner, the receipt's section, the out-of-memory error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from finetune.launch.launcher import continue_command
from finetune.measure.cuda_peaks import peak_reserved
from finetune.measure.out_of_memory import does_not_fit, is_out_of_memory, memory_of
from finetune.measure.phases import Phase, Phases, peak_bytes
from finetune.measure.units import GIB, PHASES
from finetune.run_folder.watchdog import Progress
from finetune.strategies.accelerator import device_of
from finetune.training.planner_process import PLANNER_TIMEOUT, PlannerProcess, PlanRequest
from finetune.training.start import Start
from finetune.training.worst_step import longest_rows, micro_steps_to_try
from finetune.wording import recomputation_in_words


def plan_request(start: Start) -> PlanRequest:
    """Rank 0's worst step, on its own device."""
    launch, rows = start.launch, start.prepared.train
    of_rank_0 = longest_rows(rows, start.plan)[:: start.plan.world_size]
    documents = tuple(tuple(len(ids) for ids, _ in rows.documents(int(row))) for row in of_rank_0)
    device = device_of(launch)
    return PlanRequest(
        recipe=start.recipe.model_dump_json(),
        documents=(documents,) * micro_steps_to_try(start.plan),
        flat=start.plan.flat,
        nodes=launch.nodes,
        ranks_of_node=launch.local_world_size,
        device="cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        memory=memory_of(device).total,
        width=start.plan.width,
    )


def memory_facts(planned: Mapping[str, Any], phases: Mapping[str, Phase], device: torch.device) -> dict[str, Any]:
    """The receipt's `memory`: the plan, or why there is none, and what rank 0 measured; all in bytes.

    `planned` is the planner's result. Measured by phase are CUDA's allocated bytes, on a CPU the bytes of all tensors.
    The process's peak on a CPU is its resident set, which includes the libraries that no plan covers.
    """
    on_gpu = device.type == "cuda"
    measured = {name: phase for name, phase in phases.items() if name in PHASES}
    return {
        "planned": planned["plan"],
        "why": planned["why"],
        "measured": {
            "by": "CUDA's allocator" if on_gpu else "live tensors",
            "phases": {
                name: {"peak_bytes": phase.peak_bytes, "end_bytes": phase.allocated_bytes}
                for name, phase in measured.items()
            },
            "process_peak_bytes": peak_bytes(device),
            "reserved_bytes": peak_reserved(device) if on_gpu else None,
        },
    }


def describe_memory(facts: Mapping[str, Any]) -> str:
    """The phase in which tensors took most and the plan for it, and the process's own peak, in one line."""
    phases = facts["measured"]["phases"]
    name = max(phases, key=lambda phase: phases[phase]["peak_bytes"])
    measured = phases[name]["peak_bytes"]
    line = f"memory: tensors {measured / GIB:.3f} GiB at the peak of {name}"
    reserved, process = facts["measured"]["reserved_bytes"], facts["measured"]["process_peak_bytes"]
    whole = f"the process {process / GIB:.3f}" if reserved is None else f"CUDA's allocator {reserved / GIB:.3f}"
    if facts["planned"] is None:
        return f"{line}, {whole}; not planned: {facts['why']}"
    planned = facts["planned"]["phases"][name]["peak_bytes"]
    return f"{line}, planned {planned / GIB:.3f} ({planned / measured - 1:+.2%}); {whole}"


@contextmanager
def out_of_memory_explained(
    start: Start, progress: Progress, phases: Phases, planner: PlannerProcess
) -> Iterator[None]:
    """Around a training: an allocation that fails becomes DoesNotFit, with plan, measurement and what would take less.

    It may wait a minute for the planner; this rank's heartbeat continues meanwhile.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        if start.recomputation and phases.current != "load":
            runs = recomputation_in_words(start.recomputation["runs"])
            error.add_note(f"training.activation_checkpointing: auto chose {runs}")
        memory = memory_of(phases.device)
        planned = planner.result(PLANNER_TIMEOUT, with_changes=True)
        raise does_not_fit(
            start.recipe,
            error,
            doing=progress.phase,
            phase=phases.current,
            memory=memory,
            planned=planned,
            command=continue_command(start.launch, resume=start.recipe.training.resume),
            step=progress.step,
        ) from error
