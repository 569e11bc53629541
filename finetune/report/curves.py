"""Charts from a run's metrics: curves over its steps, memory by phase, and a table row."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.measure.units import PHASES
from finetune.recipe.loader import recipe_from_resolved
from finetune.report.pictures import Chart, Series, smoothed
from finetune.run_folder.facts import RunFacts, read_run, require_run_folder
from finetune.untrusted.library_words import in_one_line, words_of

# Title, key of a training line, factor.
CURVES = (
    ("Learning rate", "learning_rate", 1.0),
    ("Gradient norm, before clipping", "grad_norm", 1.0),
    ("Seconds a step", "step_seconds", 1.0),
    ("Tokens per second, all ranks", "tokens_per_second", 1.0),
    ("Share of a step waiting for data, %", "data_wait_fraction", 100.0),
)
FEWEST_SMOOTHED = 20  # lines of training; a curve of fewer is read as it is
SMOOTHED_SHARE = 12  # a smoothed point is the mean of this part of the run's lines


@dataclass(frozen=True)
class ReportedRun:
    """A run's folder, read, with the name that it has among others."""

    name: str
    folder: Path
    facts: RunFacts
    plan: Mapping[str, Any] = field(default_factory=dict)  # the JSON of finetune plan; empty if there is none


def read_runs(
    folders: Sequence[Path], plan_of: Callable[[Path], Mapping[str, Any] | None] = lambda run: None
) -> list[ReportedRun]:
    """The runs in these folders; for a comparison's folder, its jobs. Raises FinetuneError if there is no run.

    Args:
        plan_of: Makes the plan for a run's folder, to show beside the measurement; by default there is none.
    """
    jobs = [job for folder in folders for job in _jobs(folder)]
    names = _names(jobs)
    return [_read(folder, name, plan_of) for folder, name in zip(jobs, names, strict=True)]


def _jobs(folder: Path) -> list[Path]:
    if (folder / "compare.json").is_file():
        found = sorted(job for job in folder.glob("jobs/*") if (job / "metrics.jsonl").is_file())
        if not found:
            raise FinetuneError(f"{folder}: a comparison none of whose jobs has a step in jobs/; run it again")
        return found
    require_run_folder(folder)
    return [folder]


def _names(folders: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as make the names distinct."""
    for words in range(1, 1 + max(len(folder.resolve().parts) for folder in folders)):
        names = ["/".join(folder.resolve().parts[-words:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    raise FinetuneError("two of these runs are the same folder; name each once")


def _read(folder: Path, name: str, plan_of: Callable[[Path], Mapping[str, Any] | None]) -> ReportedRun:
    facts = read_run(folder, recipe_from_resolved(folder / "recipe.yaml"))
    run = ReportedRun(name, folder, facts, plan_of(folder) or {})
    with in_one_line(lambda error: FinetuneError(f"{folder}: its files are not those of a run: {words_of(error)}")):
        summary(run), phase_peaks(run), planned_peaks(run), run.facts.missing()
    return run


def loss_chart(runs: Sequence[ReportedRun]) -> Chart:
    """Training losses as curves, smoothed over the faint single ones; held-out losses as dots."""
    alone, series = len(runs) == 1, []
    for index, run in enumerate(runs):
        name = "training" if alone else run.name
        lines = [line for line in run.facts.trained() if line.get("loss") is not None]
        points, window = _points(lines, "loss"), max(5, len(lines) // SMOOTHED_SHARE) | 1
        smooth = len(points) >= FEWEST_SMOOTHED
        holes = run.facts.holes()
        series.append(Series(name, points, colour=2 * index, faint=smooth, holes=holes))
        if smooth:
            mean = smoothed(points, [line.get("supervised_tokens", 1) for line in lines], window)
            between = statistics.median(after[0] - before[0] for before, after in pairwise(points))
            steps = round(between * window)
            series.append(Series(f"{name}, mean of {steps} steps", mean, colour=2 * index, holes=holes))
        if held_out := _points(run.facts.evals(), "loss"):
            series.append(Series("held out" if alone else f"{run.name}, held out", held_out, True, 2 * index + 1))
    return Chart("Loss", series, holes=_holes(runs), leads=True)


def _losses_by_set(runs: Sequence[ReportedRun]) -> list[Chart]:
    """Held-out losses of a lone run's data sets, where it has several: NAME_loss in its evaluations."""
    names = dict.fromkeys(key for run in runs for line in run.facts.evals() for key in line if key.endswith("_loss"))
    if len(runs) > 1 or not names:
        return []
    evals = runs[0].facts.evals()
    return [
        Chart("Held-out loss by data set", [Series(key.removesuffix("_loss"), _points(evals, key)) for key in names])
    ]


def curve(runs: Sequence[ReportedRun], title: str, key: str, factor: float = 1.0) -> Chart:
    """One value of the training lines, a curve for each run."""
    series = [
        Series(run.name, _points(run.facts.trained(), key, factor), colour=2 * index, holes=run.facts.holes())
        for index, run in enumerate(runs)  # in the colours of the loss, whose every second one is for held-out rows
    ]
    return Chart(title, series, holes=_holes(runs))


def _holes(runs: Sequence[ReportedRun]) -> list[tuple[int, int]]:
    """The steps without metrics of a run that is shown alone."""
    return runs[0].facts.holes() if len(runs) == 1 else []


def memory_curve(runs: Sequence[ReportedRun]) -> Chart:
    """The training lines' peaks; the title says whether they are the process's or its tensors'."""
    return curve(runs, f"Peak memory of {peaks_of(runs)}, GiB", "peak_memory_gib")


def peaks_of(runs: Sequence[ReportedRun]) -> str:
    """The subject of a training line's memory: on a CPU the process, on a GPU its tensors."""
    kinds = {"the process" if run.facts.receipt.get("device") == "cpu" else "tensors on the GPU" for run in runs}
    return kinds.pop() if len(kinds) == 1 else "the process (CPU) or tensors (GPU)"


def curves(runs: Sequence[ReportedRun]) -> list[Chart]:
    """Everything that is drawn over the optimizer steps."""
    charts = [loss_chart(runs), *_losses_by_set(runs), *(curve(runs, *each) for each in CURVES), memory_curve(runs)]
    return [chart for chart in charts if chart.shown]


def phase_chart(runs: Sequence[ReportedRun]) -> Chart:
    """Peak memory of each phase, planned and measured, as bars."""
    peaks: dict[str, dict[str, float]] = {}
    for run in runs:
        prefix = "" if len(runs) == 1 else f"{run.name}, "
        peaks |= {f"{prefix}planned": planned_peaks(run), f"{prefix}measured": phase_peaks(run)}
    phases = [phase for phase in PHASES if any(phase in each for each in peaks.values())]
    series = [
        Series(name, [(phases.index(phase), gib) for phase, gib in each.items()])
        for name, each in peaks.items()
        if each
    ]
    return Chart("Peak memory of a rank's tensors by phase, GiB", series, phases)


def memory_chart(runs: Sequence[ReportedRun]) -> Chart:
    """`phase_chart` where a run measured its phases, else the peak over the steps."""
    return phase_chart(runs) if any(map(phase_peaks, runs)) else memory_curve(runs)


def _points(lines: Sequence[Mapping[str, Any]], key: str, factor: float = 1.0) -> list[tuple[float, float]]:
    return [(line["step"], factor * line[key]) for line in lines if line.get(key) is not None]


def phase_peaks(run: ReportedRun) -> dict[str, float]:
    """Each phase's peak, GiB: over all steps and on the rank with most, if phases were measured; else in the worst
    step, which every run measures.
    """
    peaks: dict[str, float] = {}
    for line in run.facts.metrics:
        if line.get("kind") == "phase":
            peaks[line["phase"]] = max(peaks.get(line["phase"], 0.0), float(line["peak_gib"]))
    return _in_order(peaks) or _gib((run.facts.receipt.get("memory") or {}).get("measured") or {})


def planned_peaks(run: ReportedRun) -> dict[str, float]:
    """The planner's figure for each phase, GiB; empty without a plan."""
    return _gib(run.plan)


def _gib(section: Mapping[str, Any]) -> dict[str, float]:
    return _in_order({name: phase["peak_bytes"] / 2**30 for name, phase in section.get("phases", {}).items()})


def _in_order(peaks: Mapping[str, float]) -> dict[str, float]:
    return {phase: peaks[phase] for phase in PHASES if phase in peaks}


def summary(run: ReportedRun) -> dict[str, str]:
    """One row of a table: how the run ran, and its results."""
    trained, evals, receipt = run.facts.trained(), run.facts.evals(), run.facts.receipt
    seconds = [line["step_seconds"] for line in (trained[1:] or trained)]  # the first step warms up
    parameters = receipt.get("parameters", {})
    where = f"{receipt.get('world_size', '?')} x {receipt.get('device', '?')}"
    return {
        "state": str(run.facts.state.get("state", "unknown")),
        "strategy": f"{receipt.get('strategy', '?')} on {where}",
        "trained": f"{parameters['trained']:,}" if "trained" in parameters else "",
        "steps": str(trained[-1]["step"]) if trained else "0",
        "loss": f"{trained[-1]['loss']:.4f}" if trained else "",
        "held out": " to ".join(f"{evals[index]['loss']:.4f}" for index in ({0, len(evals) - 1} if evals else ())),
        "exported": _exported(run.facts),
        "s per 20 steps": f"{20 * statistics.fmean(seconds):.2f}" if seconds else "",
        "tokens/s": f"{_rate(trained):,.0f}" if trained else "",
        "peak GiB": f"{max(line['peak_memory_gib'] for line in trained):.2f}" if trained else "",
    }


def _exported(facts: RunFacts) -> str:
    """The exported step, if it is the best evaluation's, and its held-out loss."""
    export = facts.receipt.get("export", {})
    return f"step {export['step']}, the best: {export['loss']:.4f}" if export.get("best") else ""


def _rate(trained: Sequence[Mapping[str, Any]]) -> float:
    """Tokens per second over all steps but the first."""
    lines = trained[1:] or trained
    return float(sum(line["tokens"] for line in lines) / sum(line["step_seconds"] for line in lines))
