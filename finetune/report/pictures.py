"""Charts by matplotlib: SVG inside a page, and PNG for places that show no HTML (cards, chats, terminals)."""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2", "#9d755d", "#72b7b2", "#eeca3b")
FAINT = "66"  # opacity of a curve behind its smoothed one, hexadecimal
MOST_SPIKES = 3
MOST_POINTS = 1200  # of one curve; a longer curve shows the means of neighbouring points
PNG_INCHES = (8.0, 4.5)  # its 12-point letters can be read at half size
# (width, height, letters, points of a curve); all but the points in CSS pixels. A page shows a chart at nearly this
# size, so letters have one size everywhere; a narrow screen scrolls over a wide one (page.html.jinja).
SIZES = {"column": (352, 190, 12, 500), "page": (1104, 260, 12, MOST_POINTS)}
Size = Literal["column", "page"]
BARS_OF_A_COLUMN = 8  # more bars need the page's width, else their labels overlap
DPI = 130
BAR_GROUP = 0.8  # width of a group's bars; 1 is the distance between two groups
BAR_FILL = 0.92  # width of one bar in its place, so that neighbours do not touch
MATPLOTLIB_SETTINGS = {
    "svg.fonttype": "none",  # text stays text: no glyphs are embedded
    "axes.autolimit_mode": "round_numbers",  # an axis begins and ends at a tick
    "axes.xmargin": 0,
    "axes.ymargin": 0,
    "text.parse_math": False,  # a run's name may hold a dollar sign
}
NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
# Parts of a stand-alone SVG that an inlined one must not have. matplotlib numbers its groups (id="text_3"), so two
# charts of a page would share ids. Its style element would apply to the whole page.
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
    colour: int | None = None  # index in COLOURS; None: the series' own index
    faint: bool = False  # behind its smoothed curve, which has the same colour


@dataclass(frozen=True)
class Chart:
    """Curves over optimizer steps. With groups: bars, beside each other in each group."""

    title: str
    series: Sequence[Series]
    groups: Sequence[str] = ()
    leads: bool = False  # the page's first chart, which takes its width

    @property
    def shown(self) -> list[tuple[Series, str]]:
        """Series with a finite point, and their colours. A series keeps its colour if others have no points."""
        shown = []
        for index, series in enumerate(self.series):
            points = [(x, y) for x, y in series.points if math.isfinite(y)]
            if points:
                colour = COLOURS[(index if series.colour is None else series.colour) % len(COLOURS)]
                if series.faint:
                    colour += FAINT
                shown.append((replace(series, points=points), colour))
        return shown

    @property
    def size(self) -> Size:
        """The chart's size in a page."""
        if self.leads or len(self.groups) * len(self.series) > BARS_OF_A_COLUMN:
            return "page"
        return "column"

    @property
    def legend(self) -> list[tuple[str, str]]:
        """(name, colour) for each series; empty for a single series, because the title names it."""
        if len(self.series) == 1:
            return []
        return [(series.name, colour) for series, colour in self.shown]


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most `most` points, each the mean of an equal group. The last point stays as it is."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / (most - 1))
    groups = [points[first : first + size] for first in range(0, len(points) - 1, size)]
    means = [(sum(x for x, _ in some) / len(some), sum(y for _, y in some) / len(some)) for some in groups]
    return [*means, points[-1]]


def spikes(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points far above their four neighbours, as the loss of a row with three supervised tokens: they would flatten the
    rest of a curve. Not the first two points or the last two: a curve may begin high.

    Far is three times the distance from the curve's fifth to its ninety-fifth percentile. More than MOST_SPIKES of
    them are what the curve is like: then there are none.
    """
    values = sorted(y for _, y in points)
    spread = values[(len(values) - 1) * 95 // 100] - values[(len(values) - 1) * 5 // 100]
    near = [statistics.median(y for _, y in points[index - 2 : index + 3]) for index in range(2, len(points) - 2)]
    inner = zip(points[2:-2], near, strict=True)
    high = [point for point, middle in inner if point[1] > middle + 3 * spread > middle]
    return high if len(high) <= MOST_SPIKES else []


def number_label(value: float) -> str:
    """12,000 or 0.0002 or 2e-05."""
    if value and abs(value) < 1e-4:
        return f"{value:.0e}"
    return f"{value:,.6f}".rstrip("0").rstrip(".")


def smoothed(points: Sequence[tuple[float, float]], weights: Sequence[float], window: int) -> list[tuple[float, float]]:
    """The weighted mean of each point and its neighbours: `window` points in all, fewer at both ends.

    `window` is odd. With 3, point 5 is the mean of points 4, 5 and 6.
    """
    # Running sums of weight * y and of weight, so that a window costs two subtractions, however wide it is.
    totals = [(0.0, 0.0)]
    for (_, y), weight in zip(points, weights, strict=True):
        weighted_sum, weight_sum = totals[-1]
        totals.append((weighted_sum + y * weight, weight_sum + weight))
    half, means = window // 2, []
    for index, (x, _) in enumerate(points):
        before, after = totals[max(0, index - half)], totals[min(len(points), index + half + 1)]
        means.append((x, (after[0] - before[0]) / (after[1] - before[1])))
    return means


def inline_svg(chart: Chart) -> str:
    """The chart without title and legend, as an <svg> element for a page; empty if there is nothing to draw.

    Text and background have no colour. The page's style sets them, light or dark.
    """
    from matplotlib import rc_context

    if not chart.shown:
        return ""
    # matplotlib hashes the salt into the ids of clip paths and markers. With this salt the charts of one page share no
    # id, and a chart that is drawn again has the same ids.
    with rc_context(MATPLOTLIB_SETTINGS | {"svg.hashsalt": chart.title}):  # type: ignore[arg-type]
        width, height, letters, points = SIZES[chart.size]
        figure = new_figure(figsize=(width / 72, height / 72), layout=None)  # matplotlib's SVG has 72 units an inch
        # The axes' box, as shares of the figure. Room for labels: 5 letters on the left, 2 below, 1.8 right, 1.2 above.
        left, bottom = 5 * letters / width, 2 * letters / height
        right, top = 1 - 1.8 * letters / width, 1 - 1.2 * letters / height
        _draw(figure.add_axes((left, bottom, right - left, top - bottom)), chart, letters=letters, most_points=points)
        figure.patch.set_visible(False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=NO_METADATA)
    text = file.getvalue()
    for pattern, replacement in SURPLUS:
        text = pattern.sub(replacement, text)
    return text


def save_png(chart: Chart, file: Path) -> None:
    """Write the chart with title and legend."""
    from matplotlib import rc_context

    with rc_context(MATPLOTLIB_SETTINGS):  # type: ignore[arg-type]
        figure = new_figure(figsize=PNG_INCHES)
        axes = figure.subplots()
        handles = _draw(axes, chart, letters=12)
        axes.set_title(chart.title, loc="left", fontsize=14, pad=10)
        if not chart.groups:
            axes.set_xlabel("optimizer step", fontsize=12)
        if chart.legend and chart.groups:  # bars leave no room between the axes
            names = [name for name, _ in chart.legend]
            figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False, fontsize=11)
        elif chart.legend:
            axes.legend(handles, [name for name, _ in chart.legend], frameon=False, fontsize=11)
        figure.savefig(file)


def new_figure(*, layout: Literal["constrained"] | None = "constrained", **options: Any) -> Any:
    """A matplotlib figure that needs no screen."""
    from matplotlib.figure import Figure

    return Figure(layout=layout, dpi=DPI, **options)


def _draw(axes: Any, chart: Chart, *, letters: int, most_points: int = MOST_POINTS) -> list[Any]:
    """Draw all series; returns their handles for a legend."""
    axes.patch.set_visible(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=letters, pad=letters / 2)
    axes.grid(axis="y", color="#808080", alpha=0.35, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.yaxis.get_major_locator().set_params(nbins=5)
    axes.yaxis.set_major_formatter(lambda value, _: number_label(value))
    if chart.groups:
        return _draw_bars(axes, chart, letters)
    axes.xaxis.set_major_formatter(lambda value, _: number_label(value))
    axes.xaxis.get_major_locator().set_params(integer=True)
    handles = []
    for series, colour in chart.shown:
        points = thinned(series.points, most_points)
        if high := spikes(points):  # drawn as high as the rest of the curve, with its value
            top = max(y for x, y in points if (x, y) not in high)
            points = [(x, min(y, top)) for x, y in points]
            for x, y in high:
                axes.annotate(number_label(float(f"{y:.3g}")), (x, top), ha="center", va="bottom", fontsize=letters)
        if series.dots or len(points) == 1:
            style, layer = {"marker": "o", "markersize": 4.5, "linestyle": "none"}, 3
        else:
            style, layer = {"linewidth": 1.4}, 2
        handles += axes.plot(*zip(*points, strict=True), color=colour, clip_on=False, zorder=layer, **style)
    return handles


def _draw_bars(axes: Any, chart: Chart, letters: int) -> list[Any]:
    """Each series' bar in each group, with its value on top."""
    axes.set_xlim(-0.5, len(chart.groups) - 0.5)
    axes.set_xticks(range(len(chart.groups)), chart.groups)
    width = BAR_GROUP / max(1, len(chart.shown))
    handles = []
    # Digits are 0.6 of the letters' size: five of them in a narrower bar would run into the next bar's.
    bar_points = 72 * axes.figure.get_figwidth() * width / len(chart.groups)
    if upright := bar_points < 3 * letters:
        axes.margins(y=0.3)
    for index, (series, colour) in enumerate(chart.shown):
        # The bars of a group are centred on its tick: with two series they stand at -0.2 and +0.2.
        offset = (index - (len(chart.shown) - 1) / 2) * width
        heights = [value for _, value in series.points]
        bars = axes.bar([group + offset for group, _ in series.points], heights, width * BAR_FILL, color=colour)
        labels = [f"{value:.3g}" if value < 1000 else f"{value:,.0f}" for value in heights]
        axes.bar_label(bars, labels, padding=2, fontsize=letters, rotation=90 if upright else 0)
        handles.append(bars)
    return handles
