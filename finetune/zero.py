"""DeepSpeed ZeRO: an explicit config for the engine, and an engine that updates when the loop says so.

The only file that knows DeepSpeed's settings. Nothing is left to "auto", or to defaults that do not follow the model:
DeepSpeed's own buckets cost 1 to 2 GB whatever is trained.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from filelock import FileLock
from torch import Tensor, nn

from finetune.errors import EnvironmentMismatch
from finetune.recipe import Recipe
from finetune.strategy import Strategy
from finetune.zero_pieces import load_masters, whole_numel, whole_shape

# Elements of one reduction: below, latency rules; above, nothing gets faster.
SMALLEST_BUCKET, LARGEST_BUCKET = 2**20, 2**26


def zero_environment(on_cpu: bool) -> None:
    """Set what DeepSpeed and Accelerate read from the environment; before either starts a process group."""
    # The config in force is built here. Accelerate refuses a whole config beside single fields of its own file.
    os.environ.pop("ACCELERATE_CONFIG_DS_FIELDS", None)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # torch 2.13 renames collectives; DeepSpeed 0.19 and torch 2.11 know the old names.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ.pop("ACCELERATE_USE_CPU", None)  # with it, Accelerate ignores a DeepSpeed plugin without a word


@contextmanager
def quiet_engine() -> Iterator[None]:
    """DeepSpeed prints on every rank what it compiles and loads; nothing else that the user should read."""
    with redirect_stdout(io.StringIO()):
        yield


def require_deepspeed(recipe: Recipe, strategy: Strategy, *, on_cpu: bool) -> None:
    """Refuse, before anything is loaded, what this engine cannot do here or what it would do otherwise.

    Raises EnvironmentMismatch with the line to install, or with the setting to change.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise _missing(strategy, "DeepSpeed is not installed", "DS_BUILD_OPS=0 pip install 'finetune[deepspeed]'")
    for reason in _unsuitable(recipe, strategy, on_cpu):
        raise EnvironmentMismatch(reason)
    if "nvme" not in _offload(strategy).values():
        return  # CPU offload runs torch's own fused AdamW, which needs no compiler
    # pip puts ninja beside python, where an environment that is not activated does not look.
    os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{Path(sys.executable).parent}"
    if shutil.which("g++") is None or shutil.which("ninja") is None:
        what = "DeepSpeed compiles its NVMe access with g++ and ninja"
        raise _missing(strategy, what, "apt-get install g++ ninja-build")
    if not _links("#include <libaio.h>\nint main() { io_context_t c = 0; return io_setup(1, &c); }", "aio"):
        raise _missing(strategy, "NVMe offload needs libaio and its header", "apt-get install libaio-dev")
    _compile_nvme_access(on_cpu)


def _missing(strategy: Strategy, what: str, remedy: str) -> EnvironmentMismatch:
    return EnvironmentMismatch(f"accelerate_config: {strategy.name}: {what}; install it with: {remedy}")


def _unsuitable(recipe: Recipe, strategy: Strategy, on_cpu: bool) -> Iterator[str]:
    """What of the recipe the engine would refuse with a traceback, or compute in another number format."""
    training, name = recipe.training, f"accelerate_config: {strategy.name}"
    half = training.mixed_precision
    if on_cpu and torch.cuda.is_available():
        yield f"{name}: on a machine with GPUs DeepSpeed takes them; hide them with CUDA_VISIBLE_DEVICES="
    if half == "fp16" and on_cpu:
        yield "training.mixed_precision: DeepSpeed has no fp16 on a CPU; set bf16 or no"
    if training.optim != "adamw":
        yield f"training.optim: {training.optim}: ZeRO cuts state by elements, not by its blocks; set adamw"
    if training.pure_bf16 and strategy.offloaded:
        yield f"training.pure_bf16: {name} keeps float32 state in host memory; set training.pure_bf16=false"
    if half == "no" and recipe.lora and recipe.model.dtype != "float32":
        yield "training.mixed_precision: no: the engine has one number format; set bf16, or model.dtype: float32"
    if recipe.quantization is not None:
        yield from _unsuitable_quantization(recipe, strategy)


def _unsuitable_quantization(recipe: Recipe, strategy: Strategy) -> Iterator[str]:
    quantization, half = recipe.quantization, recipe.training.mixed_precision
    assert quantization is not None
    if half == "no":
        yield "training.mixed_precision: no: the engine takes no quantised weights beside float32; set bf16"
    if quantization.load_in_8bit and strategy.zero_stage == 3:
        yield f"quantization.load_in_8bit: {strategy.name} cannot cut int8 weights; set accelerate_config=zero2"
    compute = {"bf16": "bfloat16", "fp16": "float16"}.get(half)
    if quantization.load_in_4bit and strategy.zero_stage == 3 and quantization.bnb_4bit_quant_storage != compute:
        yield f"quantization.bnb_4bit_quant_storage: weights are cut in the format they compute in; set {compute}"


def _links(program: str, library: str) -> bool:
    command = ["g++", "-x", "c++", "-", "-o", os.devnull, f"-l{library}"]
    return subprocess.run(command, input=program, text=True, capture_output=True, check=False).returncode == 0


def _compile_nvme_access(on_cpu: bool) -> None:
    """Compile now what the engine would compile within its process group: two minutes on a slow machine, once.

    One process at a time: torch's own lock is a file that a killed compiler leaves for ever, so under ours it is stale.
    """
    from torch.utils.cpp_extension import get_default_build_root

    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / "finetune.lock"), quiet_engine():
        for stale in root.glob("**/async_io/lock"), root.glob("**/pin_memory/lock"):
            for path in stale:
                path.unlink(missing_ok=True)
        from deepspeed.ops.op_builder import AsyncIOBuilder

        AsyncIOBuilder().load(verbose=False)


def _offload(strategy: Strategy) -> dict[str, str]:
    """What is kept where: optimizer and param -> none, cpu or nvme."""
    section = strategy.settings.get("deepspeed_config") or {}
    return {what: section.get(f"offload_{what}_device") or "none" for what in ("optimizer", "param")}


def zero_plugin(recipe: Recipe, strategy: Strategy, *, world_size: int, on_cpu: bool) -> DeepSpeedPlugin:
    """The engine's config, complete but for the buckets, which `prepare_zero` sets."""
    training = recipe.training
    zero = _zero_section(recipe, strategy, on_cpu)
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
    config |= _precision(recipe)
    return DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=zero["stage"] == 3)


def _zero_section(recipe: Recipe, strategy: Strategy, on_cpu: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": strategy.zero_stage,
        "contiguous_gradients": True,
        "overlap_comm": not on_cpu,
        "round_robin_gradients": False,
    }
    for what, device in _offload(strategy).items():
        if device == "none":
            continue
        kept: dict[str, Any] = {"device": device, "pin_memory": not on_cpu}
        if device == "nvme":
            folder = strategy.settings["deepspeed_config"].get(f"offload_{what}_nvme_path") or swap_folder(recipe)
            kept |= {"nvme_path": str(folder)}
        zero[f"offload_{what}"] = kept
    return zero


def swap_folder(recipe: Recipe) -> Path:
    """Where NVMe offload keeps its files when the config names no place: in the run's folder."""
    return Path(recipe.run_dir) / "swap"


def remove_swap(recipe: Recipe) -> None:
    """Take NVMe offload's files away at the end of a session; a resumed one writes them again."""
    shutil.rmtree(swap_folder(recipe), ignore_errors=True)


def _precision(recipe: Recipe) -> dict[str, Any]:
    """The engine's number formats: float32 masters and gradients unless the recipe says pure_bf16."""
    half = recipe.training.mixed_precision
    if not recipe.training.pure_bf16:
        return {"bf16": {"enabled": half == "bf16"}, "fp16": {"enabled": half == "fp16", "initial_scale_power": 16}}
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
    with quiet_engine():
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
