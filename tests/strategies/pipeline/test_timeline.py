"""Order, times and bubbles of a pipeline: against the textbook, and against an independent walk through time."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from finetune.recipe.sections.pipelines import can_interleave
from finetune.strategies.pipeline.timeline import (
    BACKWARD,
    FORWARD,
    alive_at_most,
    bubble,
    bubble_of_equal_stages,
    order_of,
    planned_spans,
    steps_alike,
)

SIZES = [(2, 1), (2, 2), (2, 8), (3, 5), (4, 4), (4, 8), (4, 32), (8, 8)]


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_bubbles_of_equal_stages(stages: int, micro_batches: int) -> None:
    """By the timeline: (p-1)/(m+p-1) and (p-1)/p, whatever a backward takes beside a forward."""
    textbook = (stages - 1) / (micro_batches + stages - 1)
    for backward in (1.0, 2.0, 3.0):
        found = {
            schedule: bubble(planned_spans(schedule, [1.0] * stages, [backward] * stages, micro_batches))
            for schedule in ("gpipe", "1f1b", "naive")
        }
        assert found == pytest.approx({"gpipe": textbook, "1f1b": textbook, "naive": (stages - 1) / stages})
        assert found == pytest.approx({name: bubble_of_equal_stages(name, stages, micro_batches) for name in found})


def test_orders() -> None:
    """Of the second of three stages, with four micro-batches."""

    def words(schedule: str) -> str:
        return " ".join(f"{work.kind[0]}{work.micro_batch}" for work in order_of(schedule, 1, 3, 4))

    assert words("gpipe") == "f0 f1 f2 f3 b0 b1 b2 b3"
    assert words("1f1b") == "f0 f1 b0 f2 b1 f3 b2 b3"
    assert words("naive") == "f0 b0 f1 b1 f2 b2 f3 b3"
    assert order_of("1f1b", 0, 3, 2) == order_of("gpipe", 0, 3, 2)  # which 1f1b cannot order


@pytest.mark.parametrize(("stages", "micro_batches"), [each for each in SIZES if each[1] >= each[0]])
def test_micro_batches_alive(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        alive = {each: alive_at_most(each, stage, stages, micro_batches) for each in ("gpipe", "1f1b", "naive")}
        assert alive == {"gpipe": micro_batches, "1f1b": stages - stage, "naive": 1}


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 8), (3, 12), (4, 32), (8, 36)])
@pytest.mark.parametrize("schedule", ["1f1b", "naive", "interleaved_1f1b"])
def test_steps_of_few_micro_batches_are_like_the_whole(schedule: str, stages: int, micro_batches: int) -> None:
    """Each stage holds as many at once, and does so again after its first backward, which makes the gradients."""
    counts = steps_alike(schedule, stages, micro_batches)
    assert counts is not None
    assert counts[0] < counts[1] < micro_batches
    for stage, count in itertools.product(range(stages), counts):
        steps = [1 if work.kind == FORWARD else -1 for work in order_of(schedule, stage, stages, count)]
        alive = list(itertools.accumulate(steps))
        most = alive_at_most(schedule, stage, stages, micro_batches)
        assert max(alive) == max(alive[steps.index(-1) :]) == most
    assert steps_alike(schedule, stages, counts[1]) is None
    assert steps_alike("gpipe", stages, micro_batches) is None  # it holds all of them


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "naive"])
def test_unequal_stages_by_ticks(schedule: str) -> None:
    """Every tick, each stage that is free begins its next work if the stage before it (or after it) is done."""
    forward, backward, sending, micro_batches = [2, 5, 3], [4, 6, 7], 1, 6
    work = [order_of(schedule, stage, 3, micro_batches) for stage in range(3)]
    ends: dict[tuple[str, int, int], int] = {}
    busy_until, at = [0, 0, 0], [0, 0, 0]
    for tick in range(1000):
        for stage in range(3):
            if tick < busy_until[stage] or at[stage] == len(work[stage]):
                continue
            kind, number, _ = work[stage][at[stage]]
            source = stage + (-1 if kind == FORWARD else 1)
            if source in (-1, 3) or ends.get((kind, number, source), 1000) + sending <= tick:
                busy_until[stage] = tick + (forward if kind == FORWARD else backward)[stage]
                ends[kind, number, stage] = busy_until[stage]
                at[stage] += 1
    spans = planned_spans(schedule, forward, backward, micro_batches, sending)
    assert {(span.kind, span.micro_batch, span.stage): span.end for span in spans} == ends
    assert len(ends) == 2 * 3 * micro_batches
    assert {span.kind for span in spans} == {FORWARD, BACKWARD}
    whole = max(ends.values())
    busy = micro_batches * (sum(forward) + sum(backward))
    assert bubble(spans) == pytest.approx(1 - busy / (3 * whole))


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (2, 5), (2, 6), (3, 9), (4, 4), (4, 10), (4, 16)])
def test_runs_are_interleaved_as_torch_does(stages: int, micro_batches: int) -> None:
    """torch's own class decides in a run; a plan has this order. (2, 5): five do not make rounds of equal size."""
    at = [
        [
            SimpleNamespace(
                stage_index=run * stages + stage, num_stages=2 * stages, group_size=stages, group_rank=stage
            )
            for run in range(2)
        ]
        for stage in range(stages)
    ]
    if not can_interleave(stages, micro_batches):
        with pytest.raises(ValueError, match="multiple of the number of rounds"):
            ScheduleInterleaved1F1B(at[0], micro_batches)
        return
    order = ScheduleInterleaved1F1B(at[0], micro_batches).pipeline_order
    for stage in range(stages):
        theirs = [str(action) for action in order[stage] if action is not None]
        ours = [
            f"{work.run * stages + stage}{work.kind[0].upper()}{work.micro_batch}"
            for work in order_of("interleaved_1f1b", stage, stages, micro_batches)
        ]
        assert ours == theirs


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (2, 8), (4, 4), (4, 8), (4, 16)])
def test_two_runs_halve_the_bubble(stages: int, micro_batches: int) -> None:
    """(p-1)/(2m+p-1), whatever a backward takes beside a forward; more activations wait than under 1f1b."""
    for backward in (1.0, 2.0):
        equal = [1.0] * stages, [backward] * stages, micro_batches
        idle = bubble(planned_spans("interleaved_1f1b", *equal))
        assert idle == pytest.approx((stages - 1) / (2 * micro_batches + stages - 1))
        assert idle == pytest.approx(bubble_of_equal_stages("interleaved_1f1b", stages, micro_batches))
    # On the first stage, of half as many layers each: what arXiv 2104.04473 calls p (1 + (p-1)/(pv)), in halves.
    alive = alive_at_most("interleaved_1f1b", 0, stages, micro_batches)
    assert alive == min(2 * stages + stages - 1, 2 * micro_batches)
