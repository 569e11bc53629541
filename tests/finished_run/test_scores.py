"""The verdict on scored answers: a sentence that follows from the paired interval, and none from too few rows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from finetune.finished_run.scores import compared, keeps_earlier, score_verdict, scores_in_words

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


def test_the_table_ends_with_a_verdict_on_each_metric() -> None:
    metrics = {"exact": compared([WRONG] * 12, [RIGHT] * 12), "chrf": compared([0.5] * 12, [0.5] * 12)}
    figures = {"data": "held-out rows", "rows": 12, "max_new_tokens": 8, "notes": [], "metrics": metrics}
    assert scores_in_words(figures).splitlines()[-2:] == [
        "Better: exact 0 -> 12 of 12 (difference 8 to 12).",
        "12 rows show no clear difference in chrf.",
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
