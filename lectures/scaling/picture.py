"""The picture of the lecture: memory and TFLOP/s of a GPU over the number of GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.report.pictures import COLOURS, new_figure
from finetune.wording import GIB
from lectures.scaling.plans import GPU, GPU_COUNTS, PUBLISHED, PUBLISHED_LOSS, SWEPT_STRATEGIES, Cell

LIMIT, LEGEND = "#a00000", "#555555"
# Lines of equal figures lie on each other: those of the smallest size are below, with the widest line and the largest
# markers.
STRATEGY_LINES = dict(zip(SWEPT_STRATEGIES, ("-", "--", ":"), strict=True))
STRATEGY_MARKERS = dict(zip(SWEPT_STRATEGIES, "os^", strict=True))
SIZE_STYLES = {size: (COLOURS[place], 4 - place, 11 - 3 * place) for place, size in enumerate(PUBLISHED)}
ALL_LINKS_LINE = "-."


def draw_scaling(cells: Mapping[tuple[str, str], Cell], memory: int, file: Path) -> None:
    """A colour for each size, a line style for each strategy; speeds where the memory suffices."""
    figure = new_figure(figsize=(9.5, 8.5))
    top, bottom = figure.subplots(2, 1)
    for (size, strategy), cell in cells.items():
        top.plot(list(cell.needed), [each / GIB for each in cell.needed.values()], **_style(size, strategy))
        fitting = [ranks for ranks in cell.times if cell.needed[ranks] <= memory]
        bottom.plot(fitting, [cell.teraflops(ranks) for ranks in fitting], **_style(size, strategy))
    largest = list(PUBLISHED)[-1]
    wide = cells[largest, "fsdp2"]
    style = _style(largest, "fsdp2") | {"linestyle": ALL_LINKS_LINE, "markerfacecolor": "white"}
    bottom.plot(GPU_COUNTS, [wide.teraflops(ranks, all_links=True) for ranks in GPU_COUNTS], **style)
    _mark_published(bottom, wide)
    top.axhline(memory / GIB, color=LIMIT, linewidth=1)
    place = (GPU_COUNTS[-1], memory / GIB)
    words = f"{GPU}: {memory / GIB:.1f} GiB"
    top.annotate(words, place, (0, 4), textcoords="offset points", ha="right", color=LIMIT)
    top.set_yscale("log")
    top.set_yticks((2, 5, 10, 20, 50, 100, 200), ("2", "5", "10", "20", "50", "100", "200"))
    top.minorticks_off()
    top.set_ylabel("GiB of a GPU")
    bottom.set_ylabel("TFLOP/s of a GPU")
    bottom.set_ylim(0, None)
    for axes, title in (
        (top, "Memory of a GPU by the plan"),
        (bottom, "Speed of a GPU by the plan, where the memory suffices"),
    ):
        axes.set_xscale("log", base=2)
        axes.set_xticks(GPU_COUNTS, [str(ranks) for ranks in GPU_COUNTS])
        axes.set_xlim(GPU_COUNTS[0] / 1.1, GPU_COUNTS[-1] * 1.1)
        axes.set_title(title, loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_xlabel("GPUs")
    _legend(figure, top)
    figure.savefig(file)


def _mark_published(axes: Any, cell: Cell) -> None:
    """The published loss, from what is planned for one machine."""
    place = (GPU_COUNTS[-1], cell.teraflops(GPU_COUNTS[0]) * (1 - PUBLISHED_LOSS / 100))
    axes.plot(*place, "D", color=LEGEND, markersize=6)
    words = f"published: {PUBLISHED_LOSS} % fewer than on {GPU_COUNTS[0]}"
    axes.annotate(words, place, (-10, -10), textcoords="offset points", ha="right", va="center", color=LEGEND)


def _style(size: str, strategy: str) -> dict[str, Any]:
    colour, width, marker = SIZE_STYLES[size]
    return {
        "color": colour,
        "linewidth": width,
        "markersize": marker,
        "linestyle": STRATEGY_LINES[strategy],
        "marker": STRATEGY_MARKERS[strategy],
    }


def _legend(figure: Any, axes: Any) -> None:
    """Sizes by colour, strategies by line: nine rows for each pair would say the same."""
    sizes = [axes.plot([], [], color=colour, linewidth=width)[0] for colour, width, _ in SIZE_STYLES.values()]
    lines = [
        axes.plot([], [], STRATEGY_LINES[each], marker=STRATEGY_MARKERS[each], color=LEGEND)[0]
        for each in SWEPT_STRATEGIES
    ]
    lines += axes.plot([], [], ALL_LINKS_LINE, marker="s", markerfacecolor="white", color=LEGEND)
    names = [*SIZE_STYLES, *SWEPT_STRATEGIES, "fsdp2, all links of a machine"]
    figure.legend([*sizes, *lines], names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=10)
