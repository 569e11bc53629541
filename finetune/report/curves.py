"""Charts from a run's metrics: curves over its steps, memory by phase, and a table row."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.library_errors import library_errors
from finetune.measure.units import GIB, PHASES
from finetune.recipe.loader import recipe_from_resolved
from finetune.recipe.sections.preferences import is_own_reference
from finetune.report.pictures import Chart, Series, smoothed
from finetune.run_folder.facts import RunFacts, read_run, require_run_folder
from finetune.wording import metric_in_words

# Title, key of a training line, factor.
CURVES = (
    ("Learning rate", "learning_rate", 1.0),
    ("Gradient norm, before clipping", "grad_norm", 1.0),
    ("Seconds a step", "step_seconds", 1.0),
    ("Tokens per second, all ranks", "tokens_per_second", 1.0),
    ("Share of a step waiting for data, %", "data_wait_fraction", 100.0),
)
# Curves of runs on preferences: title, key of training lines and evaluations, factor.
PREFERENCE_CURVES = (
    ("Reward accuracy, %", "reward_accuracy", 100.0),
    ("Reward margin, chosen less rejected", "reward_margin", 1.0),
    ("KL to the reference, by token", "kl_by_token", 1.0),
    ("KL baseline", "kl", 1.0),
)
# Title, and the key of each kind of answer. KTO has no figures by token.
REWARDS = ("Rewards", {"chosen": "reward_chosen", "rejected": "reward_rejected"})
LOGP_BY_TOKEN = ("Log-probability by token", {"chosen": "logp_chosen_by_token", "rejected": "logp_rejected_by_token"})
LOGPS = ("Log-probability of an answer", {"chosen": "logps_chosen", "rejected": "logps_rejected"})
ANSWER_COLOURS = (2, 3)  # green and red of pictures.COLOURS
FEWEST_SMOOTHED = 20  # training lines; a shorter curve is not smoothed
SMOOTHED_SHARE = 12  # a smoothed point is the mean of a twelfth of the run's lines


@dataclass(frozen=True)
class ReportedRun:
    """A run's folder, its contents, and its name among the other runs."""

    name: str
    folder: Path
    facts: RunFacts
    plan: Mapping[str, Any] = field(default_factory=dict)  # the JSON of finetune plan; empty if there is none


def read_runs(
    folders: Sequence[Path], plan_of: Callable[[Path], Mapping[str, Any] | None] = lambda run: None
) -> list[ReportedRun]:
    """Read the runs in these folders; a comparison's folder gives its jobs. Raises FinetuneError if there is no run.

    Args:
        plan_of: Makes the plan for a run's folder, to show beside the measurement; by default there is none.
    """
    run_folders: list[Path] = []
    for folder in folders:
        if (folder / "compare.json").is_file():
            jobs = sorted(job for job in folder.glob("jobs/*") if (job / "metrics.jsonl").is_file())
            if not jobs:
                raise FinetuneError(f"{folder}: no job of this comparison has trained a step; run it again")
            run_folders += jobs
        else:
            require_run_folder(folder)
            run_folders.append(folder)
    runs = []
    for folder, name in zip(run_folders, _distinct_names(run_folders), strict=True):
        facts = read_run(folder, recipe_from_resolved(folder / "recipe.yaml"))
        run = ReportedRun(name, folder, facts, plan_of(folder) or {})
        # Compute every figure once, so that a damaged file is one line here and no traceback while the page is drawn.
        with library_errors(f"{folder}: its files are not those of a run"):
            for figures_of in (summary, phase_peaks, planned_peaks):
                figures_of(run)
            run.facts.missing()
        runs.append(run)
    return runs


def _distinct_names(folders: Sequence[Path]) -> list[str]:
    """Each path's end, with as many parts as make the names distinct: a/run and b/run."""
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, 1 + max(map(len, parts))):
        names = ["/".join(path[-count:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    raise FinetuneError("two of these runs are the same folder; name each once")


def loss_chart(runs: Sequence[ReportedRun]) -> Chart:
    """Training losses as faint curves, their smoothed curves before them, and held-out losses as dots."""
    return measured_chart(runs, "Loss", "loss", leads=True)


def measured_chart(
    runs: Sequence[ReportedRun], title: str, key: str, factor: float = 1.0, *, leads: bool = False
) -> Chart:
    """A value that training lines and evaluations have: faint curves, smoothed ones before them, and dots.

    Smaller charts of several runs have no room for the faint curves.
    """
    series = []
    for index, run in enumerate(runs):
        training_name, held_out_name = run.name, f"{run.name}, held out"
        if len(runs) == 1:
            training_name, held_out_name = "training", "held out"
        points = _points(run.facts.trained(), key, factor)
        smooth, steps = _smoothed(run, key, factor)
        if leads or len(runs) == 1 or not smooth:
            series.append(Series(training_name, points, colour=index, faint=bool(smooth)))
        if smooth:
            series.append(Series(f"{training_name}, mean of {steps} steps", smooth, colour=index))
        if held_out := _held_out(run, key, factor):
            # Several runs have one colour each. A single run has a second one for its held-out rows.
            series.append(Series(held_out_name, held_out, True, 1 if len(runs) == 1 else index))
    return Chart(title, series, leads=leads)


def _held_out(run: ReportedRun, key: str, factor: float = 1.0) -> list[tuple[float, float]]:
    """The evaluations' values. A model that is its own reference has no accuracy yet: all margins are 0."""
    lines = run.facts.evals()
    if key == "reward_accuracy":
        lines = [line for line in lines if not is_own_reference(line)]
    return _points(lines, key, factor)


def _smoothed(run: ReportedRun, key: str, factor: float = 1.0) -> tuple[list[tuple[float, float]], int]:
    """The means of neighbouring training lines by their supervised tokens, and the steps in each; nothing for a run
    that is too short."""
    lines = [line for line in run.facts.trained() if line.get(key) is not None]
    if len(lines) < FEWEST_SMOOTHED:
        return [], 1
    # An odd window has a middle: 60 lines give 5, 240 lines give 21.
    points, window = _points(lines, key, factor), max(5, len(lines) // SMOOTHED_SHARE) | 1
    mean = smoothed(points, [line.get("supervised_tokens", 1) for line in lines], window)
    steps_between = statistics.median(after[0] - before[0] for before, after in pairwise(points))
    return mean, round(steps_between * window)


def reward_charts(runs: Sequence[ReportedRun]) -> list[Chart]:
    """The charts of runs on preferences; each is empty where no run has its values."""
    charts = [measured_chart(runs, *row) for row in PREFERENCE_CURVES]
    by_token = any("logp_chosen_by_token" in line for run in runs for line in run.facts.trained())
    for title, keys in (REWARDS, LOGP_BY_TOKEN if by_token else LOGPS):
        if len(runs) == 1:
            charts.append(chosen_and_rejected(runs[0], title, keys))
        else:
            charts += [measured_chart(runs, f"{title}, {answer}", key) for answer, key in keys.items()]
    return charts


def chosen_and_rejected(run: ReportedRun, title: str, keys: Mapping[str, str]) -> Chart:
    """Chart one metric for chosen and rejected answers: smoothed curves from training, dots from held-out rows."""
    curves, dots, shown = [], [], title
    for colour, (answer, key) in zip(ANSWER_COLOURS, keys.items(), strict=True):
        smooth, steps = _smoothed(run, key)
        if smooth:
            shown = f"{title}, means of {steps} steps"
        points = smooth or _points(run.facts.trained(), key)
        curves.append(Series(answer, points, colour=colour))
        dots.append(Series(f"{answer}, held out", _held_out(run, key), True, colour))
    return Chart(shown, [*curves, *dots])


def rewards_chart(runs: Sequence[ReportedRun]) -> Chart:
    """The rewards of chosen and rejected answers of one run, or the reward margins of several; empty without any."""
    if len(runs) == 1:
        return chosen_and_rejected(runs[0], *REWARDS)
    return measured_chart(runs, *PREFERENCE_CURVES[1])


def score_chart(runs: Sequence[ReportedRun]) -> Chart:
    """The scores of answers that were generated in training, as dots: a single run's by metric."""
    series = []
    for index, run in enumerate(runs):
        lines = run.facts.scores()
        keys = dict.fromkeys(key for line in lines for key in line if key.startswith("score_"))
        for place, key in enumerate(keys):
            metric = key.removeprefix("score_")
            name, colour = f"{run.name}, {metric}", index
            if len(runs) == 1:
                name, colour = metric, place
            series.append(Series(name, _points(lines, key), True, colour))
    return Chart("Score of answers to held-out rows", series)


def reliability_chart(run: ReportedRun) -> Chart:
    """How often given answers are right, by the probability that the model gave them; a calibrated model's dots lie on
    the grey line."""
    figures = run.facts.evaluated.get("options", {})
    series = []
    for name in ("base", "tuned") if figures else ():
        curve_of = figures[name]["curve"]
        points = [(100 * point["probability"], 100 * point["right"]["mean"]) for point in curve_of]
        series.append(Series(name, points, dots=True))
    if series:
        series.append(Series("calibrated", [(0.0, 0.0), (100.0, 100.0)], colour=2, faint=True))
    return Chart("Right answers, %, by the probability of the answer, %", series)


def curve(runs: Sequence[ReportedRun], title: str, key: str, factor: float = 1.0) -> Chart:
    """One value of the training lines, a curve for each run."""
    series = [
        Series(run.name, _points(run.facts.trained(), key, factor), colour=index) for index, run in enumerate(runs)
    ]
    return Chart(title, series)


def memory_curve(runs: Sequence[ReportedRun]) -> Chart:
    """The training lines' peaks; the title says whether they are the process's or its tensors'."""
    return curve(runs, f"Peak memory of {peaks_of(runs)}, GiB", "peak_memory_gib")


def peaks_of(runs: Sequence[ReportedRun]) -> str:
    """Name what a training line's memory measures: on a CPU the process, on a GPU its tensors."""
    on_cpu = [run.facts.receipt.get("device") == "cpu" for run in runs]
    if all(on_cpu):
        return "the process"
    if any(on_cpu):
        return "the process (CPU) or tensors (GPU)"
    return "tensors on the GPU"


def curves(runs: Sequence[ReportedRun]) -> list[Chart]:
    """All charts over the optimizer steps that have something to show."""
    charts = [loss_chart(runs), *reward_charts(runs)]
    if len(runs) == 1:
        # With several data.eval sets, an evaluation holds NAME_loss for each.
        evals = runs[0].facts.evals()
        keys = dict.fromkeys(key for line in evals for key in line if key.endswith("_loss"))
        by_set = [Series(key.removesuffix("_loss"), _points(evals, key)) for key in keys]
        charts.append(Chart("Held-out loss by data set", by_set))
    charts.append(score_chart(runs))
    if len(runs) == 1:
        charts.append(reliability_chart(runs[0]))
    charts += [curve(runs, *row) for row in CURVES]
    charts.append(memory_curve(runs))
    return [chart for chart in charts if chart.shown]


def phase_chart(runs: Sequence[ReportedRun]) -> Chart:
    """Peak memory of each phase, planned and measured, as bars."""
    planned, measured = [planned_peaks(run) for run in runs], [phase_peaks(run) for run in runs]
    phases = [phase for phase in PHASES if any(phase in times for times in (*planned, *measured))]
    series = []
    for index, run in enumerate(runs):
        prefix = f"{run.name}, " if len(runs) > 1 else ""
        for name, peaks in (("planned", planned[index]), ("measured", measured[index])):
            if peaks:
                points = [(phases.index(phase), gib) for phase, gib in peaks.items()]
                series.append(Series(f"{prefix}{name}", points, colour=index, faint=name == "planned"))
    return Chart("Peak memory of a rank's tensors by phase, GiB", series, phases)


def memory_chart(runs: Sequence[ReportedRun]) -> Chart:
    """`phase_chart` where a run measured its phases, else the peak over the steps."""
    if any(phase_peaks(run) for run in runs):
        return phase_chart(runs)
    return memory_curve(runs)


def _points(lines: Sequence[Mapping[str, Any]], key: str, factor: float = 1.0) -> list[tuple[float, float]]:
    return [(line["step"], factor * line[key]) for line in lines if line.get(key) is not None]


def phase_peaks(run: ReportedRun) -> dict[str, float]:
    """Each phase's measured peak, GiB.

    With measured phases, the peak over all steps, on the rank with the highest. Else the worst step's peak; every run
    measures it.
    """
    peaks: dict[str, float] = {}
    for line in run.facts.metrics:
        if line.get("kind") == "phase":
            peaks[line["phase"]] = max(peaks.get(line["phase"], 0.0), float(line["peak_gib"]))
    if any(phase in peaks for phase in PHASES):
        return {phase: peaks[phase] for phase in PHASES if phase in peaks}
    return _peaks_in_gib((run.facts.receipt.get("memory") or {}).get("measured") or {})


def planned_peaks(run: ReportedRun) -> dict[str, float]:
    """The planner's figure for each phase, GiB; empty without a plan."""
    return _peaks_in_gib(run.plan)


def _peaks_in_gib(section: Mapping[str, Any]) -> dict[str, float]:
    """A plan's or receipt's peaks, in the order in which a step has its phases."""
    peaks = {name: phase["peak_bytes"] / GIB for name, phase in section.get("phases", {}).items()}
    return {phase: peaks[phase] for phase in PHASES if phase in peaks}


def summary(run: ReportedRun) -> dict[str, str]:
    """One row of a table: how the run ran, and its results."""
    receipt, trained, evals = run.facts.receipt, run.facts.trained(), run.facts.evals()
    strategy, ranks, device = (receipt.get(key, "?") for key in ("strategy", "world_size", "device"))
    row = {
        "state": str(run.facts.state.get("state", "unknown")),
        "strategy": f"{strategy} on {ranks} x {device}",
        "trained": "",
        "steps": "0",
        **dict.fromkeys(("loss", "held out", "reward accuracy", "reward margin"), ""),
        **dict.fromkeys(("KL by token", "log-p chosen", "exported"), ""),
        **dict.fromkeys(("s per 20 steps", "tokens/s", "peak GiB"), ""),
    }
    parameters, export = receipt.get("parameters", {}), receipt.get("export", {})
    if "trained" in parameters:
        row["trained"] = f"{parameters['trained']:,}"
    if evals:
        row["held out"] = f"{evals[0]['loss']:.4f}"
        if len(evals) > 1:
            row["held out"] += f" to {evals[-1]['loss']:.4f}"
        # Only the last: before training all rewards are 0, because the model is its own reference.
        if evals[-1].get("reward_accuracy") is not None:
            row["reward accuracy"] = f"{evals[-1]['reward_accuracy']:.1%}"
        if evals[-1].get("reward_margin") is not None:
            row["reward margin"] = f"{evals[-1]['reward_margin']:.3g}"
    if run.facts.recipe.preferences is not None:
        last = (evals or trained or [{}])[-1]
        if last.get("kl_by_token") is not None:
            row["KL by token"] = f"{last['kl_by_token']:.2f}"
        if last.get("logp_chosen_by_token") is not None:
            row["log-p chosen"] = f"{last['logp_chosen_by_token']:.2f}"
    if export.get("best"):
        best = metric_in_words(str(export.get("metric", "eval_loss")), export["loss"]).removeprefix("held-out ")
        row["exported"] = f"step {export['step']}, the best: {best.removeprefix('loss ')}"
    if trained:
        row["steps"] = str(trained[-1]["step"])
        row["loss"] = f"{trained[-1]['loss']:.4f}"
        timed = trained[1:] or trained  # the first step warms up
        seconds = [line["step_seconds"] for line in timed]
        row["s per 20 steps"] = f"{20 * statistics.fmean(seconds):.2f}"
        row["tokens/s"] = f"{float(sum(line['tokens'] for line in timed) / sum(seconds)):,.0f}"
        row["peak GiB"] = f"{max(line['peak_memory_gib'] for line in trained):.2f}"
    return row
