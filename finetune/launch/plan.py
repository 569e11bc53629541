"""A recipe's launch: the launcher, the machines and the ranks on each. No torch here.

Anything that the trainer and the strategy would refuse on the machines is refused here, before a job waits in a queue.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from finetune.errors import FinetuneError
from finetune.files import FETCHED
from finetune.output_stream import printable
from finetune.recipe.loader import load_recipe
from finetune.recipe.resolved import LoadedRecipe
from finetune.recipe.strategy import Strategy, strategy_of
from finetune.wording import counted

Launcher = Literal["slurm", "torchrun"]
LAUNCHERS: tuple[str, ...] = get_args(Launcher)
CONTAINERS = ("kubernetes", "k8s", "kubectl", "docker", "podman", "container", "job", "helm", "kubeflow")
TRAINER = ("-m", "finetune.train")  # by its name: machines may have this package in different folders


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
    offline: bool = False  # the recipe is one of `finetune fetch`: everything that it names is beside it

    @property
    def world(self) -> int:
        return self.nodes * self.ranks

    @property
    def exports(self) -> list[str]:
        """Lines of bash for the ranks' environment."""
        return ["export HF_HUB_OFFLINE=1  # everything is in this folder: nothing is asked for"] if self.offline else []

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
        offline=(loaded.path.parent / FETCHED).is_file(),
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
