"""A recipe's memory on one of its GPUs, by a trace without weights, data or a GPU."""

from __future__ import annotations

import dataclasses
import io
import logging
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from finetune.closed_form.constants import CUDA_CONTEXT, NCCL_BUFFERS
from finetune.closed_form.recomputation import choose_reduction
from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.launch.gpu_environment import expands_segments
from finetune.model.known_configs import planned_config
from finetune.model.mixtures import refuse_mixture
from finetune.planner.depth.caching_allocator import NoMemory, least_room, replay
from finetune.planner.depth.fork import run_in_forks
from finetune.planner.depth.repeat_layers import StorageChange, add_unlayered_storage
from finetune.planner.depth.trace_to_depth import TraceRequest, trace_to_depth
from finetune.planner.remedies import changed
from finetune.planner.trace.step_work import StepWork, with_ddp_reductions
from finetune.planner.trace.timeline import Peak, PhaseMemory
from finetune.planner.trace.worst_batches import worst_batches
from finetune.recipe.gpus import Gpus
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy_fit import NO_FLOAT8, pages_problem, ranks_problem, refuse_recipe
from finetune.strategies.packages import missing_packages
from finetune.tokens.batches import MicroBatch
from finetune.wording import counted

FIRST_TOKENS = 512  # a row's in the first step, if memory alone is planned
STAGES_AT_ONCE = 4  # pipeline stages that are traced at once, with half a GiB of host memory each


@dataclass(frozen=True)
class Layout:
    """The grouping of ranks, and the division of a step's rows among them."""

    ranks: int
    node: int  # ranks on one machine
    tokens: int  # in a micro-batch
    rows: int  # micro-batches in a step over all ranks
    layers: int
    copies: int = 1  # HSDP: copies of the sharded model; gradients are reduced between them
    gathers_once: bool = False  # FSDP2 that keeps weights gathered: it gathers in the first micro-step alone
    reduces_once: bool = False  # DDP, ZeRO-1: gradients are sent in the last micro-step alone
    shards_state: bool = True  # an update is divided among the ranks
    on_disk: bool = False  # weights or states wait on a disk; its speed is not known here

    @property
    def micro_steps(self) -> int:
        """One rank's micro-steps in a step; at least one, even if there are more ranks than rows."""
        return max(1, -(-self.rows // self.ranks))


@dataclass(frozen=True)
class Plan:
    """A recipe's memory on one rank's GPU."""

    phases: dict[str, PhaseMemory]
    outside: dict[str, int]  # bytes outside of tensors
    strategy: str
    ranks: int
    gpus: Gpus | None
    notes: tuple[str, ...]
    work: StepWork  # one rank's computation and traffic
    layout: Layout
    # Bytes by torch's allocator on a GPU: at least, and with all the room it asks for.
    reserved: tuple[int, int] | None = None
    upper: int = 0  # bytes that certainly suffice, by the allocator's replay
    host: Mapping[str, int] = field(default_factory=dict)  # rank 0's tensors in host memory, at each phase's peak
    node: int = 1  # ranks on one machine
    stage: int | None = None  # a pipeline's; None: all ranks are alike
    stage_layers: tuple[range, ...] = ()  # the stage's layers, by its runs
    schedule: str | None = None  # the pipeline's
    stages: tuple[Plan, ...] = ()  # all of the pipeline's, in the plan of the stage that needs most
    # In the GPU's memory at full depth, if the allocator was replayed.
    changes: Sequence[StorageChange] = field(default=(), repr=False, compare=False)

    @property
    def peak(self) -> tuple[str, Peak]:
        """The phase with the largest peak, and that peak."""
        return max(((name, phase.peak) for name, phase in self.phases.items()), key=lambda pair: pair[1].nbytes)

    @property
    def held(self) -> int:
        """This rank's copies of trained weights in host memory, which a run's worst step holds; as many bytes as their
        gradients."""
        return self.phases["step"].peak.parts.get("gradients", 0)

    @property
    def needed(self) -> int:
        """Tensors' bytes at the peak, and those outside tensors."""
        return self.peak[1].nbytes + sum(self.outside.values())

    @property
    def fits(self) -> bool:
        """Whether one GPU certainly suffices; True if no GPU is named."""
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
    keeps_gradients: bool | None = None,
    memory_alone: bool = False,
) -> Plan:
    """Plan one rank by a trace; in a pipeline the stage that needs most. It takes seconds.

    Raises FinetuneError if the trainer would refuse the recipe. It is EnvironmentMismatch for an unknown model, and if
    a library fails on tensors without data.

    Args:
        gpus: None: plan a CPU's memory, for one process unless `ranks` and those on a `node` are given.
        batches: A run's largest step; by default the largest step that the recipe allows. On a CPU a run's step is
            traced at full depth, so that the plan equals the run.
        stage: Plan this pipeline stage alone, from 0 on.
        must_fit: Raise DoesNotFit as soon as it is certain, after about half the plan's time.
        keeps_gradients: FSDP2 reduces gradients once a step, as a run has chosen; None: as a run on `gpus` would.
        memory_alone: The step that makes the optimizer's state has one short micro-batch, and losses take three chunks,
            which halves the time. `work` is wrong.
    """
    strategy = refuse_recipe(recipe)
    problem = missing_packages(recipe, strategy, plan=True)
    if gpus is None:
        problem = problem or pages_problem(recipe)
    elif gpus.lacks_float8 and recipe.model.load_in_fp8:
        problem = problem or NO_FLOAT8.format(card=f"{gpus.name} has no products in it")
    if problem:
        raise EnvironmentMismatch(problem)
    if gpus is not None:
        ranks = gpus.count * gpus.nodes
    elif ranks is None:
        ranks = strategy.num_processes if strategy.schedule else 1
    ranks = strategy.rank_count(ranks or 1)
    if strategy.schedule and ranks == 1:
        raise EnvironmentMismatch(
            f"accelerate_config: {strategy.name}: how many stages? add --gpus 2x24GB, or num_processes: 2 in its file"
        )
    if (strategy.schedule or strategy.replicates) and stage is None:
        machines = "" if gpus is None else f"{gpus.nodes} x {counted(gpus.count, 'GPU')}"
        if misfit := ranks_problem(recipe, strategy, ranks, gpus.count if gpus else ranks, machines):
            raise EnvironmentMismatch(misfit)
    if strategy.schedule and stage is None:
        plan = partial(plan_recipe, recipe, gpus, batches=batches, ranks=ranks, node=node, must_fit=must_fit)
        stages: list[Plan] = []
        count = strategy.stage_count(ranks)
        for first in range(0, count, STAGES_AT_ONCE):
            numbers = range(first, min(first + STAGES_AT_ONCE, count))
            with run_in_forks({number: partial(plan, stage=number) for number in numbers}) as planned_stage:
                stages += map(planned_stage, numbers)
        worst = max(stages, key=lambda planned: max(planned.needed, planned.upper))
        return dataclasses.replace(worst, stages=tuple(stages))
    config, source = planned_config(recipe.model.name_or_path, recipe.model.revision)
    refuse_mixture(recipe, strategy, config)
    reduction = None
    if keeps_gradients is None and gpus is not None:
        reduction = choose_reduction(recipe, config, strategy, gpus, ranks=ranks, memory=gpus.memory)
        keeps_gradients = reduction is not None and reduction.once
    strategy = dataclasses.replace(strategy, keeps_gradients=bool(keeps_gradients))
    assumed_rows = {
        "pairs": "pairs of two answers, each of data.max_length",
        "judged": "answers of data.max_length",
        "documents": "full rows of data.max_length",
    }
    notes = [assumed_rows[recipe.data.unit], f"model: {source}"]
    if recipe.model.adapter is not None:
        notes.append(f"model.adapter: training starts from {recipe.model.adapter}, in the memory of a new adapter")
    if reduction is not None:
        notes.append(reduction.facts["line"])
    if recipe.training.mixed_precision == "fp16":
        training = recipe.training.model_copy(update={"mixed_precision": "bf16"})
        recipe = recipe.model_copy(update={"training": training})
        notes.append("fp16 is planned as bf16, which has as many bytes")
    outside = {"CUDA context": CUDA_CONTEXT}
    if ranks > 1:
        outside["NCCL"] = NCCL_BUFFERS
    outside_bytes = sum(outside.values())
    short_rows = changed(recipe, {"data.max_length": min(recipe.data.max_length, FIRST_TOKENS)})
    request = TraceRequest(
        recipe=recipe,
        config=config,
        strategy=strategy,
        batches=batches or worst_batches(recipe, ranks),
        ranks=ranks,
        node=gpus.count if gpus else node or ranks,
        on_gpu=gpus is not None,
        outside_bytes=outside_bytes,
        must_fit_bytes=gpus.memory if gpus and must_fit else None,
        rank=stage or 0,
        first_batches=worst_batches(short_rows, ranks)[:1] if memory_alone else None,
    )
    with tempfile.TemporaryDirectory() as folder, _failure_in_one_line(strategy.name):
        deep = trace_to_depth(request, Path(folder), full_depth=bool(batches) and gpus is None)
    work = deep.work
    if strategy.gradient_buckets:
        work = with_ddp_reductions(work, deep.phases["step"].peak.parts["gradients"])
    planned = Plan(
        phases=deep.phases,
        outside=outside if gpus else {},
        strategy=strategy.name,
        ranks=ranks,
        gpus=gpus,
        notes=tuple(notes),
        work=work,
        layout=Layout(
            ranks=strategy.data_rank_count(ranks),
            node=request.node,
            tokens=max(batch["input_ids"].numel() for batch in request.batches),
            rows=math.ceil(recipe.training.global_batch_size / recipe.training.rows_at_once),
            layers=int(config["num_hidden_layers"]),
            copies=strategy.replica_count(ranks, request.node),
            gathers_once=strategy.gathers_once,
            reduces_once=strategy.reduces_once,
            shards_state=strategy.shards_optimizer_state,
            on_disk="nvme" in strategy.offload_devices.values(),
        ),
        stage=stage,
        stage_layers=deep.stage_layers,
        schedule=strategy.schedule,
    )
    if gpus is None:
        return planned
    planned = dataclasses.replace(planned, host=deep.host, node=min(request.node, ranks))
    if deep.reserved_share is not None:  # the allocator's reserved bytes are a multiple of the allocated ones
        allocated = planned.peak[1].nbytes
        most = int(deep.reserved_share * allocated)
        return dataclasses.replace(planned, reserved=(allocated, most), upper=most + outside_bytes)
    # Replay the allocator. If it would reserve more than the room, a second replay shows whether returning cached
    # segments suffices.
    changes, room = deep.changes, gpus.memory - outside_bytes
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
    upper += outside_bytes
    return dataclasses.replace(planned, reserved=(least, most), upper=upper, changes=changes)


@contextmanager
def _failure_in_one_line(strategy: str) -> Iterator[None]:
    """Make one line of a library's error on tensors without data, and nothing of what libraries print."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # logs missing optional kernels
    try:
        with redirect_stdout(io.StringIO()):  # DeepSpeed
            yield
    except FinetuneError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {(str(error).splitlines() or ['without a message'])[0][:200]}"
        raise EnvironmentMismatch(
            f"{strategy}: the planner cannot trace it ({why}); `finetune compare` measures it"
        ) from error
