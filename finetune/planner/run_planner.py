"""The process that plans a run while it trains: `python -m finetune.planner.run_planner ANSWER`, the request on stdin.

training/planner_process.py starts it. Whatever fails here becomes an answer: no run may fail because of its plan.
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
from finetune.launch.signals import die_with_parent
from finetune.model.known_configs import full_config
from finetune.recipe.gpus import Gpus
from finetune.recipe.schema import Recipe
from finetune.training.planner_process import PlanRequest

if TYPE_CHECKING:
    from finetune.planner.plan_recipe import Planned
    from finetune.tokens.batches import MicroBatch

LOWEST_PRIORITY = 19  # priority: a run on a CPU needs its cores
TIGHT = 0.5  # of the memory there is: below it nobody asks what would take less


def main(argv: Sequence[str]) -> int:
    """Answer into the file named; 0, also where the answer is that there is no plan."""
    die_with_parent(signal.SIGKILL)
    os.nice(LOWEST_PRIORITY)
    question = read_request(json.load(sys.stdin))
    file = Path(argv[0])
    plan, why, needed = planned(question)
    write_json(file, {"plan": plan, "why": why, "changes": None})
    if plan is not None:
        found = changes(question) if needed > TIGHT * question.memory else []
        write_json(file, {"plan": plan, "why": why, "changes": found})
    return 0


def read_request(told: Mapping[str, Any]) -> PlanRequest:
    """The question, from its JSON."""
    documents = tuple(tuple(tuple(row) for row in batch) for batch in told["documents"])
    return PlanRequest(**{**told, "documents": documents})


def planned(question: PlanRequest) -> tuple[dict[str, Any] | None, str | None, int]:
    """The plan's JSON, or why there is none, and the bytes it needs."""
    try:
        from finetune.planner.memory_table import plan_json

        found = plan_run(question)
    except FinetuneError as error:
        return None, str(error), 0
    except Exception as error:  # of any kind: a mistake of the planner is not the run's
        return None, f"the planner failed: {type(error).__name__}: {error}", 0
    return plan_json(found), None, found.needed


def plan_run(question: PlanRequest) -> Planned:
    """Plan rank 0 of the run, on the batches of its worst step. Raises what `plan_recipe` raises."""
    from finetune.planner.plan_recipe import plan_recipe

    recipe = Recipe.model_validate_json(question.recipe)
    batches = batches_of(question)
    if question.device == "cpu":
        ranks = question.nodes * question.ranks_of_node
        return plan_recipe(recipe, None, batches=batches, ranks=ranks, node=question.ranks_of_node)
    return plan_recipe(recipe, gpus_of_run(question), batches=batches)


def gpus_of_run(question: PlanRequest) -> Gpus:
    """The run's own GPUs, by their driver's name and size."""
    return Gpus(question.ranks_of_node, question.memory, question.device, question.nodes)


def changes(question: PlanRequest) -> list[dict[str, Any]]:
    """What would fit, each planned again on the run's own rows: `change` as key=value, `needed_bytes`."""
    recipe = Recipe.model_validate_json(question.recipe)
    if question.device != "cpu":
        from finetune.planner.remedies import remedies

        def plan(another: Recipe, _: Gpus) -> Planned:
            return plan_run(request_for(question, another))

        config, _source = full_config(recipe.model.name_or_path, recipe.model.revision)
        return [found.as_json() for found in remedies(recipe, config, gpus_of_run(question), plan)]
    from finetune.measure.out_of_memory import smaller
    from finetune.planner.variants import changed

    fitting = []
    for change in smaller(recipe):
        key, _, value = change.partition("=")
        plan_there, _, nbytes = planned(request_for(question, changed(recipe, {key: json.loads(value)})))
        if plan_there is not None and nbytes <= question.memory:
            fitting.append({"change": change, "needed_bytes": nbytes})
    return fitting


def request_for(question: PlanRequest, recipe: Recipe) -> PlanRequest:
    """The question for another recipe, the run's rows dealt out and cut as it has them."""
    rows, length = recipe.training.per_device_batch_size, recipe.data.max_length
    documents = tuple(tuple(_cut(row, length) for row in batch[:rows]) for batch in question.documents)
    return replace(question, recipe=recipe.model_dump_json(), documents=documents)


def _cut(row: tuple[int, ...], length: int) -> tuple[int, ...]:
    """The first `length` tokens of a row of documents."""
    starts = [sum(row[:index]) for index in range(len(row))]
    return tuple(min(each, length - start) for each, start in zip(row, starts, strict=True) if start < length)


@dataclass(frozen=True)
class _Lengths:
    """Rows of which only the lengths are known."""

    documents_of: tuple[tuple[int, ...], ...]

    def documents(self, row: int) -> list[tuple[Any, Any]]:
        import numpy as np

        return [(np.full(length, 3), np.full(length, 3)) for length in self.documents_of[row]]


def batches_of(question: PlanRequest) -> list[MicroBatch]:
    """The micro-batches of the run's worst step, but for what stands in them."""
    from finetune.tokens.batches import micro_batches

    made = []
    for rows in question.documents:
        options: dict[str, Any] = {"rank": 0, "world_size": 1, "per_device_batch_size": len(rows)}
        made += micro_batches(_Lengths(rows), range(len(rows)), flat=question.flat, **options)
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
