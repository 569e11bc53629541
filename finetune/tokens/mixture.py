"""Pools all data sets' documents: holds some out, repeats the others by weight, and packs them into rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.errors import DataError
from finetune.recipe.schema import DataSet, EvalFraction
from finetune.tokens.cache import StoredDocuments
from finetune.tokens.packing import pack


class DocumentPool:
    """All documents, numbered through the data sets in order. The tokens stay on disk, memory-mapped.

    Two data sets with 3 and 2 documents have starts [0, 3, 5]; document 4 is the second set's second document.
    """

    def __init__(self, stores: Sequence[StoredDocuments]) -> None:
        self.stores = tuple(stores)
        self.starts = np.cumsum([0, *map(len, stores)]).astype(np.int64)  # [stores + 1]
        self.lengths = np.concatenate([np.diff(store.offsets) for store in stores])  # int64 [documents]: tokens
        self.supervised = np.concatenate([store.supervised for store in stores])
        self.digests = np.concatenate([store.digests for store in stores])
        # Only for preferences: each first document's supervised tokens, and whether a judged answer is wanted.
        self.first_supervised = _joined([store.first_supervised for store in stores])
        self.desirable = _joined([store.desirable for store in stores])
        # Rows are numbered through all sets: documents from one row share a number that no other row has.
        source_rows, first_row = [], 0
        for store in stores:
            source_rows.append(store.rows + first_row)
            if len(store):
                first_row += int(store.rows[-1]) + 1
        self.source_rows = np.concatenate(source_rows)
        # For judged answers: two training documents with different answers, which `prepare` finds.
        self.two_answers: tuple[tuple[np.ndarray, np.ndarray], ...] = ()

    def longest(self) -> np.ndarray:
        """Each document's tokens, int64 [documents]; a pair's are those of its longer answer with the prompt."""
        first = [store.first for store in self.stores if store.first is not None]
        if not first:
            return self.lengths
        of_first = np.concatenate(first)
        longest: np.ndarray = np.maximum(of_first, self.lengths - of_first)
        return longest

    def group(self, store: int) -> np.ndarray:
        """One data set's documents."""
        return np.arange(self.starts[store], self.starts[store + 1])

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(input_ids, labels), int64, unshifted; for a pair, the chosen document's."""
        return self.documents(index)[0]

    def documents(self, index: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """(input_ids, labels), int64, unshifted: one document's, or both documents' for a preference pair."""
        store, local_index = self._locate(index)
        return store.documents(local_index)

    def place(self, index: int) -> str:
        """file:line of a document's row."""
        store, local_index = self._locate(index)
        return store.place(local_index)

    def rows(self, documents: np.ndarray, capacity: int | None) -> Rows:
        """Pack documents into rows of `capacity` tokens; None: one document a row.

        Documents [7, 2, 9] in packs [[0, 2], [1]] have offsets [0, 2, 3] and members [7, 9, 2].
        """
        packs = [[index] for index in range(len(documents))]
        if capacity is not None:
            packs = pack(self.lengths[documents], capacity)
        offsets = np.concatenate([[0], np.cumsum([len(indices) for indices in packs])]).astype(np.int64)
        order = np.fromiter((index for indices in packs for index in indices), dtype=np.int64, count=len(documents))
        members = documents[order]
        # Each row's tokens and supervised tokens: sums over its part of `members`.
        lengths, supervised = np.add.reduceat(
            np.stack([self.lengths[members], self.supervised[members]]), offsets[:-1], axis=1
        )
        return Rows(lengths, supervised, self, offsets, members)

    def join(self, parts: Sequence[Rows]) -> Rows:
        """Join these parts' rows, in order. No row mixes documents from two parts.

        Offsets [0, 2, 3] and [0, 1, 4] become [0, 2, 3, 4, 7].
        """
        shifts = np.cumsum([0, *(part._offsets[-1] for part in parts)]).astype(np.int64)
        ends = [part._offsets[1:] + shift for part, shift in zip(parts, shifts, strict=False)]
        return Rows(
            np.concatenate([part.lengths for part in parts]),
            np.concatenate([part.supervised for part in parts]),
            self,
            np.concatenate([[0], *ends]).astype(np.int64),
            np.concatenate([part._members for part in parts]),
        )

    def _locate(self, index: int) -> tuple[StoredDocuments, int]:
        """A document's data set, and its index there."""
        store = int(np.searchsorted(self.starts, index, side="right")) - 1
        return self.stores[store], int(index - self.starts[store])


def _joined(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """All stores' arrays as one; None if a store has none."""
    present = [array for array in arrays if array is not None]
    if len(present) < len(arrays):
        return None
    return np.concatenate(present)


@dataclass(frozen=True)
class Rows:
    """Rows with one or more complete documents each."""

    lengths: np.ndarray  # int64 [rows]: tokens
    supervised: np.ndarray  # int64 [rows]: supervised tokens
    pool: DocumentPool
    _offsets: np.ndarray  # int64 [rows + 1], into _members
    _members: np.ndarray  # int64 [documents]
    is_all_supervised: bool = False  # prompts too, for the worst step: the most logits that the head can compute

    def __len__(self) -> int:
        return len(self.lengths)

    def documents(self, row: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Each document's (input_ids, labels) in a row, int64, unshifted."""
        documents = [document for index in self.members(row) for document in self.pool.documents(index)]
        return [(ids, ids) for ids, _ in documents] if self.is_all_supervised else documents

    def places(self, row: int) -> list[str]:
        """Each document's file:line in a row."""
        return [self.pool.place(index) for index in self.members(row)]

    def units(self, rows: np.ndarray | Sequence[int]) -> np.ndarray:
        """Each row's document in the pool. Only for rows with one document: a preference pair or a judged answer."""
        members: np.ndarray = self._members[self._offsets[np.asarray(rows, dtype=np.int64)]]
        return members

    @property
    def two_answers(self) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        """For judged answers: two training documents with different answers. None for the worst step."""
        return () if self.is_all_supervised else self.pool.two_answers

    def subset(self, rows: Sequence[int]) -> Rows:
        """Only these rows, in this order."""
        members = [self.members(row) for row in rows]
        offsets = np.cumsum([0, *map(len, members)]).astype(np.int64)
        flat = np.asarray([index for indices in members for index in indices], dtype=np.int64)
        chosen = np.asarray(rows, dtype=np.int64)
        return Rows(self.lengths[chosen], self.supervised[chosen], self.pool, offsets, flat)

    def members(self, row: int) -> list[int]:
        """A row's documents, as indices into the pool."""
        members: list[int] = self._members[self._offsets[row] : self._offsets[row + 1]].tolist()
        return members


@dataclass(frozen=True)
class Split:
    """Training documents, as often as their weights say, and held-out documents; both are indices into the pool."""

    train: np.ndarray
    held_out: np.ndarray
    duplicates: int  # held-out documents left out because an identical one is trained on


def split_documents(
    pool: DocumentPool,
    entries: Sequence[DataSet],
    training_sets: int,
    evaluation: EvalFraction | list[DataSet] | None,
    seed: int,
) -> Split:
    """Hold out first, then weigh, so that no copy of a held-out document is trained on. Raises DataError."""
    end = int(pool.starts[training_sets])
    train, held_out = np.arange(end), np.arange(end, len(pool.lengths))
    if isinstance(evaluation, EvalFraction):
        rows, row_of = np.unique(pool.source_rows[:end], return_inverse=True)  # examples of one row stay together
        if len(rows) < 2:
            raise DataError(["data.eval: one document cannot be split; give more rows, or eval: null"])
        # With 10 rows, fraction 0.02 holds one row out, and fraction 0.98 leaves one to train on.
        count = max(1, min(len(rows) - 1, round(evaluation.fraction * len(rows))))
        is_held_out = np.isin(row_of, seeded_order(len(rows), seed, HOLD_OUT)[:count])
        train, held_out = np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
    is_copy = np.isin(pool.digests[held_out], pool.digests[train])
    if len(held_out) and is_copy.all():
        raise DataError(["data.eval: every held-out document is also a training one; name other rows, or eval: null"])
    weighed = [weigh(train, pool, store, entries[store].weight, seed) for store in range(training_sets)]
    weighed_held_out = [held_out[~is_copy]]
    if training_sets < len(entries):
        weighed_held_out = [
            weigh(held_out[~is_copy], pool, store, entries[store].weight, seed)
            for store in range(training_sets, len(entries))
        ]
    trained = np.concatenate(weighed)
    if not len(trained):
        raise DataError(["data.train: weights leave no document; raise them"])
    return Split(trained, np.concatenate(weighed_held_out), int(is_copy.sum()))


def shares(pool: DocumentPool, split: Split, training_sets: int) -> list[dict[str, Any]]:
    """Each training set's part in an epoch, with copies by weight: documents, tokens, and their share of all tokens."""
    total, parts = int(pool.lengths[split.train].sum()), []
    for store in range(training_sets):
        inside = (split.train >= pool.starts[store]) & (split.train < pool.starts[store + 1])
        tokens = int(pool.lengths[split.train[inside]].sum())
        parts.append({"documents": int(inside.sum()), "tokens": tokens, "share": tokens / total})
    return parts


def weigh(documents: np.ndarray, pool: DocumentPool, store: int, weight: float, seed: int) -> np.ndarray:
    """Repeat one data set's documents by its weight, in ascending order.

    With 10 documents, weight 2.3 gives two copies each, and a third copy for 3 documents that the seed draws.
    """
    members = documents[(documents >= pool.starts[store]) & (documents < pool.starts[store + 1])]
    copies = int(weight)
    extra = round((weight - copies) * len(members))
    chosen = members[seeded_order(len(members), seed, WEIGH, store)[:extra]]
    return np.sort(np.concatenate([np.repeat(members, copies), chosen]))


# A draw's key begins with the seed and one of these, so that a run's draws differ from each other.
HOLD_OUT, WEIGH, ROW_ORDER = 1, 2, 3


def seeded_order(count: int, *key: int) -> np.ndarray:
    """A permutation of range(count) that depends on `key` alone, int64.

    Sorts by a hash (splitmix64; Steele, Lea and Flood 2014). The streams of numpy's generators may change between
    releases, and a run must find its rows again after an upgrade.
    """
    # Each key part is mixed into a 64-bit state; item i then has the hash of state + i.
    state = np.uint64(0)
    for part in key:
        state = _mix(np.asarray([state ^ np.uint64(part & (2**64 - 1))], dtype=np.uint64))[0]
    hashes = _mix(np.arange(count, dtype=np.uint64) + state)
    return np.argsort(hashes, kind="stable").astype(np.int64)


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's step, modulo 2^64: add the golden ratio's bits, then spread every bit over all others."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed
