"""A run's memory: the receipt's section, and the error when memory runs out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from finetune.launch.launcher import continue_command
from finetune.launch.plan_request import PlanRequest, ask_once, ask_planner
from finetune.measure.phases import Phase, Phases, memory_of, peak_bytes, peak_reserved
from finetune.strategies.machine import device_of
from finetune.training.agreement import Agreed
from finetune.training.watchdog import Progress
from finetune.training.worst_step import longest_groups, micro_steps_to_try
from finetune.wording import GIB, PHASES, recomputation_in_words

PLANNER_TIMEOUT = 60  # seconds that a run out of memory waits for the planner


def plan_request(agreed: Agreed) -> PlanRequest:
    """Rank 0's share of the worst step, on this rank's device."""
    launch, rows = agreed.launch, agreed.prepared.train
    of_rank_0 = longest_groups(rows, agreed.plan)[:: agreed.plan.world_size]
    device = device_of(launch)
    return PlanRequest(
        recipe=agreed.recipe.model_dump(mode="json"),
        documents=tuple(tuple(len(ids) for row in group for ids, _ in rows.documents(row)) for group in of_rank_0),
        micro_batches=micro_steps_to_try(agreed.plan),
        flat=agreed.plan.flat,
        nodes=launch.nodes,
        ranks_of_node=launch.local_world_size,
        device="cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        memory=memory_of(device).total,
        width=agreed.plan.width,
        keeps_gradients=agreed.strategy.keeps_gradients,
    )


def memory_facts(request: PlanRequest, phases: Mapping[str, Phase], device: torch.device) -> dict[str, Any]:
    """The receipt's `memory`: the worst step, as the planner needs it, and rank 0's measurements; all in bytes.

    On CUDA, allocated bytes are measured by phase; on a CPU all tensors' bytes. A CPU's process peak is its resident
    set, with the libraries that no plan covers.
    """
    on_gpu = device.type == "cuda"
    measured = {name: phase for name, phase in phases.items() if name in PHASES}
    return {
        "worst_step": request.facts(),
        "measured": {
            "by": "CUDA's allocator" if on_gpu else "live tensors",
            "phases": {
                name: {"peak_bytes": phase.peak_bytes, "end_bytes": phase.allocated_bytes}
                for name, phase in measured.items()
            },
            "process_peak_bytes": peak_bytes(device),
            "reserved_bytes": peak_reserved(device) if on_gpu else None,
            # CUDA's context, NCCL and other programs: of which a plan counts the first two.
            "outside_bytes": memory_of(device).others if on_gpu else None,
        },
    }


def describe_memory(facts: Mapping[str, Any]) -> str:
    """One line: the phase with the largest tensors' peak, and the process's own peak."""
    phases = facts["measured"]["phases"]
    name = max(phases, key=lambda phase: phases[phase]["peak_bytes"])
    reserved, process = facts["measured"]["reserved_bytes"], facts["measured"]["process_peak_bytes"]
    whole = f"the process {process / GIB:.3f}" if reserved is None else f"CUDA's allocator {reserved / GIB:.3f}"
    return f"memory: tensors {phases[name]['peak_bytes'] / GIB:.3f} GiB at the peak of {name}, {whole}"


@contextmanager
def out_of_memory_explained(agreed: Agreed, progress: Progress, phases: Phases) -> Iterator[PlanRequest]:
    """Put this around a training. A failed allocation becomes DoesNotFit, with plan, measurement and changes that would
    take less.

    Yields the request, which the receipt has too. A failure asks the planner, which may take a minute. This rank's
    heartbeat continues meanwhile.
    """
    from finetune.measure.out_of_memory import does_not_fit, is_out_of_memory

    request = plan_request(agreed)  # this and the import before memory is short
    try:
        yield request
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        if agreed.recomputation and phases.current != "load":
            runs = recomputation_in_words(agreed.recomputation["runs"])
            error.add_note(f"training.activation_checkpointing: auto chose {runs}")
        memory = memory_of(phases.device)
        if agreed.launch.world_size > 1:
            planned = ask_once(request, PLANNER_TIMEOUT, agreed.run_dir)
        else:
            planned = ask_planner(request, PLANNER_TIMEOUT, changes=True)
        raise does_not_fit(
            agreed.recipe,
            error,
            doing=progress.phase,
            phase=phases.current,
            memory=memory,
            planned=planned,
            command=continue_command(agreed.launch, resume=agreed.recipe.training.resume),
            step=progress.step,
        ) from error
