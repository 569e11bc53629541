"""Why a training that was launched as a job has failed, read from its run folder and its log."""

from __future__ import annotations

import json
import re
from pathlib import Path

from finetune.recipe.yaml_text import shorten


def failure_reason(run_dir: Path, log: str) -> str:
    """One line: what the run recorded, else the last line that it printed before the launcher's own report."""
    state = run_dir / "run_state.json"
    recorded = json.loads(state.read_text("utf-8")) if state.is_file() else {}
    if "error" in recorded:
        return f"{_one_line(recorded['error'])} ({recorded['phase']}, rank {recorded['rank']})"
    lines = [line for line in _without_launcher(log).splitlines() if line.strip() and "WARNING" not in line]
    last_line = _one_line(lines[-1]) if lines else "it printed nothing"
    # Of the rank that failed first: torchrun then ends the others with its own signal.
    killed = re.search(r"(?s)Root Cause.*exitcode +: -(\d+)|died with <Signals\.(\w+)", log)
    return f"killed by signal {killed[1] or killed[2]}; its last line: {last_line}" if killed else last_line


def _without_launcher(log: str) -> str:
    """The log up to the launcher's own report: torchrun's, or the traceback of `accelerate launch` itself."""
    report = re.search(r"^[EWI]\d{4} .*torch/distributed/elastic", log, flags=re.M)
    if report:
        return log[: report.start()]
    before, _, traceback = log.rpartition("Traceback (most recent call last)")
    return before if "CalledProcessError" in traceback else log


def _one_line(text: str, width: int = 300) -> str:
    return shorten(" ".join(text.split()), width, "…")
