"""A rank's trace at full depth: extrapolated from shallow models, or traced with all layers.

A pipeline's stage is traced with all layers and few micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from finetune.errors import DoesNotFit
from finetune.launch.gpu_environment import expands_segments
from finetune.planner.depth.caching_allocator import NoMemory, replay
from finetune.planner.depth.extrapolate import (
    depths,
    extrapolate,
    kinds_of_layers,
    layers_kept_gathered,
    period_and_depth,
    with_layers,
    with_more_of_the_same,
)
from finetune.planner.depth.fork import run_in_forks
from finetune.planner.depth.repeat_layers import StorageChange, phases_of_changes, repeat_layers
from finetune.planner.trace.fake_device import DEVICE_NAME
from finetune.planner.trace.step_work import StepWork, with_more_micro_steps, work_at_depth
from finetune.planner.trace.timeline import PhaseMemory
from finetune.planner.trace.trace import trace
from finetune.probe.small_model import with_layers_alone
from finetune.recipe.schema import Recipe
from finetune.recipe.sections.pipelines import RUNS
from finetune.recipe.strategy import Strategy
from finetune.strategies.pipeline.timeline import steps_alike
from finetune.tokens.batches import MicroBatch


@dataclass(frozen=True)
class TraceRequest:
    """The trace's subject and place."""

    recipe: Recipe
    config: Mapping[str, Any]  # the model's at full depth
    strategy: Strategy
    batches: Sequence[MicroBatch]
    ranks: int
    node: int  # ranks on one machine
    on_gpu: bool
    outside_bytes: int  # bytes outside of tensors
    must_fit_bytes: int | None  # stop as soon as more are certain to be needed
    rank: int  # the one that is traced
    first_batches: Sequence[MicroBatch] | None = None  # in the first step; only the GPU's memory is right then


@dataclass(frozen=True)
class DeepTrace:
    """The memory and work of one rank at full depth."""

    phases: dict[str, PhaseMemory]
    work: StepWork
    host: dict[str, int] = field(default_factory=dict)  # these and the following only if a GPU is planned
    changes: list[StorageChange] = field(default_factory=list)  # in the GPU's memory
    reserved_share: float | None = None  # instead of `changes`: reserved over allocated bytes, at most
    stage_layers: tuple[range, ...] = ()  # the layers that a pipeline's stage holds


def trace_to_depth(request: TraceRequest, folder: Path, *, full_depth: bool) -> DeepTrace:
    """Trace shallow models and extrapolate to the request's depth, or trace it at `full_depth`."""
    strategy, layers, lora = request.strategy, int(request.config["num_hidden_layers"]), request.recipe.lora
    # A pipeline's step has few of its micro-batches, unless a model with few layers may lack those that `lora` names.
    if not full_depth and strategy.schedule is not None and not (lora and lora.names_single_layers):
        counts = steps_alike(strategy.schedule, strategy.stage_count(request.ranks), len(request.batches))
        if counts is not None:
            return _of_few_micro_batches(request, folder, *counts)
    period, shallow = repetition(request)
    few, more = depths(layers, period, shallow)
    needed = (layers,) if full_depth or layers <= more else (more, few)
    # Where every storage belongs to a layer or does not grow with depth, the repeated layers alone have all bytes.
    memory_alone = request.on_gpu and request.first_batches is not None
    memory_alone = memory_alone and strategy.layers_repeat and not strategy.gradient_buckets
    if memory_alone:
        needed = needed[:1]
    functions = {}
    for depth in needed:
        model = with_layers(request.recipe, request.config, depth, folder)
        place: dict[str, Any] = {"ranks": request.ranks, "rank": request.rank, "node": request.node}
        place["first_batches"] = request.first_batches
        functions[depth] = partial(trace, model, strategy, request.batches, gpu=request.on_gpu, **place)
    changes: list[StorageChange] = []
    with run_in_forks(functions) as traced:
        deepest = traced(needed[0])
        if request.on_gpu and strategy.layers_repeat:
            changes = list(repeat_layers(deepest.timeline, DEVICE_NAME, needed[0], layers, period))
            if request.must_fit_bytes is not None:  # before the other depth is waited for, which is half the time
                try:
                    replay(changes, request.must_fit_bytes - request.outside_bytes, expandable=expands_segments())
                except NoMemory:
                    bytes_needed = request.outside_bytes + max(peak.allocated for peak in replay(changes).values())
                    message = f"it needs {bytes_needed} bytes of a GPU's {request.must_fit_bytes}"
                    raise DoesNotFit(message, bytes_needed) from None
        if memory_alone:
            return DeepTrace(phases_of_changes(changes), deepest.work, changes=changes)
        traces = {depth: traced(depth) for depth in needed[1:]} | {needed[0]: deepest}
    timelines = {depth: shallow_trace.timeline for depth, shallow_trace in traces.items()}
    deep = DeepTrace(
        phases=extrapolate(timelines, layers, DEVICE_NAME if request.on_gpu else "cpu", period=period),
        work=work_at_depth({depth: shallow_trace.work for depth, shallow_trace in traces.items()}, layers),
        stage_layers=deepest.stage_layers if needed == (layers,) else (),
    )
    if not request.on_gpu:
        return deep
    in_host = extrapolate(timelines, layers, "cpu", period=period)
    deep = replace(deep, host={name: phase.peak.nbytes for name, phase in in_host.items()}, changes=changes)
    if strategy.layers_repeat:
        return deep
    # ZeRO-3 gathers weights in an order that does not repeat from layer to layer, so runs cannot be repeated.
    shares = []
    for depth, timeline in timelines.items():
        peaks = replay(repeat_layers(timeline, DEVICE_NAME, depth, depth), expandable=expands_segments()).values()
        shares.append(max(peak.reserved for peak in peaks) / max(peak.allocated for peak in peaks))
    return replace(deep, reserved_share=max(shares))


def repetition(request: TraceRequest) -> tuple[int, int]:
    """The number of layers after which they repeat, and the depth from which each such period adds the same bytes.

    The depth is the model's own if no layer stands for another.
    """
    strategy, lora, config = request.strategy, request.recipe.lora, request.config
    period, shallow = period_and_depth(kinds_of_layers(config), max(1, request.recipe.training.recompute_every))
    no_layer_stands_for_another = (
        strategy.schedule is not None,  # each stage has some of the layers
        lora is not None and lora.names_single_layers,  # adapters differ
        # ZeRO's pinned flat buffers are rounded up to a power of two, so they do not grow linearly with layers.
        strategy.uses_engine and bool(strategy.offloaded),
        # ZeRO-1 and 2 reduce by buckets, with a size that follows the trained weights. They make the buffer for a
        # rank's gradients with its first weight: in a shallow model the embeddings', in a deep one a layer's.
        strategy.uses_engine and strategy.layers_repeat,
    )
    if any(no_layer_stands_for_another):
        return period, int(config["num_hidden_layers"])
    if not strategy.layers_repeat:
        quantization, packed = request.recipe.quantization, 1
        if quantization is not None and not quantization.load_in_8bit:
            # 4-bit weights in one element of their container: 4 in bfloat16's two bytes.
            packed = 2 * int(getattr(torch, quantization.bnb_4bit_quant_storage).itemsize)
        shallow += layers_kept_gathered(config, packed)
    return period, shallow


def _of_few_micro_batches(request: TraceRequest, folder: Path, few: int, more: int) -> DeepTrace:
    """A stage's trace with `few` micro-batches, plus the addition of each further one.

    A micro-batch adds its own tensors, and one buffer per message. That does not depend on depth, so a thin model with
    one layer per run shows it. Full training is the exception, because it casts all layers' weights once a step.
    """
    thin, depth = request, int(request.config["num_hidden_layers"])
    if request.recipe.lora:
        runs = request.strategy.stage_count(request.ranks) * RUNS.get(request.strategy.schedule or "", 1)
        thin = replace(request, config=with_layers_alone(request.config, depth, range(runs)))
    traces = {0: (request, few), 1: (thin, few), 2: (thin, more)}
    if thin is request:
        del traces[1]
    functions = {
        key: partial(trace_to_depth, replace(part, batches=part.batches[:count]), folder / f"{key}", full_depth=False)
        for key, (part, count) in traces.items()
    }
    with run_in_forks(functions) as traced:
        deep, second = traced(0), traced(2)
        first = deep if thin is request else traced(1)
    times = (len(request.batches) - few) / (more - few)
    host = {name: nbytes + round(times * (second.host[name] - first.host[name])) for name, nbytes in deep.host.items()}
    return replace(
        deep,
        phases=with_more_of_the_same(deep.phases, first.phases, second.phases, times),
        host=host,
        work=with_more_micro_steps(deep.work, first.work, second.work, (few, more, len(request.batches))),
    )
