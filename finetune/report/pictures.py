"""loss.png and memory.png of a run, for places that show no HTML: cards, chats, terminals. By matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.errors import EnvironmentMismatch
from finetune.report.curves import PHASES, ReportedRun, curve, loss_lines, phase_peaks, planned_peaks
from finetune.report.html import COLOURS, thinned

SIZE = (8.0, 4.5)  # inches; with 12-point letters still readable at half size
DPI = 130


def new_figure(what: str, **options: Any) -> Any:
    """A figure that needs no screen. Raises EnvironmentMismatch without matplotlib; `what` wanted it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EnvironmentMismatch(
            f"{what}: the picture needs matplotlib, which is not installed; pip install 'finetune[report]'"
        ) from error
    figure = Figure(layout="constrained", dpi=DPI, **options)
    FigureCanvasAgg(figure)
    return figure


def draw_loss(runs: Sequence[ReportedRun], file: Path) -> None:
    """Training loss as a line, held-out loss as dots. Raises EnvironmentMismatch without matplotlib."""
    figure = new_figure(file.name, figsize=SIZE)
    axes = figure.subplots()
    lines = loss_lines(runs)
    for index, line in enumerate(lines):
        style = {"marker": "o", "linestyle": "none"} if line.dots else {"linewidth": 1.8}
        steps, values = zip(*thinned(line.points), strict=True) if line.points else ((), ())
        axes.plot(steps, values, color=COLOURS[index % len(COLOURS)], label=line.name, **style)
    _finish(axes, "Loss", "optimizer step", legend=len(lines) > 1)
    figure.savefig(file)


def draw_memory(runs: Sequence[ReportedRun], file: Path) -> None:
    """Peak by phase, planned beside measured; where phases were not measured, the peak of each step."""
    figure = new_figure(file.name, figsize=SIZE)
    axes = figure.subplots()
    alone = len(runs) == 1
    bars = [
        (kind if alone else f"{run.name}, {kind}", peaks)
        for run in runs
        for kind, peaks in (("planned", planned_peaks(run)), ("measured", phase_peaks(run)))
        if peaks
    ]
    if any(name.endswith("measured") for name, _ in bars):
        _draw_bars(axes, bars)
        _finish(axes, "Peak memory of a rank by phase, GiB", "", legend=True)
    else:
        for index, line in enumerate(curve(runs, "peak_memory_gib")):
            steps, values = zip(*thinned(line.points), strict=True) if line.points else ((), ())
            axes.plot(steps, values, color=COLOURS[index % len(COLOURS)], label=line.name, linewidth=1.8)
        _finish(axes, "Peak memory of a rank, GiB", "optimizer step", legend=not alone)
    axes.set_ylim(bottom=0)
    figure.savefig(file)


def _draw_bars(axes: Any, bars: Sequence[tuple[str, dict[str, float]]]) -> None:
    phases = [phase for phase in PHASES if any(phase in peaks for _, peaks in bars)]
    width = 0.8 / len(bars)
    for index, (name, peaks) in enumerate(bars):
        places = [position + (index - (len(bars) - 1) / 2) * width for position in range(len(phases))]
        heights = [peaks.get(phase, 0.0) for phase in phases]
        drawn = axes.bar(places, heights, width * 0.92, color=COLOURS[index % len(COLOURS)], label=name)
        axes.bar_label(drawn, fmt="{:.3g}", padding=2, fontsize=10)
    axes.set_xticks(range(len(phases)), phases)


def _finish(axes: Any, title: str, across: str, *, legend: bool) -> None:
    axes.set_title(title, loc="left", fontsize=14)
    axes.set_xlabel(across, fontsize=12)
    axes.tick_params(labelsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    if legend:
        axes.legend(frameon=False, fontsize=11)
