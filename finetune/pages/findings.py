"""What is odd about tokenised data, told by its arrays: counts, and where to look."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from finetune.batches import Prepared
from finetune.document_pool import DocumentPool
from finetune.recipe import Data
from finetune.token_cache import StoredDocuments

PLACES = 3  # shown of each finding


@dataclass(frozen=True)
class Finding:
    """One thing to know; an error is refused by training, a warning is trained on as it is."""

    severity: Literal["error", "warning", "note"]
    text: str
    places: tuple[str, ...] = ()  # file:line of the first few

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"places": list(self.places)}


def find_oddities(prepared: Prepared, data: Data, *, begin: int | None, special: Collection[int]) -> list[Finding]:
    """Findings over all data sets.

    Args:
        begin: The tokenizer's begin-of-text token, if it has one.
        special: Its control tokens, one of which ends each answer.
    """
    pool, found = prepared.pool, []
    for index, store in enumerate(pool.stores):
        odd = dict(_by_store(store, data, begin, special))
        found += [_warning(pool, index, members, text) for text, members in odd.items() if len(members)]
    found += list(_copies(prepared))
    found += [Finding("note", note) for note in prepared.notes]
    return found


def _by_store(
    store: StoredDocuments, data: Data, begin: int | None, special: Collection[int]
) -> Iterator[tuple[str, np.ndarray]]:
    """(what is odd, which documents of the data set)"""
    if begin is not None:
        yield "begin with two begin-of-text tokens; take the text's own out of the row", doubled_begin(store, begin)
    if data.train_on != "all":  # then every last line break is learned, and ends nothing
        cut, silent = unfinished(store, special, data.max_length)
        yield "are answers cut at data.max_length: they teach no end; raise it, or data.truncation: drop", cut
        yield "hold an answer whose end of turn is not learned: the model would not stop; look at the template", silent


def doubled_begin(store: StoredDocuments, begin: int) -> np.ndarray:
    """Documents whose first two tokens are both `begin`; int64 [documents found]."""
    starts = store.offsets[:-1]
    long = np.flatnonzero(np.diff(store.offsets) > 1)
    first, second = store.tokens[starts[long]], store.tokens[starts[long] + 1]
    found: np.ndarray = long[(first == begin) & (second == begin)]
    return found


def unfinished(store: StoredDocuments, special: Collection[int], max_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents with a learned stretch that ends in no control token: cut by the row's length, and all others."""
    learned = np.asarray(store.learned)
    ends = learned.copy()
    ends[:-1] &= ~learned[1:]
    ends[store.offsets[1:] - 1] |= learned[store.offsets[1:] - 1]  # the next token belongs to another document
    where = np.flatnonzero(ends & ~np.isin(store.tokens, list(special)))
    documents = np.searchsorted(store.offsets, where, side="right") - 1
    full = np.diff(store.offsets)[documents] == max_length
    cut = full & (where == store.offsets[documents + 1] - 1)
    return np.unique(documents[cut]), np.unique(documents[~cut])


def _warning(pool: DocumentPool, store: int, members: np.ndarray, text: str) -> Finding:
    name = pool.stores[store].names[0]
    several = pool.group(store)[members[:PLACES]].tolist()
    return Finding(
        "warning", f"{len(members):,} documents of {name} {text}", tuple(pool.place(index) for index in several)
    )


def _copies(prepared: Prepared) -> Iterator[Finding]:
    """Documents that are the same as an earlier one of the training set."""
    pool, trained = prepared.pool, np.unique(prepared.split.train)
    _, first = np.unique(pool.digests[trained], return_index=True)
    again = np.delete(trained, first)
    if len(again):
        places = tuple(pool.place(index) for index in again[:PLACES].tolist())
        yield Finding("warning", f"{len(again):,} training documents are copies of another one", places)


def length_histogram(lengths: np.ndarray, max_length: int, bins: int = 12) -> list[tuple[int, int, int]]:
    """(from, below, documents) of equal bins from 0 to max_length, which belongs to the last."""
    edges = np.unique(np.linspace(0, max_length + 1, bins + 1).round().astype(int))
    counts, _ = np.histogram(lengths, edges)
    return [(int(low), int(high), int(count)) for low, high, count in zip(edges, edges[1:], counts, strict=False)]
