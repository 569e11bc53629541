"""The request of `finetune eval`, read from the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.errors import FinetuneError
from finetune.recipe.metric_names import read_metric
from finetune.recipe.schema import DataSet
from finetune.scoring.metrics import Metric

if TYPE_CHECKING:
    from finetune.answers.endpoint import Endpoint


@dataclass(frozen=True)
class EvalRequest:
    """The command line of `finetune eval`."""

    metrics: Sequence[Metric] = ()  # empty: the recipe's, or those that fit the references
    file: Path | None = None  # answered instead of the held-out rows
    limit: int | None = None  # rows to answer, and questions of each task
    max_new_tokens: int | None = None  # None: as the references need
    general: bool = False  # the general set too
    generate: bool = True  # False: the loss alone
    fail_under: Mapping[str, float] = field(default_factory=dict)  # metric -> the least mean score of the tuned model
    tasks: Sequence[str] = ()  # lm-eval's names; * matches any letters
    include: Path | None = None  # a folder with the user's own task files
    chat_template: bool | None = None  # for all tasks, or for none; None: for those that generate
    endpoint: Endpoint | None = None  # a server that answers; no model is loaded
    scorer: str | None = None  # FILE.py:FUNCTION, a metric more
    scorer_seconds: float = 10.0  # of one answer
    entry: DataSet | None = None  # how `file` is read; None: as the run's rows


def chosen_metrics(names: Sequence[str], scorer: str | None = None) -> list[Metric]:
    """The metrics of the command line; `scorer`, FILE.py:FUNCTION, has another name. Raises FinetuneError."""
    metrics = []
    for text in names:
        try:
            metrics.append(Metric.of(read_metric(text)))
        except ValueError as error:
            raise FinetuneError(f"--metric {text}: {error}") from None
    taken = [metric.name for metric in metrics] + ([] if scorer is None else [scorer.rpartition(":")[2]])
    if repeated := [name for name in taken if taken.count(name) > 1]:
        raise FinetuneError(f"--metric: {repeated[0]} is named twice; keep one of them")
    return metrics


def thresholds(texts: Sequence[str]) -> dict[str, float]:
    """`exact=0.8` as a metric and the least mean of the tuned model. Raises FinetuneError."""
    least_scores = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            least_scores[name] = float(value)
        except ValueError:
            least_scores[name] = -1.0
        if not equals or not 0 <= least_scores[name] <= 1:
            raise FinetuneError(f"--fail-under {text}: write a metric and a number from 0 to 1, as exact=0.8")
    return least_scores
