"""`finetune launch`: writes the file that starts a recipe on its machines, to be read, submitted or run. No torch here.

launcher.py, slurm.py and rendezvous.py read the same options again in every rank. Anything that they and the strategy
would refuse on the machines is refused here, before a job waits in a queue.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from finetune.errors import FinetuneError
from finetune.files import write_text
from finetune.launch.slurm import job_script
from finetune.output_stream import printable
from finetune.recipe.loader import load_recipe
from finetune.recipe.resolved import LoadedRecipe
from finetune.recipe.strategy import Strategy, strategy_of
from finetune.wording import counted

Launcher = Literal["slurm", "torchrun"]
LAUNCHERS: tuple[str, ...] = get_args(Launcher)
CONTAINERS = ("kubernetes", "k8s", "kubectl", "docker", "podman", "container", "job", "helm", "kubeflow")

TRAINER = ("-m", "finetune.train")  # by its name: machines may have this package in different folders
_PORT = 29500  # torch's own default
_MARK = "# Made by: finetune launch "


@dataclass(frozen=True)
class LaunchPlan:
    """The launcher, the ranks it starts, and the machines."""

    launcher: Launcher
    loaded: LoadedRecipe
    strategy: Strategy
    nodes: int
    gpus: int  # on each node; 0: the CPU
    ranks: int  # on each node
    words: tuple[str, ...]  # the trainer, the recipe and its overrides
    verb_arguments: str  # of `finetune launch`, for the file's first line

    @property
    def world(self) -> int:
        return self.nodes * self.ranks

    @property
    def alone(self) -> bool:
        """Whether it is one process that needs no launcher; under torchrun it would be a distributed run."""
        return not self.strategy.distributed


def plan_launch(
    recipe: Path, overrides: Sequence[str], *, launcher: str, nodes: int | None = None, gpus_per_node: int | None = None
) -> LaunchPlan:
    """Plan a recipe's launch on these machines, or on its budget's machines if no number is given.

    On a CPU, one machine has two ranks. With several machines each has one, which uses all cores. Raises RecipeError,
    and FinetuneError if the strategy does not fit the machines.
    """
    if launcher not in LAUNCHERS:
        hint = ""
        if launcher == "accelerate":
            hint = "; take torchrun, which starts the same run"
        elif launcher.lower() in CONTAINERS:
            hint = (
                "; docs/launching.md has a Dockerfile and a Job for containers and Kubernetes, which run finetune train"
            )
        raise FinetuneError(f"--on: {printable(launcher)} is not one of {', '.join(LAUNCHERS)}{hint}")
    loaded = load_recipe(recipe, overrides)
    budget, strategy = loaded.recipe.budget, strategy_of(loaded.recipe)
    machines = {"nodes": budget.nodes, "gpus": budget.gpus}
    options: list[str] = []
    if nodes is not None:
        machines["nodes"] = nodes or budget.nodes
        options += ["--nodes", str(nodes)]
    if gpus_per_node is not None:
        machines["gpus"] = gpus_per_node
        options += ["--gpus-per-node", str(gpus_per_node)]
    # The trainer checks the launch against the recipe's budget. So the command overrides each number that differs.
    changed = [f"budget.{key}={value}" for key, value in machines.items() if value != getattr(budget, key)]
    ranks = machines["gpus"]
    if not ranks:
        ranks = 1 if machines["nodes"] > 1 else strategy.rank_count(2)
    plan = LaunchPlan(
        launcher=launcher,  # type: ignore[arg-type]  # one of LAUNCHERS
        loaded=loaded,
        strategy=strategy,
        nodes=machines["nodes"],
        gpus=machines["gpus"],
        ranks=ranks,
        words=(*TRAINER, str(recipe), *overrides, *changed),
        verb_arguments=shlex.join([str(recipe), "--on", launcher, *options, *overrides]),
    )
    for problem in _misfits(plan):
        raise FinetuneError(problem)
    return plan


def _misfits(plan: LaunchPlan) -> Iterator[str]:
    """Reasons why the trainer would refuse these machines, or why ranks would be idle."""
    strategy, world = plan.strategy, plan.world
    each = counted(plan.ranks, "CPU process", "CPU processes")
    if plan.gpus:
        each = counted(plan.gpus, "GPU")
    machines = f"{plan.nodes} x {each}"
    place = f"accelerate_config: {strategy.name}"
    if strategy.only_where and plan.gpus:
        yield f"{place} runs on a CPU, not on {machines}; set accelerate_config=ddp, or take no GPU: budget.gpus=0"
    if plan.alone and world > 1:
        yield f"{place} runs one process, {machines} are {world}; set accelerate_config=ddp, or take one GPU"
    if strategy.needs_ranks and world == 1:
        yield f"{place} runs on several processes, {machines} are one; set accelerate_config=single, or take more GPUs"
    if strategy.replicates and not strategy.can_replicate(world, plan.ranks):
        yield (
            f"{place} shards within a node and repeats between nodes, {machines} make "
            f"{strategy.replica_count(world, plan.ranks)} such copies; take several nodes of several GPUs, or set "
            "accelerate_config=fsdp2"
        )
    if strategy.pipelines and world > 1 and (misfit := strategy.pipelines.misfit(world)) is not None:
        yield f"{place} {misfit}"
    # Stages of one pipeline share their rows, so only the pipelines are counted.
    rows, readers = plan.loaded.recipe.training.global_batch_size, strategy.data_rank_count(world)
    if rows < readers:
        idle = f"{counted(rows, 'row')} a step leave {readers - rows} of {readers} ranks without one"
        yield f"training.global_batch_size: {idle}; raise it to {readers}, or take fewer GPUs"


def script(plan: LaunchPlan) -> str:
    """The file's text: a bash script to run on every machine, or a job script for Slurm."""
    if plan.launcher == "slurm":
        starter = _starter(plan, machine='"$SLURM_NODEID"', first='"$MASTER_ADDR"', port='"$MASTER_PORT"')
        return job_script(plan, _head(plan), starter)
    lines, trainer = ["#!/usr/bin/env bash", *_head(plan)], shlex.join(plan.words)
    if plan.nodes == 1:
        lines += ["# Start: bash THIS_FILE", "", f"exec {_starter(plan)} \\", f"  {trainer}"]
        return "\n".join(lines) + "\n"
    starter = _starter(plan, machine='"$machine"', first='"$first"', port=str(_PORT))
    last = plan.nodes - 1
    lines += [
        f"# Start on every machine, R = 0 to {last}, with the address of machine 0: bash THIS_FILE R ADDRESS",
        "# All of them see the run's folder under the same path. To stop and save: Ctrl-C on one.",
        f'machine="${{1:?the number of this machine, 0 to {last}}}"',
        'first="${2:?the address of machine 0, as the others reach it}"',
        "",
        f"exec {starter} \\",
        f"  {trainer}",
    ]
    return "\n".join(lines) + "\n"


def write_script(path: Path, text: str) -> None:
    """Write the file. An existing file is replaced only if this verb made it.

    Raises FinetuneError, EnvironmentMismatch.
    """
    if path.exists() and not (path.is_file() and _MARK.encode() in path.read_bytes()[:1000]):
        raise FinetuneError(f"-o: {path}: exists and was not made by `finetune launch`; name another file")
    write_text(path, text)


def _head(plan: LaunchPlan) -> list[str]:
    """The comments that both kinds of file begin with."""
    devices = counted(plan.gpus, "GPU") if plan.gpus else "its CPU"
    machines = f"one machine with {devices}"
    if plan.nodes > 1:
        machines = f"{plan.nodes} machines with {devices} each"
    ranks = counted(plan.world, "rank")
    return [
        _MARK + printable(plan.verb_arguments),
        f"# {plan.strategy.name} on {machines}, {ranks}. Paths are as seen from the folder where it is started.",
    ]


def line_of_machine(plan: LaunchPlan) -> str:
    """The line that starts machine R of several by hand. ADDRESS_OF_0 is machine 0's address."""
    return f"{_starter(plan, machine='R', first='ADDRESS_OF_0', port=str(_PORT))} {shlex.join(plan.words)}"


def _starter(plan: LaunchPlan, *, machine: str = "", first: str = "", port: str = "") -> str:
    """The command that starts one machine's ranks, up to the trainer.

    `machine` (this machine's number), `first` (machine 0's address) and `port` are bash words.
    """
    if plan.alone:
        return "python"
    if plan.nodes == 1:
        return f"torchrun --standalone --nproc-per-node {plan.ranks}"
    place = f"--node-rank {machine} --master-addr {first} --master-port {port}"
    return f"torchrun --nnodes {plan.nodes} {place} --nproc-per-node {plan.ranks}"
