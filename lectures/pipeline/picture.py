"""The timelines of the lecture: a row for each stage, forwards, backwards and idle time, planned beside measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from finetune.report.pictures import COLOURS, new_figure
from finetune.strategies.pipeline.timeline import BACKWARD, FORWARD, Computation, bubble

SHADES = {FORWARD: COLOURS[0], BACKWARD: COLOURS[1]}
IDLE = "#e9e9e9"
TOO_NARROW = 0.025  # of the axis; a number has room in what is wider


class Timelines(NamedTuple):
    """Of one schedule, each from 0 seconds on."""

    schedule: str
    planned: Sequence[Computation]
    measured: Sequence[Computation]


def draw_timelines(all_of_them: Sequence[Timelines], stages: int, file: Path) -> None:
    """A row of axes for each schedule: planned on the left, measured on the right, on one scale of time."""
    figure = new_figure(figsize=(11.0, 1.0 + (0.9 + 0.32 * stages) * len(all_of_them)))
    for axes, each in zip(figure.subplots(len(all_of_them), 2, squeeze=False), all_of_them, strict=True):
        ends = [max(span.end for span in spans) for spans in (each.planned, each.measured)]
        for side, name, spans, end in zip(
            axes, ("planned", "measured"), (each.planned, each.measured), ends, strict=True
        ):
            _draw(side, spans, stages, end, max(ends))
            side.set_title(f"{each.schedule}, {name}: {100 * bubble(spans):.0f} % idle", loc="left", fontsize=11)
    for side in axes:
        side.set_xlabel("seconds")
    patches = [axes[0].barh([0], [0], color=shade) for shade in (*SHADES.values(), IDLE)]
    figure.legend(patches, (*SHADES, "idle"), loc="outside upper right", ncols=3, frameon=False)
    figure.savefig(file)


def _draw(axes: Any, spans: Sequence[Computation], stages: int, end: float, widest: float) -> None:
    axes.barh(range(stages), end, 0.86, color=IDLE)
    for span in spans:
        length = span.end - span.begin
        axes.barh(span.stage, length, 0.86, span.begin, color=SHADES[span.kind], edgecolor="white", linewidth=0.8)
        if length > TOO_NARROW * widest:
            middle = span.begin + length / 2
            axes.text(middle, span.stage, f"{span.micro_batch}", ha="center", va="center", color="white", fontsize=9)
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    axes.set_xlim(0, widest * 1.01)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
