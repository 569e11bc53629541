"""Small charts as inline SVG: lines over steps, and grouped bars. They take their ink from the page, so both light and
dark; `pictures.py` draws the same as PNG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 26, 26
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2", "#9d755d", "#72b7b2", "#eeca3b")
MOST_POINTS = 1200  # of one line; each of more is the mean of its neighbours


@dataclass(frozen=True)
class Line:
    """One curve: (step, value) in the order of steps."""

    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = False  # few points that belong to themselves: evaluations


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most so many points: equal groups, each its mean. The last point stays itself."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / (most - 1))
    groups = [points[first : first + size] for first in range(0, len(points) - 1, size)]
    means = [(sum(x for x, _ in some) / len(some), sum(y for _, y in some) / len(some)) for some in groups]
    return [*means, points[-1]]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values that cover a range: steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        low, high = low - (abs(low) * 0.1 or 1), high + (abs(high) * 0.1 or 1)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def short(value: float) -> str:
    """A tick's label: 12,000 or 0.0002 or 2e-05."""
    if value and abs(value) < 1e-4:
        return f"{value:.0e}"
    return f"{value:,.6f}".rstrip("0").rstrip(".")


def line_chart(title: str, lines: Sequence[Line]) -> str:
    """Curves over optimizer steps; empty text when none of them has a finite point."""
    shown = [(index, line, _finite(line)) for index, line in enumerate(lines)]
    shown = [(index, line, points) for index, line, points in shown if points]
    if not shown:
        return ""
    every = [point for *_, points in shown for point in points]
    marks = ticks(min(y for _, y in every), max(y for _, y in every))
    across = _Scale(min(x for x, _ in every), max(max(x for x, _ in every), min(x for x, _ in every) + 1),
                    LEFT, WIDTH - RIGHT)  # fmt: skip
    upward = _Scale(marks[0], marks[-1], HEIGHT - BOTTOM, TOP)
    body = [*_grid(marks, upward), *_steps(across)]
    for index, line, points in shown:
        colour = COLOURS[index % len(COLOURS)]
        placed = [(across(x), upward(y)) for x, y in thinned(points)]
        if not line.dots and len(placed) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        else:
            body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{colour}"/>' for x, y in placed]
    return _figure(title, body, [(line.name, index) for index, line, _ in shown] if len(lines) > 1 else [])


def bar_chart(title: str, groups: Sequence[str], bars: Sequence[tuple[str, Sequence[float | None]]]) -> str:
    """Bars side by side in each group, each with its value on top; None leaves a gap."""
    values = [value for _, several in bars for value in several if value is not None]
    if not values:
        return ""
    marks = ticks(0, max(values))
    upward = _Scale(marks[0], marks[-1], HEIGHT - BOTTOM, TOP)
    body = list(_grid(marks, upward))
    room = (WIDTH - LEFT - RIGHT) / len(groups)
    width = room * 0.8 / len(bars)
    for position, group in enumerate(groups):
        left = LEFT + position * room + room * 0.1
        middle = left + room * 0.4
        body.append(f'<text x="{middle:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(group)}</text>')
        for index, (_, several) in enumerate(bars):
            value = several[position]
            if value is not None:
                body += _bar(left + index * width, width, upward(value), value, COLOURS[index % len(COLOURS)])
    return _figure(title, body, [(name, index) for index, (name, _) in enumerate(bars)] if len(bars) > 1 else [])


def _finite(line: Line) -> list[tuple[float, float]]:
    return [(x, y) for x, y in line.points if math.isfinite(y)]


def _grid(marks: Sequence[float], upward: _Scale) -> Iterator[str]:
    for mark in marks:
        y = upward(mark)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(mark)}</text>'


def _steps(across: _Scale) -> Iterator[str]:
    for mark in ticks(across.low, across.high, 6):
        if across.low <= mark <= across.high and mark == int(mark):
            anchor = "end" if across(mark) > WIDTH - RIGHT - 20 else "middle"
            yield f'<text x="{across(mark):.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{short(mark)}</text>'


def _bar(left: float, width: float, top: float, value: float, colour: str) -> list[str]:
    foot = HEIGHT - BOTTOM
    label = f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
    return [
        f'<rect x="{left + 1:.1f}" y="{top:.1f}" width="{width - 2:.1f}" height="{foot - top:.1f}" rx="2" '
        f'style="fill:{colour}"/>',
        f'<text x="{left + width / 2:.1f}" y="{top - 3:.1f}" text-anchor="middle">{label}</text>',
    ]


def _figure(title: str, body: Sequence[str], legend: Sequence[tuple[str, int]]) -> str:
    keys = "".join(
        f'<span class="key"><i style="background:{COLOURS[index % len(COLOURS)]}"></i>{escape(name)}</span>'
        for name, index in legend
    )
    return (
        f'<figure><figcaption><b>{escape(title)}</b> {keys}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title, quote=True)}">{"".join(body)}</svg></figure>'
    )
