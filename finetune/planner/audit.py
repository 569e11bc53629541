"""`finetune plan --audit RUN ...`: the plans of runs against their measurements."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.files import read_lines
from finetune.measure.units import GIB
from finetune.planner.constants import STEP_PHASES
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


def audit_in_words(runs: Sequence[Path]) -> tuple[dict[str, Any], str]:
    """The audit as JSON and as text. Raises FinetuneError for a folder that is not a run."""
    receipts = [(run, _receipt(run)) for run in runs]
    rows = [row for run, receipt in receipts for row in audited(run, receipt)]
    unplanned = {str(run): why for run, receipt in receipts if (why := _why_not(receipt))}
    result = {
        "ok": True,
        "exit_code": 0,
        "rows": [{**asdict(row), "error": row.error} for row in rows],
        "not_planned": unplanned,
        **_summary(rows),
    }
    return result, "\n".join(_lines(rows, unplanned, result))


def audited(run: Path, receipt: Mapping[str, Any]) -> Iterator[AuditRow]:
    """A row for each phase that was planned and measured.

    The receipt has loading and the worst step, which runs try first; a run with `measure_phases` has every phase in
    metrics.jsonl, of which the largest peak counts.
    """
    memory = receipt.get("memory") or {}
    if not memory.get("planned"):
        return
    measured = {name: phase["peak_bytes"] for name, phase in memory["measured"]["phases"].items()}
    for line in read_lines(run / "metrics.jsonl") if (run / "metrics.jsonl").is_file() else ():
        if line.get("kind") == "phase" and line["rank"] == 0:
            measured[line["phase"]] = max(measured.get(line["phase"], 0), round(line["peak_gib"] * GIB))
    for name, phase in memory["planned"]["phases"].items():
        if measured.get(name):
            facts = str(run), receipt["strategy"], receipt["world_size"]
            yield AuditRow(*facts, name, phase["peak_bytes"], measured[name])


def _receipt(run: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((run / "receipt.json").read_text("utf-8")))
    except (OSError, ValueError):
        raise FinetuneError(f"--audit: {run}: has no receipt.json; name the folder of a run") from None


def _why_not(receipt: Mapping[str, Any]) -> str | None:
    memory = receipt.get("memory")
    if memory is None:
        return "its receipt has no memory section: it ended before its worst step, or an older version wrote it"
    return None if memory["planned"] else str(memory["why"])


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
