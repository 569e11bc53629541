"""One self-contained HTML page: no script, no network; light and dark as the reader's system is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
