"""Recipe and Accelerate config to an Accelerator that is what was asked for, or an error.

The only file that knows Accelerate's plugins. Libraries here do something else without a word when a launch does not
fit them, so everything is compared after building: strategy, world size, precision.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import DistributedType

from finetune.errors import EnvironmentMismatch, RecipeError
from finetune.launcher import Launch
from finetune.recipe import Recipe
from finetune.recipe_file import CONFIG_FOLDER
from finetune.rendezvous import check_world, choose_interface, meeting

Kind = Literal["single", "ddp", "fsdp", "deepspeed"]
KIND_OF_TYPE: dict[str, Kind] = {"NO": "single", "MULTI_GPU": "ddp", "FSDP": "fsdp", "DEEPSPEED": "deepspeed"}


@dataclass(frozen=True)
class Strategy:
    """A strategy as an Accelerate config file states it."""

    name: str
    path: Path
    kind: Kind
    only_where: bool  # says where to run (two CPU ranks), not how: agrees with any strategy
    num_processes: int | None
    settings: dict[str, Any]


def read_strategy(name_or_path: str) -> Strategy:
    """Read a file of accelerate_configs/ by name, or any Accelerate config by path. Raises RecipeError."""
    path = CONFIG_FOLDER / f"{name_or_path}.yaml"
    if not path.is_file():
        path = Path(name_or_path)
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise RecipeError([f"accelerate_config: {path}: cannot be read: {reason}; name an existing file"]) from error
    kind = KIND_OF_TYPE.get(str(settings.get("distributed_type", "NO")) if isinstance(settings, dict) else "")
    if kind is None:
        known = ", ".join(KIND_OF_TYPE)
        raise RecipeError([f"accelerate_config: {path}: distributed_type is none of {known}; correct that file"])
    return Strategy(
        name=path.stem,
        path=path,
        kind=kind,
        only_where=bool(settings.get("use_cpu")),
        num_processes=settings.get("num_processes"),
        settings=settings,
    )


def check_launch(recipe: Recipe, launch: Launch) -> Strategy:
    """Refuse, before anything is loaded, a launch that would not run what the recipe asks for.

    Returns the strategy. Raises EnvironmentMismatch naming what was asked, what runs, and the remedy.
    """
    strategy = read_strategy(recipe.accelerate_config)
    config = launch.config_file or _default_config(launch)
    if config is not None:
        _agree(strategy, read_strategy(str(config)), config, stray=launch.config_file is None)
    asked = launch.asked_processes
    if asked is None and config is not None:
        asked = read_strategy(str(config)).num_processes
    check_world(recipe, launch, asked)
    _right_number_of_processes(recipe, strategy, launch)
    _right_device(recipe, launch)
    _supported_here(recipe, strategy)
    return strategy


def launch_notes(launch: Launch) -> list[str]:
    """What has a say in this launch without having been named on its command line, a line each."""
    path = None if launch.config_file else _default_config(launch)
    return [f"launch: no --config_file, so `accelerate launch` read {path}"] if path else []


def _default_config(launch: Launch) -> Path | None:
    """The config in the user's cache that a bare `accelerate launch` reads without a word."""
    from accelerate.commands.config.config_args import default_config_file

    path = Path(default_config_file)
    return path if launch.by_accelerate and path.is_file() else None


def _agree(recipe_side: Strategy, launch_side: Strategy, path: Path, *, stray: bool) -> None:
    if launch_side.only_where or launch_side.kind == recipe_side.kind:
        return
    remedy = (
        f"move {path} away, or pass --config_file {recipe_side.path}"
        if stray
        else f"launch with --config_file {recipe_side.path}, or set accelerate_config={path}"
    )
    raise EnvironmentMismatch(
        f"accelerate_config: the recipe asks for {recipe_side.kind} ({recipe_side.path}), the launcher for "
        f"{launch_side.kind} ({path}{', a default config in the cache' if stray else ''}); {remedy}"
    )


def _right_number_of_processes(recipe: Recipe, strategy: Strategy, launch: Launch) -> None:
    if strategy.kind == "single" and launch.world_size > 1:
        raise EnvironmentMismatch(
            f"accelerate_config: single runs one process, the launcher started {launch.world_size}; "
            "set accelerate_config=ddp, or launch with --num_processes 1"
        )
    if strategy.kind != "single" and launch.world_size == 1:
        wanted = max(2, recipe.budget.gpus * recipe.budget.nodes)
        raise EnvironmentMismatch(
            f"accelerate_config: {strategy.name} runs on several processes, the launcher started one; launch with "
            f"`accelerate launch --multi_gpu --num_processes {wanted}`, on a CPU with `--config_file "
            "accelerate_configs/cpu_2proc.yaml`, or set accelerate_config=single"
        )


def _right_device(recipe: Recipe, launch: Launch) -> None:
    if recipe.budget.gpus and not torch.cuda.is_available() and not launch.on_cpu:
        budget = recipe.budget
        raise EnvironmentMismatch(
            f"budget: the recipe is made for {budget.gpus} GPU(s) of {budget.gpu_memory_gb:g} GB, this machine has "
            "none; run it where they are, or on this CPU with budget.gpus=0"
        )


def _supported_here(recipe: Recipe, strategy: Strategy) -> None:
    if strategy.kind in ("fsdp", "deepspeed"):
        raise EnvironmentMismatch(
            f"accelerate_config: {strategy.name}: this version of finetune trains under single and ddp only; "
            "set accelerate_config=ddp"
        )
    if recipe.training.mixed_precision == "fp16":
        raise EnvironmentMismatch(
            "training.mixed_precision: fp16 needs loss scaling, which this version has not; set bf16 or no"
        )
    if recipe.training.optim != "adamw":
        raise EnvironmentMismatch(
            f"training.optim: {recipe.training.optim} is not in this version; set training.optim=adamw"
        )


def build_accelerator(recipe: Recipe, strategy: Strategy, launch: Launch) -> Accelerator:
    """The Accelerator for this recipe, compared with what was asked for.

    Accumulation stays 1: the loop collects the micro-batches of a step itself and divides once. Raises
    EnvironmentMismatch when strategy, world size or precision in force differ from those asked for.
    """
    accelerator = Accelerator(
        mixed_precision=recipe.training.mixed_precision,
        cpu=not recipe.budget.gpus and not torch.cuda.is_available(),
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False),
            InitProcessGroupKwargs(),
        ],
        step_scheduler_with_optimizer=False,
    )
    in_force = {
        "strategy": "single" if accelerator.distributed_type == DistributedType.NO else "ddp",
        "world size": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "dynamo_backend": accelerator.state.dynamo_plugin.backend.value,
    }
    asked = {
        "strategy": strategy.kind,
        "world size": launch.world_size,
        "mixed_precision": recipe.training.mixed_precision,
        "gradient_accumulation_steps": 1,
        "dynamo_backend": "NO",
    }
    differing = [f"{key}: asked {asked[key]}, runs {in_force[key]}" for key in asked if asked[key] != in_force[key]]
    if differing:
        raise EnvironmentMismatch(f"launch: {'; '.join(differing)}; correct the launcher's settings and environment")
    return accelerator


def prepare_quietly(accelerator: Accelerator, *parts: Any) -> Any:
    """`accelerator.prepare`, without a warning that is not the user's."""
    with warnings.catch_warnings():
        # torch 2.13 renames broadcast_buffers; 2.11 knows only this name, and buffers here never change.
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
        return accelerator.prepare(*parts)


def hush_libraries(launch: Launch) -> None:
    """Take progress bars and notices that are not about this run off the terminal; errors stay."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if not launch.is_main:
        transformers_logging.set_verbosity_error()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # speaks of kernels it would like to download


def use_all_cores(launch: Launch, device: torch.device) -> None:
    """`accelerate launch` sets one thread a process; on a CPU share the cores out, unless the user chose."""
    import psutil

    if device.type == "cpu" and not launch.threads_chosen:
        torch.set_num_threads(max(1, (psutil.cpu_count(logical=False) or 1) // launch.local_world_size))
