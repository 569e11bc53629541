"""A run, or several side by side, as one page: curves, memory by phase, answers, and everything needed to repeat it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

from finetune.files import write_text
from finetune.recipe.flat import leaves
from finetune.recipe.yaml_text import dotted, shorten
from finetune.report.curves import (
    CURVES,
    PHASES,
    ReportedRun,
    curve,
    loss_lines,
    phase_peaks,
    planned_peaks,
    read_runs,
    summary,
)
from finetune.report.html import bar_chart, line_chart, page, table
from finetune.report.pictures import draw_loss, draw_memory

SAMPLES = 8  # prompts shown
LETTERS = 1500  # of an answer
NAME = "report.html"


def write_report(runs: Sequence[ReportedRun], file: Path) -> None:
    """Write the page."""
    write_text(file, report(runs))


def report(runs: Sequence[ReportedRun]) -> str:
    """The page as HTML."""
    alone = runs[0] if len(runs) == 1 else None
    title = f"Run {alone.name}" if alone else f"{len(runs)} runs"
    lead = _lead(alone) if alone else ", ".join(run.name for run in runs)
    body = [*_table_of(runs), *_charts(runs), *_memory(runs)]
    for run in runs:
        body += _samples(run, heading="" if alone else run.name)
    if alone:
        body += _details(alone)
    return page(title, lead, body)


def _lead(run: ReportedRun) -> str:
    recipe = run.facts.recipe
    method = "all weights" if recipe.lora is None else "QLoRA" if recipe.quantization else "LoRA"
    updated = str(run.facts.state.get("updated", ""))[:16].replace("T", " ")
    return f"{recipe.model.name_or_path}, {method}" + (f"; {updated} UTC" if updated else "")


def _table_of(runs: Sequence[ReportedRun]) -> Iterator[str]:
    rows = [summary(run) for run in runs]
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    numbers = range(3, len(names) + 1)
    cells = [[run.name, *(row[name] for name in names)] for run, row in zip(runs, rows, strict=True)]
    yield table(["run", *names], cells, numbers=numbers)
    if len(runs) == 1 and "error" in runs[0].facts.state:
        yield f'<p class="error">{escape(str(runs[0].facts.state["error"]))}</p>'


def _charts(runs: Sequence[ReportedRun]) -> Iterator[str]:
    drawn = [line_chart("Loss", loss_lines(runs))]
    drawn += [line_chart(title, curve(runs, key, factor)) for title, key, factor in CURVES]
    drawn = [chart for chart in drawn if chart]
    if drawn:
        yield '<h2>Over the optimizer steps</h2><div class="charts">' + "".join(drawn) + "</div>"


def _memory(runs: Sequence[ReportedRun]) -> Iterator[str]:
    """Peaks by phase, measured beside planned."""
    bars: list[tuple[str, dict[str, float]]] = []
    for run in runs:
        before = "" if len(runs) == 1 else f"{run.name}, "
        bars += [(f"{before}planned", planned_peaks(run)), (f"{before}measured", phase_peaks(run))]
    bars = [(name, peaks) for name, peaks in bars if peaks]
    if not bars:
        return
    phases = [phase for phase in PHASES if any(phase in peaks for _, peaks in bars)]
    columns = [(name, [peaks.get(phase) for phase in phases]) for name, peaks in bars]
    yield "<h2>Memory of a rank by phase, peak in GiB</h2>"
    yield f'<div class="charts">{bar_chart("GiB", phases, columns)}</div>'
    rows = [[name, *("" if value is None else f"{value:.3f}" for value in values)] for name, values in columns]
    yield table(["", *phases], rows, numbers=range(1, len(phases) + 1))


def _samples(run: ReportedRun, heading: str) -> Iterator[str]:
    answers: dict[str, dict[str, Mapping[str, Any]]] = {}
    for line in run.facts.samples:
        answers.setdefault(str(line.get("prompt")), {})[str(line.get("when"))] = line
    if not answers:
        return
    yield f"<h2>Before and after{escape(f': {heading}' if heading else '')}</h2>"
    yield '<p class="faint">The first prompts, not the best ones; answers are greedy.</p>'
    for prompt, said in list(answers.items())[:SAMPLES]:
        reference = next((line["reference"] for line in said.values() if line.get("reference")), None)
        yield f"<h3>{escape(_cut(prompt))}</h3>"
        boxes = "".join(
            f"<div><div class=faint>{when}</div><pre>{escape(_cut(str(said[when]['answer'])))}</pre></div>"
            for when in ("before", "after")
            if when in said
        )
        yield f'<div class="two">{boxes}</div>'
        if reference:
            yield f'<p class="faint">The data says: {escape(_cut(str(reference)))}</p>'


def _cut(text: str) -> str:
    return shorten(text, LETTERS, " …")


def _details(run: ReportedRun) -> Iterator[str]:
    facts = run.facts
    yield "<h2>What really ran</h2>"
    receipt = {key: value for key, value in facts.receipt.items() if key != "memory"}
    yield table(["", ""], [(dotted(path), _cell(value)) for path, value in leaves(receipt, lists="none")])
    recipe = run.folder / "recipe.yaml"
    for title, text in (
        ("The recipe, every value resolved", recipe.read_text("utf-8")),
        ("The environment", json.dumps(facts.environment, indent=2)),
    ):
        yield f"<details><summary>{title}</summary><pre>{escape(text)}</pre></details>"


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if value in (None, {}):
        return ""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


PICTURES = {"loss.png": draw_loss, "memory.png": draw_memory}


def write_page(run_dir: Path, log: Callable[[str], None]) -> None:
    """report.html of a run that goes on: 25 ms for a thousand steps."""
    with _told(log):
        write_report(read_runs([run_dir]), run_dir / NAME)


def write_pages(run_dir: Path, log: Callable[[str], None]) -> None:
    """report.html, and its pictures where matplotlib is installed."""
    with _told(log):
        runs = read_runs([run_dir])
        write_report(runs, run_dir / NAME)
        if importlib.util.find_spec("matplotlib") is not None:
            for name, draw in PICTURES.items():
                draw(runs, run_dir / name)
        log(f"report: {run_dir / NAME}")


@contextmanager
def _told(log: Callable[[str], None]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever it is, hours of training are worth more than their picture
        log(f"the report was not written: {type(error).__name__}: {error}")
