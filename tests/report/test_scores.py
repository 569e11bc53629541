"""Scores in the report and on the card: those of eval.json, and nothing for files that no eval writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from finetune.answers.options import probability_figures
from finetune.answers.scores import compared
from finetune.recipe.loader import recipe_from_resolved
from finetune.report.curves import read_runs, reliability_chart, score_chart
from finetune.report.run_page import report
from finetune.run_folder.facts import read_run, score_rows
from finetune.scoring.metrics import Unread
from tests.support.runs.finished import finished_run

ANSWERS = [("Bonn", 0.0, 1.0), ("Berlin", 1.0, 0.0), ("Paris", 0.0, 1.0), ("Rome", 1.0, 1.0)]


def evaluated(run: Path, metric: str = "exact", **changes: Any) -> Path:
    figures = compared([base for _, base, _ in ANSWERS], [tuned for _, _, tuned in ANSWERS])
    scores = {"data": "held-out rows", "rows": 4, "max_new_tokens": 8, "notes": [], "metrics": {metric: figures}}
    (run / "eval.json").write_text(json.dumps({"scores": scores | changes}), "utf-8")
    rows = [
        {"prompt": f"where is {name}", "reference": name, "base": f"base {name}", "tuned": f"tuned {name}",
         "scores": {metric: [base, tuned]}}
        for name, base, tuned in ANSWERS
    ]  # fmt: skip
    rows[1]["cut"] = {"base": 8}
    (run / "eval_answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return run


def test_wins_and_losses_side_by_side(tmp_path: Path, tiny_llama: Path) -> None:
    run = evaluated(finished_run(tmp_path, tiny_llama))
    page = report(read_runs([run]))
    for text in (
        "Score, exact, 4 answers: 50.0% before, 75.0% after, difference +25.0 points",
        "Higher exact than before: 2 answers",
        "Lower exact than before: 1 answer",
        "tuned Bonn",
        "base Berlin",
    ):
        assert text in page
    assert "tuned Rome" not in page  # right before and after
    assert page.count("… cut at ") == page.count('base Berlin <span class="faint">… cut at 8 tokens</span></pre>') == 1


def test_overlap_is_not_called_correctness_and_no_question_is_shown_twice(tmp_path: Path, tiny_llama: Path) -> None:
    run = evaluated(finished_run(tmp_path, tiny_llama), metric="chrf")
    samples = [
        {"when": when, "step": step, "prompt": prompt, "answer": f"{when} {prompt[-4:]}", "reference": "so"}
        for when, step in (("before", 0), ("after", 4))
        for prompt in ("where is Bonn", "where is Lima")
    ]
    samples[-1]["cut"] = 9
    (run / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples), "utf-8")
    page = report(read_runs([run]))
    assert "Higher chrf than before: 2 answers" in page
    assert page.count("chrf counts letters in common, not right answers") == 1
    assert page.count("where is Bonn") == 1  # among the scored ones, with the same two models' answers
    assert page.count("where is Lima") == 1
    assert page.count("… cut at 9 tokens") == 1
    assert page.count("… cut at 8 tokens") == 1
    assert page.index("after Lima") < page.index("… cut at 9 tokens")
    assert "counts letters" not in report(read_runs([evaluated(run)]))  # exact is what it says


def test_several_runs_show_their_scores_in_one_table(tmp_path: Path, tiny_llama: Path) -> None:
    runs = [finished_run(tmp_path / name, tiny_llama) for name in ("a", "b")]
    page = report(read_runs([evaluated(runs[0]), evaluated(runs[1], metric="chrf")]))
    found = re.findall(r"<tr><td>([^<]*)</td><td>((?:exact|chrf), 4 answers)</td>", page)
    assert [metric for _, metric in found] == ["exact, 4 answers", "chrf, 4 answers"]
    assert [name.split("/")[0] for name, _ in found] == ["a", "b"]
    assert "not right answers" in page


def test_files_that_no_eval_writes_show_nothing(tmp_path: Path, tiny_llama: Path) -> None:
    run = finished_run(tmp_path, tiny_llama)
    recipe = recipe_from_resolved(run / "recipe.yaml")
    figures = compared([0.0], [1.0]) | {"unread": {"base": "many"}}
    for changes in (
        {"rows": "four"}, {"metrics": {"exact": {"base": 1}}}, {"metrics": [1]}, {"metrics": {"exact": figures}}
    ):  # fmt: skip
        assert score_rows(read_run(evaluated(run, **changes), recipe)) == []
        assert "than before:" not in report(read_runs([run]))
    assert len(score_rows(read_run(evaluated(run), recipe))) == 1
    figures = compared([Unread(), 1.0], [1.0, 0.0], answers=[["four", "4"], ["4", "5"]])
    (row,) = score_rows(read_run(evaluated(run, metrics={"number": figures}), recipe))
    assert row[0] == "number, 4 answers (unread: 1 base)"


def test_given_answers_have_a_row_and_a_curve(tmp_path: Path, tiny_llama: Path) -> None:
    run, right = finished_run(tmp_path, tiny_llama), np.asarray([0, 1, 0, 1])
    shares = {"base": np.full((4, 2), 0.5), "tuned": np.asarray([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7], [0.1, 0.9]])}
    figures: dict[str, Any] = {"rows": 4, "accuracy": compared([1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0])}
    figures |= {name: probability_figures(each, right) for name, each in shares.items()}
    (run / "eval.json").write_text(json.dumps({"options": figures}), "utf-8")
    recipe = recipe_from_resolved(run / "recipe.yaml")
    (row,) = score_rows(read_run(run, recipe))
    assert row[:3] == ("given answers by probability, 4 answers", "50.0%", "75.0%")
    (reported,) = read_runs([run])
    drawn = {series.name: [*map(list, series.points)] for series in reliability_chart(reported).series}
    assert drawn["base"] == [[50, 50]]
    assert np.allclose(drawn["tuned"], [[70, 0], [80, 100], [90, 100]])
    assert "by the probability of the answer" in report([reported])
    figures["tuned"]["curve"] = [{"probability": "high"}]
    (run / "eval.json").write_text(json.dumps({"options": figures}), "utf-8")
    assert score_rows(read_run(run, recipe)) == []
    assert "by the probability of the answer" not in report(read_runs([run]))


def test_scores_in_training_are_a_chart(tmp_path: Path, tiny_llama: Path) -> None:
    run = finished_run(tmp_path, tiny_llama)
    lines = [{"kind": "score", "step": step, "rows": 4, "score_exact": score} for step, score in ((0, 0.25), (4, 0.5))]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    series = score_chart(read_runs([run])).series
    assert [(each.name, list(each.points)) for each in series] == [("exact", [(0, 0.25), (4, 0.5)])]
