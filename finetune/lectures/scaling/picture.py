"""The picture of the lecture: memory and TFLOP/s of a GPU over the number of GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from finetune.lectures.scaling.plans import GPU, GPU_COUNTS, PUBLISHED, STRATEGIES, Cell
from finetune.measure.units import GIB
from finetune.report.pictures import COLOURS, new_figure

LIMIT = "#a00000"


def draw_scaling(cells: Mapping[tuple[str, str], Cell], memory: int, file: Path) -> None:
    """A colour for each size, a line style for each strategy; speeds where the memory suffices."""
    figure = new_figure(figsize=(9.5, 7.5))
    top, bottom = figure.subplots(2, 1)
    styles = dict(zip(STRATEGIES, ("o-", "s--", "^:"), strict=True))
    colours = dict(zip(PUBLISHED, COLOURS, strict=False))
    for (size, strategy), cell in cells.items():
        style = {"color": colours[size], "markersize": 5, "label": f"{size} {strategy}"}
        top.plot(list(cell.needed), [each / GIB for each in cell.needed.values()], styles[strategy], **style)
        fitting = [ranks for ranks in cell.times if cell.needed[ranks] <= memory]
        bottom.plot(fitting, [cell.teraflops(ranks) for ranks in fitting], styles[strategy], **style)
    top.axhline(memory / GIB, color=LIMIT, linewidth=1)
    place = (GPU_COUNTS[-1], memory / GIB)
    words = f"{GPU}: {memory / GIB:.1f} GiB"
    top.annotate(words, place, (0, 4), textcoords="offset points", ha="right", color=LIMIT)
    top.set_yscale("log")
    top.set_yticks((2, 5, 10, 20, 50, 100, 200), ("2", "5", "10", "20", "50", "100", "200"))
    top.minorticks_off()
    top.set_ylabel("GiB of a GPU")
    bottom.set_ylabel("TFLOP/s of a GPU, at most")
    for axes, title in ((top, "Memory by the plan"), (bottom, "Speed by the plan's bound, where it fits")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(GPU_COUNTS, [str(ranks) for ranks in GPU_COUNTS])
        axes.set_xlim(GPU_COUNTS[0] / 1.1, GPU_COUNTS[-1] * 1.1)
        axes.set_title(title, loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    bottom.set_xlabel("GPUs")
    top.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.0))
    figure.savefig(file)
