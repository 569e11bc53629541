"""The six runs at full size by the kit's plan: memory after each phase, and the seconds of the roofline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from finetune.errors import FinetuneError
from finetune.lectures.output import LectureRequest
from finetune.lectures.zero.notes import HOMEWORK
from finetune.planner.command import plan_by_trace
from finetune.planner.constants import STEP_PHASES
from finetune.planner.plan_recipe import Planned
from finetune.planner.roofline import CHIPS, StepTime, step_time
from finetune.planner.variants import changed
from finetune.recipe.gpus import Gpus, parse_gpus
from finetune.recipe.loader import load_recipe


@dataclass(frozen=True)
class PlannedRun:
    """One of the six rows by the plan, or why it has none."""

    name: str
    reason: str | None = None
    planned: Planned | None = None
    time: StepTime | None = None  # of an optimizer step

    def after(self, phase: str) -> int:
        """Bytes of tensors on a GPU when a phase ends."""
        assert self.planned is not None
        return self.planned.phases[phase].end_bytes

    def as_json(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"name": self.name, "reason": self.reason}
        if self.planned is not None:
            facts["end_bytes"] = {phase: self.after(phase) for phase in STEP_PHASES}
            facts["peak_bytes"] = self.planned.peak[1].nbytes
        return facts | ({"time": self.time.as_json()} if self.time is not None else {})


def named_gpus(asked: LectureRequest) -> Gpus:
    """The GPUs of the setting `gpus`. Raises FinetuneError where no data sheet of them is known."""
    gpus = parse_gpus(asked.settings["gpus"])
    if gpus is None or gpus.name not in CHIPS:
        known = f"gpus=8x and one of {', '.join(CHIPS)}"
        raise FinetuneError(f"gpus: {asked.settings['gpus']}: the plan's time needs GPUs by name; write {known}")
    return gpus


def plan_rows(asked: LectureRequest) -> list[PlannedRun]:
    """A plan of each row. Raises FinetuneError for a wrong recipe, and for GPUs that are not known."""
    gpus, recipe = named_gpus(asked), load_recipe(asked.recipe, asked.overrides).recipe
    runs = []
    for row in HOMEWORK:
        asked.note(f"planning {row.name} on {asked.settings['gpus']}")
        try:
            planned = plan_by_trace(changed(recipe, row.settings), gpus)
        except FinetuneError as error:
            runs.append(PlannedRun(row.name, str(error)))
            continue
        layout = planned.layout
        runs.append(PlannedRun(row.name, None, planned, step_time(planned.work, CHIPS[gpus.name], layout, layout)))
    return runs
