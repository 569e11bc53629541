"""A rank's trace at full depth: extrapolated from a shallow model, or with all layers; a pipeline's stage has all
layers and few micro-batches.
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
from finetune.model.small import with_layers_alone
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
from finetune.planner.depth.repeat_layers import StorageChange, repeat_layers
from finetune.planner.trace.fake_device import DEVICE_NAME
from finetune.planner.trace.step_work import StepWork, per_step, with_more_micro_steps, work_at_depth
from finetune.planner.trace.timeline import PhaseMemory, Timeline
from finetune.planner.trace.trace import STEPS, trace
from finetune.recipe.schema import Recipe
from finetune.recipe.sections.pipelines import RUNS
from finetune.recipe.strategy import Strategy
from finetune.strategies.pipeline.timeline import steps_alike
from finetune.tokens.batches import MicroBatch


@dataclass(frozen=True)
class TraceRequest:
    """The trace's subject and place."""

    recipe: Recipe
    config: Mapping[str, Any]  # of the model at full depth
    strategy: Strategy
    batches: Sequence[MicroBatch]
    ranks: int
    node: int
    on_gpu: bool
    outside_bytes: int  # bytes that are not of tensors
    must_fit_bytes: int | None  # stop as soon as more are certain to be needed
    rank: int  # which is traced


@dataclass(frozen=True)
class DeepTrace:
    """The memory and work of one rank at full depth."""

    phases: dict[str, PhaseMemory]
    work: StepWork
    host: dict[str, int] = field(default_factory=dict)  # this and the following where a GPU is planned
    changes: list[StorageChange] = field(default_factory=list)  # of the GPU's memory
    reserved_share: float | None = None  # instead of `changes`: reserved over allocated bytes, at most
    stage_layers: tuple[range, ...] = ()


def trace_to_depth(request: TraceRequest, folder: Path, *, full_depth: bool) -> DeepTrace:
    """Trace shallow models and extrapolate to this one's depth, or trace it at `full_depth`."""
    if not full_depth and (counts := _fewer_micro_batches(request)) is not None:
        return _of_few_micro_batches(request, folder, *counts)
    config = request.config
    layers, period = int(config["num_hidden_layers"]), max(1, request.recipe.training.recompute_every)
    period, shallow = period_and_depth(kinds_of_layers(config), period)
    if request.strategy.uses_engine and request.strategy.offloaded:
        # ZeRO's pinned flat buffers are rounded up to a power of two, so they do not grow linearly with layers.
        shallow = layers
    elif not request.strategy.layers_repeat:
        shallow += layers_kept_gathered(config, _weights_an_element(request.recipe))
    elif request.strategy.uses_engine:
        # ZeRO-1 and 2 reduce by buckets whose size follows what is trained, and make the buffer of a rank's gradients
        # with the first of its part of the weights: in a shallow model the embeddings', in a deep one a layer's.
        shallow = layers
    if request.strategy.schedule or (request.recipe.lora and request.recipe.lora.names_single_layers):
        shallow = layers  # a stage has some of them; or adapters differ, so that no layer stands for another
    few, more = depths(layers, period, shallow)
    needed = (layers,) if full_depth or layers <= more else (more, few)
    with run_in_forks({depth: partial(_trace_shallow, request, depth, folder) for depth in needed}) as traced:
        work: dict[int, StepWork] = {}
        timelines: dict[int, Timeline] = {}
        held: dict[int, tuple[range, ...]] = {}

        def timeline_of(depth: int) -> Timeline:
            if depth not in timelines:
                timelines[depth], work[depth], held[depth] = traced(depth)
            return timelines[depth]

        def changes_of(depth: int) -> list[StorageChange]:
            return list(repeat_layers(timeline_of(depth), DEVICE_NAME, depth, layers, period))

        if full_depth:
            phases = timeline_of(layers).phases("cpu")
            return DeepTrace(phases, work_at_depth(work, layers), stage_layers=held[layers])
        phases_on = partial(extrapolate, timeline_of, layers, period=period, shallow=shallow)
        if not request.on_gpu:
            return DeepTrace(phases_on("cpu"), work_at_depth(work, layers), stage_layers=held.get(layers, ()))
        repeats = request.strategy.layers_repeat
        if request.must_fit_bytes is not None and repeats:
            _refuse_if_larger(changes_of(needed[0]), request.outside_bytes, request.must_fit_bytes)
        phases, host = phases_on(DEVICE_NAME), {name: phase.peak.nbytes for name, phase in phases_on("cpu").items()}
        if not repeats:
            # ZeRO-3 gathers weights in an order that does not repeat from layer to layer, so runs cannot be repeated.
            reserved_share = max(_reserved_share(timeline, count) for count, timeline in timelines.items())
            return DeepTrace(phases, work_at_depth(work, layers), host, reserved_share=reserved_share)
        done = phases, work_at_depth(work, layers), host, changes_of(needed[0])
        return DeepTrace(*done, stage_layers=held.get(layers, ()))


def _fewer_micro_batches(request: TraceRequest) -> tuple[int, int] | None:
    """Two numbers of micro-batches to trace, instead of all in a pipeline's step."""
    schedule, lora = request.strategy.schedule, request.recipe.lora
    if schedule is None or (lora and lora.names_single_layers):  # a model of few layers may lack those that it names
        return None
    return steps_alike(schedule, request.strategy.stage_count(request.ranks), len(request.batches))


def _of_few_micro_batches(request: TraceRequest, folder: Path, few: int, more: int) -> DeepTrace:
    """A stage's trace with `few` micro-batches, and each further one's addition: its own tensors, and one buffer per
    message. That does not depend on depth, so it is seen in a thin model with one layer per run. Full training is
    the exception, because it casts all layers' weights once a step.
    """
    thin, depth = request, int(request.config["num_hidden_layers"])
    if request.recipe.lora:
        runs = request.strategy.stage_count(request.ranks) * RUNS.get(request.strategy.schedule or "", 1)
        thin = replace(request, config=with_layers_alone(request.config, depth, range(runs)))
    asked = {0: (request, few), 1: (thin, few), 2: (thin, more)}
    if thin is request:
        del asked[1]
    functions = {
        key: partial(trace_to_depth, replace(each, batches=each.batches[:count]), folder / f"{key}", full_depth=False)
        for key, (each, count) in asked.items()
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


def _trace_shallow(request: TraceRequest, layers: int, folder: Path) -> tuple[Timeline, StepWork, tuple[range, ...]]:
    """Trace the model with `layers` layers; also says which of them a pipeline's stage holds."""
    shallow = with_layers(request.recipe, request.config, layers, folder)
    options: dict[str, Any] = {"ranks": request.ranks, "rank": request.rank, "node": request.node}
    options["gpu"] = request.on_gpu
    traced = trace(shallow, request.strategy, request.batches, **options)
    collectives = {name: phase.collectives for name, phase in traced.measured.items()}
    work = per_step(
        traced.operations,
        collectives,
        steps=STEPS,
        micro_steps=len(request.batches),
        gathers_once=request.strategy.gathers_once,
        reduces_once=request.strategy.reduces_once,
        compiles=traced.compiles,
    )
    return traced.timeline, work, traced.stage_layers


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
