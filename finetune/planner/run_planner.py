"""The process that plans a run while it trains: `python -m finetune.planner.run_planner ANSWER`, the request on stdin.

training/planner_process.py starts it. A failure here is written as the answer: no run may fail because of its plan.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import FinetuneError
from finetune.files import write_json
from finetune.launch.with_parent import die_with_parent
from finetune.model.known_configs import planned_config
from finetune.recipe.gpus import Gpus
from finetune.recipe.schema import Recipe
from finetune.training.planner_process import PLANNER_SWITCH, PlanRequest

if TYPE_CHECKING:
    from finetune.planner.plan_recipe import Planned
    from finetune.tokens.batches import MicroBatch

TIGHT_SHARE = 0.5  # of the memory; below it no smaller changes are planned


def main(argv: Sequence[str]) -> int:
    """Write the answer into the file named; return 0, also where the answer is that there is no plan."""
    die_with_parent(signal.SIGKILL)
    if os.environ.get(PLANNER_SWITCH) != "wait":
        # A run on a CPU needs its cores, and its threads wait for each other at every operator: at priority 19 the
        # planner still has a core for milliseconds at a time, and steps took twice as long.
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    request = read_request(json.load(sys.stdin))
    file = Path(argv[0])
    plan, why, needed = planned(request)
    write_json(file, {"plan": plan, "why": why, "changes": None})
    if plan is not None:
        result = fitting_changes(request) if needed > TIGHT_SHARE * request.memory else []
        write_json(file, {"plan": plan, "why": why, "changes": result})
    return 0


def read_request(facts: Mapping[str, Any]) -> PlanRequest:
    """The request, from its JSON."""
    documents = tuple(tuple(tuple(row) for row in batch) for batch in facts["documents"])
    return PlanRequest(**{**facts, "documents": documents})


def planned(request: PlanRequest) -> tuple[dict[str, Any] | None, str | None, int]:
    """The plan's JSON, or why there is none, and the bytes it needs."""
    try:
        from finetune.planner.memory_table import plan_json

        result = plan_run(request)
    except FinetuneError as error:
        return None, str(error), 0
    except Exception as error:  # of any kind: the planner's bug must not fail the run
        return None, f"the planner failed: {type(error).__name__}: {error}", 0
    return plan_json(result), None, result.needed


def plan_run(request: PlanRequest) -> Planned:
    """Plan rank 0 of the run, on the batches of its worst step. Raises what `plan_recipe` raises."""
    from finetune.planner.plan_recipe import plan_recipe
    from finetune.recipe.strategy import strategy_of

    recipe = Recipe.model_validate_json(request.recipe)
    batches, stage = batches_of(request), 0 if strategy_of(recipe).schedule else None
    if request.device == "cpu":
        ranks = request.nodes * request.ranks_of_node
        return plan_recipe(recipe, None, batches=batches, ranks=ranks, node=request.ranks_of_node, stage=stage)
    return plan_recipe(recipe, gpus_of_run(request), batches=batches, stage=stage)


def gpus_of_run(request: PlanRequest) -> Gpus:
    """The run's own GPUs, by their driver's name and size."""
    return Gpus(request.ranks_of_node, request.memory, request.device, request.nodes)


def fitting_changes(request: PlanRequest) -> list[dict[str, Any]]:
    """Changes that fit, each planned on the run's own rows: `change` as key=value, `needed_bytes`."""
    recipe = Recipe.model_validate_json(request.recipe)
    if request.device != "cpu":
        from finetune.planner.remedies import remedies

        def plan(another: Recipe, _: Gpus) -> Planned:
            return plan_run(request_for(request, another))

        config, _source = planned_config(recipe.model.name_or_path, recipe.model.revision)
        return [result.as_json() for result in remedies(recipe, config, gpus_of_run(request), plan)]
    from finetune.measure.out_of_memory import smaller
    from finetune.planner.variants import changed

    fitting = []
    for change in smaller(recipe):
        key, _, value = change.partition("=")
        plan_there, _, nbytes = planned(request_for(request, changed(recipe, {key: json.loads(value)})))
        if plan_there is not None and nbytes <= request.memory:
            fitting.append({"change": change, "needed_bytes": nbytes})
    return fitting


def request_for(request: PlanRequest, recipe: Recipe) -> PlanRequest:
    """The request for another recipe, with the run's rows batched and truncated as it says."""
    rows, length = recipe.training.per_device_batch_size, recipe.data.max_length
    documents = tuple(tuple(_truncated(row, length) for row in batch[:rows]) for batch in request.documents)
    width = None if request.width is None else min(request.width, rows * length)
    return replace(request, recipe=recipe.model_dump_json(), documents=documents, width=width)


def _truncated(row: tuple[int, ...], length: int) -> tuple[int, ...]:
    """The first `length` tokens of a row of documents."""
    starts = [sum(row[:index]) for index in range(len(row))]
    return tuple(min(each, length - start) for each, start in zip(row, starts, strict=True) if start < length)


@dataclass(frozen=True)
class _RowLengths:
    """Rows, by their documents' lengths alone."""

    documents_of: tuple[tuple[int, ...], ...]

    def documents(self, row: int) -> list[tuple[Any, Any]]:
        import numpy as np

        return [(np.full(length, 3), np.full(length, 3)) for length in self.documents_of[row]]


def batches_of(request: PlanRequest) -> list[MicroBatch]:
    """The micro-batches of the run's worst step, with other tokens."""
    from finetune.tokens.batches import micro_batches

    batches = []
    for rows in request.documents:
        options: dict[str, Any] = {"rank": 0, "world_size": 1, "per_device_batch_size": len(rows)}
        options |= {"flat": request.flat, "width": request.width}
        batches += micro_batches(_RowLengths(rows), range(len(rows)), **options)
    return batches


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
