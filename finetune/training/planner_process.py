"""What the planner says of the run that is about to start: asked before the first process group, answered beside it.

The planner makes and unmakes process-wide state (Accelerate's, process groups, a pretend device), so it has no place in
a process that trains; and its seconds would be the user's. So rank 0 starts it as a process of its own, at the lowest
priority and without a GPU, while the ranks meet and read weights. Its answer lies in the run's folder: at first the
plan, later also what would take less. Whatever becomes of it, the run goes on; why there is no plan is then the answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finetune.files import ASIDE

ANSWER = f"{ASIDE}plan.json"  # in the run's folder: the next start clears it away
PLANNER_SWITCH = "FINETUNE_PLANNER"  # off: no planner beside the run
# Of the launchers, which would make the planner a rank; a GPU's context alone is half a GB.
NOT_ITS_OWN = tuple(
    "RANK WORLD_SIZE LOCAL_ GROUP_ ROLE_ MASTER_ TORCHELASTIC_ PET_ ACCELERATE_ FSDP_ SLURM_ DS_".split()
)


@dataclass(frozen=True)
class PlanRequest:
    """A run as it will be: everything its memory depends on."""

    recipe: str  # JSON
    documents: tuple[tuple[tuple[int, ...], ...], ...]  # tokens, by micro-batch of the worst step, row and document
    flat: bool  # micro-batches are one flat row
    nodes: int
    ranks_of_node: int
    device: str  # cpu, or the GPU's name
    memory: int  # bytes of one device: a GPU's, or this machine's


class PlannerProcess:
    """The planner's answer, when it has come."""

    def __init__(
        self, folder: Path = Path(), process: subprocess.Popen[bytes] | None = None, why: str = "nobody asked"
    ) -> None:
        """`why` there is no planner, where there is none: then only an answer that is there already is read."""
        self._file, self._process, self._why = folder / ANSWER, process, why

    def answer(self, *, wait_seconds: float = 0.0) -> Mapping[str, Any]:
        """`plan`: finetune plan's JSON, or null and `why`; `changes`: key=value and bytes of what would take less,
        null until they are known. Never raises."""
        end = time.monotonic() + wait_seconds
        while True:
            ended = self._process is None or self._process.poll() is not None
            with suppress(OSError, ValueError):
                return dict(json.loads(self._file.read_text("utf-8")))
            if ended or time.monotonic() >= end:
                return {"plan": None, "why": self._reason(ended), "changes": None}
            time.sleep(0.05)

    def settled(self, *, wait_seconds: float) -> Mapping[str, Any]:
        """The answer with its changes, as far as they come within that time."""
        end = time.monotonic() + wait_seconds
        answer = self.answer(wait_seconds=wait_seconds)
        while self._process is not None and self._process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
            answer = self.answer()
        return answer

    def close(self) -> None:
        """End the planner, if it still plans, and take its answer away."""
        if self._process is not None:
            with suppress(OSError):
                self._process.kill()
            self._process.wait()
            self._file.unlink(missing_ok=True)

    def _reason(self, ended: bool) -> str:
        if self._process is None:
            return self._why
        return f"the planner ended with {self._process.returncode}" if ended else "the planner has not answered yet"


@contextmanager
def asked(question: PlanRequest | None, folder: Path) -> Iterator[PlannerProcess]:
    """Ask while the block runs; without a question (another rank asks) only what is in the folder can be read.

    Never raises: a planner that cannot be started is an answer.
    """
    foretold = _ask(question, folder)
    try:
        yield foretold
    finally:
        foretold.close()


def _ask(question: PlanRequest | None, folder: Path) -> PlannerProcess:
    if question is None:
        return PlannerProcess(folder, why="rank 0 asks")
    if os.environ.get(PLANNER_SWITCH) == "off":
        return PlannerProcess(folder, why=f"{PLANNER_SWITCH}=off")
    own = {name: value for name, value in os.environ.items() if not name.startswith(NOT_ITS_OWN)}
    own |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-W", "ignore", "-m", "finetune.planner.run_planner", str((folder / ANSWER).absolute())]
    quiet: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:  # in a session of its own: Ctrl-C is for the run
        process = subprocess.Popen(command, env=own, start_new_session=True, **quiet)
    except OSError as error:
        return PlannerProcess(folder, why=f"the planner could not be started: {error}")
    assert process.stdin is not None
    with suppress(OSError), process.stdin as pipe:  # if it is gone, that is found when its answer is asked for
        pipe.write(json.dumps(asdict(question)).encode())
    return PlannerProcess(folder, process)
