"""A run's plan, from the run's own recipe and the worst step that its receipt records.

    receipt.json: memory.worst_step  +  recipe.yaml   ->  PlanRequest  ->  `python -m finetune.planner`  ->  plan.json

`plan_of_run` is for a user's command: it starts the child and stores the answer. The functions below it run in the
child, and import the planner's heavy parts themselves. The audit is at the end; it runs in the user's command again.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.closed_form.constants import STEP_PHASES
from finetune.errors import FinetuneError
from finetune.files import read_lines, write_json
from finetune.launch.plan_request import PlanRequest, ask_planner
from finetune.library_errors import library_errors, words_of
from finetune.measure.units import GIB
from finetune.model.known_configs import planned_config
from finetune.output_stream import one_line
from finetune.recipe.gpus import Gpus
from finetune.recipe.loader import recipe_from_resolved
from finetune.recipe.schema import Recipe
from finetune.run_folder.facts import MOST_RECORD_BYTES, is_as_written, require_run_folder
from finetune.untrusted.json_files import read_object
from finetune.wording import counted

if TYPE_CHECKING:
    from finetune.planner.plan_recipe import Plan
    from finetune.tokens.batches import MicroBatch

PLAN_OF_RUN_SECONDS = 600  # a plan of the largest recipes takes about two minutes
PLAN_FILE = "plan.json"  # in the run's folder, beside the receipt
NO_MEMORY = "its receipt has no memory section: it ended before its worst step, or an older version wrote it"


def plan_of_run(
    run: Path, say: Callable[[str], None] = lambda line: None, timeout: float = PLAN_OF_RUN_SECONDS
) -> tuple[Mapping[str, Any] | None, str | None]:
    """The run's plan as JSON, or None and the reason. Plans once: the result is stored in the run's folder.

    A folder that cannot be written is planned every time. Never raises for a plan that cannot be made.

    Args:
        say: Receives one line before a plan is made, because that takes seconds to minutes.
        timeout: Seconds to wait for a new plan.
    """
    try:
        receipt: Mapping[str, Any] = {}
        if (run / "receipt.json").is_file():
            receipt = read_object(run / "receipt.json", MOST_RECORD_BYTES)
        memory = receipt.get("memory")
        if not memory:
            return None, NO_MEMORY
        if "worst_step" not in memory:  # an older version planned beside the run, into the receipt
            return memory.get("planned"), str(memory.get("why"))
        request = request_of_run(run, receipt)
        made_for = hashlib.sha256(json.dumps(asdict(request), sort_keys=True).encode()).hexdigest()
        if (run / PLAN_FILE).is_file():
            with suppress(FinetuneError):
                stored = read_object(run / PLAN_FILE, MOST_RECORD_BYTES)
                if stored.get("made_for") == made_for and isinstance(stored.get("plan"), dict):
                    return stored["plan"], None
    except (FinetuneError, ValueError, TypeError, KeyError, AttributeError) as error:
        return None, f"its files are not those of a run: {words_of(error)}"
    say(f"{run}: planning its memory, to show it beside what was measured; this takes seconds, seldom a minute")
    answer = ask_planner(request, timeout)
    if answer["plan"] is not None:
        with suppress(FinetuneError, OSError):  # a folder that cannot be written
            write_json(run / PLAN_FILE, {"made_for": made_for, "plan": answer["plan"]})
    return answer["plan"], answer["why"]


def request_of_run(run: Path, receipt: Mapping[str, Any]) -> PlanRequest:
    """The request for the run's worst step, from its folder.

    Raises FinetuneError, ValueError, TypeError or KeyError for a folder that no run wrote.
    """
    recipe = recipe_from_resolved(require_run_folder(run))
    recomputation = receipt.get("recomputation") or {}
    split = receipt.get("rows") or {}
    if recomputation or split:  # the recipe says `auto`; the receipt has the chosen setting
        training = recipe.training.model_dump(mode="json")
        if recomputation:
            training["activation_checkpointing"] = recomputation["runs"]
        if split:
            training["per_device_batch_size"] = min(split["runs"], recipe.training.global_batch_size)
        recipe = Recipe.model_validate(recipe.model_dump(mode="json") | {"training": training})
    request = read_request({"recipe": recipe.model_dump(mode="json"), **receipt["memory"]["worst_step"]})
    # A receipt may be anybody's, so no number in it may ask for more than its recipe could.
    rows, length = recipe.training.rows_at_once, recipe.data.row_tokens
    sizes = [request.micro_batches, request.nodes, request.ranks_of_node, *map(len, request.documents)]
    sizes += [tokens for row in request.documents for tokens in row]
    if any(type(size) is not int or not 0 < size <= 2**20 for size in sizes):
        raise ValueError("memory.worst_step: a count that no run has")
    if len(request.documents) > rows or any(sum(row) > length for row in request.documents):
        raise ValueError("memory.worst_step: more rows or tokens than the recipe allows")
    if request.width is not None and not 0 < request.width <= rows * length:
        raise ValueError("memory.worst_step: a width that no run has")
    return request


def read_request(facts: Mapping[str, Any]) -> PlanRequest:
    """The request, from its JSON."""
    return PlanRequest(**{**facts, "documents": tuple(tuple(row) for row in facts["documents"])})


def planned(request: PlanRequest) -> tuple[dict[str, Any] | None, str | None, int]:
    """The plan's JSON, or the reason that there is none, and the needed bytes."""
    try:
        from finetune.planner.memory_table import plan_json

        result = plan_run(request)
    except FinetuneError as error:
        return None, str(error), 0
    except Exception as error:  # any kind: the planner's bug must not fail the run
        return None, f"the planner failed: {type(error).__name__}: {error}", 0
    return plan_json(result), None, result.needed


def plan_run(request: PlanRequest) -> Plan:
    """Plan the run's rank 0, on its worst step's batches. Raises the errors that `plan_recipe` raises."""
    from finetune.planner.plan_recipe import plan_recipe
    from finetune.recipe.strategy import strategy_of

    recipe = Recipe.model_validate(request.recipe)
    place: dict[str, Any] = {"gpus": gpus_of_run(request)}
    if request.device == "cpu":
        ranks = request.nodes * request.ranks_of_node
        place = {"gpus": None, "ranks": ranks, "node": request.ranks_of_node}
    stage = 0 if strategy_of(recipe).schedule else None
    batches, kept = batches_of(request), request.keeps_gradients
    return plan_recipe(recipe, batches=batches, stage=stage, keeps_gradients=kept, **place)


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
        return [variant.as_json() for variant in remedies(recipe, config, gpus_of_run(request), plan)]
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
    rows, length = recipe.training.rows_at_once, recipe.data.max_length
    documents = []
    if recipe.data.unit != "documents":  # each answer has a length of its own, and the group keeps all of them
        documents = [tuple(min(tokens, length) for tokens in row) for row in request.documents[:rows]]
        return replace(request, recipe=recipe.model_dump(mode="json"), documents=tuple(documents))
    for row in request.documents[:rows]:  # documents with (7, 5) tokens, cut to 10 tokens, have (7, 3)
        starts = [sum(row[:index]) for index in range(len(row))]
        kept = [min(tokens, length - start) for tokens, start in zip(row, starts, strict=True) if start < length]
        documents.append(tuple(kept))
    width = request.width
    if width is not None:
        width = min(width, rows * length)
    return replace(request, recipe=recipe.model_dump(mode="json"), documents=tuple(documents), width=width)


def batches_of(request: PlanRequest) -> list[MicroBatch]:
    """The micro-batches in the run's worst step, with other tokens."""
    from finetune.planner.trace.worst_batches import batches_with_lengths

    recipe = Recipe.model_validate(request.recipe)
    count, width = request.micro_batches, request.width
    return batches_with_lengths(recipe, request.documents, count, flat=request.flat, width=width)


@dataclass(frozen=True)
class AuditRow:
    """One phase in one run, on rank 0: peak bytes."""

    run: str
    strategy: str
    ranks: int
    phase: str
    planned_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """The plan's error, as a share of the measurement."""
        return self.planned_bytes / self.measured_bytes - 1


def audit(runs: Sequence[Path], say: Callable[[str], None]) -> tuple[dict[str, Any], str]:
    """`finetune plan --audit`: planned and measured bytes, as JSON and as text.

    Raises FinetuneError for a folder that is not a run.

    Args:
        say: Receives a line for each run that is planned now, because that takes seconds.
    """
    receipts: list[tuple[Path, Mapping[str, Any]]] = []
    for run in runs:
        if not (run / "receipt.json").is_file():
            raise FinetuneError(f"--audit: {run}: has no receipt.json; name the folder of a run")
        receipts.append((run, read_object(run / "receipt.json", MOST_RECORD_BYTES)))
        if not isinstance(receipts[-1][1].get("memory") or {}, dict):
            raise _not_a_run(run, "memory must be an object")
    rows: list[AuditRow] = []
    unplanned: dict[str, str] = {}
    for run, receipt in receipts:
        with library_errors(partial(_not_a_run, run)):
            plan, why = plan_of_run(run, say)
            if plan is None:
                unplanned[str(run)] = str(why)
            else:
                rows += audited(run, receipt, plan)
    # Without loading: temporaries from reading files are measured, not planned.
    errors = [abs(row.error) for row in rows if row.phase in STEP_PHASES]
    result = {
        "ok": True,
        "exit_code": 0,
        "rows": [{**asdict(row), "error": row.error} for row in rows],
        "not_planned": unplanned,
        "median_error": statistics.median(errors) if errors else None,
        "worst_error": max(errors, default=None),
    }
    width, lines = max((len(row.run) for row in rows), default=3), list[str]()
    if rows:
        lines += [
            f"{'run':<{width}}  {'strategy':<14}{'ranks':>5}  {'phase':<9}{'planned':>15}{'measured':>15}   error"
        ]
    for row in rows:
        facts = f"{row.run:<{width}}  {row.strategy:<14}{row.ranks:>5}  {row.phase:<9}"
        lines.append(f"{facts}{row.planned_bytes:>15,}{row.measured_bytes:>15,} {row.error:>+8.3%}")
    lines += [f"{run}: not planned: {why}" for run, why in unplanned.items()]
    if errors:
        count = counted(len({row.run for row in rows}), "run")
        lines.append(
            f"bytes at the peak, rank 0; forward, backward and step of {count}: "
            f"median error {result['median_error']:.3%}, worst {result['worst_error']:.3%}"
        )
    return result, "\n".join(lines)


def audited(run: Path, receipt: Mapping[str, Any], plan: Mapping[str, Any]) -> Iterator[AuditRow]:
    """A row for each phase that was planned and measured.

    The receipt has loading and the worst step, which runs try first. A run with `measure_phases` has every phase in
    metrics.jsonl; its largest peak counts.
    """
    measured = {name: phase["peak_bytes"] for name, phase in receipt["memory"]["measured"]["phases"].items()}
    metrics = run / "metrics.jsonl"
    for line in read_lines(metrics) if metrics.is_file() else ():
        if line.get("kind") == "phase" and line.get("rank") == 0 and is_as_written(line):
            measured[line["phase"]] = max(measured.get(line["phase"], 0), round(line["peak_gib"] * GIB))
    for name, phase in plan["phases"].items():
        if measured.get(name):
            facts = str(run), str(receipt["strategy"]), int(receipt["world_size"])
            yield AuditRow(*facts, name, _bytes(phase["peak_bytes"]), _bytes(measured[name]))


def _bytes(value: Any) -> int:
    """A recorded peak. Raises ValueError for anything else."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"a peak of {one_line(value, 40)} bytes")
    return value


def _not_a_run(run: Path, problem: Exception | str) -> FinetuneError:
    words = problem if isinstance(problem, str) else words_of(problem)
    return FinetuneError(f"--audit: {run}: its receipt is not that of a run: {words}; leave it out")
