"""Draws that follow from a seed alone, on any machine and with any release of any library."""

from __future__ import annotations

import numpy as np

# The first part of a draw's key after the seed, so that two draws of one run are not the same draw.
HOLD_OUT, WEIGH, ROW_ORDER = 1, 2, 3


def seeded_order(count: int, *key: int) -> np.ndarray:
    """A permutation of range(count) that follows from `key` alone, int64.

    Sorts by a hash (splitmix64; Steele, Lea and Flood 2014) instead of asking numpy's generators, whose streams may
    change between releases: a run must find its rows again after an upgrade.
    """
    state = np.uint64(0)
    for part in key:
        state = _mix(np.asarray([state ^ np.uint64(part & (2**64 - 1))], dtype=np.uint64))[0]
    hashes = _mix(np.arange(count, dtype=np.uint64) + state)
    return np.argsort(hashes, kind="stable").astype(np.int64)


def _mix(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed
