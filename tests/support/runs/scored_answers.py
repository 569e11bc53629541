"""Trainings as tests/support/runs/cells.py runs them; every rank writes its scored answers beside the runs, as JSON."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from finetune.files import append_lines
from finetune.generation import generate
from finetune.training import row_scorer
from tests.support.runs.cells import main


def record(words: list[str]) -> int:
    """Train the recipes; RUN.scoredN has a line with all answers for each time that rank N scored.

    Rows that ended leave their batch after 3 and 6 tokens.
    """
    genuine, score = row_scorer.generated_answers, row_scorer.RowScorer.score
    runs = [Path()]

    def of_run(scorer: row_scorer.RowScorer, step: int) -> Any:
        runs.append(Path(scorer.output._recipe.run_dir))
        return score(scorer, step)

    def recorded(*arguments: Any) -> list[Any]:
        answers = genuine(*arguments)
        append_lines(
            runs[-1].with_suffix(f".scored{os.environ.get('RANK', '0')}"),
            [{"answers": [each.text for each in answers]}],
        )
        return answers

    with (
        mock.patch.object(generate, "FIRST_ROUND", 3),
        mock.patch.object(row_scorer.RowScorer, "score", of_run),
        mock.patch.object(row_scorer, "generated_answers", recorded),
    ):
        return main(words)


if __name__ == "__main__":
    sys.exit(record(sys.argv[1:]))
