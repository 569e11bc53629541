"""Out of memory: the error names what ran, the plan, the measurement, and changes that would take less.

A run that is out of memory has written nothing since: its checkpoints are intact.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from finetune.errors import DoesNotFit
from finetune.measure.phases import Memory
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import strategy_of
from finetune.wording import GIB

# The messages of allocators that raise plain RuntimeErrors: the host's, cuBLAS's, NCCL's.
_WORDS = re.compile(r"out of memory|DefaultCPUAllocator|ALLOC_FAILED|Cannot allocate memory|Failed to CUDA (m|c)alloc")
_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|[KMG]iB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SHOWN_CHANGES = 3  # changes named in the message


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this error is an allocation that failed, on a GPU or in host memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and bool(_WORDS.search(str(error)))


def requested_bytes(error: BaseException) -> int | None:
    """Bytes of the allocation that failed; None where the error does not state them."""
    match = _REQUESTED.search(str(error))
    if match:
        return int(float(match[1]) * _UNITS[match[2]])
    return None


def does_not_fit(
    recipe: Recipe,
    error: BaseException,
    *,
    doing: str,
    phase: str,
    memory: Memory,
    planned: Mapping[str, Any],
    command: str,
    step: int,
) -> DoesNotFit:
    """The error that ends the run.

    Args:
        doing: The run's phase: load, worst step first, training, ...
        phase: The step's phase: forward, backward, step; empty outside a step.
        planned: The planner's answer (launch/plan_request.py).
        command: The command that continues the run after `step`.
    """
    notes = ", ".join(getattr(error, "__notes__", ()))
    requested = requested_bytes(error)
    more = f", {requested / GIB:.2f} GiB more requested" if requested else ""
    where = f" in {phase}" if phase else ""
    lines = [
        f"{doing}: out of memory{where}{notes and f', {notes}'}: {memory.taken / GIB:.2f} of {memory.total / GIB:.1f} "
        f"GiB taken{more}; {remedy(recipe, planned)}",
        f"  {_planned(planned, phase)}; measured: {memory.peak / GIB:.2f} GiB at the peak",
        *_others(memory),
        f"  {'nothing is lost: ' if step else ''}the run is at step {step}; after the change: {command}",
    ]
    return DoesNotFit("\n".join(lines))


def remedy(recipe: Recipe, planned: Mapping[str, Any]) -> str:
    """Changes that take less: those that fit by plan with their planned bytes, else general advice."""
    changes = planned.get("changes") or ()
    if changes:
        named = [f"{change['change']} ({change['needed_bytes'] / GIB:.2f} GiB)" for change in changes[:SHOWN_CHANGES]]
        return f"fits by plan: {', or '.join(named)}"
    return f"try {', or '.join([*smaller(recipe), 'a strategy that shards more'])}"


def smaller(recipe: Recipe) -> Iterator[str]:
    """Changes that take less as key=value, the cheapest first; all but the last leave the loss curve as it is."""
    training = recipe.training
    if training.rows_at_once > 1:
        yield f"training.per_device_batch_size={training.rows_at_once // 2}"
    if training.recompute_every != 1 or training.keeps_products:
        yield "training.activation_checkpointing=true"
    elif not training.activation_offloading and strategy_of(recipe).schedule is None:
        yield "training.activation_offloading=true"
    yield f"data.max_length={recipe.data.max_length // 2}"


def _planned(planned: Mapping[str, Any], phase: str) -> str:
    """The planned peak in this phase, or in the largest phase, with its largest component."""
    plan = planned.get("plan")
    if not plan:
        return f"not planned: {planned.get('why')}"
    name = phase if phase in plan["phases"] else plan["peak"]["phase"]
    peak = plan["phases"][name]
    component, most = max(peak["parts"].items(), key=lambda part: part[1])
    outside_allocator = sum(plan["outside_bytes"].values())
    place = f", in {peak['module']}" if peak["module"] else ""
    needed = (peak["peak_bytes"] + outside_allocator) / GIB
    return f"planned: {needed:.2f} GiB at the peak of {name}{place}, most of it {component}, {most / GIB:.2f} GiB"


def _others(memory: Memory) -> Sequence[str]:
    if memory.others < 0.02 * memory.total:  # a context and what the driver keeps
        return ()
    return (f"  {memory.others / GIB:.1f} GiB of this GPU are used by other processes; nvidia-smi lists them",)
