"""A run, or several side by side, as one page: curves, memory by phase, answers, and everything needed to repeat it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from finetune.base.location import online_name
from finetune.files import write_text
from finetune.measure.units import GIB
from finetune.recipe.resolved import leaves
from finetune.recipe.schema import Recipe
from finetune.recipe.sections.preferences import objective_in_words, warnings_of
from finetune.recipe.yaml_text import dotted
from finetune.report.curves import (
    ReportedRun,
    curves,
    loss_chart,
    memory_chart,
    peaks_of,
    phase_chart,
    read_runs,
    rewards_chart,
    summary,
)
from finetune.report.html import render_page
from finetune.report.pictures import save_png
from finetune.run_folder.facts import score_rows
from finetune.wording import counted, duration

PAGE_SAMPLES = 8  # prompts shown with their answers
PAGE_WINS = 4  # answers shown that got better, and as many that got worse
_CONTROL = re.compile(r"<\|[^|<>]{1,40}\|>|<(?:start|end)_of_turn>|\[/?INST\]|</?s>|<bos>")
_ROLE = re.compile(r"^(?:user|human|system|model|assistant)\n+")
PAGE_NAME = "report.html"
# Metrics that a reader may take for correctness.
OVERLAP = {"chrf": "chrf counts letters in common, not right answers: read the answers."}
PICTURES = {"loss.png": loss_chart, "rewards.png": rewards_chart, "memory.png": memory_chart}


def write_report(runs: Sequence[ReportedRun], file: Path) -> None:
    """Write the page."""
    write_text(file, report(runs))


def write_pictures(runs: Sequence[ReportedRun], folder: Path) -> list[str]:
    """Write loss.png, memory.png and, of runs on preferences, rewards.png. Returns the written names."""
    written = []
    for name, chart_of in PICTURES.items():
        chart = chart_of(runs)
        if chart.shown or name != "rewards.png":
            save_png(chart, folder / name)
            written.append(name)
    return written


def report(runs: Sequence[ReportedRun]) -> str:
    """The page as HTML. A single run has facts, receipt and documents; several runs are rows of one table."""
    summaries = [summary(run) for run in runs]
    columns = [name for name in summaries[0] if any(row[name] for row in summaries)]
    headings = [f"peak GiB, {peaks_of(runs)}" if name == "peak GiB" else name for name in columns]
    rows = [[run.name, *(row[name] for name in columns)] for run, row in zip(runs, summaries, strict=True)]
    memory = phase_chart(runs)
    memory_rows = []  # the bars as numbers: name, GiB of each phase
    for series in memory.series:
        gib = {index: f"{value:.3f}" for index, value in series.points}
        memory_rows.append([series.name, *(gib.get(index, "") for index in range(len(memory.groups)))])
    objectives: list[str] = []  # another beta or loss_type scales the losses
    sections = [run.facts.recipe.preferences for run in runs]
    if any(section != sections[0] for section in sections):
        words = ["supervised" if section is None else objective_in_words(section) for section in sections]
        named = "; ".join(f"{run.name}: {objective}" for run, objective in zip(runs, words, strict=True))
        objectives.append(f"The objectives differ, so the losses do not compare. {named}.")
    values: dict[str, Any] = {
        "title": f"{len(runs)} runs",
        "lead": ", ".join(run.name for run in runs),
        "facts": [],
        "columns": ["run", *headings],
        "rows": rows,
        "numbers": range(3, len(columns) + 1),  # columns aligned right: all behind run, state and strategy
        "error": None,
        "missing": [
            *(f"{run.name}: {missing}" for run in runs if (missing := run.facts.missing())),
            *objectives,
            *(f"{run.name}: {warning}" for run in runs for warning in _warnings(run)),
        ],
        "process": "",
        "curves": curves(runs),
        "memory": memory,
        "memory_rows": memory_rows,
        "answers": [(run.name, prompts) for run in runs if (prompts := _first_prompts(run))],
        "question_of": question_of,
        "told": [],
        "first_chart": None,
        "scores": [(run.name, *row) for run in runs for row in score_rows(run.facts)],
        "overlap": [words for metric, words in OVERLAP.items() if any(metric in _scored(run) for run in runs)],
        "wins": [],
        "receipt": {},
        "documents": [],
    }
    if len(runs) == 1:
        values |= _values_of_single(runs[0])
        values["facts"] = list(zip(headings, rows[0][1:], strict=True))
        loss = loss_chart(runs)
        if loss.shown:  # in the part for others; the other curves are the trainer's
            values["first_chart"] = loss
            values["curves"] = values["curves"][1:]
    return render_page("report.html.jinja", **values)


def _first_prompts(run: ReportedRun) -> list[Any]:
    return list(run.facts.samples_by_prompt().items())[:PAGE_SAMPLES]


def _values_of_single(run: ReportedRun) -> dict[str, Any]:
    """The page's values that only a single run has, or that do not repeat its name."""
    facts, recipe = run.facts, run.facts.recipe
    method = "LoRA"
    if recipe.lora is None:
        method = "all weights"
    elif recipe.quantization:
        method = "QLoRA"
    lead = f"{online_name(recipe.model.name_or_path)}, {method}"
    if updated := str(facts.state.get("updated", ""))[:16].replace("T", " "):
        lead += f"; {updated} UTC"
    measured = (facts.receipt.get("memory") or {}).get("measured") or {}
    process = ""  # the process's memory beside its tensors, if the run measured it
    if measured.get("reserved_bytes"):
        gib = measured["reserved_bytes"] / GIB
        process = f"CUDA's allocator reserved {gib:.3f} GiB at its peak, caches included."
    elif measured.get("process_peak_bytes"):
        gib = measured["process_peak_bytes"] / GIB
        process = f"The process took {gib:.3f} GiB at its peak, with the libraries that no plan covers."
    missing, wins = facts.missing(), _wins_and_losses(run)
    shown = {row["prompt"] for _, rows in wins for row in rows}
    prompts = [(prompt, lines) for prompt, lines in _first_prompts(run) if prompt not in shown]
    # The receipt's values by their section, without those that say nothing.
    receipt = {key: value for key, value in run.facts.receipt.items() if key != "memory"}
    groups: dict[str, list[tuple[str, str]]] = {}
    for path, value in leaves(receipt, lists="none"):
        if value in (None, "", {}, []):
            continue
        group = str(path[0]) if len(path) > 1 else "the run"
        groups.setdefault(group, []).append((dotted(path[1:] or path), _cell(value)))
    return {
        "title": f"Run {run.name}",
        "lead": lead,
        "error": facts.state.get("error"),
        "missing": [*filter(None, [missing]), *_warnings(run)],
        "process": process,
        "answers": [("", prompts)] if prompts else [],
        "receipt": dict(sorted(groups.items(), key=lambda pair: pair[0] != "the run")),
        "told": _told(run),
        "scores": score_rows(facts),
        "wins": wins,
        "documents": [
            ("The recipe, every value resolved", (run.folder / "recipe.yaml").read_text("utf-8")),
            ("The environment", json.dumps(facts.environment, indent=2)),
        ],
    }


def _warnings(run: ReportedRun) -> list[str]:
    """Lines for the figures that docs/preferences.md calls bad."""
    if run.facts.recipe.preferences is None:
        return []
    rows = run.facts.recipe.training.global_batch_size
    return [*warnings_of(run.facts.trained(), run.facts.exported_eval(), rows)]


def _scored(run: ReportedRun) -> Mapping[str, Any]:
    """The scores of `finetune eval`, by metric."""
    metrics: Mapping[str, Any] = run.facts.evaluated.get("scores", {}).get("metrics", {})
    return metrics


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
        noun = "example" if recipe.preferences is None else recipe.data.row_noun
        shown = f"{counted(data['documents'], noun)} of {names}, {data.get('tokens', 0):,} tokens"
        if data.get("supervised_tokens"):
            shown += f"; {data['supervised_tokens']:,} of them are supervised (the answers)"
        told.append(f"Data: {shown}.")
    if parameters.get("trained"):
        whole = parameters["trained"] + parameters.get("frozen", 0)
        told.append(
            f"Trained: {parameters['trained']:,} of {whole:,} parameters ({parameters['trained'] / whole:.1%})."
        )
    if recipe.preferences is not None:
        told.append(f"Objective: {objective_in_words(recipe.preferences)}.")
    if trained:
        seconds = sum(line["step_seconds"] for line in trained)
        where = "one CPU" if receipt.get("device") == "cpu" else f"{receipt.get('world_size', 1)} GPU"
        told.append(f"Time: {counted(trained[-1]['step'], 'step')} in {duration(seconds)} on {where}.")
    if len(evals) > 1:
        exported = run.facts.exported_eval() or evals[-1]
        before, after = evals[0]["loss"], exported["loss"]
        change = f"{1 - after / before:.0%} lower" if after <= before else "it got worse"
        held_out = "examples" if recipe.preferences is None else f"{recipe.data.row_noun}s"
        told.append(f"Result on held-out {held_out}: loss {before:.3f} before, {after:.3f} after ({change}).")
        told += _rewards_told(recipe, exported, data.get("eval_documents"))
    for name, base, tuned, change in score_rows(run.facts):
        told.append(f"Score, {name}: {base} before, {tuned} after, difference {change}.")
    if trained and not run.facts.evaluated.get("general"):
        told.append("Not measured: forgetting. finetune eval RUN --general asks both models general questions.")
    return told


def _rewards_told(recipe: Recipe, exported: Mapping[str, Any], rows: int | None) -> Iterator[str]:
    """A sentence about the exported weights' rewards on held-out rows, if the run has them."""
    accuracy, margin = exported.get("reward_accuracy"), exported.get("reward_margin")
    if kl := exported.get("kl_by_token"):
        yield f"Distance from the reference: KL {kl:.2f} by token; 0.01 to 0.3 is usual."
    if accuracy is None:
        return
    of_rows = f"held-out {recipe.data.row_noun}s" if rows is None else counted(rows, f"held-out {recipe.data.row_noun}")
    says = "the chosen answer gained more than the rejected one"
    if recipe.data.unit == "judged":
        says = "a wanted answer gained, or an unwanted one lost, against the baseline"
    line = f"Reward accuracy: in {accuracy:.0%} of {of_rows} {says}"
    yield f"{line}." if margin is None else f"{line}; the mean reward margin is {margin:.3g}."


def _wins_and_losses(run: ReportedRun) -> list[tuple[str, list[Any]]]:
    """The first answers with a higher score by the first metric, and the first with a lower one."""
    metric = next(iter(_scored(run)), "score")
    better: list[Any] = []
    worse: list[Any] = []
    for row in run.facts.scored_answers:
        scores = row.get("scores")
        pairs = [*scores.values()] if isinstance(scores, dict) else []
        if not pairs or not isinstance(pairs[0], list) or len(pairs[0]) != 2:
            continue
        base, tuned = pairs[0]
        if isinstance(base, int | float) and isinstance(tuned, int | float) and base != tuned:
            (better if tuned > base else worse).append(row)
    groups = [(f"Higher {metric} than before", better), (f"Lower {metric} than before", worse)]
    return [(f"{name}: {counted(len(rows), 'answer')}", rows[:PAGE_WINS]) for name, rows in groups if rows]


def _cell(value: Any) -> str:
    """A receipt's value: 12345 as 12,345, a list with commas, and null or an empty section as nothing."""
    if value in (None, {}):
        return ""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def write_page(run_dir: Path, say: Callable[[str], None]) -> None:
    """Write report.html for a run that is still training. A thousand steps take 0.3 to 0.5 s, mostly to draw."""
    with _failure_logged(say):
        write_report(read_runs([run_dir]), run_dir / PAGE_NAME)


def write_pages(run_dir: Path, say: Callable[[str], None]) -> None:
    """Write report.html and its pictures for a run that has ended."""
    with _failure_logged(say):
        runs = read_runs([run_dir])
        if missing := runs[0].facts.missing():
            say(f"{run_dir}: {missing}; the report shows where")
        write_report(runs, run_dir / PAGE_NAME)
        write_pictures(runs, run_dir)
        say(f"report: {run_dir / PAGE_NAME}")


@contextmanager
def _failure_logged(say: Callable[[str], None]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a page that cannot be drawn must not end hours of training
        say(f"the report was not written: {type(error).__name__}: {error}")
