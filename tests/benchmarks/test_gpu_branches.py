"""The record of the questions for a GPU is of the questions that there are, and what is open has its reason."""

from __future__ import annotations

import pytest

from benchmarks.gpu_branches import REASONS, known

AGAIN = "run python benchmarks/gpu_branches.py with the tests that come to it, or write its reason there"


@pytest.mark.thorough
def test_each_question_is_answered_both_ways_or_has_its_reason() -> None:
    open_ = {name: answers for name, answers in known().items() if len(answers) < 2}
    assert {name: answers for name, answers in open_.items() if name not in REASONS} == {}, AGAIN
    assert [name for name in REASONS if name not in open_] == [], "no longer open, or no longer in the code"
    assert all(len(reason) > 20 for reason in REASONS.values())
