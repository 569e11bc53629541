"""Rows with tokenised documents, their order, and a rank's micro-batches.

Data, seed and global_batch_size alone decide a step's rows. All functions here are pure, except `prefetch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, NotRequired, Protocol, TypedDict

import numpy as np
import torch

from finetune.tokens.encoder import IGNORE
from finetune.tokens.mixture import ROW_ORDER, seeded_order


class MicroBatch(TypedDict):
    """One forward's input: flat [1, tokens] with all rows' documents, or [rows, longest] padded right.

    Two documents with 3 and 2 tokens, as a flat batch with width 6. The sixth token is an unsupervised document. Only
    each document's last two tokens are supervised:

        input_ids         a  b  c  d  e  0
        position_ids      0  1  2  0  1  0
        shift_labels      b  c  -  e  -  -
        supervised        0  1     3
        cu_seq_lens       0        3     5  6
        document_lengths  3, 2, 1
    """

    input_ids: torch.Tensor  # int64
    position_ids: torch.Tensor  # int64, from 0 in each document; a padded tail counts as one more document
    shift_labels: torch.Tensor  # int64, each position's target; IGNORE at each document's last
    supervised: torch.Tensor  # int64, positions with a target other than IGNORE, counted through all rows
    cu_seq_lens: NotRequired[torch.Tensor]  # int32 [documents + 1], flat only
    # On the host, so that attention reads them without a sync; flat only.
    document_lengths: NotRequired[tuple[int, ...]]
    answers: NotRequired[Answers]  # preferences only; no argument of the model


@dataclass(frozen=True)
class Answers:
    """What an objective on preferences knows of a micro-batch's answers, in the order of its documents."""

    units: int  # pairs or judged answers of this rank
    lengths: tuple[int, ...]  # supervised tokens of each answer
    tokens: torch.Tensor  # the same, float32 [answers]
    reference: torch.Tensor  # float32 [answers]: the reference's log-probability
    units_a_token: float = 0.0  # pairs alone: the step's pairs for each chosen token of it
    desirable: torch.Tensor | None = None  # judged answers alone: bool [answers]
    mismatched: MicroBatch | None = None  # judged answers alone: the same prompts, each with another answer


def rows_of_step(step: int, *, rows: int, global_batch_size: int, seed: int, total_rows: int) -> np.ndarray:
    """The row numbers for step `step` (from 0), int64 [at most global_batch_size].

    Each epoch is one seeded permutation of all rows, and the epochs follow each other as one stream. Step s takes the
    stream's s-th global_batch_size rows. `total_rows` ends the stream, so the last step may be short: no row is dropped
    or doubled.

    With 5 rows, global_batch_size 4 and 10 rows in all (two epochs):

        stream   3 1 4 0 2 2 0 3 1 4
        step 0   3 1 4 0
        step 1           2 2 0 3
        step 2                   1 4
    """
    first = step * global_batch_size
    end = min(first + global_batch_size, total_rows)
    parts = []
    if first < end:
        for epoch in range(first // rows, -(-end // rows)):
            epoch_start = epoch * rows
            order = _epoch_order(rows, seed, epoch)
            parts.append(order[max(first - epoch_start, 0) : min(end - epoch_start, rows)])
    if parts:
        return np.concatenate(parts)
    return np.empty(0, np.int64)


@lru_cache(maxsize=2)  # a step touches two epochs at most, unless rows are fewer than a batch
def _epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    order = seeded_order(rows, seed, ROW_ORDER, epoch)
    order.flags.writeable = False
    return order


class Documents(Protocol):
    """Rows, as batches need them."""

    def documents(self, row: int, /) -> list[tuple[np.ndarray, np.ndarray]]:
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
    """This rank's micro-batches for a step's rows; every rank has as many.

    With `width`, one unsupervised document pads each flat batch to that many tokens. Rows are dealt in turn, so ranks
    differ by at most one row a micro-batch. A rank without a row gets a batch with one unsupervised token, because its
    gradients must still be reduced.

    With rows 0 to 9, 2 ranks and 2 rows a device, rank 0 has [0, 2], [4, 6], [8] and rank 1 has [1, 3], [5, 7], [9].
    """
    result = []
    for places in dealt(len(indices), rank, world_size, per_device_batch_size):
        own_rows = [rows.documents(int(indices[place])) for place in places] or [[_unsupervised_document(1)]]
        longest = max(sum(len(ids) for ids, _ in row) for row in own_rows)
        result.append(_flat_batch(own_rows, width) if flat else _joined(own_rows, longest))
    return result


def dealt(rows: int, rank: int, world_size: int, per_device_batch_size: int) -> list[range]:
    """The places of this rank's rows in range(rows), one range for each micro-batch; every rank has as many."""
    share = per_device_batch_size * world_size
    return [range(start + rank, min(start + share, rows), world_size) for start in range(0, rows, share)]


def _flat_batch(rows: list[list[tuple[np.ndarray, np.ndarray]]], width: int | None) -> MicroBatch:
    documents = [document for row in rows for document in row]
    tokens = sum(len(ids) for ids, _ in documents)
    if width is not None:
        assert tokens <= width, f"{tokens} tokens in a micro-batch of {width}"
        if tokens < width:
            documents.append(_unsupervised_document(width - tokens))
    ends = np.cumsum([0] + [len(ids) for ids, _ in documents])
    batch = _joined([documents], int(ends[-1]))
    batch["cu_seq_lens"] = torch.from_numpy(ends.astype(np.int32))
    batch["document_lengths"] = tuple(np.diff(ends).tolist())
    return batch


def _unsupervised_document(tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """A document with `tokens` tokens, all 0."""
    return np.zeros(tokens, np.int64), np.full(tokens, IGNORE)


def _joined(rows: list[list[tuple[np.ndarray, np.ndarray]]], width: int) -> MicroBatch:
    """Join each row's documents, and pad it right to `width`; labels are shifted within each document."""
    input_ids = np.zeros((len(rows), width), np.int64)
    position_ids = np.zeros((len(rows), width), np.int64)
    shift_labels = np.full((len(rows), width), IGNORE, np.int64)
    for index, row in enumerate(rows):
        start = 0
        for ids, labels in row:
            end = start + len(ids)
            input_ids[index, start:end] = ids
            position_ids[index, start:end] = np.arange(len(ids))
            shift_labels[index, start : end - 1] = labels[1:]  # a document's last token predicts nothing
            start = end
        position_ids[index, start:] = np.arange(width - start)
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        shift_labels=torch.from_numpy(shift_labels),
        supervised=torch.from_numpy(np.flatnonzero(shift_labels != IGNORE)),
    )


def without_learning(batch: MicroBatch) -> MicroBatch:
    """The micro-batch for a rank that computes no loss."""
    return {**batch, "supervised": batch["supervised"][:0]}


def prefetch(batches: Iterable[MicroBatch], device: torch.device | str, non_blocking: bool) -> Iterator[MicroBatch]:
    """Yield the batches on the device.

    On a GPU with `non_blocking`, a second stream copies the next batch from pinned memory during the present compute.

        copying stream   copy 0   copy 1      copy 2
        present stream            compute 0   compute 1   compute 2
    """
    device = torch.device(device)
    if device.type == "cpu" or not non_blocking:
        for batch in batches:
            yield changed_tensors(batch, lambda tensor: tensor.to(device))
        return
    module: Any = torch.get_device_module(device)
    copying_stream = module.Stream(device)
    ahead: tuple[MicroBatch, torch.Event] | None = None
    for batch in batches:
        with module.stream(copying_stream):
            copied = changed_tensors(batch, lambda tensor: tensor.pin_memory().to(device, non_blocking=True))
            is_copied = copying_stream.record_event()
        if ahead is not None:
            yield _wait_for_copy(*ahead)
        ahead = copied, is_copied
    if ahead is not None:
        yield _wait_for_copy(*ahead)


def _wait_for_copy(batch: MicroBatch, is_copied: torch.Event) -> MicroBatch:
    """Let the present stream wait for a copied batch, and keep the batch's memory until the stream is done."""
    present_stream: Any = torch.get_device_module(batch["input_ids"].device).current_stream()
    present_stream.wait_event(is_copied)

    def use(tensor: torch.Tensor) -> torch.Tensor:
        # The tensor's memory belongs to the copying stream; keep it until this stream is done with it.
        tensor.record_stream(present_stream)
        return tensor

    waited_for: MicroBatch = changed_tensors(batch, use)
    return waited_for


def changed_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The batch with each tensor replaced by `change` of it, also in its answers and their mismatched batch."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {key: changed_tensors(value, change) for key, value in batch.items()}
    if isinstance(batch, Answers):
        parts = {member.name: getattr(batch, member.name) for member in fields(batch)}
        return replace(batch, **changed_tensors(parts, change))
    return batch
