"""A recipe's memory on one of its GPUs, by a trace without weights, data or a GPU."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from finetune.closed_form.constants import CUDA_CONTEXT, NCCL_BUFFERS
from finetune.errors import EnvironmentMismatch
from finetune.launch.gpu_environment import expands_segments
from finetune.model.known_configs import planned_config
from finetune.planner.depth.caching_allocator import NoMemory, least_room, replay
from finetune.planner.depth.fork import run_in_forks
from finetune.planner.depth.repeat_layers import StorageChange, add_unlayered_storage
from finetune.planner.depth.trace_to_depth import TraceRequest, trace_to_depth
from finetune.planner.roofline import Layout
from finetune.planner.trace.step_work import StepWork, with_ddp_reductions
from finetune.planner.trace.timeline import Peak, PhaseMemory
from finetune.planner.trace.worst_batches import worst_batches
from finetune.recipe.gpus import Gpus
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import Strategy, strategy_of
from finetune.recipe.strategy_fit import stages_problem
from finetune.strategies.accelerator import check_combination
from finetune.tokens.batches import MicroBatch

STAGES_AT_ONCE = 4  # stages of a pipeline that are traced beside each other, half a GiB of host memory each


@dataclass(frozen=True)
class Plan:
    """A recipe's memory on one rank's GPU."""

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
    stage: int | None = None  # of a pipeline; None: all ranks are alike
    stage_layers: tuple[range, ...] = ()  # those that it holds, by its runs
    schedule: str | None = None  # of the pipeline
    stages: tuple[Plan, ...] = ()  # each of the pipeline, where this is the one that needs most
    # Of the GPU's memory at full depth, where the allocator was replayed.
    changes: Sequence[StorageChange] = field(default=(), repr=False, compare=False)

    @property
    def peak(self) -> tuple[str, Peak]:
        """The phase with the largest peak, and that peak."""
        return max(((name, phase.peak) for name, phase in self.phases.items()), key=lambda pair: pair[1].nbytes)

    @property
    def needed(self) -> int:
        """Bytes of tensors at the peak, and those outside tensors."""
        return self.peak[1].nbytes + sum(self.outside.values())

    @property
    def fits(self) -> bool:
        """Whether one GPU certainly suffices; True where no GPU is named."""
        return self.gpus is None or max(self.needed, self.upper) <= self.gpus.memory

    def fits_from(self) -> int:
        """The smallest GPU memory that fits, to an allocator page; several replays, a tenth of a second each."""
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
    stage: int | None = None,
    must_fit: bool = False,
) -> Plan:
    """Plan one rank, of a pipeline the stage that needs most.

    Raises EnvironmentMismatch for an unknown model, and for what the trainer would refuse.

    Args:
        gpus: None: plan a CPU's memory, of one process unless `ranks` and those of a `node` are given.
        batches: A run's own of its largest step, by default the largest there can be. With a run's own the model is
            traced at full depth on a CPU, to be equal to the run.
        stage: Plan this one of a pipeline alone, from 0 on.
        must_fit: Raise DoesNotFit as soon as it is certain, after about half of a plan's time.
    """
    strategy = strategy_of(recipe)
    check_combination(recipe, strategy, on_cpu=gpus is None)
    if strategy.schedule and stage is None:
        count = _ranks_of(strategy, gpus, ranks)
        if problem := stages_problem(recipe, strategy, count):
            raise EnvironmentMismatch(problem)
        one = partial(plan_recipe, recipe, gpus, batches=batches, ranks=count, node=node, must_fit=must_fit)
        return _worst(list(_each_stage(one, strategy.stage_count(count))))
    config, source = planned_config(recipe.model.name_or_path, recipe.model.revision)
    notes = [f"model: {source}"]
    if recipe.model.adapter is not None:
        notes.append(f"model.adapter: training starts from {recipe.model.adapter}, in the memory of a new adapter")
    if recipe.training.mixed_precision == "fp16":
        training = recipe.training.model_copy(update={"mixed_precision": "bf16"})
        recipe = recipe.model_copy(update={"training": training})
        notes.append("fp16 is planned as bf16, which has as many bytes")
    ranks = _ranks_of(strategy, gpus, ranks)
    node = gpus.count if gpus else node or ranks
    batches_traced, exact = batches or worst_batches(recipe, ranks), bool(batches) and gpus is None
    outside = {"CUDA context": CUDA_CONTEXT} | ({"NCCL": NCCL_BUFFERS} if ranks > 1 else {})
    outside_bytes = sum(outside.values())
    must_fit_bytes = gpus.memory if gpus and must_fit else None
    with tempfile.TemporaryDirectory() as folder:
        sizes = ranks, node, gpus is not None, outside_bytes, must_fit_bytes
        request = TraceRequest(recipe, config, strategy, batches_traced, *sizes, stage or 0)
        deep = trace_to_depth(request, Path(folder), full_depth=exact)
    work = deep.work
    if strategy.gradient_buckets:
        work = with_ddp_reductions(work, deep.phases["step"].peak.parts["gradients"])
    outside, layout = outside if gpus else {}, _layout(request)
    planned = Plan(deep.phases, outside, strategy.name, ranks, gpus, tuple(notes), work, layout)
    planned = dataclasses.replace(planned, stage=stage, stage_layers=deep.stage_layers, schedule=strategy.schedule)
    if gpus is None:
        return planned
    planned = dataclasses.replace(planned, host=deep.host, node=min(node, ranks))
    if deep.reserved_share is not None:
        return _with_reserved_share(planned, deep.reserved_share)
    return _with_allocator(planned, deep.changes, gpus.memory - outside_bytes)


def _ranks_of(strategy: Strategy, gpus: Gpus | None, ranks: int | None) -> int:
    """Raises EnvironmentMismatch for a pipeline of one."""
    if gpus is None and ranks is None and strategy.schedule:
        ranks = strategy.num_processes
    count = strategy.rank_count(gpus.count * gpus.nodes if gpus else ranks or 1)
    if strategy.schedule and count == 1:
        raise EnvironmentMismatch(
            f"accelerate_config: {strategy.name}: how many stages? add --gpus 2x24GB, or num_processes: 2 in its file"
        )
    return count


def _each_stage(plan: Callable[..., Plan], count: int) -> Iterator[Plan]:
    """The plan of each stage, a few at a time beside each other."""
    for first in range(0, count, STAGES_AT_ONCE):
        some = range(first, min(first + STAGES_AT_ONCE, count))
        with run_in_forks({each: partial(plan, stage=each) for each in some}) as planned:
            yield from map(planned, some)


def _worst(stages: Sequence[Plan]) -> Plan:
    """The stage that needs most, with all of them."""
    worst = max(stages, key=lambda planned: max(planned.needed, planned.upper))
    return dataclasses.replace(worst, stages=tuple(stages))


def _with_reserved_share(planned: Plan, reserved_share: float) -> Plan:
    """With the allocator's reserved bytes as a multiple of the allocated ones."""
    allocated = planned.peak[1].nbytes
    most = int(reserved_share * allocated)
    return dataclasses.replace(planned, reserved=(allocated, most), upper=most + sum(planned.outside.values()))


def _with_allocator(planned: Plan, changes: Sequence[StorageChange], room: int) -> Plan:
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


def _layout(request: TraceRequest) -> Layout:
    training, strategy = request.recipe.training, request.strategy
    return Layout(
        ranks=strategy.data_rank_count(request.ranks),
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
