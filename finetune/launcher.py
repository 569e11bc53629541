"""What started this process, and with which settings. Reads the process table and the environment; changes nothing.

The launchers hand over less than they were told: `accelerate launch --cpu --num_processes 2` runs one process without
a word, a default config in the user's cache decides what a bare `accelerate launch` does, and no variable tells. The
launcher's own command line does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Launch:
    """How the trainer was started."""

    launcher: str  # accelerate | torchrun | python
    asked_processes: int | None  # as written on the launcher's command line
    config_file: Path | None  # --config_file of accelerate launch
    threads_chosen: bool  # the user, not the launcher, set OMP_NUM_THREADS
    world_size: int  # as the launcher tells the ranks; 1 without one
    rank: int
    local_rank: int
    on_cpu: bool  # the launcher was told to use the CPU

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def read_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """Look at the environment and at the processes above this one."""
    launcher, arguments, parent_environment = _find_launcher()
    config = _option(arguments, "--config_file", "--config-file")
    asked = _option(arguments, "--num_processes", "--num-processes", "--nproc_per_node", "--nproc-per-node")
    return Launch(
        launcher=launcher,
        asked_processes=int(asked) if asked and asked.isdigit() else None,
        config_file=Path(config) if config else None,
        threads_chosen="OMP_NUM_THREADS" in parent_environment,
        world_size=int(environment.get("WORLD_SIZE", "1")),
        rank=int(environment.get("RANK", "0")),
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        on_cpu=environment.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1", "yes"),
    )


def _find_launcher() -> tuple[str, list[str], Mapping[str, str]]:
    """Name, arguments and environment of the nearest launcher above; python with our own where there is none."""
    # Two levels reach it: the ranks are its children, and it may run under a shell or `python -m`.
    for process in psutil.Process().parents()[:2]:
        try:
            command = process.cmdline()
            name = _launcher_name(command)
            if name:
                return name, _before_script(command), process.environ()
        except psutil.Error:  # ended meanwhile, or another user's
            continue
    return "python", [], os.environ


def _launcher_name(command: Sequence[str]) -> str | None:
    names = [Path(word).name for word in command[:4]]
    if "accelerate" in names or "accelerate.commands.launch" in command or "accelerate-launch" in names:
        return "accelerate"
    if "torchrun" in names or "torch.distributed.run" in command:
        return "torchrun"
    return None


def _before_script(command: Sequence[str]) -> list[str]:
    """The launcher's own arguments: those before our entrypoint."""
    for index, word in enumerate(command):
        if word.endswith("train.py") or word == "finetune.train":
            return list(command[:index])
    return list(command)


def _option(arguments: Sequence[str], *names: str) -> str | None:
    for index, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else next(iter(arguments[index + 1 : index + 2]), None)
    return None
