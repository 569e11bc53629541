"""`finetune plan --audit RUN ...`: the plans of runs against their measurements."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from finetune.closed_form.constants import STEP_PHASES
from finetune.errors import FinetuneError
from finetune.files import read_lines
from finetune.measure.units import GIB
from finetune.output_stream import one_line
from finetune.planner import PLAN_OF_RUN_SECONDS
from finetune.planner.run_plans import plan_of_run
from finetune.run_folder.facts import MOST_RECORD_BYTES, is_as_written
from finetune.untrusted.json_files import read_object
from finetune.untrusted.library_words import in_one_line, words_of
from finetune.wording import counted


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
    return read_object(run / "receipt.json", MOST_RECORD_BYTES)


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
