"""Processes of a lecture that are gloo ranks on this machine; each leaves its figures as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from finetune.errors import EnvironmentMismatch
from finetune.paths import CHECKOUT

_DEADLINE_SECONDS = 300  # a busy machine starts processes slowly


def figures_of_ranks(
    lecture: str, module: str, folder: Path, ranks: int, *words: str, on_gpus: bool = False
) -> Sequence[Mapping[str, Any]]:
    """`python -m MODULE FOLDER RANK WORDS` for each rank, together; what each left in rank-RANK.json of the folder.

    Raises EnvironmentMismatch where one fails or is late, with the last line of its output.
    """
    path = os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if not on_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with ExitStack() as files:
        logs = [files.enter_context(open(folder / f"log-{rank}", "w+", encoding="utf-8")) for rank in range(ranks)]
        command = [sys.executable, "-m", module, str(folder)]
        processes = [
            subprocess.Popen([*command, str(rank), *words], env=environment, stdout=log, stderr=log)
            for rank, log in enumerate(logs)
        ]
        try:
            codes = _wait(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(codes):
            failed = next(rank for rank, code in enumerate(codes) if code)
            last = (folder / f"log-{failed}").read_text("utf-8").strip().splitlines()[-1:] or ["it printed nothing"]
            raise EnvironmentMismatch(f"{lecture}: rank {failed} ended with {codes[failed]}: {last[0][:200]}")
        return [json.loads((folder / f"rank-{rank}.json").read_text("utf-8")) for rank in range(ranks)]


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """The exit codes; a rank that waits for one that has failed, or that is late, counts as failed too."""
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            break
        time.sleep(0.05)
    return [process.poll() or (-1 if process.returncode is None else 0) for process in processes]
