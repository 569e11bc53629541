"""Memory that others measured on a GPU, against our trace of their loop: peft's method comparison on an L40S.

    python benchmarks/public_memory.py [NAME ...]

Of all points, or those named; tests/support/public_memory.py says what they are and how each is traced. Writes
benchmarks/results/public_memory.json and the table of docs/planner.md.
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
from tests.support.public_memory import LONGEST, MEAN, POINTS, compared, summary, table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "planner.md"
BEGIN, END = "<!-- public_memory.py begins -->\n", "<!-- public_memory.py ends -->\n"


def write_page(rows: Iterator[str]) -> None:
    """Between its marks in docs/planner.md."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + "\n".join(rows) + "\n" + END + after, "utf-8")


def main(wanted: Sequence[str]) -> None:
    """All points, or those named beside what is known of the others."""
    points: dict[str, Any] = json.loads(POINTS.read_text("utf-8"))
    names, found = list(wanted or points), {}
    # A process each: after a trace of all 28 layers the next one's crashed (torch 2.13; cause not found).
    one_each = ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), max_tasks_per_child=1)
    with one_each as processes:
        for name, row in zip(names, processes.map(compared, names, [points[name] for name in names]), strict=True):
            found[name] = row
            print(name, row, flush=True)
    if wanted:
        known = json.loads((RESULTS / "public_memory.json").read_text("utf-8"))["points"]
        found = {name: found.get(name, known[name]) for name in points}
    kinds = "reserved_error", "mean_allocated_error"
    result = {"longest": LONGEST, "mean": MEAN} | {kind: summary(found, kind) for kind in kinds} | {"points": found}
    write_result("public_memory", result)
    write_page(table(points, found))


if __name__ == "__main__":
    main(sys.argv[1:])
