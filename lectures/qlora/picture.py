"""The figure of the lecture: a bar for each way to train, stacked by parts; at small size planned beside tracked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.recipe.gpus import Gpus
from finetune.report.pictures import COLOURS, new_figure
from finetune.wording import GIB

MEBIBYTE = 2**20
Bars = Mapping[str, Mapping[str, int]]  # bytes by part, by way
Pairs = Mapping[str, tuple[Mapping[str, int], Mapping[str, int]]]  # planned and tracked
PART_COLOURS = {
    "weights": COLOURS[0],
    "16-bit copies": COLOURS[6],
    "gradients": COLOURS[1],
    "optimizer states": COLOURS[2],
    "activations, all else": COLOURS[4],
    "left by forward": COLOURS[4],  # of the small model; 16-bit copies are among it
}
LIMIT = "#a00000"
WIDE, NARROW = 0.62, 0.36  # of a bar alone, and of each of two


def draw_parts(full_size: Bars, small_size: Pairs, model: str, gpus: Gpus | None, file: Path) -> None:
    """Two pictures beside each other, with one legend; a line at the memory of the GPU that is planned for."""
    figure = new_figure(figsize=(11.0, 5.2))
    left, right = figure.subplots(1, 2, width_ratios=[4, 3])
    for place, parts in enumerate(full_size.values()):
        _stack(left, place, parts, GIB, "{:.1f}", WIDE, labelled=place == 0)
    left.set_xticks(range(len(full_size)), [name.replace(", ", ",\n") for name in full_size])
    for place, (planned, tracked) in enumerate(small_size.values()):
        _stack(right, place - 0.2, planned, MEBIBYTE, "{:.0f}", NARROW)
        _stack(right, place + 0.2, tracked, MEBIBYTE, "{:.0f}", NARROW, hatch="//")
    right.set_xticks(range(len(small_size)), [f"{name}\nplanned | tracked" for name in small_size])
    for axes, unit, title in (
        (left, "GiB", f"{model.split('/')[-1]}, planned: at the peak"),
        (right, "MiB", "a small Llama: the peak of each part"),
    ):
        axes.set_ylabel(unit)
        axes.set_title(title, loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.08)
    if gpus is not None:
        left.axhline(gpus.memory / GIB, color=LIMIT, linewidth=1)
        end = (len(full_size) - 0.6, gpus.memory / GIB)
        left.annotate(f"{gpus.gb:g} GB", end, (0, 3), textcoords="offset points", ha="right", color=LIMIT, fontsize=9)
    left.legend(frameon=False, fontsize=9, loc="upper right")
    figure.savefig(file)


def _stack(
    axes: Any,
    place: float,
    parts: Mapping[str, int],
    unit: int,
    number: str,
    width: float,
    *,
    labelled: bool = False,
    hatch: str = "",
) -> None:
    """One bar, with its sum above it."""
    below = 0.0
    for part, nbytes in parts.items():
        label = part if labelled else None
        axes.bar(
            place, nbytes / unit, width, below, color=PART_COLOURS[part], label=label, hatch=hatch, edgecolor="white"
        )
        below += nbytes / unit
    sum_above = axes.annotate(
        number.format(below), (place, below), (0, 3), textcoords="offset points", ha="center", fontsize=9
    )
    sum_above.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # over a limit's line
