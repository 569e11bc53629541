"""A run, or several side by side, as one page: curves, memory by phase, answers, and everything needed to repeat it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from finetune.files import write_text
from finetune.measure.units import GIB
from finetune.recipe.resolved import leaves
from finetune.recipe.yaml_text import dotted
from finetune.report.curves import (
    ReportedRun,
    curves,
    loss_chart,
    memory_chart,
    peaks_of,
    phase_chart,
    read_runs,
    summary,
)
from finetune.report.html import render_page
from finetune.report.pictures import Chart, save_png

PAGE_SAMPLES = 8  # prompts
PAGE_NAME = "report.html"
PICTURES = {"loss.png": loss_chart, "memory.png": memory_chart}


def write_report(runs: Sequence[ReportedRun], file: Path) -> None:
    """Write the page."""
    write_text(file, report(runs))


def write_pictures(runs: Sequence[ReportedRun], folder: Path) -> None:
    """Write loss.png and memory.png."""
    for name, chart in PICTURES.items():
        save_png(chart(runs), folder / name)


def report(runs: Sequence[ReportedRun]) -> str:
    """The page as HTML."""
    alone = runs[0] if len(runs) == 1 else None
    summaries = [summary(run) for run in runs]
    columns = [name for name in summaries[0] if any(each[name] for each in summaries)]
    memory = phase_chart(runs)
    samples = [(run, list(run.facts.samples_by_prompt().items())[:PAGE_SAMPLES]) for run in runs]
    return render_page(
        "report.html.jinja",
        title=f"Run {alone.name}" if alone else f"{len(runs)} runs",
        lead=_lead(alone) if alone else ", ".join(run.name for run in runs),
        facts=[(_heading(name, runs), summaries[0][name]) for name in columns] if alone else [],
        columns=["run", *(_heading(name, runs) for name in columns)],
        rows=[[run.name, *(each[name] for name in columns)] for run, each in zip(runs, summaries, strict=True)],
        numbers=range(3, len(columns) + 1),
        error=alone.facts.state.get("error") if alone else None,
        missing=[missing for run in runs if (missing := _missing(run, alone))],
        process=_process(alone) if alone else "",
        curves=curves(runs),
        memory=memory,
        memory_rows=list(_memory_rows(memory)),
        answers=[("" if alone else run.name, answers) for run, answers in samples if answers],
        receipt=_receipt(alone) if alone else [],
        documents=_documents(alone) if alone else [],
    )


def _heading(column: str, runs: Sequence[ReportedRun]) -> str:
    return f"{column}, {peaks_of(runs)}" if column == "peak GiB" else column


def _missing(run: ReportedRun, alone: ReportedRun | None) -> str:
    missing = run.facts.missing()
    return missing if alone or not missing else f"{run.name}: {missing}"


def _process(run: ReportedRun) -> str:
    """The process's memory beside its tensors, if the run measured it."""
    measured = (run.facts.receipt.get("memory") or {}).get("measured") or {}
    if measured.get("reserved_bytes"):
        return f"CUDA's allocator reserved {measured['reserved_bytes'] / GIB:.3f} GiB at its peak, caches included."
    if measured.get("process_peak_bytes"):
        gib = measured["process_peak_bytes"] / GIB
        return f"The process took {gib:.3f} GiB at its peak, with the libraries that no plan covers."
    return ""


def _lead(run: ReportedRun) -> str:
    recipe = run.facts.recipe
    method = "all weights" if recipe.lora is None else "QLoRA" if recipe.quantization else "LoRA"
    updated = str(run.facts.state.get("updated", ""))[:16].replace("T", " ")
    return f"{recipe.model.name_or_path}, {method}" + (f"; {updated} UTC" if updated else "")


def _memory_rows(chart: Chart) -> Iterator[list[str]]:
    """The bars as numbers: name, GiB of each phase."""
    for series in chart.series:
        peaks = dict(series.points)
        yield [series.name, *(f"{peaks[index]:.3f}" if index in peaks else "" for index in range(len(chart.groups)))]


def _receipt(run: ReportedRun) -> list[tuple[str, str]]:
    receipt = {key: value for key, value in run.facts.receipt.items() if key != "memory"}
    return [(dotted(path), _cell(value)) for path, value in leaves(receipt, lists="none")]


def _documents(run: ReportedRun) -> list[tuple[str, str]]:
    return [
        ("The recipe, every value resolved", (run.folder / "recipe.yaml").read_text("utf-8")),
        ("The environment", json.dumps(run.facts.environment, indent=2)),
    ]


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if value in (None, {}):
        return ""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def write_page(run_dir: Path, log: Callable[[str], None]) -> None:
    """Write report.html for a run that is still training: 0.3 to 0.5 s for a thousand steps, nearly all for drawing."""
    with _failure_logged(log):
        write_report(read_runs([run_dir]), run_dir / PAGE_NAME)


def write_pages(run_dir: Path, log: Callable[[str], None]) -> None:
    """report.html and its pictures."""
    with _failure_logged(log):
        runs = read_runs([run_dir])
        if missing := runs[0].facts.missing():
            log(f"{run_dir}: {missing}; the report shows where")
        write_report(runs, run_dir / PAGE_NAME)
        write_pictures(runs, run_dir)
        log(f"report: {run_dir / PAGE_NAME}")


@contextmanager
def _failure_logged(log: Callable[[str], None]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # no failure to draw is worth hours of training
        log(f"the report was not written: {type(error).__name__}: {error}")
