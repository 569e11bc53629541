"""torchtitan's and torchtune's own measurements beside our traces of their steps: figures and the page's table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.support.memory import titan_memory, tune_memory

Rows = dict[str, dict[str, Any]]


def compared() -> Rows:
    """GiB measured and planned, and the error in percent, by point; or why there is no plan."""
    found: Rows = {}
    for name, sharded in titan_memory.POINTS.items():
        found[f"torchtitan, 8B, {name}"] = _row(sharded.reserved, titan_memory.planned(sharded)[1])
    for name, (measured, reason) in tune_memory.REASONS.items():
        found[f"torchtune, 3B, {name}"] = {"measured_gib": measured, "reason": reason}
    for name, point in tune_memory.POINTS.items():
        found[f"torchtune, 3B, {name}"] = _row(point.active, tune_memory.planned(point))
    return found


def _row(measured: float, planned: float) -> dict[str, float]:
    return {
        "measured_gib": measured,
        "planned_gib": round(planned, 2),
        "error": round(100 * (planned / measured - 1), 2),
    }


def table(found: Rows) -> Iterator[str]:
    """The page's rows."""
    yield "| point | measured, GiB | planned | error |"
    yield "|---|---|---|---|"
    for name, row in found.items():
        if "reason" in row:
            yield f"| {name} | {row['measured_gib']:.1f} | {row['reason']} | |"
        else:
            yield f"| {name} | {row['measured_gib']:.1f} | {row['planned_gib']:.1f} | {row['error']:+.1f} % |"
