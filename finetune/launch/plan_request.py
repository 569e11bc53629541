"""Ask the planner about a run, in a child process. No torch here.

    run out of memory     ->  ask_planner(request, changes=True)   ->  the plan, and changes that would take less
    finetune report RUN   ->  ask_planner(request)                 ->  the plan, to show beside what was measured

The planner creates and destroys process-wide state (Accelerate's, process groups, a fake device). So it never runs
inside a process that trains or reports. The child is `python -m finetune.planner`: it reads a request from standard
input and prints one line of JSON per answer. The core starts it by that name and imports nothing from it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finetune.errors import EnvironmentMismatch
from finetune.files import TEMPORARY_PREFIX, write_json
from finetune.launch.launcher import environment_for_child

SHARED_ANSWER = f"{TEMPORARY_PREFIX}plan.json"  # one rank's answer for the others; the run's next start deletes it
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class PlanRequest:
    """Everything that the memory of a run depends on."""

    recipe: Mapping[str, Any]  # as JSON, with every choice of `auto` made
    documents: tuple[tuple[int, ...], ...]  # tokens of each document, by row of the worst step's micro-batch
    micro_batches: int  # how often the worst step runs that micro-batch
    flat: bool  # a micro-batch is one flat row
    nodes: int
    ranks_of_node: int
    device: str  # cpu, or the GPU's name
    memory: int  # bytes of one device: a GPU's, or this machine's
    width: int | None = None  # tokens that a pipeline's micro-batches are padded to
    keeps_gradients: bool = False  # FSDP2 reduces gradients in a step's last micro-batch alone

    def facts(self) -> dict[str, Any]:
        """For the receipt: everything that the run's own recipe does not say."""
        facts = asdict(self)
        del facts["recipe"]
        return facts


def ask_planner(request: PlanRequest, timeout: float, *, changes: bool = False) -> Mapping[str, Any]:
    """Start the planner, without a GPU, and wait up to `timeout` seconds. Never raises.

    Returns:
        `plan`: the JSON of `finetune plan`, or null; `why`: the reason if there is no plan; `changes`: with `changes`,
        a list with key=value and bytes of each change that would take less, or null if they are not known.
    """
    command = [sys.executable, "-W", "ignore", "-m", "finetune.planner"]
    # One thread and no GPU: a CUDA context alone takes half a GB.
    paths = os.pathsep.join(filter(None, sys.path))
    environment = environment_for_child(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", PYTHONPATH=paths)
    try:
        process = subprocess.run(
            command,
            env=environment,
            input=json.dumps({"changes": changes, **asdict(request)}).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=timeout,
            start_new_session=True,  # Ctrl-C is for the run
        )
        printed, why = process.stdout, f"the planner ended with {process.returncode}"
    except subprocess.TimeoutExpired as error:
        printed, why = error.stdout or b"", f"the planner has not answered within {timeout:g} seconds"
    except OSError as error:
        printed, why = b"", f"the planner could not be started: {error}"
    answer: dict[str, Any] = {"plan": None, "why": why, "changes": None}
    for line in printed.splitlines():  # the plan comes first, the changes later: the last whole line knows most
        with suppress(ValueError):
            answer = dict(json.loads(line))
    return answer


def ask_once(request: PlanRequest, timeout: float, run_dir: Path) -> Mapping[str, Any]:
    """`ask_planner` with changes, for ranks that may all run out of memory at once. Never raises.

    The first rank that creates the file in the run's folder asks. The others wait for its answer there.
    """
    file = run_dir / SHARED_ANSWER
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with suppress(OSError, ValueError):
                return dict(json.loads(file.read_text("utf-8")))
            time.sleep(POLL_SECONDS)
        return {"plan": None, "why": "the rank that asked the planner has left no answer", "changes": None}
    except OSError:  # a folder that cannot be written: this rank asks for itself
        return ask_planner(request, timeout, changes=True)
    answer = ask_planner(request, timeout, changes=True)
    with suppress(OSError, EnvironmentMismatch):
        write_json(file, answer)
    return answer
