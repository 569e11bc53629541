"""Intervals against scipy's."""

from __future__ import annotations

import numpy as np
import pytest

from finetune.scoring.intervals import interval, paired_interval


@pytest.mark.sample(1, thorough=3)
@pytest.mark.parametrize("rows", [20, 100, 500])
def test_intervals_agree_with_scipys_bootstrap(rows: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(rows)
    base = (rng.random(rows) < 0.3).astype(float)
    tuned = np.maximum(base * (rng.random(rows) < 0.9), rng.random(rows) < 0.5).astype(float)
    overlaps = rng.random(rows)
    for ours, values in (
        (interval(overlaps.tolist()), overlaps),
        (paired_interval(base.tolist(), tuned.tolist()), tuned - base),
    ):
        theirs = stats.bootstrap(
            (values,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(1)
        ).confidence_interval
        assert ours.mean == pytest.approx(values.mean())
        # With few rows the mean takes few values, and an end may fall on the next one.
        assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=max(1e-2, 1 / rows) + 1e-9)


@pytest.mark.parametrize(("right", "count"), [(0, 50), (50, 50), (1, 1), (37, 100), (499, 500)])
def test_a_share_has_scipys_wilson_interval(right: int, count: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    ours = interval([1.0] * right + [0.0] * (count - right))
    theirs = stats.binomtest(right, count).proportion_ci(method="wilson")
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


@pytest.mark.parametrize(("score", "count"), [(0.5, 1), (0.25, 8), (0.75, 100)])
def test_equal_scores_are_not_certain(score: float, count: int) -> None:
    """Wilson's ends are where the mean is 1.96 standard errors of p (1 - p) away, the widest a score can spread."""
    found = interval([score] * count)
    assert found.mean == score
    for end in (found.low, found.high):
        assert abs(score - end) == pytest.approx(1.959964 * (end * (1 - end) / count) ** 0.5, abs=1e-6)
    assert found.low < score < found.high


def test_the_same_scores_give_the_same_interval() -> None:
    scores = [0.0, 1.0, 0.25] * 7
    assert interval(scores) == interval(scores)


def test_pairs_are_narrower_than_apart() -> None:
    """Rows that are hard for both models widen each mean, and not their difference."""
    base = [0.0, 1.0] * 50
    tuned = [min(1.0, each + 0.1) for each in base]
    change = paired_interval(base, tuned)
    assert change.high - change.low < 0.05
    assert interval(base).high - interval(base).low > 0.15


def test_wilsons_interval_by_hand() -> None:
    """z = 1.959964. 100 of 100: low = 1 / (1 + z^2 / 100). 5 of 10: 0.5 -+ z / 2 / sqrt(10 + z^2)."""
    whole, half = interval([1.0] * 100), interval([1.0, 0.0] * 5)
    assert (whole.low, whole.high) == pytest.approx((0.963007, 1.0), abs=1e-6)
    assert (half.low, half.high) == pytest.approx((0.236593, 0.763407), abs=1e-6)
