"""Intervals for a mean score, by the bootstrap over rows (Efron 1979): percentiles of the means of resampled rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
DRAWN_AT_ONCE = 2**22  # drawn row numbers in memory at a time
LEVEL = 0.95


@dataclass(frozen=True)
class MeanInterval:
    """A mean with the ends of its 95 % interval."""

    mean: float
    low: float
    high: float

    def as_json(self) -> dict[str, float]:
        return {"mean": self.mean, "low": self.low, "high": self.high}


def interval(scores: Sequence[float], seed: int = 0) -> MeanInterval:
    """The mean of the scores and its interval. One row has an interval of no width, which says nothing."""
    values = np.asarray(scores, dtype=np.float64)
    rng, count = np.random.default_rng(seed), len(values)
    means, at_once = [], max(1, DRAWN_AT_ONCE // count)
    for start in range(0, RESAMPLES, at_once):
        drawn = rng.integers(count, size=(min(at_once, RESAMPLES - start), count))
        means.append(values[drawn].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return MeanInterval(float(values.mean()), float(low), float(high))


def paired_interval(before: Sequence[float], after: Sequence[float], seed: int = 0) -> MeanInterval:
    """The mean difference, row by row, and its interval: a row that is hard for both models widens nothing."""
    return interval(np.subtract(after, before).tolist(), seed)
