"""The half of `refuse` that this machine and this launch decide. A start ends at the first problem, `doctor` lists all.

Where a launch does not fit the recipe, the libraries silently do something else. recipe/strategy_fit.py has the other
half.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from finetune.architecture.attention import AMPERE
from finetune.base.location import weights_are_here
from finetune.errors import EnvironmentMismatch, RecipeError
from finetune.launch.gpu_environment import CUBLAS_VARIABLE, REPRODUCIBLE_WORKSPACES, gpu_of_rank
from finetune.launch.launcher import Launch
from finetune.launch.rendezvous import check_world
from finetune.output_stream import one_line
from finetune.paths import from_here
from finetune.recipe.mixed_precision import FastestFormat, fastest_by_flags, fastest_by_products, fastest_on_gpu
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import CONFIG_FOLDER, Strategy, read_strategy
from finetune.recipe.strategy_fit import NO_FLOAT8, pages_problem, ranks_problem
from finetune.strategies.packages import missing_packages
from finetune.wording import counted

DRIVER = Path("/proc/driver/nvidia/version")
OLDER_WHEELS = "for an older driver or card: pip install torch --index-url https://download.pytorch.org/whl/cu126"
ADA = (8, 9)  # the first compute capability with products in float8


def refuse_machine(recipe: Recipe, strategy: Strategy, launch: Launch) -> None:
    """Refuse, before anything is loaded, a launch that would not run on this machine as the recipe asks.

    Raises EnvironmentMismatch with the request, the launch, and the remedy; RecipeError for the launcher's own file.
    """
    requested = launch.requested_processes
    if (config := launch.config_file or _default_config(launch)) is not None:
        launched = read_strategy(str(config), strict=False)
        _check_same_strategy(recipe, strategy, launched, launch)
        requested = launched.num_processes if requested is None else requested
    for _, problem in machine_problems(recipe, strategy, launch):
        raise EnvironmentMismatch(problem)
    check_world(recipe, launch, requested)
    if misfit := ranks_problem(recipe, strategy, launch.world_size, launch.local_world_size):
        raise EnvironmentMismatch(misfit)
    if strategy.uses_engine:
        from finetune.strategies.zero_requirements import compile_engine

        compile_engine(strategy, on_cpu=computes_on_cpu(launch))


def machine_problems(recipe: Recipe, strategy: Strategy, launch: Launch) -> Iterator[tuple[str, str]]:
    """Everything that this machine lacks for a recipe: a topic, and the problem with its remedy.

    The checks read all GPUs of this machine's ranks, so that each rank reaches the same result.
    """
    budget, name = recipe.budget, recipe.model.name_or_path
    on_cpu = launch.on_cpu or not (budget.gpus or torch.cuda.is_available())
    lacks_gpus = not on_cpu and not torch.cuda.is_available()
    if lacks_gpus and (reason := why_torch_sees_no_gpu()):
        yield "devices", f"budget: {reason}; or train on this CPU with budget.gpus=0"
    elif lacks_gpus:
        missing = ""
        if not weights_are_here(name, recipe.model.revision):
            remedy = f"`hf download {name}`; if gated, first `hf auth login`"
            missing = f", nor the weights of {name} in its cache ({remedy})"
        yield (
            "devices",
            f"budget: the recipe is made for {counted(budget.gpus * budget.nodes, 'GPU')} of "
            f"{budget.gpu_memory_gb:g} GB, this machine has none{missing}; run it where they are, see "
            f"all of it work here, small, with `{shlex.join(['finetune', 'rehearse', launch.recipe])}`, or train on "
            "this CPU with budget.gpus=0",
        )
    if packages := missing_packages(recipe, strategy):
        yield "packages", packages
    for tracker in recipe.report_to:
        if importlib.util.find_spec(tracker) is None:
            remedy = f"pip install {tracker}, or remove it from report_to"
            yield "trackers", f"report_to: {tracker} is not installed; {remedy}"
    if strategy.uses_engine:
        from finetune.strategies.zero_requirements import engine_problems

        yield from (("strategy", problem) for problem in engine_problems(strategy, on_cpu=on_cpu))
    if on_cpu and (problem := pages_problem(recipe)):
        yield "strategy", problem
    if not on_cpu and not lacks_gpus:
        yield from (("devices", problem) for problem in gpu_problems(recipe, launch))


def gpu_problems(recipe: Recipe, launch: Launch) -> Iterator[str]:
    """The problems of this launch's GPUs, each with the settings to write.

    torch and Accelerate both count emulated bfloat16, many times slower, as support.
    """
    workspace = os.environ.get(CUBLAS_VARIABLE)  # a start sets it where the user has not
    if recipe.training.deterministic and workspace not in (None, *REPRODUCIBLE_WORKSPACES):  # torch would refuse later
        yield (
            f"training.deterministic: {CUBLAS_VARIABLE}={workspace} is not one of its reproducible settings; unset "
            f"it, or export {CUBLAS_VARIABLE}={REPRODUCIBLE_WORKSPACES[0]}"
        )
    # Two ranks on one GPU. NCCL ends them too, with "Duplicate GPU detected", but long after the start. Under srun each
    # rank may see its own GPU, always as number 0, and before ranks can communicate nothing tells these GPUs apart.
    gpus, ranks = torch.cuda.device_count(), launch.local_world_size
    if launch.shares_gpus and ranks > gpus:
        fewer = f"budget.gpus={gpus}"
        if launch.by_torchrun:
            fewer = f"--nproc_per_node {gpus}"
        elif launch.by_accelerate:
            fewer = f"--num_processes {gpus * launch.nodes}"
        alone = " and accelerate_config=single" if gpus * launch.nodes == 1 else ""
        yield (
            f"launch: {ranks} ranks were started on this machine, and it shows them {counted(gpus, 'GPU')}; each rank "
            f"needs one of its own. Launch with {fewer}{alone}, or list more in CUDA_VISIBLE_DEVICES"
        )
    own_gpus = sorted({gpu_of_rank(rank) for rank in (*range(ranks), launch.local_rank)})
    for index in own_gpus:
        if kernels := kernels_of_others(index):
            yield (
                f"launch: this torch has kernels for {kernels}, and none for "
                f"{torch.cuda.get_device_name(f'cuda:{index}')}; install a wheel that has some: {OLDER_WHEELS}"
            )
    capability, index = min((torch.cuda.get_device_capability(f"cuda:{index}"), index) for index in own_gpus)
    card = f"{torch.cuda.get_device_name(f'cuda:{index}')} has {capability[0]}.{capability[1]}"
    if recipe.model.load_in_fp8 and capability < ADA:
        yield NO_FLOAT8.format(card=card)
    # The replacement for each setting that computes in bfloat16.
    training, quantization, remedies = recipe.training, recipe.quantization, list[str]()
    other = "float32" if training.mixed_precision == "no" else "float16"
    if training.mixed_precision == "bf16":
        remedies.append("training.mixed_precision=fp16")
    if training.pure_bf16:
        remedies.append("training.pure_bf16=false")
    if recipe.lora is not None and recipe.model.dtype == "bfloat16":  # else weights are trained in float32
        remedies.append(f"model.dtype={other}")
    if quantization is not None and quantization.load_in_4bit and quantization.bnb_4bit_compute_dtype == "bfloat16":
        remedies.append(f"quantization.bnb_4bit_compute_dtype={other}")
    if capability < AMPERE and remedies:
        key = remedies[0].partition("=")[0]
        yield (
            f"{key}: bfloat16 begins with compute capability 8.0 (Ampere), {card} and would emulate it; set "
            f"{' '.join(remedies)}"
        )


def kernels_of_others(index: int) -> str:
    """The kernels that torch has, if none runs on this GPU; else empty.

    sm_75 runs on capabilities 7.5 to 7.9, so not on a V100 (7.0). compute_90 is compiled there, for 9.0 and later.
    """
    capability = torch.cuda.get_device_capability(f"cuda:{index}")
    kernels = [name for name in torch.cuda.get_arch_list() if name.startswith(("sm_", "compute_"))]  # not AMD's
    for kind, number in re.findall(r"(sm|compute)_(\d+)", " ".join(kernels)):
        needed = divmod(int(number), 10)
        if needed <= capability and (kind == "compute" or needed[0] == capability[0]):
            return ""
    return ", ".join(kernels)


def why_torch_sees_no_gpu(driver: Path = DRIVER) -> str:
    """A clause for machines with an NVIDIA driver that torch cannot use; empty where there is no driver."""
    installed = ""
    if driver.is_file():
        version = driver.read_text("utf-8", "replace").partition("\n")[0]
        installed = f": {one_line(version, 120)}"
    elif shutil.which("nvidia-smi") is None:  # WSL 2 has this program, and no such file
        return ""
    built, remedy = "the CPU", "install torch's wheel for CUDA: https://pytorch.org/get-started"
    if torch.version.cuda:
        built, remedy = f"CUDA {torch.version.cuda}", OLDER_WHEELS
        if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
            built, remedy = f"{built}, with CUDA_VISIBLE_DEVICES={visible!r}", f"unset that variable, or {OLDER_WHEELS}"
    return f"torch {torch.__version__}, built for {built}, sees no GPU behind this driver{installed}; {remedy}"


def launch_notes(launch: Launch, strategy: Strategy) -> list[str]:
    """Notes about settings that affect this launch although the command line lacks them, and about idle settings."""
    path = None if launch.config_file else _default_config(launch)
    notes = [f"launch: no --config_file, so `accelerate launch` read {path}"] if path else []
    if strategy.num_processes not in (None, launch.world_size):
        stated = f"num_processes: {strategy.num_processes} changes nothing"
        notes.append(f"accelerate_config: {strategy.path}: {stated}: {launch.world_size} were launched")
    return notes


def _default_config(launch: Launch) -> Path | None:
    """The config in the user's cache that a bare `accelerate launch` reads silently."""
    from accelerate.commands.config.config_args import default_config_file

    path = Path(default_config_file)
    if launch.by_accelerate and path.is_file():
        return path
    return None


def _check_same_strategy(recipe: Recipe, recipe_side: Strategy, launch_side: Strategy, launch: Launch) -> None:
    """The recipe names the strategy. A file given to the launcher may repeat it, or only say where to run.

    Raises EnvironmentMismatch for a file with another strategy, RecipeError with each key that contradicts the recipe.
    """
    path, stray = launch_side.path, launch.config_file is None
    of_launcher = f"{path}{', a default config in the cache' if stray else ''}"
    try:
        read_strategy(str(path), recipe=recipe, named_by="--config_file")
        mistakes: list[str] = []
    except RecipeError as error:
        mistakes = [*error.mistakes]
    if not launch_side.only_where:
        ranks = (launch.world_size, launch.local_world_size)
        launched, configured = launch_side.plugin_settings(*ranks), recipe_side.plugin_settings(*ranks)
        differing = [key for key in {**configured, **launched} if launched.get(key) != configured.get(key)]
        if launch_side.kind != recipe_side.kind or (differing and not mistakes):
            sides = [f"{configured.get(key)} there, {launched.get(key)} here for {key}" for key in differing]
            same_kind = f": {'; '.join(sides)}" if launch_side.kind == recipe_side.kind else ""
            remedies = [f"move {path} away"] if stray else []
            options = f"--config_file {recipe_side.path}"
            if computes_on_cpu(launch) and recipe_side.needs_ranks:
                options = f"--config_file {from_here(CONFIG_FOLDER / 'cpu_2proc.yaml')}"
            elif recipe_side.num_processes is None:
                budget = recipe.budget.gpus * recipe.budget.nodes
                options += f" --num_processes {max(launch.world_size, budget, 2 if recipe_side.needs_ranks else 1)}"
            remedies.append(f"launch with {options}")
            remedies += [] if stray or mistakes else [f"set accelerate_config={path}"]
            raise EnvironmentMismatch(
                f"accelerate_config: the recipe asks for {recipe_side.kind} ({recipe_side.path}), the launcher for "
                f"{launch_side.kind} ({of_launcher}){same_kind}; {', or '.join(remedies)}"
            )
    if mistakes:
        where = [f"--config_file: {path} is the default config in the cache; move it away, or correct it"]
        raise RecipeError([*(where if stray else []), *mistakes])


def computes_on_cpu(launch: Launch) -> bool:
    """Whether this launch trains on a CPU, by its own word or because torch sees no GPU."""
    return launch.on_cpu or not torch.cuda.is_available()


def fastest_on(device: torch.device) -> FastestFormat:
    """The number format in which this device computes fastest. Small products are timed on a CPU."""
    if device.type == "cpu":
        from finetune.measure.product_speed import product_seconds

        return fastest_by_products(fastest_by_flags(), *product_seconds([torch.bfloat16, torch.float32]))
    has_bfloat16 = torch.cuda.get_device_capability(device) >= AMPERE
    return fastest_on_gpu(torch.cuda.get_device_name(device), has_bfloat16=has_bfloat16)


def device_of(launch: Launch) -> torch.device:
    """The device that this rank computes on."""
    if computes_on_cpu(launch):
        return torch.device("cpu")
    return torch.device("cuda", gpu_of_rank(launch.local_rank))
