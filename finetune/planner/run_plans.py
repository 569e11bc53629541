"""The plan of a run, from the run's own recipe and the worst step that its receipt records.

    receipt.json: memory.worst_step  +  recipe.yaml   ->  PlanRequest  ->  `python -m finetune.planner`  ->  plan.json

`plan_of_run` is for the process of a user's command: it starts the child and stores the answer. The functions below it
run in the child; they import the planner's heavy parts themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import FinetuneError
from finetune.files import write_json
from finetune.model.known_configs import planned_config
from finetune.recipe.gpus import Gpus
from finetune.recipe.loader import recipe_from_resolved
from finetune.recipe.schema import Recipe
from finetune.run_folder.facts import MOST_RECORD_BYTES, require_run_folder
from finetune.training.plan_request import PlanRequest, ask_planner
from finetune.untrusted.json_files import read_object
from finetune.untrusted.library_words import words_of

if TYPE_CHECKING:
    from finetune.planner.plan_recipe import Plan
    from finetune.tokens.batches import MicroBatch


import statistics
from collections.abc import Iterator, Sequence
from functools import partial

from finetune.closed_form.constants import STEP_PHASES
from finetune.files import read_lines
from finetune.measure.units import GIB
from finetune.output_stream import one_line
from finetune.planner import PLAN_OF_RUN_SECONDS
from finetune.run_folder.facts import is_as_written
from finetune.untrusted.library_words import in_one_line
from finetune.wording import counted

PLAN_FILE = "plan.json"  # in the run's folder, beside the receipt
NO_MEMORY = "its receipt has no memory section: it ended before its worst step, or an older version wrote it"


def plan_of_run(run: Path, note: Callable[[str], None], timeout: float) -> tuple[Mapping[str, Any] | None, str | None]:
    """The JSON of the run's plan, or None and the reason. Plans once: the result is stored in the run's folder.

    A folder that cannot be written is planned every time. Never raises for a plan that cannot be made.

    Args:
        note: Told in one line that a plan is being made, because that takes seconds to minutes.
    """
    try:
        receipt = read_object(run / "receipt.json", MOST_RECORD_BYTES) if (run / "receipt.json").is_file() else {}
        memory = receipt.get("memory")
        if not memory:
            return None, NO_MEMORY
        if "worst_step" not in memory:  # an older version planned beside the run, into the receipt
            return memory.get("planned"), None if memory.get("planned") else str(memory.get("why"))
        request = request_of_run(run, receipt)
        made_for = hashlib.sha256(json.dumps(asdict(request), sort_keys=True).encode()).hexdigest()
        with suppress(FinetuneError):
            stored = read_object(run / PLAN_FILE, MOST_RECORD_BYTES) if (run / PLAN_FILE).is_file() else {}
            if stored.get("made_for") == made_for and isinstance(stored.get("plan"), dict):
                return stored["plan"], None
    except (FinetuneError, ValueError, TypeError, KeyError, AttributeError) as error:
        return None, f"its files are not those of a run: {words_of(error)}"
    note(f"{run}: planning its memory, to show it beside what was measured; this takes seconds, seldom a minute")
    answer = ask_planner(request, timeout)
    if answer["plan"] is not None:
        with suppress(FinetuneError, OSError):  # a folder that cannot be written
            write_json(run / PLAN_FILE, {"made_for": made_for, "plan": answer["plan"]})
    return answer["plan"], answer["why"]


def request_of_run(run: Path, receipt: Mapping[str, Any]) -> PlanRequest:
    """What the run's folder says of its worst step. Raises FinetuneError, ValueError, TypeError or KeyError."""
    recipe = recipe_from_resolved(require_run_folder(run))
    recomputation = receipt.get("recomputation") or {}
    if recomputation:  # the recipe says `auto`; the receipt says what that was
        recipe = _with_recomputation(recipe, recomputation["runs"])
    request = read_request({"recipe": recipe.model_dump(mode="json"), **receipt["memory"]["worst_step"]})
    # A receipt may be anybody's: no number in it may ask for more than its recipe could.
    rows, length = recipe.training.per_device_batch_size, recipe.data.max_length
    sizes = [request.micro_batches, request.nodes, request.ranks_of_node, *map(len, request.documents)]
    sizes += [tokens for row in request.documents for tokens in row]
    if any(type(size) is not int or not 0 < size <= 2**20 for size in sizes):
        raise ValueError("memory.worst_step: a count that no run has")
    if len(request.documents) > rows or any(sum(row) > length for row in request.documents):
        raise ValueError("memory.worst_step: more rows or tokens than the recipe allows")
    if request.width is not None and not 0 < request.width <= rows * length:
        raise ValueError("memory.worst_step: a width that no run has")
    return request


def _with_recomputation(recipe: Recipe, runs: Any) -> Recipe:
    training = recipe.training.model_dump(mode="json") | {"activation_checkpointing": runs}
    return Recipe.model_validate(recipe.model_dump(mode="json") | {"training": training})


def read_request(facts: Mapping[str, Any]) -> PlanRequest:
    """The request, from its JSON."""
    return PlanRequest(**{**facts, "documents": tuple(tuple(row) for row in facts["documents"])})


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


def plan_run(request: PlanRequest) -> Plan:
    """Plan rank 0 of the run, on the batches of its worst step. Raises what `plan_recipe` raises."""
    from finetune.planner.plan_recipe import plan_recipe
    from finetune.recipe.strategy import strategy_of

    recipe = Recipe.model_validate(request.recipe)
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
    recipe = Recipe.model_validate(request.recipe)
    if request.device != "cpu":
        from finetune.planner.remedies import remedies

        def plan(another: Recipe, _: Gpus) -> Plan:
            return plan_run(request_for(request, another))

        config, _source = planned_config(recipe.model.name_or_path, recipe.model.revision)
        return [result.as_json() for result in remedies(recipe, config, gpus_of_run(request), plan)]
    from finetune.measure.out_of_memory import smaller
    from finetune.planner.remedies import changed

    fitting = []
    for change in smaller(recipe):
        key, _, value = change.partition("=")
        smaller_plan, _, nbytes = planned(request_for(request, changed(recipe, {key: json.loads(value)})))
        if smaller_plan is not None and nbytes <= request.memory:
            fitting.append({"change": change, "needed_bytes": nbytes})
    return fitting


def request_for(request: PlanRequest, recipe: Recipe) -> PlanRequest:
    """The request for another recipe: the run's rows, batched and truncated as that recipe says."""
    rows, length = recipe.training.per_device_batch_size, recipe.data.max_length
    documents = tuple(_truncated(row, length) for row in request.documents[:rows])
    width = None if request.width is None else min(request.width, rows * length)
    return replace(request, recipe=recipe.model_dump(mode="json"), documents=documents, width=width)


def _truncated(row: tuple[int, ...], length: int) -> tuple[int, ...]:
    """The first `length` tokens of a row of documents: (7, 5) cut to 10 tokens is (7, 3)."""
    starts = [sum(row[:index]) for index in range(len(row))]
    return tuple(min(tokens, length - start) for tokens, start in zip(row, starts, strict=True) if start < length)


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

    rows = request.documents
    options: dict[str, Any] = {"rank": 0, "world_size": 1, "per_device_batch_size": len(rows)}
    options |= {"flat": request.flat, "width": request.width}
    batches = []
    for _ in range(request.micro_batches):  # tensors of their own: the first may still be there in the next one's step
        batches += micro_batches(_RowLengths(rows), range(len(rows)), **options)
    return batches


@dataclass(frozen=True)
class AuditRow:
    """One phase of one run, on rank 0: peak bytes."""

    run: str
    strategy: str
    ranks: int
    phase: str
    planned_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """Of the plan, as a share of the measurement."""
        return self.planned_bytes / self.measured_bytes - 1


def audit_in_words(runs: Sequence[Path], note: Callable[[str], None]) -> tuple[dict[str, Any], str]:
    """The audit as JSON and as text. Raises FinetuneError for a folder that is not a run.

    Args:
        note: Told of each run that is planned now, which takes seconds.
    """
    receipts = [(run, _receipt(run)) for run in runs]
    rows: list[AuditRow] = []
    unplanned: dict[str, str] = {}
    for run, receipt in receipts:
        with in_one_line(partial(_not_of_a_run, run)):
            plan, why = plan_of_run(run, note, PLAN_OF_RUN_SECONDS)
            if plan is None:
                unplanned[str(run)] = str(why)
            else:
                rows += audited(run, receipt, plan)
    result = {
        "ok": True,
        "exit_code": 0,
        "rows": [{**asdict(row), "error": row.error} for row in rows],
        "not_planned": unplanned,
        **_summary(rows),
    }
    return result, "\n".join(_lines(rows, unplanned, result))


def audited(run: Path, receipt: Mapping[str, Any], plan: Mapping[str, Any]) -> Iterator[AuditRow]:
    """A row for each phase that was planned and measured.

    The receipt has loading and the worst step, which runs try first; a run with `measure_phases` has every phase in
    metrics.jsonl, of which the largest peak counts.
    """
    measured = {name: phase["peak_bytes"] for name, phase in receipt["memory"]["measured"]["phases"].items()}
    for line in read_lines(run / "metrics.jsonl") if (run / "metrics.jsonl").is_file() else ():
        if line.get("kind") == "phase" and line.get("rank") == 0 and is_as_written(line):
            measured[line["phase"]] = max(measured.get(line["phase"], 0), round(line["peak_gib"] * GIB))
    for name, phase in plan["phases"].items():
        if measured.get(name):
            facts = str(run), str(receipt["strategy"]), int(receipt["world_size"])
            yield AuditRow(*facts, name, _bytes(phase["peak_bytes"]), _bytes(measured[name]))


def _bytes(value: Any) -> int:
    """A peak of a record. Raises ValueError for what is none."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"a peak of {one_line(value, 40)} bytes")
    return value


def _receipt(run: Path) -> dict[str, Any]:
    if not (run / "receipt.json").is_file():
        raise FinetuneError(f"--audit: {run}: has no receipt.json; name the folder of a run")
    receipt = read_object(run / "receipt.json", MOST_RECORD_BYTES)
    if not isinstance(receipt.get("memory") or {}, dict):
        raise FinetuneError(f"--audit: {run}: its receipt is not that of a run: memory must be an object; leave it out")
    return receipt


def _not_of_a_run(run: Path, error: Exception) -> FinetuneError:
    return FinetuneError(f"--audit: {run}: its receipt is not that of a run: {words_of(error)}; leave it out")


def _summary(rows: Sequence[AuditRow]) -> dict[str, Any]:
    """Over the phases of an update. Loading is left out: temporaries of reading files are measured, not planned."""
    errors = [abs(row.error) for row in rows if row.phase in STEP_PHASES]
    if not errors:
        return {"median_error": None, "worst_error": None}
    return {"median_error": statistics.median(errors), "worst_error": max(errors)}


def _lines(rows: Sequence[AuditRow], unplanned: Mapping[str, str], result: Mapping[str, Any]) -> Iterator[str]:
    width = max((len(row.run) for row in rows), default=3)
    if rows:
        yield f"{'run':<{width}}  {'strategy':<14}{'ranks':>5}  {'phase':<9}{'planned':>15}{'measured':>15}   error"
    for row in rows:
        facts = f"{row.run:<{width}}  {row.strategy:<14}{row.ranks:>5}  {row.phase:<9}"
        yield f"{facts}{row.planned_bytes:>15,}{row.measured_bytes:>15,} {row.error:>+8.3%}"
    for run, why in unplanned.items():
        yield f"{run}: not planned: {why}"
    if result["worst_error"] is not None:
        runs = counted(len({row.run for row in rows}), "run")
        yield (
            f"bytes at the peak, rank 0; forward, backward and step of {runs}: "
            f"median error {result['median_error']:.3%}, worst {result['worst_error']:.3%}"
        )
