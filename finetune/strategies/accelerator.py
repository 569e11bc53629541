"""Build the Accelerator that a recipe and its Accelerate config ask for, or raise an error.

The only file that knows Accelerate's plugins. Where a launch does not fit them, the libraries silently do something
else, so everything is compared after building: strategy, world size, precision.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn

from finetune.base.location import weights_are_here
from finetune.errors import EnvironmentMismatch, RecipeError
from finetune.launch.gpu_environment import gpu_of_rank, libraries_on_gpu
from finetune.launch.launcher import Launch
from finetune.launch.rendezvous import check_world, collective_timeout
from finetune.measure.host_memory import cores_each
from finetune.model.optimizer import check_optimizer
from finetune.paths import from_here
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import CONFIG_FOLDER, KIND_OF_TYPE, Strategy, read_strategy, strategy_of
from finetune.recipe.strategy_fit import ranks_problem, unfit
from finetune.strategies.packages import check_packages
from finetune.wording import counted

# A launcher's variables for a single process. Engines that shard need a process group even for one rank.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def check_launch(recipe: Recipe, launch: Launch) -> Strategy:
    """Refuse, before anything is loaded, a launch that would not run as the recipe asks.

    Returns the strategy. Raises EnvironmentMismatch with the request, the launch, and the remedy.
    """
    strategy = strategy_of(recipe)
    config = launch.config_file or _default_config(launch)
    requested = launch.asked_processes
    if config is not None:
        launched = read_strategy(str(config), strict=False)
        _check_same_strategy(recipe, strategy, launched, launch)
        requested = launched.num_processes if requested is None else requested
    on_cpu = _computes_on_cpu(launch)
    for check in machine_checks(recipe, strategy, launch, on_cpu=on_cpu).values():
        check()
    check_world(recipe, launch, requested)
    if problem := ranks_problem(recipe, strategy, launch.world_size, launch.local_world_size):
        raise EnvironmentMismatch(problem)
    if strategy.uses_engine:
        from finetune.strategies.zero_requirements import compile_engine

        compile_engine(strategy, on_cpu=on_cpu)
    if not on_cpu:
        from finetune.strategies.gpu_needs import check_gpus

        check_gpus(recipe, launch)
    return strategy


def machine_checks(
    recipe: Recipe, strategy: Strategy, launch: Launch, *, on_cpu: bool
) -> dict[str, Callable[[], None]]:
    """Checks of what a machine may lack for a recipe, however it is launched. The start and `doctor` make them.

    Each raises EnvironmentMismatch.
    """
    return {
        "devices": partial(check_has_gpu, recipe, launch),
        "packages": partial(check_packages, recipe, strategy),
        "strategy": partial(check_combination, recipe, strategy, on_cpu=on_cpu),
    }


def launch_notes(launch: Launch, strategy: Strategy | None = None) -> list[str]:
    """Notes about settings that affect this launch although the command line lacks them, and about idle settings."""
    path = None if launch.config_file else _default_config(launch)
    notes = [f"launch: no --config_file, so `accelerate launch` read {path}"] if path else []
    if strategy is not None and strategy.num_processes not in (None, launch.world_size):
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
            remedies.append(f"launch with {_options_for(recipe, recipe_side, launch)}")
            remedies += [] if stray or mistakes else [f"set accelerate_config={path}"]
            raise EnvironmentMismatch(
                f"accelerate_config: the recipe asks for {recipe_side.kind} ({recipe_side.path}), the launcher for "
                f"{launch_side.kind} ({of_launcher}){same_kind}; {', or '.join(remedies)}"
            )
    if mistakes:
        where = [f"--config_file: {path} is the default config in the cache; move it away, or correct it"]
        raise RecipeError([*(where if stray else []), *mistakes])


def _options_for(recipe: Recipe, strategy: Strategy, launch: Launch) -> str:
    """Options for `accelerate launch` to start the recipe's strategy on this machine."""
    if _computes_on_cpu(launch) and strategy.needs_ranks:
        return f"--config_file {from_here(CONFIG_FOLDER / 'cpu_2proc.yaml')}"
    if strategy.num_processes is not None:
        return f"--config_file {strategy.path}"
    ranks = max(launch.world_size, recipe.budget.gpus * recipe.budget.nodes, 2 if strategy.needs_ranks else 1)
    return f"--config_file {strategy.path} --num_processes {ranks}"


def check_has_gpu(recipe: Recipe, launch: Launch) -> None:
    """Refuse a machine without a GPU for a recipe that is made for GPUs. Raises EnvironmentMismatch."""
    if recipe.budget.gpus and not torch.cuda.is_available() and not launch.on_cpu:
        budget = recipe.budget
        from finetune.strategies.gpu_needs import why_torch_sees_no_gpu

        if reason := why_torch_sees_no_gpu():
            raise EnvironmentMismatch(f"budget: {reason}; or train on this CPU with budget.gpus=0")
        missing, name = "", recipe.model.name_or_path
        if not weights_are_here(name, recipe.model.revision):
            remedy = f"`hf download {name}`; if gated, first `hf auth login`"
            missing = f", nor the weights of {name} in its cache ({remedy})"
        raise EnvironmentMismatch(
            f"budget: the recipe is made for {counted(budget.gpus * budget.nodes, 'GPU')} of "
            f"{budget.gpu_memory_gb:g} GB, this machine has none{missing}; run it where they are, see "
            f"all of it work here, small, with `{shlex.join(['finetune', 'rehearse', launch.recipe])}`, or train on "
            "this CPU with budget.gpus=0"
        )


def device_of(launch: Launch) -> torch.device:
    """The device that this rank computes on."""
    if _computes_on_cpu(launch):
        return torch.device("cpu")
    return torch.device("cuda", gpu_of_rank(launch.local_rank))


def _computes_on_cpu(launch: Launch) -> bool:
    return launch.on_cpu or not torch.cuda.is_available()


def check_combination(recipe: Recipe, strategy: Strategy, *, on_cpu: bool) -> None:
    """Refuse settings that this strategy cannot train with, on any machine. Raises EnvironmentMismatch."""
    if strategy.uses_engine:
        from finetune.strategies.zero_requirements import require_engine

        require_engine(strategy, on_cpu=on_cpu)
    for problem in unfit(recipe, strategy):
        raise EnvironmentMismatch(str(problem))
    check_optimizer(recipe.training.optim, on_cpu=on_cpu, sharded=strategy.shards_optimizer_state)


def build_accelerator(recipe: Recipe, strategy: Strategy, launch: Launch) -> Accelerator:
    """The Accelerator for this recipe, compared with the request.

    Accumulation stays 1: the loop collects a step's micro-batches itself and divides once. Raises EnvironmentMismatch
    if strategy, world size or precision in force differ from the recipe.
    """
    on_cpu = _computes_on_cpu(launch)
    if not on_cpu and launch.world_size > 1:
        from finetune.strategies.gpu_needs import go_around_peers

        go_around_peers(launch)
    process_group = InitProcessGroupKwargs(timeout=collective_timeout(recipe))
    if strategy.shards_optimizer_state:
        for key, value in ALONE.items():
            os.environ.setdefault(key, value)
    if strategy.shards_modules and on_cpu:
        # Make Accelerate accept an FSDP plugin on gloo ranks. Version 1.15 turns only MULTI_GPU and similar types into
        # FSDP (accelerate/state.py), and would silently use DDP instead. tests/proofs/test_strategies.py checks it.
        PartialState(cpu=True, **process_group.to_kwargs())
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # not public
    if strategy.shards_modules and strategy.offloaded and not on_cpu:
        process_group.backend = "cpu:gloo,cuda:nccl"  # the norm of gradients in host memory is reduced there
    zero = None
    quiet: AbstractContextManager[Any] = nullcontext()
    if strategy.uses_engine:
        from finetune.strategies.zero import zero_plugin
        from finetune.strategies.zero_requirements import silenced_deepspeed, zero_environment

        quiet = silenced_deepspeed()
        zero_environment(recipe, on_cpu=on_cpu)
        process_group.backend = "gloo" if on_cpu else None
        zero = zero_plugin(recipe, strategy, world_size=launch.world_size, on_cpu=on_cpu)
    on_gpu = nullcontext() if on_cpu else libraries_on_gpu(gpu_of_rank(launch.local_rank))
    with quiet, on_gpu:
        accelerator = Accelerator(
            mixed_precision=recipe.training.mixed_precision,
            # With cpu=True Accelerate would drop the plugin of an engine on gloo ranks.
            cpu=zero is None and on_cpu,
            fsdp_plugin=_fsdp_plugin(strategy) if strategy.shards_modules else None,
            deepspeed_plugin=zero,
            kwargs_handlers=[
                DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False),
                process_group,
            ],
            step_scheduler_with_optimizer=False,
        )
    scale_losses_on_cpu(accelerator)
    _compare(recipe, strategy, launch, accelerator)
    return accelerator


def _fsdp_plugin(strategy: Strategy) -> FullyShardedDataParallelPlugin:
    """The plugin that the file describes; mixed precision, units and loading are fsdp.py's."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=strategy.reshard_after_forward,
        cpu_offload=strategy.offloaded,
        auto_wrap_policy="no_wrap",  # the model comes sharded
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,  # rank 0 alone reads the weights all the same: fsdp.py
        activation_checkpointing=False,
    )


def _compare(recipe: Recipe, strategy: Strategy, launch: Launch, accelerator: Accelerator) -> None:
    """Compare what Accelerate built with the request. Raises EnvironmentMismatch."""
    in_force = {
        "strategy": KIND_OF_TYPE.get(accelerator.distributed_type.value, "ddp"),  # MULTI_CPU among others
        "world size": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "dynamo_backend": accelerator.state.dynamo_plugin.backend.value,
    }
    asked = {
        "strategy": "ddp" if strategy.schedule else strategy.kind,  # Accelerate has ranks, and no word for stages
        "world size": launch.world_size,
        "mixed_precision": recipe.training.mixed_precision,
        "gradient_accumulation_steps": 1,
        "dynamo_backend": "NO",
    }
    differing = [f"{key}: asked {asked[key]}, runs {in_force[key]}" for key in asked if asked[key] != in_force[key]]
    if differing:
        raise EnvironmentMismatch(f"launch: {'; '.join(differing)}; correct the launcher's settings and environment")


def accumulating(accelerator: Accelerator, strategy: Strategy, model: nn.Module) -> AbstractContextManager[Any]:
    """The context for every micro-batch in a step except the last.

    Unsharded gradients are reduced once, after the last micro-batch. Sharded ones are reduced each time, unless all of
    them fit unsharded (closed_form/recomputation.py). In float32 an 8B model's take 30 GiB on each GPU, its adapters'
    0.2.
    Weights that stay gathered from forward to backward stay so until the last backward, so they are gathered once a
    step. At the peak, where backward begins, all of them are there anyway.
    """
    if strategy.uses_engine:  # DeferredStepEngine sees to it itself
        return nullcontext()
    if strategy.shards_modules:
        return _accumulating_shards(strategy, model)
    context: AbstractContextManager[Any] = accelerator.no_sync(model)
    return context


@contextmanager
def _accumulating_shards(strategy: Strategy, model: nn.Module) -> Iterator[None]:
    from finetune.strategies import fsdp

    with ExitStack() as stack:
        if strategy.gathers_once:
            stack.enter_context(fsdp.weights_kept(model))
        if strategy.keeps_gradients:
            stack.enter_context(fsdp.gradients_kept(model))
        yield


def silence_libraries(launch: Launch) -> None:
    """Take progress bars and notices that are not about this run off the terminal; errors stay."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if not launch.is_main:
        transformers_logging.set_verbosity_error()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # logs missing optional kernels
    if not torch.cuda.is_available():  # saving imports DeepSpeed if installed, which would log that it found no GPU
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def use_all_cores(launch: Launch, device: torch.device, *, offloaded: bool = False) -> None:
    """Share the cores out between ranks that work on the host, unless the user chose. Launchers set one thread.

    Needed on a CPU and with offload. AdamW then moves 28 bytes per weight: 225 GB for 8B, 20 to 30 s with 1 thread.
    """
    if (device.type == "cpu" or offloaded) and not launch.threads_chosen:
        torch.set_num_threads(cores_each(launch.local_world_size, launch.words))


# fp16 with dynamic loss scaling. float16 ends at 65,504 and begins at 6e-8, so the loss is multiplied by a scale before
# backward and the gradients are divided by it before they are clipped. If a gradient overflows, the update is skipped
# and the scale halved. After 2,000 steps without an overflow it is doubled. Without fp16 there is no scaler.

# A scale below 1 would only push small gradients out of float16: gradients that overflow at 1 overflow at any scale.
FLOOR = 1.0


def scale_losses_on_cpu(accelerator: Accelerator) -> None:
    """Give fp16 on a CPU the autocast and the scaler that a GPU gets.

    accelerate 1.15 accepts mixed_precision="fp16" on a CPU and reports it, but silently computes in float32
    without a scaler. DeepSpeed has its own scaler and refuses a CPU.
    """
    if accelerator.mixed_precision != "fp16" or accelerator.device.type != "cpu":
        return
    if accelerator.distributed_type != DistributedType.DEEPSPEED and accelerator.scaler is None:
        accelerator.native_amp = True  # what prepare() looks at before it wraps forward
        accelerator.scaler = torch.amp.GradScaler("cpu")


def loss_scale(accelerator: Accelerator) -> torch.Tensor:
    """The scale in force, float64 [1] on the device, not read to the host; 1 without scaling."""
    one = torch.ones(1, dtype=torch.float64, device=accelerator.device)
    if accelerator.scaler is None:
        return one
    scale: torch.Tensor = accelerator.scaler.scale(one)
    return scale


def kind_of_scaling(accelerator: Accelerator) -> str | None:
    """`dynamic`, `static` (a strategy file's loss_scale), or None without scaling."""
    if accelerator.scaler is None:
        return None
    if getattr(accelerator.scaler, "static", False):
        return "static"
    return "dynamic"


def lowest_scale(accelerator: Accelerator) -> float:
    """The scaler's lowest scale. A static scale is its own lowest."""
    return float(getattr(accelerator.scaler, "floor", FLOOR))


def scaler_state(accelerator: Accelerator) -> dict[str, Any] | None:
    """Scale and growth count for a checkpoint, as JSON; None without scaling. Waits for the device."""
    if accelerator.scaler is None:
        return None
    state: dict[str, Any] = accelerator.scaler.state_dict()
    return state


def load_scaler_state(accelerator: Accelerator, saved: Mapping[str, Any] | None) -> None:
    """Continue with the scale that `scaler_state` gave."""
    if accelerator.scaler is not None and saved is not None:
        accelerator.scaler.load_state_dict(dict(saved))


def holds_on_all(accelerator: Accelerator, holds: bool) -> bool:
    """Whether something holds on every rank. A collective: every rank calls it."""
    ranks = accelerator.reduce(torch.tensor(int(holds), device=accelerator.device), reduction="sum")
    return bool(int(ranks) == accelerator.num_processes)
