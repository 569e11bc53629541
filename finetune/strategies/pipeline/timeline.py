"""The order in which each pipeline stage computes a step's micro-batches, when it does so, and how long it is idle.

Arithmetic alone, without torch: for plans, and to compare with `StageRecorder` (schedule.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from finetune.recipe.sections.pipelines import RUNS, can_interleave

FORWARD, BACKWARD = "forward", "backward"


class Computation(NamedTuple):
    """The forward or the backward of one micro-batch on one stage, in seconds."""

    stage: int
    kind: str  # FORWARD or BACKWARD
    micro_batch: int
    begin: float
    end: float
    run: int = 0  # of the stage's runs of layers


class Work(NamedTuple):
    """A forward or a backward of a stage, as its schedule orders it."""

    kind: str
    micro_batch: int
    run: int = 0


def order_of(schedule: str, stage: int, stages: int, micro_batches: int) -> list[Work]:
    """A stage's forwards and backwards, in order.

    gpipe: all forwards, then all backwards. naive: one micro-batch's backward before the next one's forward. 1f1b: as
    many forwards as there are stages from here on, then backward and forward in turn; like gpipe if there are fewer
    micro-batches than stages. interleaved_1f1b: like 1f1b over twice as many stages, two on each rank. A round of
    micro-batches goes through one run before it goes through the next (arXiv 2104.04473, figure 4).

    1f1b with 2 stages and 3 micro-batches: stage 0 has F0 F1 B0 F2 B1 B2, stage 1 has F0 B0 F1 B1 F2 B2.
    """
    if schedule == "interleaved_1f1b":
        return _interleaved(stage, stages, micro_batches, RUNS[schedule])
    first = micro_batches
    if schedule == "naive":
        first = 1
    elif schedule == "1f1b" and micro_batches >= stages:
        first = stages - stage
    forwards, backwards = ([Work(kind, number) for number in range(micro_batches)] for kind in (FORWARD, BACKWARD))
    return _in_turn(forwards, backwards, first, backward_first=True)


def _in_turn(forwards: list[Work], backwards: list[Work], first: int, *, backward_first: bool) -> list[Work]:
    """So many forwards, then one of each in turn, then the backwards that are left."""
    waiting = forwards[first:]
    pairs = zip(backwards, waiting, strict=False) if backward_first else zip(waiting, backwards, strict=False)
    return [*forwards[:first], *(action for pair in pairs for action in pair), *backwards[len(waiting) :]]


def _interleaved(stage: int, stages: int, micro_batches: int, runs: int) -> list[Work]:
    assert can_interleave(stages, micro_batches)
    at_once = micro_batches // (micro_batches // stages)
    rounds = [range(first, first + at_once) for first in range(0, micro_batches, at_once)]
    forwards = [Work(FORWARD, number, run) for some in rounds for run in range(runs) for number in some]
    backwards = [Work(BACKWARD, number, run) for some in rounds for run in reversed(range(runs)) for number in some]
    first = min((runs - 1) * at_once + 2 * (stages - 1 - stage), len(forwards))
    return _in_turn(forwards, backwards, first, backward_first=False)


def alive_at_most(schedule: str, stage: int, stages: int, micro_batches: int) -> int:
    """The most micro-batches whose activations a stage holds at once: those with a forward and no backward yet. With
    several runs of layers, each run's micro-batches count separately.
    """
    alive = most = 0
    for work in order_of(schedule, stage, stages, micro_batches):
        alive += 1 if work.kind == FORWARD else -1
        most = max(most, alive)
    return most


def steps_alike(schedule: str, stages: int, micro_batches: int) -> tuple[int, int] | None:
    """Two smaller numbers of micro-batches with which each stage behaves as with this many, or None.

    Each further micro-batch adds its own tensors and messages, and nothing else. With at least this many, a stage that
    holds most has a forward after a backward, whose gradients are there.
    """
    few, more = {"1f1b": (stages + 2, stages + 3), "naive": (3, 4)}.get(schedule, (micro_batches, micro_batches))
    if schedule == "interleaved_1f1b" and micro_batches >= stages:
        at_once = micro_batches // (micro_batches // stages)
        few, more = 2 * at_once, 3 * at_once
    if more < micro_batches:
        return (few, more)
    return None


def planned_spans(
    schedule: str, forward: Sequence[float], backward: Sequence[float], micro_batches: int, sending: float = 0.0
) -> list[Computation]:
    """When each stage computes what, as early as its order and its neighbours allow.

    Args:
        forward, backward: Seconds for one micro-batch on each stage, in equal parts for its runs of layers.
        sending: Seconds from the end on one stage to the beginning on the next, which computes meanwhile.
    """
    stages, runs = len(forward), RUNS.get(schedule, 1)
    queues = [order_of(schedule, stage, stages, micro_batches)[::-1] for stage in range(stages)]
    free = [0.0] * stages
    ends: dict[tuple[str, int, int], float] = {}  # by kind, micro-batch and place in the line of all runs
    spans: list[Computation] = []
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                kind, number, run = queue[-1]
                at = run * stages + stage
                source = at - 1 if kind == FORWARD else at + 1
                inside = 0 <= source < stages * runs
                if inside and (kind, number, source) not in ends:
                    break
                begin = max(ends[kind, number, source] + sending if inside else 0.0, free[stage])
                free[stage] = begin + (forward if kind == FORWARD else backward)[stage] / runs
                ends[kind, number, at] = free[stage]
                spans.append(Computation(stage, kind, number, begin, free[stage], run))
                queue.pop()
    return spans


def bubble(spans: Iterable[Computation]) -> float:
    """The idle share of all stages' time, from the first beginning to the last end."""
    spans = list(spans)
    stages = len({span.stage for span in spans})
    whole = max(span.end for span in spans) - min(span.begin for span in spans)
    return 1 - sum(span.end - span.begin for span in spans) / (stages * whole)


def bubble_of_equal_stages(schedule: str, stages: int, micro_batches: int) -> float:
    """The textbook formula for p stages and m micro-batches: (p-1)/(m+p-1), and (p-1)/p if they go one after another.
    With v runs of layers on each stage it is (p-1)/(vm+p-1), if p divides m.
    """
    at_once = 1 if schedule == "naive" else micro_batches * RUNS.get(schedule, 1)
    return (stages - 1) / (at_once + stages - 1)
