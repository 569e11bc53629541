"""A recipe's memory on one of its GPUs, by a trace without weights, data or a GPU."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from finetune.architecture import attention
from finetune.errors import DoesNotFit
from finetune.launch.gpu_environment import expands_segments
from finetune.model.build import attention_name
from finetune.model.known_configs import planned_config
from finetune.planner.constants import CUDA_CONTEXT, NCCL_BUFFERS
from finetune.planner.depth.caching_allocator import NoMemory, replay
from finetune.planner.depth.extrapolate import depths, extrapolate, layers_kept_gathered, with_layers
from finetune.planner.depth.fork import run_in_forks
from finetune.planner.depth.layer_kinds import kinds_of_layers, period_and_depth
from finetune.planner.depth.least_room import least_room
from finetune.planner.depth.repeat_layers import StorageChange, add_unlayered_storage, repeat_layers
from finetune.planner.roofline import Layout
from finetune.planner.trace.fake_device import DEVICE_NAME
from finetune.planner.trace.flops import StepWork, per_step, with_ddp_reductions, work_at_depth
from finetune.planner.trace.timeline import Peak, PhaseMemory, Timeline
from finetune.planner.trace.trace import STEPS, trace
from finetune.recipe.gpus import Gpus
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import Strategy, read_strategy
from finetune.strategies.accelerator import check_combination
from finetune.strategies.pipeline.requirements import refuse_pipeline
from finetune.tokens.batches import MicroBatch


@dataclass(frozen=True)
class Planned:
    """What a recipe takes on one rank's GPU."""

    phases: dict[str, PhaseMemory]
    outside: dict[str, int]  # bytes that are not of tensors
    strategy: str
    ranks: int
    gpus: Gpus | None
    notes: tuple[str, ...]
    work: StepWork  # what one rank computes and sends
    layout: Layout
    # Bytes by torch's allocator on a GPU: at least, and with all the room it asks for.
    reserved: tuple[int, int] | None = None
    upper: int = 0  # bytes that certainly suffice, by the allocator's replay
    host: Mapping[str, int] = field(default_factory=dict)  # rank 0's tensors in host memory, at each phase's peak
    node: int = 1  # ranks on one machine
    # Of the GPU's memory at full depth, where the allocator was replayed.
    changes: Sequence[StorageChange] = field(default=(), repr=False, compare=False)

    @property
    def peak(self) -> tuple[str, Peak]:
        """The phase with the largest peak, and that peak."""
        return max(((name, phase.peak) for name, phase in self.phases.items()), key=lambda pair: pair[1].nbytes)

    @property
    def needed(self) -> int:
        """Bytes of tensors at the peak, and those outside of tensors."""
        return self.peak[1].nbytes + sum(self.outside.values())

    @property
    def fits(self) -> bool:
        """Whether one GPU certainly suffices; True where no GPU is named."""
        return self.gpus is None or max(self.needed, self.upper) <= self.gpus.memory

    def fits_from(self) -> int:
        """Bytes of a GPU from which on it fits, to a page of the allocator; several replays, of a tenth of a second."""
        if self.reserved is None or not self.changes:
            return max(self.needed, self.upper)
        return least_room(self.changes, *self.reserved, expandable=expands_segments()) + sum(self.outside.values())


def plan_recipe(
    recipe: Recipe,
    gpus: Gpus | None,
    *,
    batches: Sequence[MicroBatch] | None = None,
    ranks: int | None = None,
    node: int | None = None,
    must_fit: bool = False,
) -> Planned:
    """Plan one rank. Raises EnvironmentMismatch for an unknown model, and for what the trainer would refuse.

    Args:
        gpus: None: plan a CPU's memory, of one process unless `ranks` and those of a `node` are given.
        batches: A run's own of its largest step, by default the largest there can be. With a run's own the model is
            traced at full depth on a CPU, to be equal to the run.
        must_fit: Raise DoesNotFit as soon as it is certain, after about half of a plan's time.
    """
    strategy = read_strategy(recipe.accelerate_config)
    check_combination(recipe, strategy, on_cpu=gpus is None)
    refuse_pipeline(strategy)
    config, source = planned_config(recipe.model.name_or_path, recipe.model.revision)
    notes = [f"model: {source}"]
    if recipe.model.adapter is not None:
        notes.append(f"model.adapter: training starts from {recipe.model.adapter}, in the memory of a new adapter")
    if recipe.training.mixed_precision == "fp16":
        training = recipe.training.model_copy(update={"mixed_precision": "bf16"})
        recipe = recipe.model_copy(update={"training": training})
        notes.append("fp16 is planned as bf16, which has as many bytes")
    ranks = strategy.rank_count(gpus.count * gpus.nodes if gpus else ranks or 1)
    node = gpus.count if gpus else node or ranks
    batches_traced, exact = batches or worst_batches(recipe, ranks), bool(batches) and gpus is None
    outside = {"CUDA context": CUDA_CONTEXT} | ({"NCCL": NCCL_BUFFERS} if ranks > 1 else {})
    outside_bytes = sum(outside.values())
    must_fit_bytes = gpus.memory if gpus and must_fit else None
    with tempfile.TemporaryDirectory() as folder:
        sizes = ranks, node, gpus is not None, outside_bytes, must_fit_bytes
        request = _TraceRequest(recipe, config, strategy, batches_traced, *sizes)
        deep = _trace_to_depth(request, Path(folder), full_depth=exact)
    work = deep.work
    if strategy.gradient_buckets:
        work = with_ddp_reductions(work, deep.phases["step"].peak.parts["gradients"])
    outside, layout = outside if gpus else {}, _layout(request)
    planned = Planned(deep.phases, outside, strategy.name, ranks, gpus, tuple(notes), work, layout)
    if gpus is None:
        return planned
    planned = dataclasses.replace(planned, host=deep.host, node=min(node, ranks))
    if deep.reserved_share is not None:
        return _with_reserved_share(planned, deep.reserved_share)
    return _with_allocator(planned, deep.changes, gpus.memory - outside_bytes)


def _with_reserved_share(planned: Planned, reserved_share: float) -> Planned:
    """With the allocator's reserved bytes as a multiple of the allocated ones."""
    allocated = planned.peak[1].nbytes
    most = int(reserved_share * allocated)
    return dataclasses.replace(planned, reserved=(allocated, most), upper=most + sum(planned.outside.values()))


def _with_allocator(planned: Planned, changes: Sequence[StorageChange], room: int) -> Planned:
    """With the reserved bytes of the allocator's replay; with less room, whether returning cached segments suffices."""
    replayed = partial(replay, expandable=expands_segments())
    peaks = replayed(changes)
    short = {name: phase.peak.nbytes - peaks[name].allocated for name, phase in planned.phases.items()}
    if max(short.values()) > 0:
        # Storages that belong to no layer and grow with depth: DDP's buckets, ZeRO's partitions.
        changes = list(add_unlayered_storage(changes, short))
        peaks = replayed(changes)
    least, most = (max(getattr(phase, kind) for phase in peaks.values()) for kind in ("allocated", "reserved"))
    upper = most
    if least <= room < most:
        with suppress(NoMemory):
            replayed(changes, room)
            upper = room
    upper += sum(planned.outside.values())
    return dataclasses.replace(planned, reserved=(least, most), upper=upper, changes=changes)


@dataclass(frozen=True)
class _TraceRequest:
    recipe: Recipe
    config: Mapping[str, Any]  # of the model at full depth
    strategy: Strategy
    batches: Sequence[MicroBatch]
    ranks: int
    node: int
    on_gpu: bool
    outside_bytes: int  # bytes that are not of tensors
    must_fit_bytes: int | None  # stop as soon as more are certain to be needed


@dataclass(frozen=True)
class _DeepTrace:
    phases: dict[str, PhaseMemory]
    work: StepWork
    host: dict[str, int] = field(default_factory=dict)  # this and the following where a GPU is planned
    changes: list[StorageChange] = field(default_factory=list)  # of the GPU's memory
    reserved_share: float | None = None  # instead of `changes`: reserved over allocated bytes, at most


def _trace_to_depth(request: _TraceRequest, folder: Path, *, full_depth: bool) -> _DeepTrace:
    """Trace shallow models and extrapolate to this one's depth, or trace it at `full_depth`."""
    config = request.config
    layers, period = int(config["num_hidden_layers"]), max(1, request.recipe.training.recompute_every)
    period, shallow = period_and_depth(kinds_of_layers(config), period)
    if not request.strategy.layers_repeat:
        shallow += layers_kept_gathered(config, _weights_an_element(request.recipe))
    if request.recipe.lora and request.recipe.lora.names_single_layers:
        shallow = layers  # whose adapters differ, so that none stands for another
    few, more = depths(layers, period, shallow)
    needed = (layers,) if full_depth or layers <= more else (more, few)
    with run_in_forks({depth: partial(_trace_shallow, request, depth, folder) for depth in needed}) as traced:
        work: dict[int, StepWork] = {}
        timelines: dict[int, Timeline] = {}

        def timeline_of(depth: int) -> Timeline:
            if depth not in timelines:
                timelines[depth], work[depth] = traced(depth)
            return timelines[depth]

        def changes_of(depth: int) -> list[StorageChange]:
            return list(repeat_layers(timeline_of(depth), DEVICE_NAME, depth, layers, period))

        if full_depth:
            return _DeepTrace(timeline_of(layers).phases("cpu"), work_at_depth(work, layers))
        phases_on = partial(extrapolate, timeline_of, layers, period=period, shallow=shallow)
        if not request.on_gpu:
            return _DeepTrace(phases_on("cpu"), work_at_depth(work, layers))
        repeats = request.strategy.layers_repeat
        if request.must_fit_bytes is not None and repeats:
            _refuse_if_larger(changes_of(needed[0]), request.outside_bytes, request.must_fit_bytes)
        phases, host = phases_on(DEVICE_NAME), {name: phase.peak.nbytes for name, phase in phases_on("cpu").items()}
        if not repeats:
            # ZeRO-3 gathers weights in an order that does not repeat from layer to layer, so runs cannot be repeated.
            reserved_share = max(_reserved_share(timeline, count) for count, timeline in timelines.items())
            return _DeepTrace(phases, work_at_depth(work, layers), host, reserved_share=reserved_share)
        return _DeepTrace(phases, work_at_depth(work, layers), host, changes_of(needed[0]))


def _trace_shallow(request: _TraceRequest, layers: int, folder: Path) -> tuple[Timeline, StepWork]:
    """Trace the model with `layers` layers."""
    shallow = with_layers(request.recipe, request.config, layers, folder)
    options: dict[str, Any] = {"ranks": request.ranks, "node": request.node, "gpu": request.on_gpu}
    traced = trace(shallow, request.strategy, request.batches, **options)
    collectives = {name: phase.collectives for name, phase in traced.measured.items()}
    return traced.timeline, per_step(
        traced.operations,
        collectives,
        steps=STEPS,
        micro_steps=len(request.batches),
        gathers_once=request.strategy.gathers_once,
        reduces_once=request.strategy.reduces_once,
        compiles=traced.compiles,
    )


def _refuse_if_larger(changes: Sequence[StorageChange], outside_bytes: int, must_fit_bytes: int) -> None:
    try:
        replay(changes, must_fit_bytes - outside_bytes, expandable=expands_segments())
    except NoMemory:
        needed = outside_bytes + max(peak.allocated for peak in replay(changes).values())
        raise DoesNotFit(f"it needs {needed} bytes of a GPU's {must_fit_bytes}", needed) from None


def _reserved_share(timeline: Timeline, layers: int) -> float:
    changes = repeat_layers(timeline, DEVICE_NAME, layers, layers)
    peaks = replay(changes, expandable=expands_segments()).values()
    return max(peak.reserved for peak in peaks) / max(peak.allocated for peak in peaks)


def _weights_an_element(recipe: Recipe) -> int:
    """Weights to one element of a quantised layer's tensor."""
    if recipe.quantization is None or recipe.quantization.load_in_8bit:
        return 1
    return 2 * int(getattr(torch, recipe.quantization.bnb_4bit_quant_storage).itemsize)


def _layout(request: _TraceRequest) -> Layout:
    training, strategy = request.recipe.training, request.strategy
    return Layout(
        ranks=request.ranks,
        node=request.node,
        tokens=max(batch["input_ids"].numel() for batch in request.batches),
        rows=math.ceil(training.global_batch_size / training.per_device_batch_size),
        layers=int(request.config["num_hidden_layers"]),
        copies=strategy.replica_count(request.ranks, request.node),
        gathers_once=strategy.gathers_once,
        reduces_once=strategy.reduces_once,
        shards_state=strategy.shards_optimizer_state,
        on_disk="nvme" in strategy.offload_devices.values(),
    )


def worst_batches(recipe: Recipe, ranks: int) -> list[MicroBatch]:
    """The largest micro-batches there can be: full rows; two of them where steps accumulate, and three where weights
    stay gathered between them: then only one that is neither the first nor the last has all gradients and all weights.

    Each row is one document. The last row has two where attention would need a mask for a row of several documents, or
    for a padded one: masks take memory in every layer.
    """
    rows, tokens = recipe.training.per_device_batch_size, recipe.data.max_length
    micro_steps = math.ceil(recipe.training.global_batch_size / (rows * ranks))
    count = min(micro_steps, 3 if read_strategy(recipe.accelerate_config).gathers_once else 2)
    ids = torch.full((rows, tokens), 3)
    positions = torch.arange(tokens).repeat(rows, 1)
    batch: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "shift_labels": ids}
    if attention_name(recipe) == attention.NAME:
        batch = {key: value.reshape(1, -1) for key, value in batch.items()}
        batch["cu_seq_lens"] = torch.arange(0, (rows + 1) * tokens, tokens, dtype=torch.int32)
        batch["document_lengths"] = (tokens,) * rows
    elif recipe.data.packing or rows > 1:
        positions[-1, tokens // 2 :] -= tokens // 2
    batch["supervised"] = torch.arange(ids.numel())
    return [cast(MicroBatch, {key: _copied(value) for key, value in batch.items()}) for _ in range(count)]


def _copied(value: Any) -> Any:
    return value.contiguous().clone() if isinstance(value, torch.Tensor) else value
