"""Find out how this process was started, and with which settings, from the process table and the environment.

Launchers pass on less than they were given. `accelerate launch --cpu --num_processes 2` silently starts one process. A
bare `accelerate launch` follows a default config in the user's cache. No environment variable shows either, but the
launcher's own command line does.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from finetune.errors import EnvironmentMismatch
from finetune.output_stream import one_line
from finetune.paths import read_regular
from finetune.recipe.yaml_text import MAX_BYTES, yaml_value

PARENT_AT_START = os.getppid()
RANK_0_SECONDS = 10  # ranks that share a busy machine reach the same error within seconds of each other


@dataclass(frozen=True)
class Launch:
    """How the trainer was started."""

    words: tuple[str, ...]  # the command line as typed: accelerate launch ..., torchrun ..., python ...
    requested_processes: int | None  # as written on the launcher's command line
    config_file: Path | None  # --config_file of accelerate launch
    threads_chosen: bool  # the user, not the launcher, set OMP_NUM_THREADS
    world_size: int  # from the launcher; 1 without one
    rank: int
    on_cpu: bool  # the launcher was asked to use the CPU
    local_rank: int = 0  # on its machine
    local_world_size: int = 1  # ranks of this machine
    nodes: int = 1
    settings: tuple[str, ...] = ()  # PET_NAME=VALUE in the launcher's environment: torchrun's options
    shares_gpus: bool = False  # every rank of this machine sees the same GPUs; False where unknown, as under srun

    @property
    def by_accelerate(self) -> bool:
        names = ("accelerate", "accelerate-launch")
        return any(word in names or word.startswith("accelerate.c") for word in self.words[:4])

    @property
    def by_torchrun(self) -> bool:
        return _is_torchrun(self.words)

    @property
    def recipe(self) -> str:
        """The recipe as it was named on the command line."""
        return next(iter(self.words[len(_before_script(self.words)) + 1 :]), "RECIPE")

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def read_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """Read the environment and the parent process. Call it early, while the launcher lives."""
    words, inherited = _find_launcher(environment)
    refuse_left_over(environment, by_launcher=bool(words))
    options = _before_script(words)
    config = _option(options, "--config_file", "--config-file")
    typed = words
    if not typed:
        typed = launcher_words(sys.orig_argv) or ["python", *sys.orig_argv[1:]]
        if "SLURM_PROCID" in environment and "RANK" in environment:
            typed = ["srun", *typed]
    # Accelerate 1.15 does not pass on a config's `use_cpu` to several processes, so read the config as well.
    use_cpu = environment.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1", "yes")
    world_size = int(environment.get("WORLD_SIZE", "1"))
    nodes = int(environment.get("GROUP_WORLD_SIZE", "1"))
    return Launch(
        words=tuple(typed),
        requested_processes=_requested_processes(options, inherited),
        config_file=Path(config) if config else None,
        threads_chosen="OMP_NUM_THREADS" in inherited,
        world_size=world_size,
        rank=int(environment.get("RANK", "0")),
        on_cpu=use_cpu or _settings_of(config).get("use_cpu") is True,
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", max(1, world_size // nodes))),
        nodes=nodes,
        settings=tuple(f"{name}={value}" for name, value in sorted(inherited.items()) if name.startswith("PET_")),
        shares_gpus=bool(words) and _shares_gpus(options, config, environment, inherited),
    )


_COUNTS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_PORT")


def refuse_left_over(environment: Mapping[str, str], *, by_launcher: bool) -> None:
    """Raise EnvironmentMismatch for contradictory rank variables: another launcher left them in a shell."""
    counts = {name: environment[name] for name in _COUNTS if name in environment}
    for name, text in counts.items():
        if not (text.isascii() and text.isdigit() and len(text) < 7):
            raise _left_over(name, text, "is not a count")
    rank, world = int(counts.get("RANK", "0")), int(counts.get("WORLD_SIZE", "1"))
    local_rank, local_world = int(counts.get("LOCAL_RANK", "0")), int(counts.get("LOCAL_WORLD_SIZE", max(world, 1)))
    for name, count in (("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", local_world)):
        if count < 1:
            raise _left_over(name, str(count), "is no number of ranks")
    if rank >= world:
        raise _left_over("RANK", str(rank), f"is not one of {world} ranks (WORLD_SIZE)")
    if local_rank >= local_world:
        raise _left_over("LOCAL_RANK", str(local_rank), f"is not one of {local_world} ranks of a machine")
    if world > 1 and not by_launcher and "MASTER_ADDR" not in environment:
        raise _left_over("WORLD_SIZE", str(world), "names other ranks, and MASTER_ADDR does not say where they are")


# Set by launchers and one-pod jobs, and read by Accelerate. A user may set the last two.
_OF_LAUNCHERS = (
    "LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_ MASTER_ADDR MASTER_PORT TORCHELASTIC_ PET_ "
    "ACCELERATE_ FSDP_ PMI_ OMPI_COMM_WORLD_ MV2_COMM_WORLD_ FINETUNE_RANKS"
).split()
_OF_USERS = ("ACCELERATE_USE_CPU", "ACCELERATE_LOG_LEVEL")
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def take_out_left_over(environment: MutableMapping[str, str] = os.environ) -> str:
    """Take a launcher's variables out if no launcher started this process as one of several ranks.

    A shell, an image or a job with one pod sets them. Returns a line that names them; empty if there are none. Raises
    EnvironmentMismatch for contradictory ones, and under mpirun.
    """
    if _find_launcher(environment)[0]:
        return ""
    if "SLURM_PROCID" in environment:
        from finetune.launch.slurm import slurm_ranks

        if slurm_ranks(environment):
            return ""
    refuse_left_over(environment, by_launcher=False)
    if int(environment.get("WORLD_SIZE", "1")) > 1:  # ranks started by hand, or by a cluster's operator
        return ""
    for name in _MPI_SIZES:
        if environment.get(name, "1") not in ("", "1"):
            raise EnvironmentMismatch(
                f"launch: {name}={one_line(environment[name], 40)}: mpirun's ranks do not train together; start "
                f"`finetune train` without mpirun, or unset {name} if a shell has it left over"
            )
    exact = ("RANK", "WORLD_SIZE")
    names = sorted(
        name
        for name in environment
        if (name in exact or name.startswith(tuple(_OF_LAUNCHERS))) and name not in _OF_USERS
    )
    for name in names:
        del environment[name]
    if not names:
        return ""
    return f"launch: no launcher started this process, so it takes no notice of {', '.join(names)} (unset them)"


def _left_over(name: str, value: str, problem: str) -> EnvironmentMismatch:
    return EnvironmentMismatch(
        f"launch: {name}={one_line(value, 40)} {problem}; another launcher left it in this shell: unset {name}"
    )


def speaks_for_ranks(name: str = "RANK", environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process prints for all ranks: rank 0, or a process that is no rank, whatever RANK says."""
    rank = environment.get(name, environment.get("SLURM_PROCID", "0"))
    among_ranks = under_launcher(environment) or {"MASTER_ADDR", "SLURM_PROCID"} & environment.keys()
    return not among_ranks or not rank.isdigit() or int(rank) == 0


_VISIBLE_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def _shares_gpus(
    options: Sequence[str], config: str | None, environment: Mapping[str, str], inherited: Mapping[str, str]
) -> bool:
    """Whether all ranks on this machine see the same GPUs as this rank.

    torchrun and `finetune train` pass on their own environment, `accelerate launch` passes one list (`--gpu_ids`). A
    script between launcher and trainer, or torchrun's `--virtual-local-rank`, may show each rank a different GPU.
    """
    if all(environment.get(name) == inherited.get(name) for name in _VISIBLE_GPUS):
        return True
    listed = _option(options, "--gpu_ids", "--gpu-ids") or _settings_of(config).get("gpu_ids")
    return listed is not None and str(listed) == environment.get("CUDA_VISIBLE_DEVICES")


def _settings_of(config: str | None) -> dict[str, Any]:
    """The launcher's config file; empty without one, or if its path is relative to another folder."""
    if not config:
        return {}
    try:
        settings = yaml_value(read_regular(config, MAX_BYTES).decode("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return settings if isinstance(settings, dict) else {}


# Each launcher leaves one of these in a rank's environment: `finetune train` (local_ranks.py), torchrun,
# `accelerate launch`.
BY_TRAIN_VERB, BY_TORCHRUN, BY_ACCELERATE = "FINETUNE_RANKS", "TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"


def under_launcher(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher started this process, by its traces in the environment."""
    return any(name in environment for name in (BY_TRAIN_VERB, BY_TORCHRUN, BY_ACCELERATE))


def launcher_words(arguments: Sequence[str]) -> list[str]:
    """`accelerate launch ...`, `torchrun ...`, `finetune train ...` or `finetune eval ...` as typed, from a process's
    arguments.

    Empty for any other program.
    """
    for index, word in enumerate(arguments[:3]):
        name = os.path.basename(word)
        by_verb = name == "finetune" and arguments[index + 1 : index + 2] in (["train"], ["eval"])
        if name in ("accelerate", "accelerate-launch", "torchrun") or by_verb:
            return [name, *arguments[index + 1 :]]
    modules = ("accelerate.", "torch.distributed.", _TORCHRUN_MODULE, _CLI_MODULE)
    if "-m" in arguments[:4] and any(word.startswith(modules) for word in arguments[:5]):
        return ["python", *arguments[1:]]
    return []


_CLI_MODULE = "finetune.cli.main"  # python -m finetune.cli.main train RECIPE
_TORCHRUN_MODULE = "finetune.launch.torchrun"  # python -m finetune.launch.torchrun -m finetune.train RECIPE


def _is_torchrun(words: Sequence[str]) -> bool:
    names = ("torchrun", _TORCHRUN_MODULE)
    return any(word in names or word.startswith("torch.distributed.") for word in words[:4])


def arguments_of(process: int) -> list[str]:
    """A process's command line; empty if the process has ended or may not be read."""
    try:
        return list(psutil.Process(process).cmdline())
    except psutil.Error:
        return []


def continue_command(launch: Launch, *, resume: str) -> str:
    """The command that continues this run, to be typed in the same folder.

    `resume` is the recipe's training.resume: `never` would start over, so the command overrides it.
    """
    words = list(launch.words)
    if launch.by_torchrun:
        words = [*launch.settings, *words]
    if resume == "never":
        words = [word for word in words if not word.startswith("training.resume=")] + ["training.resume=auto"]
    return shlex.join(words)


def _find_launcher(environment: Mapping[str, str]) -> tuple[list[str], Mapping[str, str]]:
    """The launcher's command line and environment; without a launcher no words and our own environment."""
    if not under_launcher(environment):
        return [], environment
    words = launcher_words(arguments_of(os.getppid()))
    if not words:  # the variables were left in the shell, or the launcher has ended
        return [], environment
    try:
        return words, psutil.Process(os.getppid()).environ()
    except psutil.Error:
        return words, environment


def _requested_processes(options: Sequence[str], inherited: Mapping[str, str]) -> int | None:
    """Requested processes on all machines.

    accelerate's --num_processes is this number. torchrun counts one machine's processes: 8 on each of 2 nodes are 16.
    """
    total = _option(options, "--num_processes", "--num-processes")
    if total is None and _is_torchrun(options):
        per_node = _option(options, "--nproc_per_node", "--nproc-per-node") or inherited.get("PET_NPROC_PER_NODE", "")
        nodes = _option(options, "--nnodes") or inherited.get("PET_NNODES", "1")
        # `--nnodes 1:4` is elastic and `--nproc-per-node gpu` counts the GPUs: neither states a number.
        if per_node.isdigit() and nodes.isdigit():
            return int(per_node) * int(nodes)
    if total and total.isdigit():
        return int(total)
    return None


def _before_script(words: Sequence[str]) -> list[str]:
    """The launcher's own arguments: everything before our entrypoint, which may be the verb `train` or `eval`."""
    for index, word in enumerate(words):
        by_verb = word in ("train", "eval") and words[index - 1].rpartition("/")[2] in ("finetune", _CLI_MODULE)
        if by_verb or word.endswith("train.py") or word == "finetune.train":
            return list(words[:index])
    return list(words)


def _option(arguments: Sequence[str], *names: str) -> str | None:
    for index, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name in names:
            if equals:
                return value
            return next(iter(arguments[index + 1 : index + 2]), None)
    return None


# Prefixes of variables from launchers, schedulers and engines. A child that inherits them becomes a rank of this run.
_RANK_VARIABLES = tuple(
    "RANK WORLD_SIZE LOCAL_ GROUP_ ROLE_ MASTER_ TORCHELASTIC_ PET_ SLURM_ ACCELERATE_ FSDP_ DS_".split()
)


def environment_for_child(**variables: str) -> dict[str, str]:
    """The environment for a process that is not a rank of this run: without a rank's variables, with `variables`."""
    prefixes = (*_RANK_VARIABLES, BY_TRAIN_VERB)
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)} | variables


_WAIT_SECONDS = 60  # torchrun ends ranks that do not leave after 30
_PRINT_AFTER_LAUNCHER = f"""
import os, select, sys
try:
    launcher = os.pidfd_open(int(sys.argv[1]))
    select.select([launcher], [], [], {_WAIT_SECONDS})
except OSError:
    pass
os.write(2, os.fsencode(sys.argv[2]))
"""


def print_after_launcher(line: str) -> None:
    """Write the line to standard error, and again when the launcher has ended, below the launcher's own report."""
    text = f"\n{line}\n"
    sys.stdout.flush()
    with suppress(OSError):
        os.write(2, text.encode(errors="replace"))
    repeat_after_launcher(line)


def repeat_after_launcher(line: str) -> None:
    """Write the line to standard error when the launcher has ended, below the launcher's report about the exit code.

    A small child process in its own session waits for the launcher's end and keeps standard error open. Nothing happens
    without a launcher that reports (`finetune train` does not), or if it has ended already. Linux only.
    """
    reports = under_launcher() and BY_TRAIN_VERB not in os.environ
    if not reports or os.getppid() != PARENT_AT_START or not hasattr(os, "pidfd_open"):
        return
    subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _PRINT_AFTER_LAUNCHER, str(os.getppid()), f"\n{line}\n"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # torchrun ends a rank's whole process group
    )
