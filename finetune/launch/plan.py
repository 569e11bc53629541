"""A recipe's launch: the launcher, the machines and the ranks on each. No torch here.

Anything that the trainer and the strategy would refuse on the machines is refused here, before a job waits in a queue.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from finetune.errors import FinetuneError
from finetune.output_stream import printable
from finetune.paths import RECIPES, SHIPPED
from finetune.recipe.loader import load_recipe
from finetune.recipe.resolved import LoadedRecipe
from finetune.recipe.sections.model import PREFIX
from finetune.recipe.sections.preferences import names_second_model
from finetune.recipe.strategy import CONFIG_FOLDER, Strategy
from finetune.recipe.strategy_fit import ranks_problem, refuse_recipe, refuse_secrets
from finetune.wording import counted

Launcher = Literal["slurm", "torchrun", "kubeflow", "hf-jobs", "ray"]
LAUNCHERS: tuple[str, ...] = get_args(Launcher)
CONTAINERS = ("kubernetes", "k8s", "kubectl", "docker", "podman", "container", "job", "helm")
TRAINER = ("-m", "finetune.train")  # by its name: machines may have this package in different folders


@dataclass(frozen=True)
class JobOptions:
    """What a job says besides the recipe, by the verb's options; None: not named."""

    image: str | None = None  # a container's image; under Slurm what `apptainer exec` takes
    claim: str | None = None  # Kubernetes' PersistentVolumeClaim
    partition: str | None = None
    account: str | None = None
    timeout: str | None = None  # as `hf jobs run --timeout` takes it

    def named(self) -> dict[str, str]:
        """The options that were named."""
        return {name: value for name, value in asdict(self).items() if value is not None}


# The options that each launcher has a place for.
_TAKES: dict[str, tuple[str, ...]] = {
    "slurm": ("image", "partition", "account"),
    "kubeflow": ("image", "claim"),
    "hf-jobs": ("image", "timeout"),
}


# Names alone: a job's file is read by a shell, by YAML and by the engine.
_FORMS = {
    "image": (r"[\w./][\w./:@ -]*", "an image; write REGISTRY/finetune:1.0, or a file's path"),
    "claim": (r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", "a claim's name; write small letters, digits and dashes"),
    "partition": (r"[\w.,-]+", "a partition; write its name, as sinfo shows it"),
    "account": (r"[\w.,@-]+", "an account; write its name, as sacctmgr shows it"),
    "timeout": (r"[1-9]\d*[smhd]?", "a time; write seconds, or 90m, 8h, 2d"),
}


@dataclass(frozen=True)
class LaunchPlan:
    """The launcher, the ranks it starts, and the machines."""

    launcher: Launcher
    loaded: LoadedRecipe
    strategy: Strategy
    nodes: int
    gpus: int  # on each node; 0: the CPU
    ranks: int  # on each node
    recipe: str  # as typed
    arguments: tuple[str, ...]  # overrides
    options: JobOptions
    verb_arguments: str  # of `finetune launch`, for the file's first line

    @property
    def words(self) -> tuple[str, ...]:
        """The trainer, the recipe and its overrides."""
        return (*TRAINER, self.recipe, *self.arguments)

    @property
    def shipped_recipe(self) -> str | None:
        """The recipe's name if it comes with the package, so an image has it too; else None."""
        path = self.loaded.path.resolve()
        return path.stem if path.parent == RECIPES.resolve() else None

    @property
    def local_paths(self) -> tuple[tuple[str, str], ...]:
        """(key, path) for each file or folder of this machine that the recipe reads and an image does not have."""
        recipe = self.loaded.recipe
        names = [("model.name_or_path", recipe.model.name_or_path), ("model.adapter", recipe.model.adapter)]
        names += [("data.chat_template", recipe.data.chat_template)]
        names += [("data", entry.path) for entry in recipe.data.sets if entry.data_files is None]
        if recipe.preferences is not None and names_second_model(recipe.preferences):
            names.append((f"{recipe.training.objective}.reference", recipe.preferences.reference))
        local = [
            (key, name) for key, name in names if name and (name.startswith((".", os.sep)) or os.path.exists(name))
        ]
        if not self.strategy.path.resolve().is_relative_to(CONFIG_FOLDER.resolve()):
            local.append(("accelerate_config", recipe.accelerate_config))
        for entry in recipe.data.sets:
            files = entry.data_files or []
            local += [("data", name) for name in ([files] if isinstance(files, str) else files)]
        if recipe.eval.generate.file is not None:
            local.append(("eval.generate.file", recipe.eval.generate.file))
        # A packaged recipe finds the package's files wherever the package is.
        shipped = (SHIPPED / "data").resolve() if self.shipped_recipe else None
        return tuple(entry for entry in local if not (shipped and Path(entry[1]).resolve().is_relative_to(shipped)))

    @property
    def world(self) -> int:
        return self.nodes * self.ranks

    @property
    def alone(self) -> bool:
        """Whether it is one process that needs no launcher; under torchrun it would be a distributed run."""
        return not self.strategy.distributed


_NONE = JobOptions()


def plan_launch(
    recipe: Path,
    overrides: Sequence[str],
    *,
    launcher: str,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    options: JobOptions = _NONE,
) -> LaunchPlan:
    """Plan a recipe's launch on these machines, or on its budget's machines if no number is given.

    On a CPU, one machine has two ranks. With several machines each has one, which uses all cores. Raises RecipeError,
    and FinetuneError if the strategy does not fit the machines, or the launcher cannot run it.
    """
    if launcher not in LAUNCHERS:
        hint = ""
        if launcher == "accelerate":
            hint = "; take torchrun, which starts the same run"
        elif launcher.lower() in CONTAINERS:
            hint = "; take kubeflow, or the Job of docs/launching.md, which runs finetune train"
        raise FinetuneError(f"--on: {printable(launcher)} is not one of {', '.join(LAUNCHERS)}{hint}")
    for name, value in options.named().items():
        if name not in _TAKES.get(launcher, ()):
            takers = " and ".join(on for on, names in _TAKES.items() if name in names)
            raise FinetuneError(f"--{name}: {printable(value)}: {launcher} takes none, only {takers}; leave it out")
        form, meant = _FORMS[name]
        if not re.fullmatch(form, value):
            raise FinetuneError(f"--{name}: {printable(value)!r} is not {meant}")
    loaded = load_recipe(recipe, overrides)
    refuse_secrets(loaded.recipe)
    budget, strategy = loaded.recipe.budget, refuse_recipe(loaded.recipe)
    machines = {"nodes": budget.nodes, "gpus": budget.gpus}
    typed: list[str] = []
    if nodes is not None:
        machines["nodes"] = nodes or budget.nodes
        typed += ["--nodes", str(nodes)]
    if gpus_per_node is not None:
        machines["gpus"] = gpus_per_node
        typed += ["--gpus-per-node", str(gpus_per_node)]
    for name, value in options.named().items():
        typed += [f"--{name}", value]
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
        recipe=str(recipe),
        arguments=(*overrides, *changed),
        options=options,
        verb_arguments=shlex.join([str(recipe), "--on", launcher, *typed, *overrides]),
    )
    for problem in _misfits(plan):
        raise FinetuneError(problem)
    return plan


def _misfits(plan: LaunchPlan) -> Iterator[str]:
    """Each reason why these machines cannot start the recipe, or why ranks would be idle."""
    recipe, strategy, world = plan.loaded.recipe, plan.strategy, plan.world
    processors = counted(plan.gpus, "GPU") if plan.gpus else counted(plan.ranks, "CPU process", "CPU processes")
    machines = f"{plan.nodes} x {processors}"
    if strategy.only_where and plan.gpus:
        place = f"accelerate_config: {strategy.name}"
        yield f"{place} runs on a CPU, not on {machines}; set accelerate_config=ddp, or take no GPU: budget.gpus=0"
    if problem := ranks_problem(recipe, strategy, world, plan.ranks, machines):
        yield problem
    # Stages of one pipeline share their rows, so only the pipelines are counted.
    rows, readers = recipe.training.global_batch_size, strategy.data_rank_count(world)
    if rows < readers:
        idle = f"{counted(rows, 'row')} a step leave {readers - rows} of {readers} ranks without one"
        yield f"training.global_batch_size: {idle}; raise it to {readers}, or take fewer GPUs"
    image = plan.options.image or ""
    is_of_apptainer = "://" in image or image.endswith(".sif") or os.path.isdir(image)  # a folder is a sandbox
    if image and plan.launcher == "slurm" and not is_of_apptainer:
        yield f"--image: apptainer reads {image} as a file's name; write docker://{image}, or a .sif file"
    if image and plan.launcher in ("kubeflow", "hf-jobs") and is_of_apptainer:
        yield f"--image: {image} is apptainer's, and {plan.launcher} takes a registry's: REGISTRY/finetune:1.0"
    on = plan.launcher
    if on not in ("kubeflow", "hf-jobs"):
        return
    # A container has none of this machine's folders.
    if not image:
        yield (
            f"--image: is missing, and {on} runs a container; build one from the checkout's Dockerfile, push it, and "
            "name it: --image REGISTRY/finetune:1.0"
        )
    if "nvme" in plan.strategy.offload_devices.values():
        yield (
            f"accelerate_config: {plan.strategy.name} writes to a fast disk, and {on} lends none; set "
            "accelerate_config=zero3_offload"
        )
    if recipe.model.name_or_path.startswith(PREFIX):
        yield (
            f"model.name_or_path: {recipe.model.name_or_path} is a package of this machine, not of the image; name the "
            "model's repository on the Hub"
        )
    storage = recipe.storage
    if storage is not None and storage.startswith("file://") and not (on == "kubeflow" and "/work/" in storage[:13]):
        yield f"run.storage: {printable(storage)} is a folder of this machine; name a bucket: s3://BUCKET/PREFIX"
    for key, path in plan.local_paths:
        shown = printable(path)
        if on == "hf-jobs":
            yield f"{key}: {shown} is on this machine, and a job shares no folder with it; put it on the Hub"
        if os.path.isabs(path) or ".." in Path(path).parts:
            yield f"{key}: {shown} is not in this folder, which the job's volume stands for; name it from here"
    if on != "hf-jobs":
        return
    if plan.nodes > 1:
        yield f"budget.nodes: {plan.nodes} machines, and an HF job has one; set budget.nodes=1, or take kubeflow"
    if not recipe.hub.push and storage is None:
        yield (
            "hub.push: is false, and a job's disk ends with it; set hub.push=true hub.repo_id=OWNER/NAME, or "
            "run.storage=hf://OWNER/NAME@BRANCH"
        )
