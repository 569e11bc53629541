"""Collectives, floating-point operations and step time of a plan, as JSON and as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from finetune.planner.plan_recipe import Planned
from finetune.planner.roofline import CHIPS, StepTime, scaled_step_times, step_time

WORK_PHASES = ("forward", "backward", "step")
ASSUMED = (
    "a bound, by makers' peaks: {half:.0f} TFLOP/s in 16 bits and {single:.0f} in 32, {memory:.2f} TB/s of memory, "
    "{link:.0f} GB/s to GPUs of the machine, {between:.1f} to others; no kernel reaches them"
)


def roofline_json(planned: Planned) -> dict[str, Any]:
    """`communication` and `arithmetic` of one rank, per micro-step and update, and `speed` on a named GPU."""
    work, layout = planned.work, planned.layout
    if work is None or layout is None:
        return {}
    moved = {
        phase: {name: {"calls": each.calls, "bytes": each.payload_bytes} for name, each in collectives.items()}
        for phase, collectives in work.moved.items()
    }
    arithmetic = {
        f"{phase}_flops_per_token": (work.flops(phase, "product") + work.flops(phase, "attention")) / layout.tokens
        for phase in WORK_PHASES[:2]
    }
    arithmetic["attention_share"] = _attention_share(planned)
    return {"communication": moved, "arithmetic": arithmetic, "speed": _step_time_json(planned)}


def roofline_lines(planned: Planned) -> Iterator[str]:
    """What one rank sends and computes, and how long that takes at best."""
    work, layout = planned.work, planned.layout
    if work is None or layout is None:
        return
    for phase in WORK_PHASES:
        for name, each in work.moved.get(phase, {}).items():
            if each.payload_bytes >= 2**20:
                once = "step" if phase == "step" or (phase == "backward" and layout.reduces_once) else "micro-step"
                yield f"{phase}: {each.calls:,} x {name}, {each.payload_bytes / 2**30:.2f} GiB a {once}"
    forward, backward = (work.flops(phase) / layout.tokens / 1e9 for phase in WORK_PHASES[:2])
    share = _attention_share(planned)
    yield f"GFLOP a token: {forward:.2f} forward, {backward:.2f} backward, {share:.0%} of both in attention"
    if (time := _step_time(planned)) is not None:
        yield from _step_time_lines(planned, time)


def _attention_share(planned: Planned) -> float:
    assert planned.work is not None
    both = [sum(planned.work.flops(phase, *kinds) for phase in WORK_PHASES[:2]) for kinds in (("attention",), ())]
    return both[0] / both[1]


def _step_time(planned: Planned) -> StepTime | None:
    """None where no GPU is named, or some of the work is done by the host."""
    if planned.gpus is None or planned.gpus.name not in CHIPS or "offload" in planned.strategy:
        return None
    assert planned.work is not None
    assert planned.layout is not None
    return step_time(planned.work, CHIPS[planned.gpus.name], planned.layout, planned.layout)


def _scale(planned: Planned) -> list[StepTime]:
    if _step_time(planned) is None or planned.strategy == "single":
        return []
    assert planned.gpus is not None
    assert planned.work is not None
    assert planned.layout is not None
    return list(scaled_step_times(planned.work, CHIPS[planned.gpus.name], planned.layout))


def _step_time_json(planned: Planned) -> dict[str, Any] | None:
    time = _step_time(planned)
    if time is None:
        return None
    return {**time.as_json(), "scale": [each.as_json() for each in _scale(planned)]}


def _step_time_lines(planned: Planned, time: StepTime) -> Iterator[str]:
    assert planned.gpus is not None
    chip = CHIPS[planned.gpus.name]
    yield (
        f"at most {time.tokens_per_second:,.0f} tokens/s on {time.layout.ranks} x {planned.gpus.name}, "
        f"{time.seconds:.2f} s a step, {time.exposed / time.seconds:.1%} of that communication that is not overlapped"
    )
    units = {name: value / 1e9 for name, value in vars(chip).items()}
    units |= {"half": chip.half / 1e12, "single": chip.single / 1e12, "memory": chip.memory / 1e12}
    yield "  " + ASSUMED.format(**units)
    scale = _scale(planned)
    if scale:
        yield f"  {'ranks':<12}" + "".join(f"{each.layout.ranks:>11,}" for each in scale)
        yield f"  {'tokens/s':<12}" + "".join(f"{each.tokens_per_second:>11,.0f}" for each in scale)
        yield f"  {'exposed':<12}" + "".join(f"{each.exposed / each.seconds:>11.1%}" for each in scale)
        largest = [each.layout.ranks for each in scale if each.layout.ranks > time.layout.rows]
        if largest:
            yield f"  from {largest[0]} ranks on, a step has more rows than global_batch_size: one for each rank"
