"""The interval of a paired difference that is the same in every row, by hand."""

from __future__ import annotations

import pytest

from finetune.scoring.intervals import paired_interval


@pytest.mark.parametrize(
    ("before", "after", "ends"),
    [
        # Wilson for 30 of 30: 30 / (30 + 1.96^2) = 0.8865 to 1. The difference 1 - 0 loses hypot(0.1135, 0.1135).
        ([0.0] * 30, [1.0] * 30, (1.0, 0.8395, 1.0)),
        ([1.0] * 30, [0.0] * 30, (-1.0, -1.0, -0.8395)),
        ([0.0] * 30, [0.0] * 30, (0.0, -0.1135, 0.1135)),  # nothing was right, and that is not certain either
        ([1.0] * 30, [1.0] * 30, (0.0, -0.1135, 0.1135)),
    ],
)
def test_equal_differences_are_not_certain(before: list[float], after: list[float], ends: tuple[float, ...]) -> None:
    found = paired_interval(before, after)
    assert (found.mean, found.low, found.high) == pytest.approx(ends, abs=1e-4)


def test_other_scores_keep_the_bootstrap() -> None:
    found = paired_interval([0.5] * 10, [0.7] * 10)
    assert (found.low, found.high) == pytest.approx((0.2, 0.2))
    one_apart = paired_interval([0.0] * 29 + [1.0], [1.0] * 30)
    assert one_apart.high - one_apart.low > 0.05
