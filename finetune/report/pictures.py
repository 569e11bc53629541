"""Charts by matplotlib: SVG inside a page, and PNG for places that show no HTML (cards, chats, terminals)."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2", "#9d755d", "#72b7b2", "#eeca3b")
FAINT = "66"  # the opacity of a curve behind its smoothed one, hexadecimal
HOLE = "#80808040"  # the ground where steps have no metrics
MOST_POINTS = 1200  # of one curve; where there are more, each is the mean of its neighbours
PNG_INCHES = (8.0, 4.5)  # with 12-point letters still readable at half size
# (width, height, letters, points of a curve) in the units of a page, CSS pixels. A page shows a chart at nearly its own
# size, on a phone and on a desk, so that letters are of one size everywhere: page.html.jinja.
SIZES = {"column": (352, 190, 12, 500), "middle": (704, 220, 12, 800), "page": (1104, 260, 12, MOST_POINTS)}
Size = Literal["column", "middle", "page"]
BARS_OF_A_COLUMN = 8  # more than these need the page's width, else their labels overlap
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
    colour: int | None = None  # a place in COLOURS; None: that of the series
    faint: bool = False  # behind its smoothed curve, which has the same colour
    holes: Sequence[tuple[int, int]] = ()  # (first, last) step of each stretch without metrics: no line crosses it


@dataclass(frozen=True)
class Chart:
    """Curves over optimizer steps; where there are groups, bars beside each other in each group."""

    title: str
    series: Sequence[Series]
    groups: Sequence[str] = ()
    holes: Sequence[tuple[int, int]] = ()  # those of its series that are shown as a ground
    leads: bool = False  # the page's first, which takes its width

    @property
    def shown(self) -> list[tuple[Series, str]]:
        """Series with a finite point, and their colours: a series keeps its colour where others have no points."""
        finite = [replace(each, points=_finite(each.points)) for each in self.series]
        return [(each, _colour(each, index)) for index, each in enumerate(finite) if each.points]

    @property
    def sizes(self) -> list[Size]:
        """The sizes that a page holds it in, widest first; its style shows the one that fits."""
        if len(self.groups) * len(self.series) > BARS_OF_A_COLUMN:
            return ["page", "middle"]
        return ["page", "middle", "column"] if self.leads else ["column"]

    @property
    def legend(self) -> list[tuple[str, str]]:
        """(name, colour) for each series; empty for a single series, which the title names."""
        if len(self.series) == 1:
            return []
        return [*((each.name, colour) for each, colour in self.shown), *([("no metrics", HOLE)] if self.holes else [])]


def _colour(series: Series, index: int) -> str:
    own = index if series.colour is None else series.colour
    return COLOURS[own % len(COLOURS)] + (FAINT if series.faint else "")


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


def smoothed(points: Sequence[tuple[float, float]], weights: Sequence[float], window: int) -> list[tuple[float, float]]:
    """The weighted mean of each point and its neighbours, `window` points in all, fewer at both ends."""
    half, sums = window // 2, [(0.0, 0.0)]
    for (_, y), weight in zip(points, weights, strict=True):
        sums.append((sums[-1][0] + y * weight, sums[-1][1] + weight))
    result = []
    for index, (x, _) in enumerate(points):
        first, last = sums[max(0, index - half)], sums[min(len(points), index + half + 1)]
        result.append((x, (last[0] - first[0]) / (last[1] - first[1])))
    return result


def inline_svg(chart: Chart, size: Size = "column") -> str:
    """The chart without title and legend, as an <svg> element for a page; empty text if there is nothing to draw.

    Text and background have no colour: the page's style sets them, light or dark.
    """
    from matplotlib import rc_context

    if not chart.shown:
        return ""
    # The salt makes the ids of clip paths and markers differ between the charts of a page, and not between two writes.
    with rc_context(MATPLOTLIB_SETTINGS | {"svg.hashsalt": f"{chart.title}, {size}"}):  # type: ignore[arg-type]
        width, height, letters, points = SIZES[size]
        figure = new_figure(figsize=(width / 72, height / 72), layout=None)  # an SVG of matplotlib has 72 units an inch
        x, bottom = 5 * letters / width, 2 * letters / height
        box = (x, bottom, 1 - x - 1.8 * letters / width, 1 - bottom - 1.2 * letters / height)
        _draw(figure.add_axes(box), chart, letters=letters, most_points=points)
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


def _draw(axes: Any, chart: Chart, *, letters: int, most_points: int = MOST_POINTS) -> list[Any]:
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
    handles = [_curve(axes, each, colour, most_points) for each, colour in series]
    grounds = [axes.axvspan(first - 0.5, last + 0.5, color=HOLE, linewidth=0) for first, last in chart.holes]
    return handles + grounds[:1]


def _curve(axes: Any, series: Series, colour: str, most_points: int) -> Any:
    points = thinned(series.points, most_points)
    lonely = series.dots or len(points) == 1
    style = {"marker": "o", "markersize": 4.5, "linestyle": "none"} if lonely else {"linewidth": 1.4}
    # A value that is not a number ends a line, and the next one begins another.
    gaps = [] if lonely else [((first + last) / 2, math.nan) for first, last in series.holes]
    drawn = sorted([*points, *gaps], key=lambda point: point[0])
    (line,) = axes.plot(*zip(*drawn, strict=True), color=colour, clip_on=False, zorder=3 if lonely else 2, **style)
    return line


def _bars(axes: Any, series: Series, colour: str, width: float, offset: float, letters: int) -> Any:
    """The bars of one series, each with its value on top."""
    heights = [value for _, value in series.points]
    bars = axes.bar([group + offset for group, _ in series.points], heights, width * 0.92, color=colour)
    labels = [f"{value:.3g}" if value < 1000 else f"{value:,.0f}" for value in heights]
    axes.bar_label(bars, labels, padding=2, fontsize=letters)
    return bars
