"""The differences between the rows, in sentences made from the figures."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from finetune.closed_form.constants import STEP_PHASES
from finetune.measure.units import GIB
from finetune.planner import HOST_MEMORY
from lectures.zero.measured import MICRO_STEPS_HERE, Measured
from lectures.zero.notes import HOMEWORK, HOMEWORK_MICRO_STEPS, LOGGED_STEPS, HomeworkRow
from lectures.zero.planned import PlannedRun
from lectures.zero.times import (
    HOMEWORK_BUS,
    HOMEWORK_THREAD,
    HOST_BYTES_A_WEIGHT,
    Rates,
    copied,
    modelled,
    rates_of_the_notes,
    sent,
)

_WIDTH = 116
_GB, _TERA = 1e9, 1e12


def differences(measured: Measured, planned: Sequence[PlannedRun], *, homework: bool) -> Iterator[str]:
    """Accumulation, offload and fp16: as measured, as planned, and in the notes where the model is theirs."""
    plans = {run.name: run for run in planned}
    for parts in (
        [
            *_accumulation_here(measured),
            *_accumulation_planned(plans),
            *(_accumulation_there(plans["zero1"]) if homework else ()),
        ],
        [*_offload_planned(plans), *(_offload_there() if homework else ())],
        [*_halves_here(measured), *(_halves_there() if homework else ())],
        [*(_memory_there(plans) if homework else ())],
    ):
        if parts:
            yield from textwrap.wrap(" ".join(parts), _WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _accumulation_here(measured: Measured) -> Iterator[str]:
    rows = [measured.of(name) for name in ("zero1", "zero2", "zero3")]
    one, two, three = (row.in_weights for row in rows)
    yield "Accumulation."
    if one is None or two is None or three is None:
        return
    per = two["backward"] / MICRO_STEPS_HERE
    yield (
        f"In {MICRO_STEPS_HERE} micro-steps ZeRO-1's backward sent {one['backward']:.2f} P, once; ZeRO-2's "
        f"{two['backward']:.2f} P, {per:.2f} P in each; ZeRO-3 gathered and scattered "
        f"{three['forward'] + three['backward']:.2f} P."
    )


def _accumulation_planned(plans: dict[str, PlannedRun]) -> Iterator[str]:
    one, two, three = (plans[name] for name in ("zero1", "zero2", "zero3"))
    if any(plan.reason is not None for plan in (one, two, three)):
        return
    yield (
        f"By the plan a step of {one.micro_steps} micro-steps communicates for {one.communication:.2f} s under ZeRO-1, "
        f"{two.communication:.2f} s under ZeRO-2 and {three.communication:.2f} s under ZeRO-3."
    )


def _accumulation_there(plan: PlannedRun) -> Iterator[str]:
    one, two = _row("zero1"), _row("zero2")
    yield (
        f"The notes' {LOGGED_STEPS} steps are micro-steps, of which {HOMEWORK_MICRO_STEPS} make an update: in them "
        f"ZeRO-1 sent nothing and took {one.seconds} s, ZeRO-2 sent {LOGGED_STEPS} x "
        f"{sent(two)['backward'] / _GB:.2f} GB a rank and took {two.seconds - one.seconds:.1f} s longer, "
        f"{two.seconds / one.seconds:.2f} times as long."
    )
    if plan.reason is None:
        rate = LOGGED_STEPS * plan.flops / one.seconds / _TERA
        yield (
            f"A micro-step computes {plan.flops / _TERA:.1f} TFLOP on a rank, so zero1's row is {rate:.1f} TFLOP/s; "
            f"were its steps updates of {HOMEWORK_MICRO_STEPS}, it would be {rate * HOMEWORK_MICRO_STEPS:.0f}, which "
            "no GPU has in float32 without TF32."
        )


def _offload_planned(plans: dict[str, PlannedRun]) -> Iterator[str]:
    yield "Offload."
    for name in ("zero2", "zero3"):
        without, with_it = plans[name], plans[f"{name} + offload"]
        if without.reason is not None or with_it.reason is not None:
            continue
        saved = (without.end_bytes["step"] - with_it.end_bytes["step"]) / GIB
        yield (
            f"By the plan it frees {saved:.2f} GiB of a GPU under {_stage(name)} and costs "
            f"{with_it.seconds - without.seconds:.2f} s a step: {with_it.copies:.2f} s of copies that are not "
            f"overlapped, {with_it.host:.2f} s of the host."
        )


def _offload_there() -> Iterator[str]:
    rates = rates_of_the_notes()
    for name in ("zero2", "zero3"):
        without, with_it = _row(name), _row(f"{name} + offload")
        time = modelled(with_it, rates)
        longer, found = with_it.seconds - without.seconds, time.copies + time.host
        host = f" and {time.host:.1f} s of AdamW on the host" if time.host else ", and no update falls into them"
        yield (
            f"In the notes {_stage(name)} with offload took {longer:.1f} s longer: {copied(with_it) / _GB:.1f} GB over "
            f"the bus are {time.copies:.1f} s{host}; {longer - found:.1f} s are not explained by bytes."
        )


def _halves_here(measured: Measured) -> Iterator[str]:
    yield "fp16."
    whole, half = measured.of("zero3"), measured.of("zero3 + fp16")
    if half.reason is not None:
        yield f"It did not run here: {half.reason}"
    elif whole.in_weights is not None:
        yield (
            f"Here it sent {half.moved:.2f} P where float32 sent {whole.moved:.2f} P, "
            f"{half.moved / whole.moved:.2f} of it: weights travel in 2 bytes, and in this kit gradients in 4."
        )


def _halves_there() -> Iterator[str]:
    whole, half = _row("zero3"), _row("zero3 + fp16")
    memory = ", ".join(f"{small / large:.2f}" for small, large in zip(half.gib, whole.gib, strict=True))
    yield (
        f"In the notes its memory was {memory} of float32's after {', '.join(STEP_PHASES)}, its time "
        f"{half.seconds / whole.seconds:.2f} of {whole.seconds} s; half of all bytes and of the computation is 0.50."
    )


def _memory_there(plans: dict[str, PlannedRun]) -> Iterator[str]:
    """Why this kit's plan of ZeRO-3 is below the notes' reading."""
    row, plan = _row("zero3"), plans["zero3"]
    if plan.reason is not None:
        return
    terms = row.explained("backward")
    kept = sum(terms[name] for name in ("logits", "keys and values", "attention mask"))
    yield (
        f"Memory: after backward of ZeRO-3 the notes read {row.gib[1]:.2f} GiB, this kit plans "
        f"{plan.end_bytes['backward'] / GIB:.2f}. Of the notes' {terms['reduce bucket'] / GIB:.2f} GiB are a bucket "
        f"of 5e8 elements, which this kit sizes by the model, and {kept / GIB:.2f} GiB the outputs that their loop "
        "still held."
    )


def of_the_model(rates: Rates) -> Iterator[str]:
    """What the model of the notes' seconds rests on."""
    shared = LOGGED_STEPS * HOST_BYTES_A_WEIGHT * _row("zero3").job.parameters / HOST_MEMORY
    offloaded = modelled(_row("zero3 + offload"), rates)
    lines = [
        "Read off the table, because the notes name no machine: "
        f"{rates.micro_step:.3f} s of computation a micro-step (zero1, which sends nothing), and "
        f"{rates.link / _GB:.2f} GB/s that a rank sends (zero2 less zero1). The other four rows follow.",
        f"Assumed: a third of the computation is forward; all but one layer's traffic runs beside it; fp16 halves it; "
        f"{HOMEWORK_BUS / _GB:.0f} GB/s to the host (PCIe 3.0); AdamW on the host by one thread a rank, "
        f"{HOST_BYTES_A_WEIGHT} bytes a weight at {HOMEWORK_THREAD / _GB:.0f} GB/s. With all of a machine's "
        f"{HOST_MEMORY / _GB:.0f} GB/s instead, zero3 + offload would take "
        f"{offloaded.seconds - offloaded.host + shared:.1f} s.",
        f"{_order(rates)}",
    ]
    for line in lines:
        yield from textwrap.wrap(line, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _order(rates: Rates) -> str:
    measured = sorted(HOMEWORK, key=lambda row: row.seconds)
    found = sorted(HOMEWORK, key=lambda row: modelled(row, rates).seconds)
    worst = max(abs(modelled(row, rates).seconds / row.seconds - 1) for row in HOMEWORK)
    same = "as the notes do" if measured == found else "not as the notes do"
    names = ", ".join(row.name for row in found)
    return f"The model orders the rows {same}: {names}. The row that is farthest off is off by {worst:.0%}."


def _row(name: str) -> HomeworkRow:
    return next(row for row in HOMEWORK if row.name == name)


def _stage(name: str) -> str:
    return f"ZeRO-{name.removeprefix('zero')}"
