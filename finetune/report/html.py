"""One self-contained HTML page: no script, no network; light and dark as the reader's system is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --faint: #68707a; --line: #d9dde2; --learned: #cdeccf;
  --control: #6b4fa0; --bar: #4c78a8; --error: #b3261e; --warning: #8a5a00; --panel: #f5f6f8 }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6ea; --paper: #16181c; --faint: #9aa3ad; --line: #363b42;
  --learned: #1f4a2a; --control: #bba4ee; --bar: #79a6d6; --error: #ff8a80; --warning: #f0b955; --panel: #1e2126 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 72rem; padding: 1rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.5rem; margin: 1rem 0 .25rem } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
h3 { font-size: .95rem; margin: 1.25rem 0 .4rem; font-weight: 600 }
p.lead, .faint, figcaption { color: var(--faint) }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
.scroll { overflow-x: auto }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
th, td { overflow-wrap: normal } td.number, th.number { text-align: right; white-space: nowrap }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: .75rem;
  white-space: pre-wrap; font: 13px/1.6 ui-monospace, monospace; margin: 0 }
.t { box-shadow: inset -1px 0 var(--line) } .l { background: var(--learned) } .s { color: var(--control) }
.error { color: var(--error) } .warning { color: var(--warning) }
figure { margin: 0 } img, svg { max-width: 100%; height: auto } svg text { fill: var(--faint); font-size: 11px }
svg rect { fill: var(--bar) } svg .grid { stroke: var(--line) } .key { margin-left: .6rem; white-space: nowrap }
.key i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .3em }
figcaption b { color: var(--ink) } .charts { display: grid; gap: 1.2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)) }
.scroll svg { min-width: 36rem }
details summary { cursor: pointer } .two { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem }
@media (max-width: 46rem) { .two { grid-template-columns: 1fr } }
"""


def page(title: str, lead: str, body: Iterable[str]) -> str:
    """The whole document; `body` is HTML, the rest is text."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f'<p class="lead">{escape(lead)}</p>\n' + "\n".join(body) + "\n</body></html>\n"
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()) -> str:
    """A table of texts; columns of `numbers` stand right. A header of empty words is left out."""

    def line(cells: Sequence[str], kind: str) -> str:
        marked = (
            f"<{kind}{' class=number' if index in numbers else ''}>{escape(cell)}</{kind}>"
            for index, cell in enumerate(cells)
        )
        return f"<tr>{''.join(marked)}</tr>"

    head = line(header, "th") if any(header) else ""
    return f'<div class="scroll"><table>{head}{"".join(line(row, "td") for row in rows)}</table></div>'


def histogram(bins: Sequence[tuple[int, int, int]], unit: str) -> str:
    """Counts over ranges as vertical bars, each labelled with its count and where it begins."""
    width, height, foot, head = 720, 160, 18, 16
    most = max((count for *_, count in bins), default=0) or 1
    step = width / max(1, len(bins))
    drawn = []
    for index, (low, _, count) in enumerate(bins):
        tall = (height - foot - head) * count / most
        left, top = index * step, height - foot - tall
        middle = left + step / 2
        drawn.append(f'<rect x="{left + 2:.1f}" y="{top:.1f}" width="{step - 4:.1f}" height="{tall:.1f}" rx="2"/>')
        drawn.append(f'<text x="{middle:.1f}" y="{height - 4}" text-anchor="middle">{low:,}</text>')
        if count:
            drawn.append(f'<text x="{middle:.1f}" y="{top - 4:.1f}" text-anchor="middle">{count:,}</text>')
    return (
        f'<figure class="scroll"><svg viewBox="0 0 {width} {height}" role="img">{"".join(drawn)}</svg>'
        f"<figcaption>{escape(unit)}</figcaption></figure>"
    )


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
