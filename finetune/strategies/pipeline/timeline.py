"""In what order each stage of a pipeline computes a step's micro-batches, when that is, and how much of it is idle.

Arithmetic alone, without torch: what a plan says, and what a recorder (recorder.py) found beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"


class Computation(NamedTuple):
    """The forward or the backward of one micro-batch on one stage, in seconds."""

    stage: int
    kind: str  # FORWARD or BACKWARD
    micro_batch: int
    begin: float
    end: float


def order_of(schedule: str, stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """What a stage computes, one after another: (kind, micro-batch).

    gpipe: all forwards, then all backwards. naive: a micro-batch's backward before the next one's forward. 1f1b: as
    many forwards as there are stages from here on, then backward and forward in turn; of fewer micro-batches than
    stages, as gpipe.
    """
    first = micro_batches
    if schedule == "naive":
        first = 1
    elif schedule == "1f1b" and micro_batches >= stages:
        first = stages - stage
    forwards, backwards = ([(kind, number) for number in range(micro_batches)] for kind in (FORWARD, BACKWARD))
    waiting = forwards[first:]
    in_turn = [each for pair in zip(backwards, waiting, strict=False) for each in pair]
    return [*forwards[:first], *in_turn, *backwards[len(waiting) :]]


def alive_at_most(schedule: str, stage: int, stages: int, micro_batches: int) -> int:
    """Micro-batches whose activations a stage holds at once: those with a forward and no backward yet."""
    alive = most = 0
    for kind, _ in order_of(schedule, stage, stages, micro_batches):
        alive += 1 if kind == FORWARD else -1
        most = max(most, alive)
    return most


def planned_spans(
    schedule: str, forward: Sequence[float], backward: Sequence[float], micro_batches: int, sending: float = 0.0
) -> list[Computation]:
    """When each stage computes what, as early as its order and the stages around it allow.

    Args:
        forward, backward: Seconds of one micro-batch on each stage.
        sending: Seconds from the end on one stage to the beginning on the next, which computes meanwhile.
    """
    stages = len(forward)
    queues = [order_of(schedule, stage, stages, micro_batches)[::-1] for stage in range(stages)]
    free = [0.0] * stages
    ends: dict[tuple[str, int, int], float] = {}
    spans: list[Computation] = []
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                kind, number = queue[-1]
                source = stage - 1 if kind == FORWARD else stage + 1
                if 0 <= source < stages and (kind, number, source) not in ends:
                    break
                ready = ends[kind, number, source] + sending if 0 <= source < stages else 0.0
                begin = max(ready, free[stage])
                free[stage] = begin + (forward if kind == FORWARD else backward)[stage]
                ends[kind, number, stage] = free[stage]
                spans.append(Computation(stage, kind, number, begin, free[stage]))
                queue.pop()
    return spans


def bubble(spans: Iterable[Computation]) -> float:
    """The share of all stages' time, from the first beginning to the last end, in which they are idle."""
    spans = list(spans)
    stages = len({span.stage for span in spans})
    whole = max(span.end for span in spans) - min(span.begin for span in spans)
    return 1 - sum(span.end - span.begin for span in spans) / (stages * whole)


def bubble_of_equal_stages(schedule: str, stages: int, micro_batches: int) -> float:
    """The textbook's: (p-1)/(m+p-1) of p stages and m micro-batches, and (p-1)/p where they go one after another."""
    at_once = 1 if schedule == "naive" else micro_batches
    return (stages - 1) / (at_once + stages - 1)
