"""The lecture `collectives`: four real ranks against numpy, bytes against rings, time against arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lectures.collectives.lecture import broadcast_seconds
from lectures.collectives.ranks import LINK, PIECES, PLAYED_MIB, RANKS
from tests.support.lectures import held

MIB = 2**20


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = held("collectives", "mib=1").facts["ranks"]
    assert len(result) == RANKS
    return result


@pytest.mark.slow
def test_the_worked_example(ranks: list[dict[str, Any]]) -> None:
    """in[r][c] and out[c] = sum over r of in[r][c], by numpy."""
    given = np.array([each["before"] for each in ranks])
    assert given.tolist() == [[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33], [40, 41, 42, 43]]
    sums = given.sum(0).tolist()
    after = {name: [each["operations"][name]["after"] for each in ranks] for name in ranks[0]["operations"]}
    assert after == {
        "Broadcast": [given[0].tolist()] * RANKS,
        "Reduce": [sums, *given[1:].tolist()],
        "AllReduce": [sums] * RANKS,
        "AllGather": [given.diagonal().tolist()] * RANKS,
        "ReduceScatter": [[each] for each in sums],
    }


@pytest.mark.slow
def test_bytes_of_a_ring(ranks: list[dict[str, Any]]) -> None:
    """All-reduce is a reduce-scatter and an all-gather: twice (N-1)/N of the tensor; the others once."""
    for each in ranks:
        sent = {name: row["ring_bytes"] for name, row in each["operations"].items()}
        once = MIB * (RANKS - 1) // RANKS
        assert sent == {
            "Broadcast": once,
            "Reduce": once,
            "AllReduce": 2 * once,
            "AllGather": once,
            "ReduceScatter": once,
        }


@pytest.mark.slow
def test_who_sends_how_much_in_a_broadcast(ranks: list[dict[str, Any]]) -> None:
    for key, nbytes in (("broadcasts", MIB), ("played", PLAYED_MIB * MIB)):
        sent = {name: [each[key][name]["sent_bytes"] for each in ranks] for name in ("naive", "ring")}
        assert sent["naive"] == [(RANKS - 1) * nbytes, 0, 0, 0]
        assert sent["ring"] == [nbytes, nbytes, nbytes, 0]


@pytest.mark.slow
def test_time_over_links_of_one_speed(ranks: list[dict[str, Any]]) -> None:
    """No less than the links allow; a busy machine may take longer, and the ring is faster all the same."""
    seconds = {name: max(each["played"][name]["seconds"] for each in ranks) for name in ("naive", "ring")}
    naive, ring = broadcast_seconds(PLAYED_MIB * MIB, LINK, RANKS)
    assert (naive, ring) == pytest.approx((3 * 0.8389, 0.8389 * (PIECES + 2) / PIECES), rel=0.01)
    assert seconds["naive"] >= naive
    assert seconds["ring"] >= ring
    assert seconds["ring"] < seconds["naive"]
