"""The six runs at full size by the kit's plan: memory after each phase, and the seconds of the roofline.

A plan of GPT-2 Large under ZeRO-3 takes minutes, because its layers are traced many at a time. So the homework's own
plans are kept in plans.json, which `python benchmarks/zero_plans.py` writes; another recipe, or other GPUs, are planned
when they are asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from finetune import planner
from finetune.closed_form.constants import STEP_PHASES
from finetune.errors import FinetuneError
from finetune.paths import CHECKOUT
from finetune.planner import CHIPS
from finetune.recipe.gpus import Gpus, parse_gpus
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Recipe
from lectures.output import LectureRequest
from lectures.zero.notes import HOMEWORK, HomeworkRow

PLANS = CHECKOUT / "lectures" / "zero" / "plans.json"


@dataclass(frozen=True)
class PlannedRun:
    """One of the six rows by the plan, or why it has none. Seconds are of one optimizer step."""

    name: str
    reason: str | None = None
    end_bytes: dict[str, int] = field(default_factory=dict)  # of tensors on a GPU after each phase
    micro_steps: int = 0
    flops: float = 0.0  # of a micro-step's products and attention, forward and backward
    computation: float = 0.0
    communication: float = 0.0  # overlapped or not
    exposed: float = 0.0  # the part that is not
    copies: float = 0.0  # between GPU and host, not overlapped
    host: float = 0.0
    update: float = 0.0

    @property
    def seconds(self) -> float:
        return self.computation + self.exposed + self.copies + self.host + self.update

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


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
    kept = kept_plans(identity_of(recipe, gpus))
    runs = []
    for row in HOMEWORK:
        if row.name in kept:
            runs.append(kept[row.name])
            continue
        asked.note(f"planning {row.name} on {asked.settings['gpus']}")
        runs.append(plan_row(row, recipe, gpus))
    return runs


def identity_of(recipe: Recipe, gpus: Gpus) -> dict[str, Any]:
    """What a plan depends on, but for where the model's configuration is kept."""
    values = recipe.model_dump(mode="json", include={"quantization", "lora", "training"})
    model = json.loads((CHECKOUT / "lectures" / "zero" / "gpt2_large" / "config.json").read_text("utf-8"))
    named = recipe.model.name_or_path
    own = model if named == str(CHECKOUT / "lectures" / "zero" / "gpt2_large") else named
    more = {"model": own, "dtype": recipe.model.dtype, "attention": recipe.model.attention}
    return values | more | {"max_length": recipe.data.max_length, "gpus": asdict(gpus)}


def kept_plans(identity: dict[str, Any]) -> dict[str, PlannedRun]:
    """The plans of PLANS by row, where they are of this recipe and these GPUs; else none."""
    kept = json.loads(PLANS.read_text("utf-8")) if PLANS.is_file() else {}
    if kept.get("identity") != identity:
        return {}
    return {each["name"]: PlannedRun(**each) for each in kept["runs"]}


def write_plans(recipe: Recipe, gpus: Gpus, note: Callable[[str], None]) -> None:
    """Plan all rows and keep them in PLANS."""
    runs: list[dict[str, Any]] = []
    for row in HOMEWORK:
        note(row.name)
        runs.append(plan_row(row, recipe, gpus).as_json())
    PLANS.write_text(json.dumps({"identity": identity_of(recipe, gpus), "runs": runs}, indent=1) + "\n", "utf-8")


def plan_row(row: HomeworkRow, recipe: Recipe, gpus: Gpus) -> PlannedRun:
    """The plan of one row, or why the planner has none."""
    from finetune.planner import changed, step_time

    try:
        planned = planner.plan(changed(recipe, row.settings), gpus)
    except FinetuneError as error:
        return PlannedRun(row.name, str(error))
    time = step_time(planned.work, CHIPS[gpus.name], planned.layout, planned.layout)
    return PlannedRun(
        row.name,
        None,
        {phase: planned.phases[phase].end_bytes for phase in STEP_PHASES},
        planned.layout.micro_steps,
        sum(planned.work.flops(phase, "product", "attention") for phase in ("forward", "backward")),
        time.forward + time.backward,
        time.communication,
        time.exposed,
        time.exposed_copies,
        time.host,
        time.update,
    )
