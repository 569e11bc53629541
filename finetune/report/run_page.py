"""A run, or several side by side, as one page: curves, memory by phase, answers, and everything needed to repeat it."""

from __future__ import annotations

import json
import re
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
from finetune.wording import counted, duration

PAGE_SAMPLES = 8  # prompts
_CONTROL = re.compile(r"<\|[^|<>]{1,40}\|>|<(?:start|end)_of_turn>|\[/?INST\]|</?s>|<bos>")
_ROLE = re.compile(r"^(?:user|human|system|model|assistant)\n+")
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
        told=_told(alone) if alone else [],
        first_chart=loss_chart(runs) if alone and loss_chart(runs).shown else None,
        curves=curves(runs)[1 if alone and loss_chart(runs).shown else 0 :],
        memory=memory,
        memory_rows=list(_memory_rows(memory)),
        answers=[("" if alone else run.name, answers) for run, answers in samples if answers],
        question_of=question_of,
        receipt=_receipt(alone) if alone else {},
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


def question_of(prompt: str) -> str:
    """The user's words in a rendered prompt: its last stretch between control tokens that is not a role's name."""
    stretches = [stretch.strip() for stretch in _CONTROL.split(prompt)]
    words = [_ROLE.sub("", stretch) for stretch in stretches]
    questions = [text for text in words if text and text.lower() not in ("user", "assistant", "model", "system")]
    return questions[-1] if questions and len(stretches) > 1 else prompt


def _told(run: ReportedRun) -> list[str]:
    """The run in sentences, for a reader who did not train it: the task, the data in numbers, the result."""
    recipe, receipt = run.facts.recipe, run.facts.receipt
    data, parameters = receipt.get("data") or {}, receipt.get("parameters") or {}
    trained, evals = run.facts.trained(), run.facts.evals()
    names = ", ".join(dict.fromkeys(entry.short_name for entry in recipe.data.train))
    told = []
    if data.get("documents"):
        shown = f"{data['documents']:,} examples of {names}, {data.get('tokens', 0):,} tokens"
        if data.get("supervised_tokens"):
            shown += f", of which {data['supervised_tokens']:,} are supervised (the answers)"
        told.append(f"Data: {shown}.")
    if parameters.get("trained"):
        whole = parameters["trained"] + parameters.get("frozen", 0)
        told.append(
            f"Trained: {parameters['trained']:,} of {whole:,} parameters ({parameters['trained'] / whole:.1%})."
        )
    if trained:
        seconds = sum(line["step_seconds"] for line in trained)
        where = "one CPU" if receipt.get("device") == "cpu" else f"{receipt.get('world_size', 1)} GPU"
        told.append(f"Time: {counted(trained[-1]['step'], 'step')} in {duration(seconds)} on {where}.")
    if len(evals) > 1:
        best = (receipt.get("export") or {}).get("loss") or evals[-1]["loss"]
        before = evals[0]["loss"]
        change = f"{1 - best / before:.0%} lower" if best <= before else "it got worse"
        told.append(f"Result on held-out examples: loss {before:.3f} before, {best:.3f} after ({change}).")
    return told


def _receipt(run: ReportedRun) -> dict[str, list[tuple[str, str]]]:
    """The receipt's values by their section, without those that say nothing."""
    receipt = {key: value for key, value in run.facts.receipt.items() if key != "memory"}
    groups: dict[str, list[tuple[str, str]]] = {}
    for path, value in leaves(receipt, lists="none"):
        if value in (None, "", {}, []):
            continue
        group = str(path[0]) if len(path) > 1 else "the run"
        groups.setdefault(group, []).append((dotted(path[1:] or path), _cell(value)))
    return dict(sorted(groups.items(), key=lambda pair: pair[0] != "the run"))


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
