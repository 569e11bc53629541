"""The six runs here: real jobs of `finetune compare` on a shrunken model, memory and traffic from their own metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.closed_form.constants import STEP_PHASES
from finetune.compare import Comparison, compare, plan_comparison
from finetune.files import read_lines
from finetune.launch.local_ranks import count_gpus
from finetune.output_stream import silenced
from finetune.recipe.loader import load_recipe
from finetune.rehearse.shrink import shrink_model
from finetune.wording import GIB
from lectures.output import LectureRequest
from lectures.zero.notes import HOMEWORK, LOGGED_STEPS

EVERY_TENTH = (10, 20)  # every tenth
MICRO_STEPS_HERE = 4  # of a rank in an optimizer step here; 32 would take eight times as long and show the same
SMALL_MODEL = "model"  # its folder in the lecture's
_TOKENS = 64  # of a row


@dataclass(frozen=True)
class MeasuredRun:
    """One of the six rows, run here or not."""

    name: str
    reason: str | None  # why it did not run
    seconds: float = 0.0  # of 20 steps
    memory: dict[int, dict[str, int]] | None = None  # bytes after each phase, by step; of the rank with the most
    calls: dict[str, dict[str, int]] | None = None  # collectives of a step, by phase and name
    in_weights: dict[str, float] | None = None  # textbook bytes of a step by phase, in units of the weights' float32

    @property
    def moved(self) -> float:
        """In a step, in units of the weights' bytes in float32."""
        return sum((self.in_weights or {}).values())

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "moved": self.moved}


@dataclass(frozen=True)
class Measured:
    """The six runs, and where and on what they ran."""

    runs: Sequence[MeasuredRun]
    model: str  # in words
    device: str
    ranks: int

    def of(self, name: str) -> MeasuredRun:
        return next(run for run in self.runs if run.name == name)


def measure(asked: LectureRequest) -> Measured:
    """Run the six rows one after another. Raises FinetuneError for a wrong recipe or a model that cannot be shrunk."""
    recipe = load_recipe(asked.recipe, asked.overrides).recipe
    section = recipe.model
    with silenced():
        small = shrink_model(section.name_or_path, section.revision, recipe.data, asked.folder / SMALL_MODEL)
    rows = {row.name: row.settings for row in HOMEWORK}
    gpus = count_gpus()
    ranks = gpus or 2
    comparison = _planned(asked, small.folder, rows, gpus)

    begun: set[str] = set()

    def progress(name: str, _: int) -> None:
        if name not in begun:
            begun.add(name)
            asked.note(f"training {name}, {LOGGED_STEPS} steps on {ranks} ranks")

    result = compare(comparison, progress)
    runs = [_run(row, planned.folder) for row, planned in zip(result["rows"], comparison.rows, strict=True)]
    sizes = f"{small.small['layers']} layers of width {small.small['hidden_size']}, {small.parameters:,} parameters"
    return Measured(runs, f"{small.architecture} of {sizes}", result["device"] or "no device", ranks)


def _planned(asked: LectureRequest, model: Path, rows: Mapping[str, Mapping[str, str]], gpus: int) -> Comparison:
    """The jobs: one row a micro-batch, MICRO_STEPS_HERE of them a step, on two ranks of a CPU or on all GPUs."""
    small = [
        f"model.name_or_path={model}",
        "model.revision=main",
        f"budget={{gpus: {gpus}}}",
        f"data.max_length={_TOKENS}",
        "data.truncation=right",
        "data.packing=true",
        "data.eval=null",
        f"training.global_batch_size={MICRO_STEPS_HERE * (gpus or 2)}",
        "training.per_device_batch_size=1",
    ]
    words = [*asked.overrides, *small]
    return plan_comparison(asked.recipe, words, rows, steps=LOGGED_STEPS, folder=asked.folder / "measured")


def _run(row: dict[str, Any], job: Path) -> MeasuredRun:
    if not row["ok"]:
        return MeasuredRun(row["name"], row["reason"])
    phases = {name: row["phases"][name] for name in STEP_PHASES}
    return MeasuredRun(
        row["name"],
        None,
        seconds=row["seconds_per_20_steps"],
        memory=memory_by_step(read_lines(job / "metrics.jsonl")),
        calls={name: dict(phase["collectives"]) for name, phase in phases.items()},
        in_weights={name: phase["textbook_bytes"] / row["trained_bytes"] for name, phase in phases.items()},
    )


def memory_by_step(lines: Sequence[dict[str, Any]]) -> dict[int, dict[str, int]]:
    """Bytes allocated after each phase of every tenth step, on the rank with the most."""
    return {
        step: {
            phase: max(
                round(line["allocated_gib"] * GIB)
                for line in lines
                if line["kind"] == "phase" and (line["step"], line["phase"]) == (step, phase)
            )
            for phase in STEP_PHASES
        }
        for step in EVERY_TENTH
    }
