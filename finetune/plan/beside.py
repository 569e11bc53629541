"""The planner beside a run, as a process of its own: `python -m finetune.plan.beside ANSWER`, the question on stdin.

See foretold.py, which asks. Whatever happens here becomes an answer, for no run may fail by its plan.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from finetune.durable import write_json
from finetune.errors import FinetuneError
from finetune.foretold import Question
from finetune.plan.gpus import Gpus
from finetune.recipe import Recipe
from finetune.signals import die_with_parent

if TYPE_CHECKING:
    from finetune.batches import MicroBatch
    from finetune.plan.job import Planned

LOWEST = 19  # priority: a run on a CPU needs its cores
TIGHT = 0.5  # of the memory there is: below it nobody asks what would take less


def main(argv: Sequence[str]) -> int:
    """Answer into the file named; 0, also where the answer is that there is no plan."""
    die_with_parent(signal.SIGKILL)
    os.nice(LOWEST)
    question = read_question(json.load(sys.stdin))
    file = Path(argv[0])
    plan, why, needed = planned(question)
    write_json(file, {"plan": plan, "why": why, "changes": None})
    if plan is not None:
        found = changes(question) if needed > TIGHT * question.memory else []
        write_json(file, {"plan": plan, "why": why, "changes": found})
    return 0


def read_question(told: Mapping[str, Any]) -> Question:
    """The question, from its JSON."""
    documents = tuple(tuple(tuple(row) for row in batch) for batch in told["documents"])
    return Question(**{**told, "documents": documents})


def planned(question: Question) -> tuple[dict[str, Any] | None, str | None, int]:
    """The plan's JSON, or why there is none, and the bytes it needs."""
    try:
        from finetune.plan.job import as_json

        found = plan_run(question)
    except FinetuneError as error:
        return None, str(error), 0
    except Exception as error:  # of any kind: a mistake of the planner is not the run's
        return None, f"the planner failed: {type(error).__name__}: {error}", 0
    return as_json(found), None, found.needed


def plan_run(question: Question) -> Planned:
    """Plan rank 0 of the run, on the batches of its worst step. Raises what `plan_recipe` raises."""
    from finetune.plan.job import plan_recipe

    recipe = Recipe.model_validate_json(question.recipe)
    batches = batches_of(question)
    if question.device == "cpu":
        ranks = question.nodes * question.ranks_of_node
        return plan_recipe(recipe, None, batches=batches, ranks=ranks, node=question.ranks_of_node)
    gpus = Gpus(question.ranks_of_node, question.memory, question.device, question.nodes)
    return plan_recipe(recipe, gpus, batches=batches)


def changes(question: Question) -> list[dict[str, Any]]:
    """What would fit, each planned again: `change` as key=value, `needed_bytes`."""
    from finetune.out_of_memory import smaller

    found = []
    for change in smaller(Recipe.model_validate_json(question.recipe)):
        plan, _, needed = planned(_changed(question, change))
        if plan is not None and needed <= question.memory:
            found.append({"change": change, "needed_bytes": needed})
    return found


def _changed(question: Question, change: str) -> Question:
    """The question for the recipe with one key changed, and for its rows cut or dealt out accordingly."""
    path, _, text = change.partition("=")
    recipe, value = json.loads(question.recipe), json.loads(text)
    *sections, key = path.split(".")
    inner = recipe
    for section in sections:
        inner = inner[section]
    inner[key] = value
    documents = question.documents
    if key == "per_device_batch_size":
        documents = tuple(batch[:value] for batch in documents)
    elif key == "max_length":
        documents = tuple(tuple(_cut(row, value) for row in batch) for batch in documents)
    return replace(question, recipe=json.dumps(recipe), documents=documents)


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


def batches_of(question: Question) -> list[MicroBatch]:
    """The run's own micro-batches but for what stands in them, each row learned whole."""
    from finetune.batches import Rows, micro_batches

    made = []
    for rows in question.documents:
        options: dict[str, Any] = {"rank": 0, "world_size": 1, "per_device_batch_size": len(rows)}
        known = cast(Rows, _Lengths(rows))
        made += micro_batches(known, range(len(rows)), flat=question.flat, **options)
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
