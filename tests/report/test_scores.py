"""Scores in the report and on the card: those of eval.json, and nothing for files that no eval writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finetune.finished_run.scores import compared
from finetune.recipe.loader import recipe_from_resolved
from finetune.report.curves import read_runs, score_chart
from finetune.report.run_page import report
from finetune.run_folder.facts import read_run, score_rows
from tests.support.runs.finished import finished_run

ANSWERS = [("Bonn", 0.0, 1.0), ("Berlin", 1.0, 0.0), ("Paris", 0.0, 1.0), ("Rome", 1.0, 1.0)]


def evaluated(run: Path, **changes: Any) -> Path:
    figures = compared([base for _, base, _ in ANSWERS], [tuned for _, _, tuned in ANSWERS])
    scores = {"data": "held-out rows", "rows": 4, "max_new_tokens": 8, "notes": [], "metrics": {"exact": figures}}
    (run / "eval.json").write_text(json.dumps({"scores": scores | changes}), "utf-8")
    rows = [
        {"prompt": f"where is {name}", "reference": name, "base": f"base {name}", "tuned": f"tuned {name}",
         "scores": {"exact": [base, tuned]}}
        for name, base, tuned in ANSWERS
    ]  # fmt: skip
    (run / "eval_answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return run


def test_wins_and_losses_side_by_side(tmp_path: Path, tiny_llama: Path) -> None:
    run = evaluated(finished_run(tmp_path, tiny_llama))
    page = report(read_runs([run]))
    for text in (
        "Score, exact, 4 answers: 50.0% before, 75.0% after, difference +25.0 points",
        "Better than before: 2 answers",
        "Worse than before: 1 answer",
        "tuned Bonn",
        "base Berlin",
    ):
        assert text in page
    assert "tuned Rome" not in page  # right before and after


def test_files_that_no_eval_writes_show_nothing(tmp_path: Path, tiny_llama: Path) -> None:
    run = finished_run(tmp_path, tiny_llama)
    recipe = recipe_from_resolved(run / "recipe.yaml")
    for changes in ({"rows": "four"}, {"metrics": {"exact": {"base": 1}}}, {"metrics": [1]}):
        assert score_rows(read_run(evaluated(run, **changes), recipe)) == []
        assert "Better than before" not in report(read_runs([run]))
    assert len(score_rows(read_run(evaluated(run), recipe))) == 1


def test_scores_in_training_are_a_chart(tmp_path: Path, tiny_llama: Path) -> None:
    run = finished_run(tmp_path, tiny_llama)
    lines = [{"kind": "score", "step": step, "rows": 4, "score_exact": score} for step, score in ((0, 0.25), (4, 0.5))]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    series = score_chart(read_runs([run])).series
    assert [(each.name, list(each.points)) for each in series] == [("exact", [(0, 0.25), (4, 0.5)])]
