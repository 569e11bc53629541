"""The lecture `zero` as one picture: memory, seconds and traffic of the six rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.closed_form.constants import STEP_PHASES
from finetune.report.pictures import COLOURS, new_figure
from finetune.wording import GIB
from lectures.zero.measured import MICRO_STEPS_HERE, Measured
from lectures.zero.notes import HOMEWORK, LOGGED_STEPS
from lectures.zero.planned import PlannedRun
from lectures.zero.times import modelled, rates_of_the_notes

PHASE_COLOURS = {"load": "#7f7f7f", "forward": "#4c78a8", "backward": "#f58518", "step": "#54a24b"}
_Group = tuple[str, list[float], dict[str, Any]]  # legend, a height for each row, how its bars are drawn


def draw_zero(measured: Measured, planned: Sequence[PlannedRun], gpus: str, homework: bool, file: Path) -> None:
    """Write the picture."""
    figure = new_figure(figsize=(13.0, 11.0))
    memory, seconds, traffic = figure.subplots(3, 1, height_ratios=[1.4, 1, 1])
    _grouped(memory, _memory(planned, homework=homework), "GiB of a GPU", f"Memory after each phase, planned on {gpus}")
    _grouped(seconds, _seconds(planned, gpus, homework=homework), "seconds", f"Seconds for {LOGGED_STEPS} steps")
    _stacked(traffic, measured)
    figure.savefig(file)


def _memory(planned: Sequence[PlannedRun], *, homework: bool) -> list[_Group]:
    groups: list[_Group] = []
    for number, phase in enumerate(STEP_PHASES):
        if homework:
            read = [row.gib[number] for row in HOMEWORK]
            style = {"fill": False, "edgecolor": PHASE_COLOURS[phase], "linewidth": 1.5}
            groups.append((f"{phase}, notes", read, style))
        here = [run.end_bytes.get(phase, 0) / GIB for run in planned]
        groups.append((f"{phase}, this kit", here, {"color": PHASE_COLOURS[phase]}))
    return groups


def _seconds(planned: Sequence[PlannedRun], gpus: str, *, homework: bool) -> list[_Group]:
    times = [LOGGED_STEPS * run.seconds for run in planned]
    steps = next((run.micro_steps for run in planned if run.micro_steps), 1)
    groups: list[_Group] = [(f"planned on {gpus}, steps of {steps} micro-steps", times, {"color": COLOURS[6]})]
    if homework:
        rates = rates_of_the_notes()
        read, found = [row.seconds for row in HOMEWORK], [modelled(row, rates).seconds for row in HOMEWORK]
        outlined = {"fill": False, "edgecolor": COLOURS[3], "linewidth": 1.5}
        groups = [
            ("notes, steps of one micro-step", read, outlined),
            ("model of the notes", found, {"color": COLOURS[3]}),
            *groups,
        ]
    return groups


def _grouped(axes: Any, groups: Sequence[_Group], unit: str, title: str) -> None:
    width = 0.84 / len(groups)
    for position, (name, heights, style) in enumerate(groups):
        places = [index + (position - (len(groups) - 1) / 2) * width for index in range(len(heights))]
        bars = axes.bar(places, heights, width * 0.9, label=name, **style)
        axes.bar_label(bars, [f"{height:.3g}" if height else "" for height in heights], fontsize=6.5, padding=2)
    _finish(axes, unit, title)


def _stacked(axes: Any, measured: Measured) -> None:
    """What a rank sends in a step, by phase."""
    bottoms = [0.0] * len(measured.runs)
    for phase in STEP_PHASES:
        heights = [(run.in_weights or {}).get(phase, 0.0) for run in measured.runs]
        axes.bar(range(len(heights)), heights, 0.5, bottom=bottoms, label=phase, color=PHASE_COLOURS[phase])
        bottoms = [below + height for below, height in zip(bottoms, heights, strict=True)]
    for index, (run, top) in enumerate(zip(measured.runs, bottoms, strict=True)):
        text = "did not run" if run.reason is not None else f"{top:.2f} P\n{run.seconds:.1f} s"
        axes.annotate(text, (index, top), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    where = f"measured on {measured.ranks} x {measured.device}, {MICRO_STEPS_HERE} micro-steps"
    _finish(axes, "P, the weights' bytes", f"Traffic of one step by phase, and seconds for {LOGGED_STEPS}: {where}")


def _finish(axes: Any, unit: str, title: str) -> None:
    axes.set_xticks(range(len(HOMEWORK)), [row.name for row in HOMEWORK])
    axes.set_ylabel(unit)
    axes.set_title(title, loc="left", fontsize=11)
    axes.margins(y=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
