"""Memory that others measured on a GPU, against our trace of their loop: peft's method comparison on an L40S, and
torchtitan's FSDP2 on H100s.

    python benchmarks/public_memory.py [NAME ... | others]

Of all points, or peft's that are named, or torchtitan's alone; tests/support/memory/public_memory.py and
titan_memory.py say what they are and how each is traced. Writes
benchmarks/results/public_memory.json and the tables of docs/planner.md.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import RESULTS, write_result
from tests.support.memory import titan_memory
from tests.support.memory.public_memory import LONGEST, MEAN, POINTS, compared, summary, table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "planner.md"
OTHERS = "others"


def write_page(mark: str, rows: Iterator[str]) -> None:
    """Between this mark's two ends in docs/planner.md."""
    begin, end = (f"<!-- {mark} {side} -->\n" for side in ("begins", "ends"))
    before, _, rest = PAGE.read_text("utf-8").partition(begin)
    _, _, after = rest.partition(end)
    PAGE.write_text(before + begin + "\n".join(rows) + "\n" + end + after, "utf-8")


def main(wanted: Sequence[str]) -> None:
    """All points, or those wanted beside what is known of the others."""
    known = json.loads((RESULTS / "public_memory.json").read_text("utf-8")) if wanted else {}
    points: dict[str, Any] = json.loads(POINTS.read_text("utf-8"))
    names = [name for name in wanted or points if name != OTHERS]
    found = traced(names, points)
    if wanted:
        found = {name: found.get(name, known["points"][name]) for name in points}
    others = known["others"] if wanted and OTHERS not in wanted else titan_memory.compared()
    kinds = "reserved_error", "mean_allocated_error"
    result = {"longest": LONGEST, "mean": MEAN} | {kind: summary(found, kind) for kind in kinds}
    write_result("public_memory", result | {"points": found, "others": others})
    write_page("public_memory.py", table(points, found))
    write_page("others of public_memory.py", titan_memory.table(others))


def traced(names: Sequence[str], points: dict[str, Any]) -> dict[str, Any]:
    """Peft's points of these names."""
    # A process each: after a trace of all 28 layers the next one's crashed (torch 2.13; cause not found).
    found = {}
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as processes:
        for name, row in zip(names, processes.map(compared, names, [points[name] for name in names]), strict=True):
            found[name] = row
            print(name, row, flush=True)
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
