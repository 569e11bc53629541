"""The verdict on scored answers: a sentence that follows from the paired interval, and none from too few rows."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from finetune.answers.evaluation import evaluate_finished
from finetune.answers.requests import EvalRequest, chosen_metrics
from finetune.answers.scores import compared, keeps_earlier, score_verdict, scores_in_words, write_eval
from finetune.errors import EnvironmentMismatch, FinetuneError

RIGHT, WRONG = 1.0, 0.0


@pytest.mark.parametrize(
    ("base", "tuned", "expected"),
    [
        ([WRONG] * 99 + [RIGHT], [RIGHT] * 93 + [WRONG] * 7, "Better: exact 1 -> 93 of 100 (difference 86 to 97)."),
        ([RIGHT] * 20, [WRONG] * 20, "Worse: exact 20 -> 0 of 20 (difference -20 to -15)."),
        ([RIGHT, WRONG] * 50, [WRONG, RIGHT] * 50, "100 rows show no clear difference in exact."),
        ([0.25] * 40, [0.5] * 40, "Better: exact 0.250 -> 0.500 (difference 0.250 to 0.250)."),
        ([WRONG] * 9, [RIGHT] * 9, "9 rows cannot show whether exact changed; answer 10 or more."),
        ([WRONG], [RIGHT], "1 row cannot show whether exact changed; answer 10 or more."),
    ],
)
def test_the_verdict(base: list[float], tuned: list[float], expected: str) -> None:
    assert score_verdict("exact", compared(base, tuned), len(base)) == expected


FREE = (
    "Free answers: chrf is the share of wording in common with your answers (base 50%, tuned 50%). It does not count "
    "right answers. Read some side by side before you decide."
)


def test_the_table_ends_with_a_verdict_on_each_metric() -> None:
    metrics = {"exact": compared([WRONG] * 12, [RIGHT] * 12), "chrf": compared([0.5] * 12, [0.5] * 12)}
    figures = {"data": "held-out rows", "rows": 12, "max_new_tokens": 8, "cut": {"base": 0, "tuned": 3}, "notes": []}
    figures |= {"metrics": metrics}
    assert scores_in_words(figures).splitlines()[-4:] == [
        "Better: exact 0 -> 12 of 12 (difference 8 to 12).",
        "12 rows show no clear difference in chrf.",
        FREE,
        "Answers cut at 8 tokens: 3 of the tuned model (--max-new-tokens).",
    ]


def test_a_quick_gate_does_not_replace_the_scores_of_all_rows(tmp_path: Path) -> None:
    def measured(rows: int, data: str = "held-out rows") -> dict[str, Any]:
        return {"scores": {"rows": rows, "data": data, "metrics": {}}}

    state, record = tmp_path / "run_state.json", tmp_path / "eval.json"
    assert keeps_earlier(tmp_path, measured(10), 10) == ""  # there is none yet
    state.write_text("{}")
    record.write_text(json.dumps(measured(200)))
    assert "keeps the scores of 200 rows" in keeps_earlier(tmp_path, measured(10), 10)
    assert keeps_earlier(tmp_path, measured(10), None) == ""  # all there are
    assert keeps_earlier(tmp_path, measured(200), 200) == ""
    assert keeps_earlier(tmp_path, measured(10, "other.jsonl"), 10) == ""
    assert keeps_earlier(tmp_path, {}, 10) == ""  # the loss alone
    os.utime(record, (1, 1))  # the run was trained again since
    assert keeps_earlier(tmp_path, measured(10), 10) == ""
    record.write_text("[1]")
    assert keeps_earlier(tmp_path, measured(10), 10) == ""


@pytest.mark.parametrize(("scores", "shares"), [([[0.2], [0.314]], "base 20%, tuned 31%"), ([[0.5]], "tuned 50%")])
def test_free_answers_have_a_sentence_for_who_decides(scores: list[list[float]], shares: str) -> None:
    figures = {"rows": 1, "data": "rows", "max_new_tokens": 8, "cut": {}, "notes": []}
    said = scores_in_words({**figures, "metrics": {"chrf": compared(*scores)}})
    assert f"wording in common with your answers ({shares}). It does not count right answers." in said
    assert "Free answers" not in scores_in_words({**figures, "metrics": {"exact": compared(*scores)}})


def test_an_equal_answer_is_not_better() -> None:
    figures = compared([1.0, 0.0, 0.5], [1.0, 0.0, 0.5])
    assert (figures["better"], figures["worse"], figures["equal"]) == (0, 0, 3)


def test_figures_and_answers_are_replaced_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_eval(tmp_path, {"run": 1}, [{"answer": 1}])
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(before) == ["eval.json", "eval_answers.jsonl"]

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for written in range(3):  # the disk fills at the first, the second file; never
        left = [written]

        def sync(descriptor: int, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                full(descriptor)

        monkeypatch.setattr(os, "fsync", sync)
        if written < 2:
            with pytest.raises(EnvironmentMismatch):
                write_eval(tmp_path, {"run": 2}, [{"answer": 2}])
            assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before
        monkeypatch.undo()
    write_eval(tmp_path, {"run": 2}, [{"answer": 2}])
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} != before


@pytest.mark.parametrize("asked", [{"metrics": chosen_metrics(["exact"], None)}, {"file": Path("rows.jsonl")}])
def test_a_loss_alone_has_no_scores(tmp_path: Path, asked: dict[str, Any]) -> None:
    with pytest.raises(FinetuneError, match=r"^--loss-only: generates no answers"):
        evaluate_finished(tmp_path, EvalRequest(generate=False, **asked), print)
