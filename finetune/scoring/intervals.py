"""95 % intervals for a mean score.

- A share of right answers has Wilson's interval (Wilson 1927): 96 to 100 % for 100 right ones
  of 100, which a bootstrap takes for certain.
- Other scores, and differences between two models, have the bootstrap over rows (Efron 1979): percentiles of the means
  of resampled rows.
- Equal scores resample to an interval of no width, which says nothing. Scores from 0 to 1 spread no wider than right
  and wrong answers with the same mean, so they have Wilson's interval: 0.05 to 0.95 for one row with 0.5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

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


def interval(scores: Sequence[float]) -> MeanInterval:
    """The mean of scores from 0 to 1, and its interval."""
    if set(scores) <= {0.0, 1.0} or len(set(scores)) == 1:
        right = sum(scores)
        count = len(scores)
        share, z = right / count, NormalDist().inv_cdf((1 + LEVEL) / 2)
        scale = 1 + z**2 / count
        middle = (share + z**2 / (2 * count)) / scale
        half = z / scale * (share * (1 - share) / count + z**2 / (4 * count**2)) ** 0.5
        return MeanInterval(share, max(0.0, middle - half), min(1.0, middle + half))
    return _bootstrap(scores)


def paired_interval(before: Sequence[float], after: Sequence[float]) -> MeanInterval:
    """The mean difference, row by row, and its interval: a row that is hard for both models widens nothing.

    Equal differences resample to an interval of no width, which says nothing. Of shares of right answers the interval
    is then Newcombe's (1998, method 10): 0 and 30 right ones of 30 differ by 0.84 to 1.
    """
    if {*before, *after} <= {0.0, 1.0} and len({*np.subtract(after, before).tolist()}) == 1:
        first, second = interval(before), interval(after)
        mean = second.mean - first.mean
        below = math.hypot(second.mean - second.low, first.high - first.mean)
        above = math.hypot(second.high - second.mean, first.mean - first.low)
        return MeanInterval(mean, max(-1.0, mean - below), min(1.0, mean + above))
    return _bootstrap(np.subtract(after, before).tolist())


def _bootstrap(scores: Sequence[float]) -> MeanInterval:
    values = np.asarray(scores, dtype=np.float64)
    rng, count = np.random.default_rng(0), len(values)
    means, at_once = [], max(1, DRAWN_AT_ONCE // count)
    for start in range(0, RESAMPLES, at_once):
        drawn = rng.integers(count, size=(min(at_once, RESAMPLES - start), count))
        means.append(values[drawn].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return MeanInterval(float(values.mean()), float(low), float(high))
