"""The lecture `overlap`: the timeline against closed forms."""

from __future__ import annotations

import pytest

from lectures.overlap import timeline
from tests.support.lectures import held


@pytest.mark.parametrize(("copy", "compute"), [(1.0, 4.0), (4.0, 1.0), (2.0, 2.0), (0.0, 3.0)])
@pytest.mark.parametrize("batches", [1, 2, 7])
def test_the_end_of_the_last_computation(copy: float, compute: float, batches: int) -> None:
    """Off: one after another. On: the longer of the two each time, and one of the shorter."""
    off = timeline(batches, copy, compute, non_blocking=False)
    on = timeline(batches, copy, compute, non_blocking=True)
    assert off[-1].end == batches * (copy + compute)
    assert on[-1].end == copy + compute + (batches - 1) * max(copy, compute)
    for spans in (off, on):
        assert all(span.end - span.begin == {"copy": copy, "compute": compute}[span.what] for span in spans)
        computed = {span.batch: span.begin for span in spans if span.what == "compute"}
        assert all(span.end <= computed[span.batch] for span in spans if span.what == "copy")


@pytest.mark.slow
def test_a_batch_of_tokens_is_small() -> None:
    facts = held("overlap").facts
    tokens, rows = 4096, 1
    assert facts["batch_bytes"]["input_ids"] == 8 * tokens * rows
    assert facts["copy_seconds"] == pytest.approx(sum(facts["batch_bytes"].values()) / 32e9)
    # 4 N operations a token where adapters alone are trained, 2 N more where layers are computed twice; at 165 TFLOP/s.
    products = 8.03e9 * tokens * rows
    assert 4 * products / 165e12 < facts["compute_seconds"] < 8 * products / 165e12
