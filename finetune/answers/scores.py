"""Scores of the base and the tuned model over the same rows: intervals, wins and losses, eval.json, thresholds."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from finetune.errors import FinetuneError
from finetune.files import TEMPORARY_PREFIX, json_lines, sync, write_json, write_text
from finetune.library_errors import library_errors
from finetune.run_folder.facts import EVAL_ANSWERS, EVAL_RECORD
from finetune.scoring.intervals import interval, paired_interval
from finetune.scoring.metrics import unread, unread_in_words
from finetune.untrusted.json_files import read_object
from finetune.wording import counted

BELOW_THRESHOLD = 5  # the exit code if a score is below --fail-under
LEAST_SCORED_ROWS = 10  # resampling fewer rows gives intervals that are too narrow for a verdict


class QuestionResult(NamedTuple):
    """A question's result for both models."""

    figures: dict[str, Any]  # for eval.json
    words: str
    rows: Sequence[dict[str, Any]] = ()  # for eval_answers.jsonl


def compared(*scores: Sequence[float], answers: Sequence[Sequence[str]] = ()) -> dict[str, Any]:
    """Means with 95 % intervals, their paired difference, and how many answers got better, worse or stayed.

    `scores` are the base's and the tuned model's, or the tuned model's alone, which have a mean and an interval.
    `answers` are their texts, of which `unread` has those that the metric cannot read.
    `all_or_nothing`: every score is 0 or 1, so that a mean is a number of right answers.
    """
    models = dict(zip(("base", "tuned")[-len(scores) :], scores, strict=True))
    figures: dict[str, Any] = {name: interval(values).as_json() for name, values in models.items()}
    if len(scores) == 2:
        pairs = list(zip(*scores, strict=True))
        better, worse = (sum(after > before for before, after in pairs), sum(after < before for before, after in pairs))
        figures["difference"] = paired_interval(*scores).as_json()
        figures |= {"better": better, "worse": worse, "equal": len(pairs) - better - worse}
    figures["all_or_nothing"] = all(score in (0.0, 1.0) for values in scores for score in values)
    texts = zip(models.items(), answers, strict=False)
    return figures | {"unread": {name: unread(of_model, values) for (name, values), of_model in texts}}


def scores_table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """A line for each metric: base, tuned, difference with its interval, wins and losses; or the tuned model alone.
    Then a line for each metric and model with unread answers.
    """
    not_read = [
        f"{name} of the {model} model: {unread_in_words(missed)}"
        for name, metric in figures.items()
        for model, missed in metric.get("unread", {}).items()
        if missed["count"]
    ]
    alone = all("base" not in metric for metric in figures.values())
    head = f"{'base':>7}{'tuned':>8}{'difference, 95 %':>27}{'better':>8}{'worse':>7}"
    lines = [f"{'':14}" + (f"{'tuned':>7}{'95 %':>17}" if alone else head)]
    for name, metric in figures.items():
        tuned = metric["tuned"]
        if alone:
            lines.append(f"{name:14}{tuned['mean']:>7.3f}   [{tuned['low']:.3f}, {tuned['high']:.3f}]")
            continue
        gain = metric["difference"]
        change = f"{gain['mean']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}]"
        lines.append(
            f"{name:14}{metric['base']['mean']:>7.3f}{tuned['mean']:>8.3f}{change:>27}"
            f"{metric['better']:>8}{metric['worse']:>7}"
        )
    return "\n".join([*lines, *not_read])


def scores_in_words(figures: Mapping[str, Any]) -> str:
    """The scored rows as a heading, a table, and a sentence for each metric."""
    heading = (
        f"{counted(figures['rows'], 'answer')} to {figures['data']}, greedy, up to {figures['max_new_tokens']} tokens"
    )
    both = {name: metric for name, metric in figures["metrics"].items() if "base" in metric}
    verdicts = [score_verdict(name, metric, figures["rows"]) for name, metric in both.items()]
    if (overlap := figures["metrics"].get("chrf")) is not None:
        shares = ", ".join(f"{name} {overlap[name]['mean']:.0%}" for name in ("base", "tuned") if name in overlap)
        verdicts.append(
            f"Free answers: chrf is the share of wording in common with your answers ({shares}). It does not count "
            "right answers. Read some side by side before you decide."
        )
    cut = [f"{count:,} of the {name} model" for name, count in figures["cut"].items() if count]
    if cut:
        verdicts.append(f"Answers cut at {figures['max_new_tokens']} tokens: {', '.join(cut)} (--max-new-tokens).")
    return "\n".join([*figures["notes"], f"{heading}:", scores_table(figures["metrics"]), *verdicts])


def score_verdict(name: str, figures: Mapping[str, Any], rows: int) -> str:
    """A metric's result as a sentence: `Better: exact 1 -> 93 of 100 (difference 88 to 98).`"""
    if rows < LEAST_SCORED_ROWS:
        return f"{counted(rows, 'row')} cannot show whether {name} changed; answer {LEAST_SCORED_ROWS} or more."
    difference = figures["difference"]
    if difference["low"] <= 0 <= difference["high"]:
        return f"{rows:,} rows show no clear difference in {name}."
    means = (figures["base"]["mean"], figures["tuned"]["mean"], difference["low"], difference["high"])
    if figures["all_or_nothing"]:
        base, tuned, low, high = (f"{mean * rows:.0f}" for mean in means)
        tuned += f" of {rows:,}"
    else:
        base, tuned, low, high = (f"{mean:.3f}" for mean in means)
    return f"{'Better' if difference['low'] > 0 else 'Worse'}: {name} {base} -> {tuned} (difference {low} to {high})."


def general_in_words(figures: Mapping[str, Any]) -> str:
    """The general set as a heading, a table, and a sentence about what was forgotten."""
    change = figures["all"].get("difference")
    if change is None:
        verdict = "the base was not asked"
    elif change["high"] < 0:
        verdict = "the tuned model has forgotten some; a lower rate and the base's own answers in data.train keep more"
    elif change["low"] > 0:
        verdict = "the tuned model is better at it"
    else:
        verdict = "no clear difference"
    table = scores_table({"all": figures["all"], **figures["kinds"]})
    return f"{counted(figures['rows'], 'general question')}: {verdict}\n{table}"


def below(thresholds: Mapping[str, float], result: Mapping[str, Any]) -> list[str]:
    """A line for each threshold that the tuned model does not reach."""
    means = {name: metric["tuned"]["mean"] for name, metric in (result.get("scores") or {}).get("metrics", {}).items()}
    if "options" in result:
        means["options"] = result["options"]["accuracy"]["tuned"]["mean"]
    if "general" in result:
        means["general"] = result["general"]["all"]["tuned"]["mean"]
    return [
        f"--fail-under {name}: the tuned model reaches {means[name]:.3f}, below {least:g}"
        for name, least in thresholds.items()
        if means[name] < least
    ]


def keeps_earlier(folder: Path, result: Mapping[str, Any], limit: int | None) -> str:
    """Why eval.json is not replaced: it has more rows of the same data than this `--limit`; empty if it is replaced.

    A record from before the run's last end is of other weights.
    """
    file, state = folder / EVAL_RECORD, folder / "run_state.json"
    if limit is None or not file.is_file() or not state.is_file() or file.stat().st_mtime < state.stat().st_mtime:
        return ""
    with suppress(FinetuneError, KeyError, TypeError, AttributeError):
        earlier, now = read_object(file).get("scores") or {}, result.get("scores") or {}
        if earlier["rows"] > now["rows"] and earlier["data"] == now["data"]:
            return f"{file}: keeps the scores of {earlier['rows']:,} rows; those of --limit {limit} are above alone"
    return ""


def write_eval(folder: Path, result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Path | None:
    """Replace eval.json and, if answers were generated, eval_answers.jsonl, both or none. Returns the answers' file.

    Both are written whole beside the present ones first, so a disk that fills leaves those as they were.
    """
    record, answers = folder / EVAL_RECORD, folder / EVAL_ANSWERS
    with library_errors(writing=record), tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=folder) as temporary:
        write_json(Path(temporary) / record.name, dict(result))
        if rows:
            write_text(Path(temporary) / answers.name, json_lines(rows))
            os.replace(Path(temporary) / answers.name, answers)
        os.replace(Path(temporary) / record.name, record)
        sync(folder)
    return answers if rows else None
