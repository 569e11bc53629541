"""The lecture `zero`: six rows in memory, seconds and collectives; measured, planned, and beside the notes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import partial
from typing import Any

from finetune.closed_form.constants import STEP_PHASES
from finetune.paths import CHECKOUT
from finetune.planner import CHIPS, HOST_MEMORY
from finetune.recipe.loader import load_recipe
from finetune.wording import GIB, counted
from lectures.output import Chapter, LectureRequest, LectureResult, columns
from lectures.zero import words
from lectures.zero.holders import holders_json, holders_table, trace_holders
from lectures.zero.holders_picture import draw_holders
from lectures.zero.measured import EVERY_TENTH, MICRO_STEPS_HERE, SMALL_MODEL, Measured, measure
from lectures.zero.notes import HOMEWORK, LOGGED_STEPS
from lectures.zero.picture import draw_zero
from lectures.zero.planned import PlannedRun, named_gpus, plan_rows
from lectures.zero.times import modelled, rates_of_the_notes

HOMEWORK_MODEL = CHECKOUT / "lectures" / "zero" / "gpt2_large"
_MIB = 2**20


def zero_lecture(asked: LectureRequest) -> LectureResult:
    """Six plans, six jobs, a trace of each strategy, and the notes' figures where the model is the homework's. Raises
    FinetuneError."""
    named_gpus(asked)  # a mistake is told before anything takes time
    homework = load_recipe(asked.recipe, asked.overrides).recipe.model.name_or_path == str(HOMEWORK_MODEL)
    planned = plan_rows(asked)
    measured = measure(asked)
    holders = trace_holders(asked, asked.folder / SMALL_MODEL)
    sections = [_memory_here(measured), _traffic_here(measured), holders_table(holders), *_planned(asked, planned)]
    if homework:
        sections += [_memory_of_the_notes(planned), _seconds_of_the_notes()]
    facts: dict[str, Any] = {
        "recipe": str(asked.recipe),
        "overrides": list(asked.overrides),
        "gpus": asked.settings["gpus"],
        "measured": {
            "model": measured.model,
            "device": measured.device,
            "ranks": measured.ranks,
            "micro_steps": MICRO_STEPS_HERE,
            "runs": [run.as_json() for run in measured.runs],
        },
        "holders": holders_json(holders),
        "planned": [run.as_json() for run in planned],
        "notes": _facts_of_the_notes() if homework else None,
    }
    draw = partial(draw_zero, measured, planned, asked.settings["gpus"], homework)
    return LectureResult(sections, facts, draw, {"holders": partial(draw_holders, holders)})


def _memory_here(measured: Measured) -> Chapter:
    where = f"{counted(measured.ranks, 'rank')} on {measured.device}: {measured.model}"
    head = ("MiB allocated", *(f"{phase} {step}" for step in EVERY_TENTH for phase in STEP_PHASES))
    rows = [
        (run.name, *(f"{run.memory[step][phase] / _MIB:.2f}" for step in EVERY_TENTH for phase in STEP_PHASES))
        for run in measured.runs
        if run.memory is not None
    ]
    lines = [where, *(columns(head, rows) if rows else ())]
    lines += [f"{run.name}: did not run: {run.reason}" for run in measured.runs if run.reason is not None]
    if measured.device == "cpu":
        lines.append("On a CPU what is offloaded stays in the same memory, so offload saves nothing here.")
    return Chapter("Memory of a rank after each phase, every tenth step", lines, measured=True)


def _traffic_here(measured: Measured) -> Chapter:
    """Seconds, and collectives by phase."""
    rows, kinds = [], []
    for run in measured.runs:
        if run.in_weights is None or run.calls is None:
            continue
        cells = [f"{run.in_weights[phase]:.2f} ({sum(run.calls[phase].values())})" for phase in STEP_PHASES]
        rows.append((run.name, f"{run.seconds:.2f}", *cells, f"{run.moved:.2f}"))
        named = [f"{phase} {name} {calls}" for phase in STEP_PHASES for name, calls in run.calls[phase].items()]
        kinds += textwrap.wrap(
            f"{run.name}: {', '.join(named)}",
            116,
            initial_indent="  ",
            subsequent_indent="    ",
            break_on_hyphens=False,
        )
    if not rows:
        return Chapter("Seconds and collectives", ["No row ran."], measured=True)
    head = (f"s for {LOGGED_STEPS} steps", "seconds", *STEP_PHASES, "sum")
    lines = [
        *columns(head, rows),
        f"Of one step of {counted(MICRO_STEPS_HERE, 'micro-step')}, in P, the weights' bytes in float32 (an all_reduce",
        "counts twice); in brackets the collectives, which are:",
        *kinds,
    ]
    return Chapter("Seconds for 20 steps, and what one rank sends in a step, by phase", lines, measured=True)


def _planned(asked: LectureRequest, planned: Sequence[PlannedRun]) -> list[Chapter]:
    """Memory and seconds of the plan at full size."""
    ran = [run for run in planned if run.reason is None]
    refused = [f"{run.name}: is not planned: {run.reason}" for run in planned if run.reason is not None]
    if not ran:
        return [Chapter("Plan at full size", refused)]
    chip = CHIPS[named_gpus(asked).name]
    memory, seconds = [], []
    for run in ran:
        memory.append((run.name, *(f"{run.end_bytes[phase] / GIB:.2f}" for phase in STEP_PHASES)))
        parts = (run.seconds, run.computation, run.exposed, run.copies, run.host, run.update)
        seconds.append((run.name, *(f"{LOGGED_STEPS * part:.1f}" for part in parts)))
    head = (f"s for {LOGGED_STEPS} steps", "in all", "compute", "traffic", "copies", "host", "update")
    title = f"Plan at full size on {asked.settings['gpus']}"
    return [
        Chapter(f"{title}: GiB of a GPU after each phase", [*columns(("GiB", *STEP_PHASES), memory), *refused]),
        Chapter(
            f"{title}: seconds for {LOGGED_STEPS} steps of {counted(ran[0].micro_steps, 'micro-step')}",
            [
                *columns(head, seconds),
                "traffic, copies: what is not overlapped with computation. Assumed, by makers' peaks: "
                f"{chip.single / 1e12:.1f} TFLOP/s",
                f"in float32, {chip.half / 1e12:.0f} in 16 bits, {chip.memory / 1e12:.2f} TB/s of memory, "
                f"{chip.link / 1e9:.0f} GB/s between GPUs, {chip.host / 1e9:.0f} GB/s to the host,",
                f"{HOST_MEMORY / 1e9:.0f} GB/s of host memory for all ranks of a machine; no real run reaches them.",
            ],
        ),
    ]


def _memory_of_the_notes(planned: Sequence[PlannedRun]) -> Chapter:
    """Their readings, the terms that explain them, and this kit's plan."""
    plans = {run.name: run for run in planned}
    rows = []
    for row in HOMEWORK:
        plan = plans[row.name]
        for phase, read in zip(STEP_PHASES, row.gib, strict=True):
            by_terms = row.explained_gib(phase)
            here = f"{plan.end_bytes[phase] / GIB:.2f}" if plan.reason is None else "-"
            rows.append((f"{row.name}, {phase}", f"{read:.3f}", f"{by_terms:.3f}", f"{by_terms / read - 1:+.2%}", here))
    head = ("GiB of a GPU after step 10", "notes", "by terms", "off", "this kit")
    lines = [
        *columns(head, rows),
        "by terms: DeepSpeed's buffers at its own sizes and what their loop keeps (docs/zero_table.md).",
    ]
    return Chapter("The notes' memory beside its explanation and this kit's plan", lines)


def _seconds_of_the_notes() -> Chapter:
    rates = rates_of_the_notes()
    rows = []
    for row in HOMEWORK:
        time = modelled(row, rates)
        off = f"{time.seconds / row.seconds - 1:+.0%}"
        parts = (time.computation, time.communication, time.copies, time.host)
        rows.append((row.name, f"{row.seconds:.1f}", f"{time.seconds:.1f}", off, *(f"{part:.1f}" for part in parts)))
    head = (f"s for {LOGGED_STEPS} logged steps", "notes", "model", "off", "compute", "traffic", "copies", "host")
    return Chapter("The notes' seconds beside a model of them", [*columns(head, rows), *words.of_the_model(rates)])


def _facts_of_the_notes() -> dict[str, Any]:
    rates = rates_of_the_notes()
    rows = [
        {
            "name": row.name,
            "gib": dict(zip(STEP_PHASES, row.gib, strict=True)),
            "explained_bytes": {phase: sum(row.explained(phase).values()) for phase in STEP_PHASES},
            "seconds": row.seconds,
            "modelled": {**vars(modelled(row, rates)), "seconds": modelled(row, rates).seconds},
        }
        for row in HOMEWORK
    ]
    return {"rows": rows, "rates": vars(rates)}
