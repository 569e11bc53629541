"""Rows of tokenised documents, their order, and the micro-batches of a rank.

Which rows make a step depends on data, seed and global_batch_size alone. Everything but `prepare` is a pure function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypedDict, cast

import numpy as np
import torch

from finetune.tokens.encoder import IGNORE
from finetune.tokens.mixture import ROW_ORDER, seeded_order

__all__ = ["Documents", "MicroBatch", "micro_batches", "prefetch", "rows_of_step", "without_learning"]


class MicroBatch(TypedDict, total=False):
    """What one forward gets: [1, tokens] with the documents of all its rows, or [rows, longest] padded right."""

    input_ids: torch.Tensor  # int64
    position_ids: torch.Tensor  # int64, from 0 in each document; a padded tail counts as one more document
    shift_labels: torch.Tensor  # int64, the target of each position; IGNORE at each document's last
    supervised: torch.Tensor  # int64, the positions whose target is not IGNORE, counted through all rows
    cu_seq_lens: torch.Tensor  # int32 [documents + 1], flat only
    document_lengths: tuple[int, ...]  # the same on the host, which attention reads without a sync; flat only


def rows_of_step(step: int, *, rows: int, global_batch_size: int, seed: int, total_rows: int) -> np.ndarray:
    """The rows of step `step` (from 0), int64 [at most global_batch_size].

    The stream of rows is one seeded permutation of all rows after another; step s takes its s-th stretch of
    global_batch_size, and `total_rows` ends it, so the last step may be short: nothing is dropped, nothing doubled.
    """
    first = step * global_batch_size
    end = min(first + global_batch_size, total_rows)
    epochs = range(first // rows, -(-end // rows)) if first < end else ()
    parts = [
        _epoch_order(rows, seed, epoch)[max(first - epoch * rows, 0) : min(end - epoch * rows, rows)]
        for epoch in epochs
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


@lru_cache(maxsize=2)  # a step touches two epochs at most, unless rows are fewer than a batch
def _epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    order = seeded_order(rows, seed, ROW_ORDER, epoch)
    order.flags.writeable = False
    return order


class Documents(Protocol):
    """What batches need of rows."""

    def documents(self, row: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """(input_ids, labels), int64, unshifted, of each document in a row."""


def micro_batches(
    rows: Documents,
    indices: np.ndarray | Sequence[int],
    *,
    rank: int,
    world_size: int,
    per_device_batch_size: int,
    flat: bool,
    width: int | None = None,
) -> list[MicroBatch]:
    """This rank's forwards for the rows of a step: the same number on every rank. Flat ones have `width` tokens, if
    that is given: what is missing is one more document, of which nothing is learned.

    Rows are dealt out in turn, so that ranks differ by at most one row a micro-batch; a rank without a row gets a
    batch of one unsupervised token, because its gradients must still be reduced.
    """
    share = per_device_batch_size * world_size
    dealt = [indices[at : at + share][rank::world_size] for at in range(0, len(indices), share)]
    documents = ([rows.documents(int(row)) for row in rows_of_batch] for rows_of_batch in dealt)
    return [_batch(rows_of_batch, flat=flat, width=width) for rows_of_batch in documents]


def _batch(rows: list[list[tuple[np.ndarray, np.ndarray]]], *, flat: bool, width: int | None) -> MicroBatch:
    if not rows:
        rows = [[_nothing_learned(1)]]
    if flat:
        documents = [document for row in rows for document in row]
        missing = 0 if width is None else width - sum(len(ids) for ids, _ in documents)
        assert missing >= 0, f"{width - missing if width else 0} tokens in a micro-batch of {width}"
        if missing:
            documents.append(_nothing_learned(missing))
        ends = np.cumsum([0] + [len(ids) for ids, _ in documents])
        return MicroBatch(
            **_joined([documents], int(ends[-1])),
            cu_seq_lens=torch.from_numpy(ends.astype(np.int32)),
            document_lengths=tuple(np.diff(ends).tolist()),
        )
    return _joined(rows, max(sum(len(ids) for ids, _ in row) for row in rows))


def _nothing_learned(tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """A document of so many tokens 0."""
    return np.zeros(tokens, np.int64), np.full(tokens, IGNORE)


def _joined(rows: list[list[tuple[np.ndarray, np.ndarray]]], width: int) -> MicroBatch:
    """Documents of each row one after another, padded right to `width`; labels shifted within each document."""
    input_ids = np.zeros((len(rows), width), np.int64)
    position_ids = np.zeros((len(rows), width), np.int64)
    shift_labels = np.full((len(rows), width), IGNORE, np.int64)
    for index, row in enumerate(rows):
        at = 0
        for ids, labels in row:
            end = at + len(ids)
            input_ids[index, at:end] = ids
            position_ids[index, at:end] = np.arange(len(ids))
            shift_labels[index, at : end - 1] = labels[1:]
            at = end
        position_ids[index, at:] = np.arange(width - at)
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        shift_labels=torch.from_numpy(shift_labels),
        supervised=torch.from_numpy(np.flatnonzero(shift_labels != IGNORE)),
    )


def without_learning(batch: MicroBatch) -> MicroBatch:
    """The micro-batch for a rank that computes no loss of it."""
    return cast(MicroBatch, {**batch, "supervised": batch["supervised"][:0]})


def prefetch(batches: Iterable[MicroBatch], device: torch.device | str, non_blocking: bool) -> Iterator[MicroBatch]:
    """The batches on the device. On a GPU with `non_blocking`, each is copied from pinned memory on a second stream
    while the one before it is computed on."""
    device = torch.device(device)
    if device.type == "cpu" or not non_blocking:
        for batch in batches:
            yield _moved(batch, lambda tensor: tensor.to(device))
        return
    module: Any = torch.get_device_module(device)
    copies = module.Stream(device)
    ahead: tuple[MicroBatch, torch.Event] | None = None
    for batch in batches:
        with module.stream(copies):
            moved = _moved(batch, lambda tensor: tensor.pin_memory().to(device, non_blocking=True))
            copied = copies.record_event()
        if ahead is not None:
            yield _received(*ahead)
        ahead = moved, copied
    if ahead is not None:
        yield _received(*ahead)


def _received(batch: MicroBatch, copied: torch.Event) -> MicroBatch:
    """A copied batch, for use on the present stream."""
    present: Any = torch.get_device_module(batch["input_ids"].device).current_stream()
    present.wait_event(copied)

    def use(tensor: torch.Tensor) -> torch.Tensor:
        tensor.record_stream(present)  # its memory belongs to the copying stream; keep it until this one is done
        return tensor

    return _moved(batch, use)


def _moved(batch: MicroBatch, move: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
    moved = {key: move(value) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    return cast(MicroBatch, moved)
