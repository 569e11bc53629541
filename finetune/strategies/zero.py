"""DeepSpeed ZeRO: an explicit config for the engine, and an engine that updates when the loop says so.

The only file that knows DeepSpeed's settings. Nothing is left to "auto", or to defaults that do not follow the model:
DeepSpeed's own buckets cost 1 to 2 GB whatever is trained.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DistributedType
from torch import Tensor, nn
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from finetune.architecture.by_document import first_parameter, run_document_by_document
from finetune.architecture.own_layers.compute import compute_layers
from finetune.launch.launcher import Launch
from finetune.model.build import structure_alone
from finetune.model.optimizer import make_optimizer
from finetune.model.optimizers.rounded_adamw import RoundedAdamW, places_of
from finetune.model.quantization import packed_experts, unpacked_weight
from finetune.recipe.schema import Recipe
from finetune.recipe.sections.engine_keys import INITIAL_SCALE_POWER
from finetune.recipe.strategy import Strategy
from finetune.strategies.late_quantising import build_on_rank_0, filled_one_by_one, make_plain
from finetune.strategies.pieces import full_numel, full_shape
from finetune.strategies.zero_requirements import silenced_deepspeed
from finetune.strategies.zero_state import flat_ranges, load_masters

# Elements of one reduction: smaller ones are bound by latency, larger ones are not faster.
SMALLEST_BUCKET, LARGEST_BUCKET = 2**20, 2**26
# Reductions of a backward under ZeRO-1 and 2, at most. Before each of them DeepSpeed 0.19 waits for the whole device
# (stage_1_and_2.py: allreduce_and_copy), and then the device waits for the host's next kernel.
MOST_BUCKETS = 24


def zero_plugin(recipe: Recipe, strategy: Strategy, *, world_size: int, on_cpu: bool) -> DeepSpeedPlugin:
    """The engine's config, without the buckets that the strategy leaves to `prepare_zero`."""
    training = recipe.training
    zero: dict[str, Any] = {
        "stage": strategy.zero_stage,
        "contiguous_gradients": True,
        "overlap_comm": not on_cpu,
        "round_robin_gradients": False,
        # Reduce each part of the gradients to its owner: P bytes. The default all-reduces them to everyone: 2P, so that
        # ZeRO-1 and 2 moved 3P a step, half as much again as DDP (measured by `finetune compare`).
        "use_multi_rank_bucket_allreduce": False,
    }
    for what, device in strategy.offload_devices.items():
        if device == "none":
            continue
        offload: dict[str, Any] = {"device": device, "pin_memory": not on_cpu}
        offload |= strategy.engine_settings.get("offload_optimizer" if what == "optimizer" else "offload_param", {})
        if device == "nvme":
            folder = strategy.section("deepspeed_config").get(f"offload_{what}_nvme_path") or swap_folder(recipe)
            offload |= {"nvme_path": str(folder)}
        zero[f"offload_{what}"] = offload
    zero |= strategy.engine_settings.get("zero_optimization", {})
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": training.rows_at_once,
        "train_batch_size": training.rows_at_once * world_size,  # of one forward: the loop accumulates
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
    # Number formats: float32 masters and gradients unless the recipe says pure_bf16.
    if training.pure_bf16:
        pure = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        config |= {"bf16": pure, "fp16": {"enabled": False}, "data_types": {"grad_accum_dtype": "bf16"}}
    else:
        # Scaled as torch's GradScaler does: halved at each overflow, doubled after 2,000 steps without one.
        scaling = {"loss_scale_window": 2000, "hysteresis": 1, "min_loss_scale": 1}
        scaling |= {"initial_scale_power": INITIAL_SCALE_POWER} | strategy.engine_settings.get("fp16", {})
        half = training.mixed_precision
        config |= {"bf16": {"enabled": half == "bf16"}, "fp16": {"enabled": half == "fp16"} | scaling}
    return DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=zero["stage"] == 3)


def swap_folder(recipe: Recipe) -> Path:
    """Where NVMe offload keeps its files when the config names no place: in the run's folder."""
    return Path(recipe.run_dir) / "swap"


def remove_swap(recipe: Recipe) -> None:
    """Delete NVMe offload's files at the end of a session; a resumed one writes them again."""
    shutil.rmtree(swap_folder(recipe), ignore_errors=True)


def buckets(model: nn.Module, stage: int) -> dict[str, int]:
    """Sizes of DeepSpeed's buffers for this model, in elements.

    Under ZeRO-1 and 2 a backward has at most MOST_BUCKETS reductions. Their two buffers take 8 to 12 % of as many bytes
    as all gradients. ZeRO-3 waits for no device: a reduction holds 1/256 of the trained weights, within [2^20, 2^26].
    ZeRO-3 keeps the layer in use and the one fetched ahead, beside the largest single tensor (embedding or head).
    """
    sizes = {parameter: full_numel(parameter) for parameter in model.parameters()}
    trained = sum(size for parameter, size in sizes.items() if parameter.requires_grad)
    if stage < 3:
        in_backward = [size for parameter, size in sizes.items() if parameter.requires_grad][::-1]
        bucket = max(-(-trained // MOST_BUCKETS), min(trained, SMALLEST_BUCKET))
        while _reductions(in_backward, bucket) > MOST_BUCKETS:
            bucket += -(-bucket // 64)
    else:
        bucket = min(max(trained // 256, min(trained, SMALLEST_BUCKET)), LARGEST_BUCKET)
    bucket += bucket % 2  # DeepSpeed wants two elements to a bucket's unit
    settings = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if stage < 3:
        return settings
    layers = [sum(map(full_numel, layer.parameters())) for layer in _layers(model)]
    layer, largest = max(layers, default=sum(sizes.values())), max(sizes.values())
    vectors = [size for parameter, size in sizes.items() if len(full_shape(parameter)) < 2]
    return settings | {
        "stage3_prefetch_bucket_size": layer,
        "stage3_max_live_parameters": 2 * layer + largest,
        "stage3_max_reuse_distance": layer,
        "stage3_param_persistence_threshold": max(vectors, default=0) + 1,  # norms and biases stay unsharded
        "sub_group_size": max(largest, LARGEST_BUCKET),
    }


def _reductions(sizes: Iterable[int], bucket: int) -> int:
    """Buckets that DeepSpeed fills with gradients of these sizes, in this order. A larger one has a bucket of its own.

    Llama 3 8B has 8.03e9 weights. Its head and embeddings, 0.53e9 each, are alone; layers fill buckets of 0.34e9.
    """
    count, filled = 0, bucket
    for size in sizes:
        if filled + size > bucket:
            count, filled = count + 1, 0
        filled += size
    return count


def swap_buffers(model: nn.Module, ranks: int) -> dict[str, int]:
    """Count and elements of the buffers with which ZeRO-3 reads weights from a disk, each for one rank's part.

    DeepSpeed's own hold 1e8 elements. With fewer than 6 ranks Llama 3 8B's embedding (525 M) then fails an assertion.
    Under recomputation all matrices of a layer are in use until its backward, beside those outside layers.
    """
    layers = _layers(model)
    matrices = [sum(len(full_shape(parameter)) > 1 for parameter in layer.parameters()) for layer in layers]
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    outside = sum(len(full_shape(parameter)) > 1 for parameter in model.parameters() if parameter not in inside)
    largest = max(full_numel(parameter) for parameter in model.parameters())
    return {"buffer_size": -(-largest // ranks), "buffer_count": max(matrices, default=0) + outside}


def _layers(model: nn.Module) -> list[nn.Module]:
    """The members of every ModuleList: the decoder layers are the largest."""
    return [layer for module in model.modules() if isinstance(module, nn.ModuleList) for layer in module]


class DeferredStepEngine:
    """Replaces Accelerate's DeepSpeed wrapper, which would step inside backward().

    training/update.py asks for the norm. The engine then measures and clips the gradients, drops a step whose norm is
    not finite, and updates, in one pass over the gradients. `optimizer.step()` has nothing left to do.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.loss_scale = 1.0  # of the latest step, under fp16

    def backward(self, loss: Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)

    def get_global_grad_norm(self) -> Tensor:
        """The norm before clipping, infinite for a step that was dropped, on the engine's device."""
        self.loss_scale = getattr(self.engine.optimizer, "loss_scale", 1.0)  # ZeRO-1's under bf16 has none
        self.engine.step()
        if self.engine.optimizer.overflow and self.engine.zero_optimization_stage() == 2:
            # Not public. If ZeRO-2 offloads, DeepSpeed 0.19 keeps a dropped step's gradients and adds the next step's.
            for group in self.engine.optimizer.averaged_gradients:
                self.engine.optimizer.averaged_gradients[group] = None
        return torch.as_tensor(self.engine.get_global_grad_norm(), device=self.engine.device)


class EngineScaler:
    """The engine's own loss scaling under fp16, with the methods of torch's scaler. It skips and adapts by itself."""

    def __init__(self, steps: DeferredStepEngine) -> None:
        self._steps = steps
        self._own = steps.engine.optimizer.loss_scaler
        self._own.raise_error_at_min_scale = False  # the loop reports it, with the step and its rows
        self.static = not self._own.dynamic
        self.floor = float(self._own.cur_scale if self.static else self._own.min_scale)

    def scale(self, values: Tensor) -> Tensor:
        return values * self._steps.loss_scale

    def update(self) -> None:
        """The engine did."""

    def state_dict(self) -> dict[str, Any]:
        scaler = self._own
        if self.static:
            return {"scale": float(scaler.cur_scale)}
        counts = {"iteration": scaler.cur_iter, "overflow": scaler.last_overflow_iter}
        return {"scale": float(scaler.cur_scale), **counts, "hysteresis": scaler.cur_hysteresis}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not self.static and "iteration" in state:  # written by a run whose scale was dynamic too
            self._own.cur_scale, self._own.cur_iter = state["scale"], state["iteration"]
            self._own.last_overflow_iter = state["overflow"]
            self._own.cur_hysteresis = state.get("hysteresis", self._own.delayed_shift)


def build_under_zero(
    recipe: Recipe,
    strategy: Strategy,
    accelerator: Accelerator,
    build: Callable[..., nn.Module],
    launch: Launch | None,
) -> tuple[nn.Module, Any, Any]:
    """The model, the engine around it and the engine's optimizer. Raises what `build` raises, on all ranks.

    The engine keeps float32 masters, so the model is loaded in the number format that it computes in.

    Under ZeRO-3 transformers shards each tensor while it loads, rank 0 alone reading. It refuses to quantise then, so
    a base in 4 bits is loaded unsharded, by rank 0 alone, and quantised and sharded one tensor at a time.
    """
    plugin = accelerator.state.deepspeed_plugin
    config = plugin.deepspeed_config
    dtype = engine_dtype(config)
    fit_swap(plugin, lambda: structure_alone(recipe, dtype), accelerator.num_processes)
    if strategy.shards_parameters and recipe.quantization is not None:
        with loading_unsharded(plugin):
            unwrapped = build_on_rank_0(recipe, build, launch, accelerator.device, dtype=dtype)
        if late := make_plain(unwrapped):
            partition(filled_one_by_one(unwrapped, late, accelerator.device, dtype), config)
    else:
        unwrapped = build(recipe, accelerator.device, dtype=dtype)
    inside = f"{strategy.name} gathers weights inside of it" if strategy.shards_parameters else None
    compute_layers(unwrapped, unpacked_weight, adapters_by_peft=inside)
    optimizer = make_optimizer(unwrapped, recipe)
    places = places_of(optimizer, unwrapped)
    engine, prepared = prepare_zero(accelerator, unwrapped, optimizer)
    if isinstance(optimizer, RoundedAdamW):
        optimizer.round_as(flat_ranges(engine, places))
    return unwrapped, engine, prepared


def prepare_zero(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """`accelerator.prepare` for DeepSpeed: the engine under the loop's control, and its optimizer.

    Weights trained in float32 (adapters, under bf16) keep their exact values in the engine's masters.
    """
    plugin = accelerator.state.deepspeed_plugin
    dtype, exact = engine_dtype(plugin.deepspeed_config), dict[str, Tensor]()  # trained values that lose digits
    for name, parameter in model.named_parameters():  # the engine would refuse other formats, or round them
        if parameter.dtype in (dtype, torch.uint8, torch.int8) or hasattr(parameter, "ds_id"):
            continue
        if parameter.requires_grad:
            exact[name] = parameter.detach().clone()
        parameter.data = parameter.data.to(dtype)
    if plugin.zero_stage == 3 and not any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        partition(model.parameters(), plugin.deepspeed_config)
    if plugin.zero_stage == 3:
        gather_at_once([*run_document_by_document(model), *packed_experts(model)])
    zero = plugin.deepspeed_config["zero_optimization"]
    zero |= {key: size for key, size in buckets(model, plugin.zero_stage).items() if key not in zero}
    with silenced_deepspeed():
        engine, optimizer = accelerator.prepare(model, optimizer)
    accelerator.deepspeed_engine_wrapped = DeferredStepEngine(engine)
    if engine.fp16_enabled():
        accelerator.scaler = EngineScaler(accelerator.deepspeed_engine_wrapped)
    if exact:
        load_masters(engine, exact)
    return engine, optimizer


def gather_at_once(modules: Iterable[nn.Module]) -> None:
    """Gather these modules' weights before their forward, not inside it. The inner forward runs once per document in a
    rank's row: ranks with different numbers of documents would wait for each other for ever.

    DeepSpeed then reduces their gradients when backward has passed their inputs. torch sees only inputs that are given
    by position and need a gradient. Without such an input, gradients would be reduced before they are computed.
    """
    from deepspeed.utils import set_z3_leaf_module

    for module in modules:
        set_z3_leaf_module(module, True)
        module.register_forward_pre_hook(_input_by_place, with_kwargs=True)


def _input_by_place(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Its hidden states as the first positional argument, with a gradient wherever one is computed."""
    hidden, *rest = args or (kwargs.pop(first_parameter(module)),)
    if torch.is_grad_enabled() and not hidden.requires_grad:
        hidden = hidden.detach().requires_grad_()
    return (hidden, *rest), kwargs


def fit_swap(plugin: DeepSpeedPlugin, structure: Callable[[], nn.Module], ranks: int) -> None:
    """With weights on a disk, size the disk's buffers for the model. Loading goes through them."""
    offload = plugin.deepspeed_config["zero_optimization"].get("offload_param", {})
    if offload.get("device") == "nvme":
        with loading_unsharded(plugin):  # at whose end transformers is given the config anew
            offload |= swap_buffers(structure(), ranks)


@contextmanager
def loading_unsharded(plugin: DeepSpeedPlugin) -> Iterator[None]:
    """Within the block, transformers loads as if there were no ZeRO-3. Under ZeRO-3 it refuses to quantise on the
    host."""
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        plugin.set_deepspeed_weakref()


def release_engine(accelerator: Accelerator) -> None:
    """Free the engine's buffers and hooks, and the process groups that DeepSpeed keeps after their end."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        import deepspeed

        accelerator.free_memory()
        deepspeed.comm.destroy_process_group()


def engine_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The number format in which DeepSpeed computes with this config."""
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return next((dtype for key, dtype in halves.items() if config[key]["enabled"]), torch.float32)


def partition(parameters: Iterable[nn.Parameter], config: Mapping[str, Any]) -> None:
    """Partition parameters over the ranks, one on the device at a time; from rank 0's values of each."""
    import deepspeed

    deepspeed.zero.Init(module=_InTurn(parameters), config_dict_or_path=dict(config))


class _InTurn(nn.Module):
    """A stand-in for the module whose parameters DeepSpeed partitions: parameters may be made as it asks for them."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._in_turn = iter(parameters)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self._in_turn
