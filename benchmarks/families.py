"""What the kit does with each architecture: writes docs/families.md and benchmarks/results/families.json.

python benchmarks/families.py [--parts FOLDER]

Each architecture as a tiny model with random weights: in each of six ways of bringing documents to it right (loss and
gradients are those of the library's eager forward on one document at a time, to 1e-5) or refused in a line; then its
adapters, a 4-bit base, a rehearsal's model and a plan. One child process for each, two at a time. With --parts, what an
interrupted run of the same code has found is not measured again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import bitsandbytes  # noqa: F401  # here, and not in each child
import peft  # noqa: F401
import transformers

from benchmarks.common import write_result
from finetune.planner import Plan, pretend_device  # noqa: F401
from tests.support.models.architecture_columns import COLUMNS, Cell, cell, right_way
from tests.support.models.architectures import ARCHITECTURES, outcomes
from tests.support.models.families_page import PAGE, entry_of, page_of, recorded

AT_ONCE = 2
CPU_SECONDS = 400  # for an architecture; a scan without its kernel takes one


def measure(name: str, file: Path) -> None:
    """The architecture's entry, into the file; in a child process, for a trace must come before any backward pass."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    pretend_device()
    cells: dict[str, Cell] = {}
    with tempfile.TemporaryDirectory() as folder:
        found = outcomes(name, Path(folder))
        way = right_way(found)
        for column in COLUMNS if way is not None else ():
            assert way is not None
            try:
                cells[column] = cell(column, name, Path(folder), way)
            except Exception as error:  # the benchmark's finding, and the test's failure
                traceback.print_exc()
                cells[column] = Cell("TRACEBACK", f"{type(error).__name__}: {error}")
    file.write_text(json.dumps(entry_of(found, cells)), "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=Path)
    with tempfile.TemporaryDirectory() as scratch:
        parts = parser.parse_args().parts or Path(scratch)
        parts.mkdir(exist_ok=True)
        failed = measure_all(parts)
        entries = {name: json.loads((parts / f"{name}.json").read_text("utf-8")) for name in sorted(ARCHITECTURES)}
    if failed:
        print(f"not written: without a result are {', '.join(failed)}")
        return 1
    write_result("families", {"transformers": transformers.__version__, "architectures": entries})
    PAGE.write_text(page_of(recorded()), "utf-8")
    return 0


def measure_all(parts: Path) -> list[str]:
    """Measure what `parts` lacks; the architectures that have no result, or a traceback."""
    fork = multiprocessing.get_context("fork")
    waiting = [name for name in sorted(ARCHITECTURES) if not (parts / f"{name}.json").is_file()]
    running = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            name = waiting.pop(0)
            running[name] = fork.Process(target=measure, args=(name, parts / f"{name}.json"))
            running[name].start()
        time.sleep(0.1)
        for name, child in list(running.items()):
            if child.exitcode is not None:
                del running[name]
                print(f"{name}: exit code {child.exitcode}", flush=True)
    files = {name: parts / f"{name}.json" for name in sorted(ARCHITECTURES)}
    return [name for name, file in files.items() if not file.is_file() or "TRACEBACK" in file.read_text("utf-8")]


if __name__ == "__main__":
    sys.exit(main())
