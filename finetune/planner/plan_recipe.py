"""A recipe's memory on one of its GPUs: traced, without weights, data or a GPU."""

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

from finetune.errors import DoesNotFit
from finetune.model import attention
from finetune.model.build import attention_name
from finetune.model.known_configs import full_config
from finetune.model.optimizer import check_optimizer
from finetune.model.quantization import check_sharded_quantization
from finetune.planner.constants import CUDA_CONTEXT, NCCL_BUFFERS
from finetune.planner.depth.caching_allocator import NoMemory, replay
from finetune.planner.depth.extrapolate import SHALLOW, depths, extrapolate, layers_kept_gathered, with_layers
from finetune.planner.depth.fork import run_in_forks
from finetune.planner.depth.repeat_layers import StorageChange, add_unlayered_storage, repeat_layers
from finetune.planner.roofline import Layout
from finetune.planner.trace.fake_device import DEVICE_NAME
from finetune.planner.trace.flops import StepWork, per_step, with_ddp_reductions, work_at_depth
from finetune.planner.trace.timeline import Peak, PhaseMemory, Timeline
from finetune.planner.trace.trace import STEPS, trace
from finetune.recipe.gpus import Gpus
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import Strategy, read_strategy
from finetune.strategies.zero_requirements import require_engine
from finetune.tokens.batches import MicroBatch


@dataclass(frozen=True)
class Planned:
    """What a recipe takes on one rank's GPU."""

    phases: dict[str, PhaseMemory]
    outside: dict[str, int]  # beside the tensors
    strategy: str
    ranks: int
    gpus: Gpus | None
    notes: tuple[str, ...]
    work: StepWork | None = None  # what one rank computes and sends
    layout: Layout | None = None
    reserved: tuple[int, int] | None = None  # by torch's allocator on a GPU: what it must, what it would with room
    upper: int = 0  # bytes that surely suffice, by the allocator's replay
    host: Mapping[str, int] = field(default_factory=dict)  # rank 0's tensors in host memory, at each phase's peak
    node: int = 1  # ranks on one machine

    @property
    def peak(self) -> tuple[str, Peak]:
        """The phase with the largest peak, and that."""
        return max(((name, phase.peak) for name, phase in self.phases.items()), key=lambda found: found[1].nbytes)

    @property
    def needed(self) -> int:
        """Bytes of tensors at the peak, and what lies beside them."""
        return self.peak[1].nbytes + sum(self.outside.values())

    @property
    def fits(self) -> bool:
        """Whether one GPU surely holds it; with no GPU named, yes."""
        return self.gpus is None or max(self.needed, self.upper) <= self.gpus.memory


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
        gpus: None: a CPU's memory is planned, one process's unless `ranks` and those of a `node` are given.
        batches: A run's own for its largest step; without, the largest there can be. On a CPU the model is then
            traced at its full depth, to be equal to the run.
        must_fit: Raise DoesNotFit as soon as that is certain, which takes half a plan.
    """
    strategy = read_strategy(recipe.accelerate_config)
    _refuse_untrainable(recipe, strategy, on_cpu=gpus is None)
    config, source = full_config(recipe.model.name_or_path, recipe.model.revision)
    notes = [f"model: {source}"]
    if recipe.training.mixed_precision == "fp16":
        recipe = _changed(recipe, mixed_precision="bf16")
        notes.append("fp16 is planned as bf16, which is as wide")
    ranks = 1 if strategy.kind == "single" else gpus.count * gpus.nodes if gpus else ranks or 1
    node = gpus.count if gpus else node or ranks
    shown, exact = batches or worst_batches(recipe, ranks), bool(batches) and gpus is None
    outside = {"CUDA context": CUDA_CONTEXT} | ({"NCCL": NCCL_BUFFERS} if ranks > 1 else {})
    beside = sum(outside.values())
    most = gpus.memory if gpus and must_fit else None
    with tempfile.TemporaryDirectory() as folder:
        job = _Job(recipe, strategy, shown, ranks, node, gpus is not None, beside, most)
        found = _traced(job, config, Path(folder), whole=exact)
    work = found.work
    if strategy.kind == "ddp":
        work = with_ddp_reductions(work, found.phases["step"].peak.parts["gradients"])
    layout = _layout(recipe, strategy, shown, ranks, node, int(config["num_hidden_layers"]))
    planned = Planned(found.phases, outside if gpus else {}, strategy.name, ranks, gpus, tuple(notes), work, layout)
    if gpus is None:
        return planned
    planned = dataclasses.replace(planned, host=found.host, node=min(node, ranks))
    if found.share is not None:
        return _with_share(planned, found.share)
    return _with_allocator(planned, found.changes, gpus.memory - beside)


def _with_share(planned: Planned, share: float) -> Planned:
    """What the allocator reserves, as so many times what it hands out."""
    allocated = planned.peak[1].nbytes
    most = int(share * allocated)
    return dataclasses.replace(planned, reserved=(allocated, most), upper=most + sum(planned.outside.values()))


def _with_allocator(planned: Planned, changes: Sequence[StorageChange], room: int) -> Planned:
    """What the allocator reserves; with less room than that, whether it gets by when it gives back what it caches."""
    held = replay(changes)
    short = {name: phase.peak.nbytes - held[name].allocated for name, phase in planned.phases.items()}
    if max(short.values()) > 0:  # of storages that are no layer's and grow with depth: DDP's buckets, ZeRO's partitions
        changes = list(add_unlayered_storage(changes, short))
        held = replay(changes)
    least, most = (max(getattr(phase, kind) for phase in held.values()) for kind in ("allocated", "reserved"))
    upper = most
    if least <= room < most:
        with suppress(NoMemory):
            replay(changes, room)
            upper = room
    return dataclasses.replace(planned, reserved=(least, most), upper=upper + sum(planned.outside.values()))


@dataclass(frozen=True)
class _Job:
    recipe: Recipe
    strategy: Strategy
    batches: Sequence[MicroBatch]
    ranks: int
    node: int
    on_gpu: bool
    beside: int  # bytes outside of the tensors
    most: int | None  # bytes that all must fit into, not to be planned in vain


@dataclass(frozen=True)
class _Traced:
    phases: dict[str, PhaseMemory]
    work: StepWork
    host: dict[str, int] = field(default_factory=dict)  # these where a GPU is planned
    changes: list[StorageChange] = field(default_factory=list)  # of its memory, which make the phases up
    share: float | None = None  # instead of them: how many times what it hands out its allocator reserves, at most


def _traced(job: _Job, config: Mapping[str, Any], folder: Path, *, whole: bool) -> _Traced:
    """The model of this depth from shallow ones, or from itself where the `whole` is asked for."""
    layers, every = int(config["num_hidden_layers"]), max(1, int(job.recipe.training.activation_checkpointing))
    shallow = SHALLOW + (layers_kept_gathered(config, _packed(job.recipe)) if job.strategy.zero_stage == 3 else 0)
    few, more = depths(layers, every, shallow)
    needed = (layers,) if whole or layers <= more else (more, few)
    with run_in_forks({depth: partial(_shallow, job, config, depth, folder) for depth in needed}) as traced:
        work: dict[int, StepWork] = {}
        timelines: dict[int, Timeline] = {}

        def timeline_of(depth: int) -> Timeline:
            if depth not in timelines:
                timelines[depth], work[depth] = traced(depth)
            return timelines[depth]

        def spliced_of(depth: int) -> list[StorageChange]:
            return list(repeat_layers(timeline_of(depth), DEVICE_NAME, depth, layers, every))

        if whole:
            return _Traced(timeline_of(layers).phases("cpu"), work_at_depth(work, layers))
        grown = partial(extrapolate, timeline_of, layers, period=every, shallow=shallow)
        if not job.on_gpu:
            return _Traced(grown("cpu"), work_at_depth(work, layers))
        repeats = job.strategy.zero_stage != 3
        if job.most is not None and repeats:
            _refuse_larger(spliced_of(needed[0]), job.beside, job.most)
        phases, host = grown(DEVICE_NAME), {name: phase.peak.nbytes for name, phase in grown("cpu").items()}
        if not repeats:
            # It fetches weights in an order that does not repeat from layer to layer, so fewer do not tell the changes.
            share = max(_share_reserved(timeline, count) for count, timeline in timelines.items())
            return _Traced(phases, work_at_depth(work, layers), host, share=share)
        return _Traced(phases, work_at_depth(work, layers), host, spliced_of(needed[0]))


def _shallow(job: _Job, config: Mapping[str, Any], layers: int, folder: Path) -> tuple[Timeline, StepWork]:
    """The model with so many layers, traced."""
    smaller = with_layers(job.recipe, config, layers, folder)
    done = trace(smaller, job.strategy, job.batches, ranks=job.ranks, node=job.node, gpu=job.on_gpu)
    moved = {phase: found.moved for phase, found in done.measured.items()}
    steps, once = len(job.batches), _reduces_once(job.strategy)
    return done.timeline, per_step(done.operations, moved, steps=STEPS, micro_steps=steps, reduces_once=once)


def _refuse_larger(changes: Sequence[StorageChange], beside: int, most: int) -> None:
    try:
        replay(changes, most - beside)
    except NoMemory:
        needed = beside + max(held.allocated for held in replay(changes).values())
        raise DoesNotFit(f"it needs {needed} bytes of a GPU's {most}", needed) from None


def _share_reserved(timeline: Timeline, layers: int) -> float:
    held = replay(repeat_layers(timeline, DEVICE_NAME, layers, layers)).values()
    return max(phase.reserved for phase in held) / max(phase.allocated for phase in held)


def _packed(recipe: Recipe) -> int:
    """Weights to one element of a quantised layer's tensor."""
    if recipe.quantization is None or recipe.quantization.load_in_8bit:
        return 1
    return 2 * int(getattr(torch, recipe.quantization.bnb_4bit_quant_storage).itemsize)


def _reduces_once(strategy: Strategy) -> bool:
    """Whether gradients wait for a step's last micro-batch."""
    return strategy.kind == "ddp" or strategy.zero_stage == 1


def _layout(
    recipe: Recipe, strategy: Strategy, batches: Sequence[MicroBatch], ranks: int, node: int, layers: int
) -> Layout:
    training = recipe.training
    return Layout(
        ranks=ranks,
        node=node,
        tokens=max(batch["input_ids"].numel() for batch in batches),
        rows=math.ceil(training.global_batch_size / training.per_device_batch_size),
        layers=layers,
        copies=1 if strategy.replicas is None else strategy.replicas or ranks // node,
        reduces_once=_reduces_once(strategy),
        shards_state=strategy.kind in ("fsdp", "deepspeed"),
    )


def worst_batches(recipe: Recipe, ranks: int) -> list[MicroBatch]:
    """The largest micro-batches there can be: full rows; two batches, where steps accumulate.

    A row is one document, but the last has two where an attention that needs a mask for it may meet such a row, or a
    padded one, which needs the same: masks take memory in every layer.
    """
    rows, tokens = recipe.training.per_device_batch_size, recipe.data.max_length
    micro_steps = math.ceil(recipe.training.global_batch_size / (rows * ranks))
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
    return [cast(MicroBatch, {key: _copied(value) for key, value in batch.items()}) for _ in range(min(2, micro_steps))]


def _copied(value: Any) -> Any:
    return value.contiguous().clone() if isinstance(value, torch.Tensor) else value


def _changed(recipe: Recipe, **training: Any) -> Recipe:
    return recipe.model_copy(update={"training": recipe.training.model_copy(update=training)})


def _refuse_untrainable(recipe: Recipe, strategy: Strategy, *, on_cpu: bool) -> None:
    """Raise what the trainer would raise for this recipe under this strategy, wherever it runs."""
    if strategy.kind == "deepspeed":
        require_engine(recipe, strategy, on_cpu=on_cpu)
    if strategy.kind == "fsdp":
        check_sharded_quantization(recipe)
    check_optimizer(recipe.training.optim, on_cpu=on_cpu, sharded=strategy.kind == "fsdp")
