"""Trainings as tests/support/runs/cells.py runs them; every rank writes its scored answers beside the runs, as JSON."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from finetune.files import append_lines
from finetune.training import session
from tests.support.runs.cells import main


def record(words: list[str]) -> int:
    """Train the recipes; RUN.scoredN has a line with all answers for each time that rank N scored."""
    genuine, scoring_of = session.generated_answers, session.scoring_of
    runs = [Path()]

    def of_run(start: Any, *arguments: Any) -> Any:
        runs.append(start.run_dir)
        return scoring_of(start, *arguments)

    def recorded(*arguments: Any) -> list[Any]:
        answers = genuine(*arguments)
        append_lines(runs[-1].with_suffix(f".scored{os.environ.get('RANK', '0')}"), [{"answers": [each.text for each in answers]}])
        return answers

    with mock.patch.object(session, "scoring_of", of_run), mock.patch.object(session, "generated_answers", recorded):
        return main(words)


if __name__ == "__main__":
    sys.exit(record(sys.argv[1:]))
