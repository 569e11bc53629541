"""One step's work, from a trace with few steps, layers or micro-steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace

from finetune.closed_form.constants import DDP_BUCKET, DDP_FIRST_BUCKET
from finetune.measure.collectives import CollectiveStats
from finetune.model.optimizers.rounded_adamw import ROUNDED_CHUNK
from finetune.planner.trace.flops import FUSED_UPDATE, Operation

# Bytes that an update reads and writes for one bfloat16 weight: RoundedAdamW's fused kernel, and the update as it is
# written, with its kernels for each chunk (tests/planner/test_speed.py counts them).
FUSED_BYTES, WRITTEN_BYTES, WRITTEN_KERNELS = 14, 576, 66
GATHERS = ("all_gather",)  # of weights, which every backward may gather again
STEP_SUMS_BYTES = 3 * 8  # loss, count of tokens and stop flag, which training/update.py reduces once a step


@dataclass(frozen=True)
class StepWork:
    """One rank's computation and traffic in one forward, one backward and one update."""

    operations: Mapping[Operation, float]  # how often each runs, if layers run as they are written
    collectives: Mapping[str, Mapping[str, CollectiveStats]] = field(default_factory=dict)  # by phase and name
    compiles: bool = False  # layers are compiled; their products and attention stay as they are

    def flops(self, phase: str, *kinds: str) -> float:
        """A phase's floating-point operations: all, or these kinds."""
        chosen = (op for op in self.operations if op.phase == phase and (not kinds or op.kind in kinds))
        return sum(self.operations[op] * op.flops for op in chosen)

    def nbytes(self, phase: str, place: str) -> float:
        """Bytes that a phase's operations read and write at one place."""
        return sum(times * op.nbytes for op, times in self.operations.items() if (op.phase, op.place) == (phase, place))

    def launches(self, phase: str) -> float:
        """A phase's operations if nothing is compiled. Each launches one kernel or more."""
        launches = 0.0
        for operation, times in self.operations.items():
            if operation.phase == phase:
                kernels = 1
                if operation.kind == FUSED_UPDATE:
                    kernels = WRITTEN_KERNELS * math.ceil(operation.nbytes // FUSED_BYTES / ROUNDED_CHUNK)
                launches += times * kernels
        return launches

    def as_written(self) -> StepWork:
        """The work if nothing is compiled."""
        operations = {
            op._replace(nbytes=op.nbytes * WRITTEN_BYTES // FUSED_BYTES) if op.kind == FUSED_UPDATE else op: times
            for op, times in self.operations.items()
        }
        return replace(self, operations=operations, compiles=False)


def per_step(
    operations: Mapping[Operation, float],
    collectives: Mapping[str, Mapping[str, CollectiveStats]],
    *,
    steps: int,
    micro_steps: int,
    gathers_once: bool = False,
    reduces_once: bool = False,
    compiles: bool = False,
) -> StepWork:
    """The work in one forward, one backward and one update, from a trace with `steps` steps and `micro_steps` each.

    Args:
        gathers_once: Forward sends in the first micro-step alone, so its collectives are per step.
        reduces_once: Backward gathers weights in each micro-step at most. All else that it sends is per step.
    """
    times = {"forward": steps * micro_steps, "backward": steps * micro_steps, "step": steps}
    done = {op: count / times[op.phase] for op, count in operations.items() if op.phase in times}
    if gathers_once:
        times["forward"] = steps
    sent: dict[str, dict[str, CollectiveStats]] = {}
    for phase, named in collectives.items():
        if phase not in times:
            continue
        sent[phase] = {}
        for name, stats in named.items():
            # The nearest integers. Half a message, if only the first of two steps sends it, counts as none.
            every = steps if phase == "backward" and reduces_once and name not in GATHERS else times[phase]
            counts = (math.ceil(number / every - 0.5) for number in astuple(stats))
            sent[phase][name] = CollectiveStats(*counts)
    return StepWork(done, sent, compiles)


def with_ddp_reductions(work: StepWork, gradient_bytes: int) -> StepWork:
    """The work with DDP's collectives. They are not traced, because DDP's reducer is C++.

    Once a step it reduces all gradients, in buckets (torch/csrc/distributed/c10d/reducer.hpp), and the loop's three
    numbers.
    """
    buckets = 1 + math.ceil(max(0, gradient_bytes - DDP_FIRST_BUCKET) / DDP_BUCKET)
    gradients, sums = CollectiveStats(buckets, gradient_bytes), CollectiveStats(1, STEP_SUMS_BYTES)
    return replace(work, collectives={"backward": {"all_reduce": gradients}, "step": {"all_reduce": sums}})


def work_at_depth(work: Mapping[int, StepWork], layers: int) -> StepWork:
    """The work for a model with `layers` layers, from one model with that depth or two with other depths."""
    if layers in work:
        return work[layers]
    few, more = sorted(work)
    shallow, deep, times = work[few], work[more], (layers - few) / (more - few)
    operations = {
        op: shallow.operations.get(op, 0.0) + times * (deep.operations.get(op, 0.0) - shallow.operations.get(op, 0.0))
        for op in {**shallow.operations, **deep.operations}
    }
    collectives = {}
    for phase, deep_stats in deep.collectives.items():
        stats = shallow.collectives.get(phase, {})
        collectives[phase] = {
            name: _sum(fewer := stats.get(name, CollectiveStats()), fewer, more, times)
            for name, more in deep_stats.items()
        }
    return StepWork(operations, collectives, deep.compiles)


def with_more_micro_steps(work: StepWork, first: StepWork, second: StepWork, counts: tuple[int, int, int]) -> StepWork:
    """The work in a step with `counts[2]` micro-steps, from `work`, a step with `counts[0]`.

    `first` has `counts[0]` micro-steps and `second` `counts[1]`. Their difference shows the work that happens once a
    step. An operation counts per micro-step, so that share falls with their number. Collectives count per step, so
    theirs stays.
    """
    few, more, count = counts
    # A micro-step's count is each + once / number. From 2 and 4 to 8 micro-steps: (1/8 - 1/2) / (1/4 - 1/2) = 1.5.
    share, times = (1 / count - 1 / few) / (1 / more - 1 / few), (count - few) / (more - few)
    operations = dict(work.operations)
    for op in {**first.operations, **second.operations}:
        once = second.operations.get(op, 0.0) - first.operations.get(op, 0.0)
        operations[op] = operations.get(op, 0.0) + share * once
    collectives, none = dict[str, Mapping[str, CollectiveStats]](), CollectiveStats()
    for phase, sent in second.collectives.items():
        base, fewer = (part.collectives.get(phase, {}) for part in (work, first))
        collectives[phase] = {
            name: _sum(base.get(name, none), fewer.get(name, none), stats, times) for name, stats in sent.items()
        }
    return replace(work, operations=operations, collectives=collectives)


def _sum(base: CollectiveStats, start: CollectiveStats, end: CollectiveStats, times: float) -> CollectiveStats:
    """Each figure in `base`, plus the difference from `start` to `end` times `times`."""
    figures = zip(astuple(base), astuple(start), astuple(end), strict=True)
    return CollectiveStats(*(round(figure + times * (more - few)) for figure, few, more in figures))
