"""Charts by matplotlib: SVG inside a page, and PNG for places that show no HTML (cards, chats, terminals)."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2", "#9d755d", "#72b7b2", "#eeca3b")
MOST_POINTS = 1200  # of one curve; where there are more, each is the mean of its neighbours
PNG_INCHES = (8.0, 4.5)  # with 12-point letters still readable at half size
SVG_INCHES = (5.6, 2.4)
WIDE_SVG_INCHES = (11.4, 2.4)  # both columns of a page
BARS_OF_A_COLUMN = 10  # more than these need both columns, else their labels overlap
DPI = 130
BAR_GROUP = 0.8  # of the distance between two groups; the rest is the gap
MATPLOTLIB_SETTINGS = {
    "svg.fonttype": "none",  # text stays text: no glyphs are embedded
    "axes.autolimit_mode": "round_numbers",  # an axis begins and ends at a tick
    "axes.xmargin": 0,
    "axes.ymargin": 0,
    "text.parse_math": False,  # a run's name may hold a dollar sign
}
NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
# What a stand-alone SVG needs and an inlined one does not. matplotlib numbers its groups (id="text_3"), so that two
# charts of a page would have the same ids; its style element would apply to the whole page.
SURPLUS = tuple(
    (re.compile(pattern, re.DOTALL), replacement)
    for pattern, replacement in (
        (r"\A.*?(?=<svg)", ""),
        (r"<defs>\s*<style.*?</defs>", ""),
        (r' xmlns(:xlink)?="[^"]*"| version="1.1"| width="[\d.]+pt" height="[\d.]+pt"| id="[\w.]+_\d+"', ""),
        (r"; font-family: [^;\"]*| transform=\"rotate\(-0 [^)]*\)\"", ""),  # the page's font, upright
        (r'(\.\d\d)\d+(?=[ \n"])', r"\1"),  # coordinates; a label's number ends at <
        (r"<g/>", ""),
        (r">\s+<", "><"),
    )
)


@dataclass(frozen=True)
class Series:
    """One curve, some dots, or one bar in each group."""

    name: str
    points: Sequence[tuple[float, float]]  # (optimizer step, value), or (index of the group, value)
    dots: bool = False  # few points that are not connected: evaluations


@dataclass(frozen=True)
class Chart:
    """Curves over optimizer steps; where there are groups, bars beside each other in each group."""

    title: str
    series: Sequence[Series]
    groups: Sequence[str] = ()

    @property
    def shown(self) -> list[tuple[Series, str]]:
        """Series with a finite point, and their colours: a series keeps its colour where others have no points."""
        finite = [Series(each.name, _finite(each.points), each.dots) for each in self.series]
        return [(each, COLOURS[index % len(COLOURS)]) for index, each in enumerate(finite) if each.points]

    @property
    def is_wide(self) -> bool:
        return len(self.groups) * len(self.series) > BARS_OF_A_COLUMN

    @property
    def legend(self) -> list[tuple[str, str]]:
        """(name, colour) of what is shown; empty for a single series, which the title names."""
        return [(each.name, colour) for each, colour in self.shown] if len(self.series) > 1 else []


def _finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(y)]


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most `most` points: equal groups, each its mean. The last point stays as it is."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / (most - 1))
    groups = [points[first : first + size] for first in range(0, len(points) - 1, size)]
    means = [(sum(x for x, _ in some) / len(some), sum(y for _, y in some) / len(some)) for some in groups]
    return [*means, points[-1]]


def number_label(value: float) -> str:
    """12,000 or 0.0002 or 2e-05."""
    if value and abs(value) < 1e-4:
        return f"{value:.0e}"
    return f"{value:,.6f}".rstrip("0").rstrip(".")


def inline_svg(chart: Chart) -> str:
    """The chart without title and legend, as an <svg> element of a page; empty text where nothing is to be drawn.

    Text and background have no colour of their own: the page's style sets them, light or dark.
    """
    from matplotlib import rc_context

    if not chart.shown:
        return ""
    # The salt makes the ids of clip paths and markers differ between the charts of a page, and not between two writes.
    with rc_context(MATPLOTLIB_SETTINGS | {"svg.hashsalt": chart.title}):  # type: ignore[arg-type]
        width, height = WIDE_SVG_INCHES if chart.is_wide else SVG_INCHES
        figure = new_figure(figsize=(width, height), layout=None)
        x, bottom = 0.55 / width, 0.28 / height
        _draw(figure.add_axes((x, bottom, 1 - x - 0.2 / width, 1 - bottom - 0.18 / height)), chart, letters=8)
        figure.patch.set_visible(False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=NO_METADATA)
    text = file.getvalue()
    for pattern, replacement in SURPLUS:
        text = pattern.sub(replacement, text)
    return text


def save_png(chart: Chart, file: Path) -> None:
    """The chart with title and legend."""
    from matplotlib import rc_context

    with rc_context(MATPLOTLIB_SETTINGS):  # type: ignore[arg-type]
        figure = new_figure(figsize=PNG_INCHES)
        axes = figure.subplots()
        handles = _draw(axes, chart, letters=12)
        axes.set_title(chart.title, loc="left", fontsize=14, pad=10)
        axes.set_xlabel("" if chart.groups else "optimizer step", fontsize=12)
        if chart.legend:
            axes.legend(handles, [name for name, _ in chart.legend], frameon=False, fontsize=11)
        figure.savefig(file)


def new_figure(*, layout: Literal["constrained"] | None = "constrained", **options: Any) -> Any:
    """A matplotlib figure that needs no screen."""
    from matplotlib.figure import Figure

    return Figure(layout=layout, dpi=DPI, **options)


def _draw(axes: Any, chart: Chart, *, letters: int) -> list[Any]:
    """Draw all series; returns the handle of each for a legend."""
    series = chart.shown
    axes.patch.set_visible(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=letters, pad=letters / 2)
    axes.grid(axis="y", color="#808080", alpha=0.35, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.yaxis.get_major_locator().set_params(nbins=5)
    axes.yaxis.set_major_formatter(lambda value, _: number_label(value))
    if chart.groups:
        axes.set_xlim(-0.5, len(chart.groups) - 0.5)
        axes.set_xticks(range(len(chart.groups)), chart.groups)
        width = BAR_GROUP / max(1, len(series))
        offsets = [(index - (len(series) - 1) / 2) * width for index in range(len(series))]
        return [_bars(axes, *each, width, offset, letters) for each, offset in zip(series, offsets, strict=True)]
    axes.xaxis.set_major_formatter(lambda value, _: number_label(value))
    axes.xaxis.get_major_locator().set_params(integer=True)
    return [_curve(axes, each, colour) for each, colour in series]


def _curve(axes: Any, series: Series, colour: str) -> Any:
    points = thinned(series.points)
    lonely = series.dots or len(points) == 1
    style = {"marker": "o", "markersize": 4.5, "linestyle": "none"} if lonely else {"linewidth": 1.4}
    (line,) = axes.plot(*zip(*points, strict=True), color=colour, clip_on=False, zorder=3 if lonely else 2, **style)
    return line


def _bars(axes: Any, series: Series, colour: str, width: float, offset: float, letters: int) -> Any:
    """The bars of one series, each with its value on top."""
    heights = [value for _, value in series.points]
    bars = axes.bar([group + offset for group, _ in series.points], heights, width * 0.92, color=colour)
    labels = [f"{value:.3g}" if value < 1000 else f"{value:,.0f}" for value in heights]
    axes.bar_label(bars, labels, padding=2, fontsize=letters)
    return bars
