"""DeepSpeed ZeRO: an explicit config for the engine, and an engine that updates when the loop says so.

The only file that knows DeepSpeed's settings. Nothing is left to "auto", or to defaults that do not follow the model:
DeepSpeed's own buckets cost 1 to 2 GB whatever is trained.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from torch import Tensor, nn

from finetune.errors import EnvironmentMismatch
from finetune.recipe import Recipe
from finetune.zero_pieces import load_masters, whole_numel, whole_shape

# Elements of one reduction: below, latency rules; above, nothing gets faster.
SMALLEST_BUCKET, LARGEST_BUCKET = 2**20, 2**26


def zero_environment(on_cpu: bool) -> None:
    """Set what DeepSpeed and Accelerate read from the environment; before either starts a process group."""
    # The config in force is built here. Accelerate refuses a whole config beside single fields of its own file.
    os.environ.pop("ACCELERATE_CONFIG_DS_FIELDS", None)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    # pip puts ninja beside python, where an environment that is not activated does not look.
    os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{Path(sys.executable).parent}"
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ.pop("ACCELERATE_USE_CPU", None)  # with it, Accelerate ignores a DeepSpeed plugin without a word


def require_deepspeed(name: str, settings: Mapping[str, Any]) -> None:
    """Raise EnvironmentMismatch with the line to install for what strategy `name` needs and this machine has not."""
    if importlib.util.find_spec("deepspeed") is None:
        _refuse(name, "DeepSpeed is not installed", "DS_BUILD_OPS=0 pip install 'finetune[deepspeed]'")
    if "nvme" not in _offload(settings).values():
        return  # CPU offload runs torch's own fused AdamW, which needs no compiler
    if shutil.which("g++") is None or shutil.which("ninja") is None:
        _refuse(name, "DeepSpeed compiles its NVMe access with g++ and ninja", "apt-get install g++ ninja-build")
    if not _links("#include <libaio.h>\nint main() { io_context_t c = 0; return io_setup(1, &c); }", "aio"):
        _refuse(name, "NVMe offload needs libaio and its header", "apt-get install libaio-dev")


def _refuse(name: str, what: str, remedy: str) -> None:
    raise EnvironmentMismatch(f"accelerate_config: {name}: {what}; install it with: {remedy}")


def _links(program: str, library: str) -> bool:
    command = ["g++", "-x", "c++", "-", "-o", os.devnull, f"-l{library}"]
    return subprocess.run(command, input=program, text=True, capture_output=True, check=False).returncode == 0


def _offload(settings: Mapping[str, Any]) -> dict[str, str]:
    """What is kept where: optimizer and param -> none, cpu or nvme."""
    section = settings.get("deepspeed_config") or {}
    return {what: section.get(f"offload_{what}_device", "none") for what in ("optimizer", "param")}


def zero_plugin(recipe: Recipe, settings: Mapping[str, Any], *, world_size: int, on_cpu: bool) -> DeepSpeedPlugin:
    """The engine's config, complete but for the buckets, which `prepare_zero` sets.

    `settings` is an Accelerate config file with a `deepspeed_config` section. Raises EnvironmentMismatch for a
    precision that the engine cannot run here.
    """
    training = recipe.training
    zero = _zero_section(recipe, settings, on_cpu)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": training.per_device_batch_size,
        "train_batch_size": training.per_device_batch_size * world_size,  # of one forward: the loop accumulates
        "gradient_accumulation_steps": 1,
        "gradient_clipping": training.max_grad_norm or 0.0,
        "communication_data_type": "fp32",
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # torch's fused AdamW on the CPU: as fast as DeepSpeed's, bit for bit the update of the other strategies, and
        # no compiler needed.
        "zero_force_ds_cpu_optimizer": False,
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": sys.maxsize,
    }
    config |= _precision(recipe, on_cpu, zero)
    return DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=zero["stage"] == 3)


def _zero_section(recipe: Recipe, settings: Mapping[str, Any], on_cpu: bool) -> dict[str, Any]:
    section = settings["deepspeed_config"]
    zero: dict[str, Any] = {
        "stage": int(section["zero_stage"]),
        "contiguous_gradients": True,
        "overlap_comm": not on_cpu,
        "round_robin_gradients": False,
    }
    for what, device in _offload(settings).items():
        if device == "none":
            continue
        kept: dict[str, Any] = {"device": device, "pin_memory": not on_cpu}
        if device == "nvme":
            folder = section.get(f"offload_{what}_nvme_path") or swap_folder(recipe)
            kept |= {"nvme_path": str(folder)}
        zero[f"offload_{what}"] = kept
    return zero


def swap_folder(recipe: Recipe) -> Path:
    """Where NVMe offload keeps its files when the config names no place: in the run's folder."""
    return Path(recipe.run_dir) / "swap"


def _precision(recipe: Recipe, on_cpu: bool, zero: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's number formats: float32 masters and gradients unless the recipe says pure_bf16."""
    training = recipe.training
    if training.mixed_precision == "fp16" and on_cpu:
        raise EnvironmentMismatch("training.mixed_precision: DeepSpeed runs no fp16 on a CPU; set bf16 or no")
    if not training.pure_bf16:
        half = training.mixed_precision
        return {"bf16": {"enabled": half == "bf16"}, "fp16": {"enabled": half == "fp16", "initial_scale_power": 16}}
    if "offload_optimizer" in zero:
        raise EnvironmentMismatch("training.pure_bf16: an offloaded optimizer keeps float32; set pure_bf16: false")
    pure = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    return {"bf16": pure, "fp16": {"enabled": False}, "data_types": {"grad_accum_dtype": "bf16"}}


def buckets(model: nn.Module, stage: int) -> dict[str, int]:
    """Elements of DeepSpeed's buffers for this model.

    A reduction holds 1/256 of what is trained, so its two buffers cost under 1 % of the gradients. ZeRO-3 keeps the
    layer in use and the one fetched ahead, besides the largest single tensor (embedding or head).
    """
    sizes = {parameter: whole_numel(parameter) for parameter in model.parameters()}
    trained = sum(size for parameter, size in sizes.items() if parameter.requires_grad)
    bucket = min(max(trained // 256, min(trained, SMALLEST_BUCKET)), LARGEST_BUCKET)
    bucket += bucket % 2  # DeepSpeed wants two elements to a bucket's unit
    found = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if stage < 3:
        return found
    layer, largest = _largest_layer(model), max(sizes.values())
    vectors = [size for parameter, size in sizes.items() if len(whole_shape(parameter)) < 2]
    return found | {
        "stage3_prefetch_bucket_size": layer,
        "stage3_max_live_parameters": 2 * layer + largest,
        "stage3_max_reuse_distance": layer,
        "stage3_param_persistence_threshold": max(vectors, default=0) + 1,  # norms and biases stay whole
        "sub_group_size": max(largest, LARGEST_BUCKET),
    }


def _largest_layer(model: nn.Module) -> int:
    """Elements of the largest member of a ModuleList: a decoder layer."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    sizes = [sum(map(whole_numel, layer.parameters())) for layers in lists for layer in layers]
    return max(sizes, default=sum(map(whole_numel, model.parameters())))


class StepWhenAsked:
    """Stands where Accelerate's own engine wrapper stands, which updates the weights inside backward.

    `clip_grad_norm_` asks for the norm: the engine reduces, measures and clips the gradients, drops a step whose norm
    is not finite, and updates. `optimizer.step()` has nothing left to do.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def backward(self, loss: Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)

    def get_global_grad_norm(self) -> Tensor:
        """The norm before clipping, infinite for a step that was dropped, on the engine's device."""
        self.engine.step()
        return torch.as_tensor(self.engine.get_global_grad_norm(), device=self.engine.device)


def prepare_zero(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """`accelerator.prepare` for DeepSpeed: the engine under the loop's control, and its optimizer.

    Weights that are trained in float32 (adapters, under bf16) stay exactly what they are in the engine's masters.
    """
    plugin = accelerator.state.deepspeed_plugin
    exact = _into_engine_dtype(model, engine_dtype(plugin.deepspeed_config))
    if plugin.zero_stage == 3 and not any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        _partition(model, plugin.deepspeed_config)
    plugin.deepspeed_config["zero_optimization"] |= buckets(model, plugin.zero_stage)
    engine, optimizer = accelerator.prepare(model, optimizer)
    accelerator.deepspeed_engine_wrapped = StepWhenAsked(engine)
    if exact:
        load_masters(engine, exact)
    return engine, optimizer


def engine_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The number format of the weights that an engine with this config computes with."""
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return next((dtype for key, dtype in halves.items() if config[key]["enabled"]), torch.float32)


def _into_engine_dtype(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Cast what the engine would refuse or round; returns the trained values that lost digits, by name."""
    exact: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.dtype in (dtype, torch.uint8, torch.int8) or hasattr(parameter, "ds_id"):
            continue
        if parameter.requires_grad:
            exact[name] = parameter.detach().clone()
        parameter.data = parameter.data.to(dtype)
    return exact


def _partition(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Partition a model that was loaded whole (a quantised one) one parameter at a time, not whole on the device."""
    import deepspeed

    deepspeed.zero.Init(module=model, config_dict_or_path=dict(config))
