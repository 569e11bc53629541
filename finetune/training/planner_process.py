"""`finetune plan` of the run that is about to start, in a second process on rank 0's machine.

The planner creates and destroys process-wide state (Accelerate's, process groups, a fake device), so it cannot run
inside a process that trains, and its seconds would be the user's. Rank 0 starts it before the process group, at the
lowest priority and without a GPU; it plans while the ranks meet and read weights. It writes its result into the run's
folder: first the plan, later the changes that would take less memory. Training never depends on it: a planner that
fails leaves a result that says why there is no plan.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finetune.files import TEMPORARY_PREFIX
from finetune.launch.launcher import environment_for_child

RESULT_FILE = f"{TEMPORARY_PREFIX}plan.json"  # in the run's folder; should it stay behind, the next start deletes it
# off: no planner during the run; wait: the run ends when the plan is there, and the planner has the run's priority
PLANNER_SWITCH = "FINETUNE_PLANNER"
PLANNER_TIMEOUT = 60  # seconds to wait for its result when the run ends
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class PlanRequest:
    """Everything that the memory of a run depends on."""

    recipe: str  # JSON
    documents: tuple[tuple[tuple[int, ...], ...], ...]  # tokens, by micro-batch of the worst step, row and document
    flat: bool  # micro-batches are one flat row
    nodes: int
    ranks_of_node: int
    device: str  # cpu, or the GPU's name
    memory: int  # bytes of one device: a GPU's, or this machine's
    width: int | None = None  # tokens that a pipeline's micro-batches are padded to


class PlannerProcess:
    """The planner of one run. Until `start`, only a result that is in the folder already is read: another rank's."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / RESULT_FILE
        self._process: subprocess.Popen[bytes] | None = None
        self._why = "the planner of rank 0 has left no result here"

    def start(self, request: PlanRequest) -> None:
        """Start it, unless FINETUNE_PLANNER=off. Never raises: why it could not be started becomes its result."""
        if os.environ.get(PLANNER_SWITCH) == "off":
            self._why = f"{PLANNER_SWITCH}=off"
            return
        # One thread and no GPU: a CUDA context alone takes half a GB of the memory that is planned for.
        paths = os.pathsep.join(filter(None, sys.path))
        environment = environment_for_child(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", PYTHONPATH=paths)
        command = [sys.executable, "-W", "ignore", "-m", "finetune.planner.run_planner", str(self._file.absolute())]
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the run
            )
        except OSError as error:
            self._why = f"the planner could not be started: {error}"
            return
        assert self._process.stdin is not None
        with suppress(OSError), self._process.stdin as pipe:  # a planner that has died already is noticed by `result`
            pipe.write(json.dumps(asdict(request)).encode())

    def result(self, timeout: float = 0.0, *, with_changes: bool = False) -> Mapping[str, Any]:
        """Waits up to `timeout` seconds for the plan, where there are any without end under FINETUNE_PLANNER=wait;
        `with_changes` for the changes too. Never raises.

        `plan`: the JSON of finetune plan, or null and `why`; `changes`: key=value and bytes of each change that would
        take less, null until they are known.
        """
        patient = timeout > 0 and os.environ.get(PLANNER_SWITCH) == "wait"
        deadline = math.inf if patient else time.monotonic() + timeout
        while True:
            running = self._process is not None and self._process.poll() is None  # looked at before its file is
            result = self._read()
            if not running or time.monotonic() >= deadline or (result is not None and not with_changes):
                return result or {"plan": None, "why": self._no_result(running), "changes": None}
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """Kill the planner, should it still run, and delete its result."""
        if self._process is not None:
            with suppress(OSError):
                self._process.kill()
            self._process.wait()
            self._file.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any] | None:
        with suppress(OSError, ValueError):
            return dict(json.loads(self._file.read_text("utf-8")))
        return None

    def _no_result(self, running: bool) -> str:
        if self._process is None:
            return self._why
        return "the planner has not answered yet" if running else f"the planner ended with {self._process.returncode}"


@contextmanager
def planner_process(request: PlanRequest | None, folder: Path) -> Iterator[PlannerProcess]:
    """A planner while the block runs; started where there is a `request`: on rank 0."""
    planner = PlannerProcess(folder)
    if request is not None:
        planner.start(request)
    try:
        yield planner
    finally:
        planner.stop()
