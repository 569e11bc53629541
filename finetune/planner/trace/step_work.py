"""One step's work, from the counts in a trace with few steps, layers or micro-steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace

from finetune.closed_form.constants import DDP_BUCKET, DDP_FIRST_BUCKET
from finetune.measure.collectives import CollectiveStats
from finetune.planner.trace.flops import Operation

STEP_SUMS_BYTES = 3 * 8  # loss, count of tokens and stop flag, which training/update.py reduces once a step


@dataclass(frozen=True)
class StepWork:
    """One rank's computation and traffic in one forward, one backward and one update."""

    operations: Mapping[Operation, float]  # how often, where layers run as they are written
    collectives: Mapping[str, Mapping[str, CollectiveStats]] = field(default_factory=dict)  # by phase and name
    compiles: bool = False  # layers are compiled, which leaves their products and attention as they are

    def flops(self, phase: str, *kinds: str) -> float:
        """A phase's floating-point operations; of these kinds, or all."""
        chosen = (op for op in self.operations if op.phase == phase and (not kinds or op.kind in kinds))
        return sum(self.operations[op] * op.flops for op in chosen)

    def nbytes(self, phase: str, place: str) -> float:
        """Bytes of a phase's operations at one place."""
        return sum(times * op.nbytes for op, times in self.operations.items() if (op.phase, op.place) == (phase, place))

    def launches(self, phase: str) -> float:
        """A phase's operations if layers run as written. Each launches one kernel or more."""
        return sum(times for op, times in self.operations.items() if op.phase == phase)


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

    `gathers_once`: forward sends in the first micro-step alone. `reduces_once`: backward sends in the last. Such
    collectives are per step.
    """
    times = {"forward": steps * micro_steps, "backward": steps * micro_steps, "step": steps}
    done = {op: count / times[op.phase] for op, count in operations.items() if op.phase in times}
    times |= {"forward": steps} if gathers_once else {}
    times |= {"backward": steps} if reduces_once else {}
    sent = {
        phase: {
            name: CollectiveStats(*(_nearest(n / times[phase]) for n in astuple(each))) for name, each in stats.items()
        }
        for phase, stats in collectives.items()
        if phase in times
    }
    return StepWork(done, sent, compiles)


def _nearest(number: float) -> int:
    """The nearest integer. Half a message, which only the first of two steps sends, counts as none."""
    return math.ceil(number - 0.5)


def with_ddp_reductions(work: StepWork, gradient_bytes: int) -> StepWork:
    """The work with DDP's collectives, whose reducer is C++ and not traced: all gradients once a step, in buckets
    (torch/csrc/distributed/c10d/reducer.hpp), and the all-reduce for the loop's three numbers.
    """
    buckets = 1 + math.ceil(max(0, gradient_bytes - DDP_FIRST_BUCKET) / DDP_BUCKET)
    gradients, sums = CollectiveStats(buckets, gradient_bytes), CollectiveStats(1, STEP_SUMS_BYTES)
    return replace(work, collectives={"backward": {"all_reduce": gradients}, "step": {"all_reduce": sums}})


def work_at_depth(work: Mapping[int, StepWork], layers: int) -> StepWork:
    """The work for a model with `layers` layers, from one with that depth or two with other depths."""
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
            name: _line(stats.get(name, CollectiveStats()), each, times) for name, each in deep_stats.items()
        }
    return StepWork(operations, collectives, deep.compiles)


def with_more_micro_steps(work: StepWork, first: StepWork, second: StepWork, counts: tuple[int, int, int]) -> StepWork:
    """The work in a step with the last of `counts` micro-steps, from one with the first.

    `first` and `second`, with the first and second of `counts`, show what happens once a step. For an operation, which
    counts per micro-step, that share falls with their number. For collectives, which count per step, it does not grow.
    """
    few, more, wanted = counts
    share, times = (1 / wanted - 1 / few) / (1 / more - 1 / few), (wanted - few) / (more - few)
    operations = dict(work.operations)
    for op in {**first.operations, **second.operations}:
        once = second.operations.get(op, 0.0) - first.operations.get(op, 0.0)
        operations[op] = operations.get(op, 0.0) + share * once
    collectives, none = dict[str, Mapping[str, CollectiveStats]](), CollectiveStats()
    for phase, sent in second.collectives.items():
        base, fewer = (each.collectives.get(phase, {}) for each in (work, first))
        collectives[phase] = {
            name: _sum(base.get(name, none), fewer.get(name, none), each, times) for name, each in sent.items()
        }
    return replace(work, operations=operations, collectives=collectives)


def _line(start: CollectiveStats, end: CollectiveStats, times: float) -> CollectiveStats:
    """Each figure in `start`, plus `times` times `end`'s surplus."""
    return _sum(start, start, end, times)


def _sum(base: CollectiveStats, start: CollectiveStats, end: CollectiveStats, times: float) -> CollectiveStats:
    """Each figure in `base`, plus `times` times the difference from `start` to `end`."""
    figures = zip(astuple(base), astuple(start), astuple(end), strict=True)
    return CollectiveStats(*(round(given + times * (more - few)) for given, few, more in figures))
