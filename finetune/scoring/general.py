"""The general set: short questions that a fine-tuned model should not have unlearned. Each row names its source and
licence.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from finetune.recipe.metric_names import read_metric
from finetune.scoring.metrics import Metric, Scored, scores_of

FILE = Path(__file__).with_name("general.jsonl")
MAX_NEW_TOKENS = 32


@dataclass(frozen=True)
class GeneralRow:
    """A question with its reference, the metric that scores its answer, and the skill that it needs."""

    prompt: str
    item: Scored
    metric: Metric
    kind: str


def general_rows() -> list[GeneralRow]:
    """The rows of the set, in its order."""
    rows = []
    for number, line in enumerate(FILE.read_text("utf-8").splitlines(), 1):
        row = json.loads(line)
        item = Scored(row["reference"], f"{FILE.name}:{number}")
        rows.append(GeneralRow(row["prompt"], item, Metric.of(read_metric(row["metric"])), row["kind"]))
    return rows


def general_scores(rows: list[GeneralRow], answers: list[str]) -> list[float]:
    """Each row's score by its own metric."""
    return [scores_of(row.metric, [answer], [row.item])[0] for row, answer in zip(rows, answers, strict=True)]
