"""CPU seconds until `finetune --help` and `finetune check` have answered.

python benchmarks/start.py        (a few seconds)
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import write_result

ROOT = Path(__file__).resolve().parent.parent
TURNS = 15
COMMANDS = {"help": ["--help"], "check": ["check", "recipes/quickstart.yaml"]}


def cpu_seconds(arguments: list[str]) -> float:
    """User and system time of one call in a process of its own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "finetune.cli.main", *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    result = {name: statistics.median(cpu_seconds(words) for _ in range(TURNS)) for name, words in COMMANDS.items()}
    print(result, write_result("start", {"what": "CPU seconds, median", "turns": TURNS, "cpu_seconds": result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
