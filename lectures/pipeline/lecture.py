"""The lecture `pipeline`: layers split over stages, with one micro-batch at a time or several, measured and planned."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from finetune import planner
from finetune.errors import FinetuneError
from finetune.output_stream import silenced
from finetune.strategies.pipeline.timeline import (
    Computation,
    alive_at_most,
    bubble,
    bubble_of_equal_stages,
    planned_spans,
)
from lectures.local_ranks import figures_of_ranks
from lectures.output import Chapter, LectureRequest, LectureResult, columns, whole_number
from lectures.pipeline.picture import Timelines, draw_timelines
from lectures.pipeline.played import BACKWARD_TIMES, PLAYED, PlayedStep, save_model

MOST_STAGES = 8  # processes on this machine
NUMBERS = (1, 2, 4, 8, 16, 32)  # of micro-batches, in the table by arithmetic


@dataclass(frozen=True)
class Held:
    """One schedule: planned, and measured on its ranks."""

    schedule: str
    planned: Sequence[Computation]
    measured: Sequence[Computation]
    planned_bytes: Sequence[int]  # of each stage, at the peak of forward and backward
    tracked_bytes: Sequence[int]
    sent_bytes: Sequence[int]  # by each stage in a step

    def as_json(self) -> dict[str, Any]:
        return {
            **{key: value for key, value in vars(self).items() if key not in ("planned", "measured")},
            "planned_spans": [list(span) for span in self.planned],
            "measured_spans": [list(span) for span in self.measured],
            "planned_bubble": bubble(self.planned),
            "measured_bubble": bubble(self.measured),
        }


def pipeline_lecture(asked: LectureRequest) -> LectureResult:
    """A process for each stage, once. Raises FinetuneError for a wrong setting, EnvironmentMismatch where one fails."""
    stages, micro_batches, milliseconds = (
        whole_number(asked.settings, name, least=least)
        for name, least in (("stages", 2), ("micro_batches", 1), ("ms", 1))
    )
    if stages > MOST_STAGES:
        raise FinetuneError(f"stages: {stages}: are as many processes here; write stages={MOST_STAGES} or fewer")
    if micro_batches < stages:
        raise FinetuneError(f"micro_batches: {micro_batches}: 1f1b fills {stages} stages; write micro_batches={stages}")
    with tempfile.TemporaryDirectory(prefix="finetune-pipeline-") as name:
        folder = Path(name)
        job = PlayedStep(str(folder / "model"), stages, micro_batches, milliseconds / 1000)
        with silenced():
            save_model(folder / "model", stages)
        (folder / "job.json").write_text(json.dumps(asdict(job)), "utf-8")
        asked.note(f"starting {stages} gloo ranks, a stage each")
        ranks = figures_of_ranks("pipeline", "lectures.pipeline.stage_rank", folder, stages)
        held = [_held(asked, job, schedule, ranks) for schedule in PLAYED]
    sections = [_arithmetic(stages), _times(held, job), _memory(held, job)]
    facts = {
        "stages": stages,
        "micro_batches": micro_batches,
        "ms": milliseconds,
        "schedules": {each.schedule: each.as_json() for each in held},
    }
    timelines = [Timelines(each.schedule, each.planned, each.measured) for each in held]
    return LectureResult(sections, facts, partial(draw_timelines, timelines, stages))


def _held(asked: LectureRequest, job: PlayedStep, schedule: str, ranks: Sequence[Mapping[str, Any]]) -> Held:
    asked.note(f"planning the stages of {schedule}")
    found = [rank[schedule] for rank in ranks]
    spans = [Computation(*each) for rank in found for each in rank["spans"]]
    began = min(span.begin for span in spans)
    measured = [span._replace(begin=span.begin - began, end=span.end - began) for span in spans]
    halves = ([job.seconds] * job.stages, [BACKWARD_TIMES * job.seconds] * job.stages)
    plan = planner.plan(job.recipe(schedule), None, ranks=job.stages)
    return Held(
        schedule,
        planned_spans(schedule, *halves, job.micro_batches),
        measured,
        [each.phases["backward"].peak.nbytes for each in plan.stages],
        [rank["peak_bytes"] for rank in found],
        [rank["sent_bytes"] for rank in found],
    )


def _arithmetic(stages: int) -> Chapter:
    """Idle shares for several numbers of micro-batches."""
    names = {"naive": "one at a time (naive)", "gpipe": "gpipe, and 1f1b"}
    rows = [
        (words, *(f"{100 * bubble_of_equal_stages(schedule, stages, number):.1f}" for number in NUMBERS))
        for schedule, words in names.items()
    ]
    lines = [
        *columns((f"idle, %, of {stages} equal stages", *(f"m = {number}" for number in NUMBERS)), rows),
        f"With p = {stages} stages and m micro-batches: (p-1)/p one at a time, else (p-1)/(m+p-1).",
    ]
    return Chapter("How much of the stages' time is idle, by arithmetic", lines)


def _times(held: Sequence[Held], job: PlayedStep) -> Chapter:
    """Seconds and idle shares of the step, planned and measured."""
    rows = []
    for each in held:
        seconds = [max(span.end for span in spans) for spans in (each.planned, each.measured)]
        idle = [100 * bubble(spans) for spans in (each.planned, each.measured)]
        rows.append((each.schedule, *(f"{value:.2f}" for value in seconds), *(f"{value:.1f}" for value in idle)))
    forward = 1000 * job.seconds
    lines = [
        *columns(("schedule", "planned, s", "measured, s", "idle planned, %", "idle measured, %"), rows),
        f"Real stages of a small model; its layers sleep besides, {forward:.0f} ms of a stage's forward and "
        f"{BACKWARD_TIMES * forward:.0f} ms of its",
        "backward, so that every stage takes as long and none waits for a core of this machine.",
    ]
    title = f"A step of {job.micro_batches} micro-batches over {job.stages} stages"
    return Chapter(title, lines, measured=True)


def _memory(held: Sequence[Held], job: PlayedStep) -> Chapter:
    """Bytes of each stage, planned and tracked."""
    rows = []
    for each in held:
        for stage, sizes in enumerate(zip(each.planned_bytes, each.tracked_bytes, each.sent_bytes, strict=True)):
            alive = alive_at_most(each.schedule, stage, job.stages, job.micro_batches)
            rows.append((each.schedule, str(stage), str(alive), *(f"{nbytes:,}" for nbytes in sizes)))
    head = ("schedule", "stage", "micro-batches alive", "planned, bytes", "tracked, bytes", "sent in a step, bytes")
    lines = [
        *columns(head, rows),
        "At the peak of forward and backward: weights, gradients, AdamW's moments, activations, what is received.",
    ]
    return Chapter("What each stage holds", lines, measured=True)
