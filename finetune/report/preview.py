"""The training data: some rows token by token, with figures and findings over all rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, Literal

import numpy as np

from finetune.data.formats import Chat, Passage
from finetune.data.readers import BadRow
from finetune.data.row_reader import RowReader
from finetune.data.sources import resolve
from finetune.errors import DataError
from finetune.model.build import load_tokenizer
from finetune.recipe.schema import Data, DataSet, Recipe
from finetune.tokens.cache import StoredDocuments
from finetune.tokens.dataset import Prepared, prepare
from finetune.tokens.encoder import IGNORE, Document, Encoder
from finetune.tokens.mixture import DocumentPool, shares
from finetune.tokens.tokenizer import TextTokenizer
from finetune.wording import counted

LONGEST = 3  # documents named
CHARACTER = 4  # tokens that one character of UTF-8 may be split into


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token as text, or the few that one character was split into."""

    text: str
    learned: bool
    special: bool


@dataclass(frozen=True)
class ShownRow:
    """One document."""

    place: str
    roles: dict[str, int]  # messages of each role; empty for a text
    pieces: list[TokenText]
    tokens: int
    learned: int


@dataclass(frozen=True)
class Preview:
    """Rows to look at, and the whole of the data in figures."""

    rows: list[ShownRow]
    findings: list[Oddity]
    facts: dict[str, Any]  # empty when the data is refused
    roles: dict[str, int]  # messages of each role in all data sets
    histogram: list[tuple[int, int, int]]  # (from, below, training documents), tokens
    longest: list[tuple[str, int]]  # (place, tokens)
    max_length: int
    batches: dict[str, Any] = field(default_factory=dict)  # what a training makes of the rows, and its notes

    @property
    def ok(self) -> bool:
        """Whether training would take this data."""
        return not any(finding.severity == "error" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"findings": [finding.as_json() for finding in self.findings], "ok": self.ok}


def preview(recipe: Recipe, rows: int, batches: Callable[[Prepared], dict[str, Any]] | None = None) -> Preview:
    """Look at a recipe's data. Data that training refuses is shown as far as it can be read.

    `batches` turns the data into a training's batch plan: its `notes` are a line, and one finding for each other line.
    Raises FinetuneError if tokenizer or data sets cannot be had at all.
    """
    tokenizer = load_tokenizer(recipe)
    encoder = Encoder(tokenizer, recipe.data)
    refused: list[Oddity] = []
    prepared: Prepared | None = None
    try:
        prepared = prepare(recipe, tokenizer)
    except DataError as error:
        refused = [Oddity("error", mistake) for mistake in error.mistakes]
    examples = list(islice(_readable(recipe.data, encoder), rows))
    roles = _all_roles(recipe.data)
    if prepared is None:
        return Preview(examples, refused, {}, roles, [], [], recipe.data.max_length)
    trained = np.unique(prepared.split.train)
    lengths = prepared.pool.lengths[trained]
    order = np.argsort(-lengths, kind="stable")[:LONGEST]
    trains = batches(prepared) if batches else {"notes": []}
    oddities = find_oddities(prepared, recipe.data, begin=tokenizer.bos_token_id)
    return Preview(
        examples,
        [*oddities, *(Oddity("warning", note) for note in trains["notes"][1:])],
        _facts(recipe, prepared, lengths),
        roles,
        length_histogram(lengths, recipe.data.max_length),
        [(prepared.pool.place(int(trained[index])), int(lengths[index])) for index in order],
        recipe.data.max_length,
        trains,
    )


def pieces(texts: TextTokenizer, document: Document) -> Iterator[TokenText]:
    """Tokens as text, each decoded after the one before, so that spaces between words are kept."""
    before: list[int] = []
    pending: list[int] = []
    for token, label in zip(document.input_ids, document.labels, strict=True):
        pending.append(token)
        text = texts.decode([*before, *pending])[len(texts.decode(before)) :]
        if text.endswith("\ufffd") and len(pending) < CHARACTER:
            continue
        yield TokenText(text, label != IGNORE, token in texts.special_ids)
        before, pending = pending, []
    if pending:
        yield TokenText(texts.decode(pending), document.labels[-1] != IGNORE, False)


def _readable(data: Data, encoder: Encoder) -> Iterator[ShownRow]:
    """The data sets' good rows, one of each in turn."""
    sources = [_rows_of(entry, encoder) for entry in data.train]
    while sources:
        for source in list(sources):
            row = next(source, None)
            if row is None:
                sources.remove(source)
            else:
                yield row


def _rows_of(entry: DataSet, encoder: Encoder) -> Iterator[ShownRow]:
    for row, read, _ in RowReader(resolve(entry)).rows():
        try:
            examples = encoder.examples(read) if read is not None else []
            documents = [encoder.document(example) for example in examples]
        except BadRow:
            continue
        for number, (example, document) in enumerate(zip(examples, documents, strict=True), 1):
            place = row.place + (f", example {number} of {len(examples)}" if len(examples) > 1 else "")
            tokens = list(pieces(encoder.texts, document))
            learned = sum(label != IGNORE for label in document.labels)
            yield ShownRow(place, _roles(example), tokens, len(document.labels), learned)


def _roles(read: Chat | Passage | None) -> dict[str, int]:
    return dict(Counter(message["role"] for message in read.messages)) if isinstance(read, Chat) else {}


def _all_roles(data: Data) -> dict[str, int]:
    """Messages of each role; rows that cannot be read have none."""
    counted: Counter[str] = Counter()
    for entry in data.sets:
        for _, read, _ in RowReader(resolve(entry)).rows():
            counted.update(_roles(read))
    return dict(counted)


def _named(entry: DataSet) -> dict[str, Any]:
    """A data set by name, configuration and split, and its weight."""
    split = entry.split if entry.split != "train" else None
    return {"name": " ".join(filter(None, (resolve(entry).name, entry.name, split))), "weight": entry.weight}


def _facts(recipe: Recipe, prepared: Prepared, lengths: np.ndarray) -> dict[str, Any]:
    """`prepare`'s counts, and one epoch's arithmetic."""
    rows, per_step = prepared.facts["rows"], recipe.training.global_batch_size
    middle, high = np.percentile(lengths, [50, 99])
    each = shares(prepared.pool, prepared.split, len(recipe.data.train))
    return prepared.facts | {
        "data_sets": [_named(entry) | part for entry, part in zip(recipe.data.train, each, strict=True)],
        "tokens_median": float(middle),
        "tokens_99th": float(high),
        "tokens_longest": int(lengths.max()),
        "steps_per_epoch": math.ceil(rows / per_step),
        "tokens_per_step": round(prepared.facts["tokens"] / rows * min(per_step, rows)),
    }


PLACES = 3  # shown of each finding


@dataclass(frozen=True)
class Oddity:
    """One thing to know; an error is refused by training, a warning is trained on as it is."""

    severity: Literal["error", "warning", "note"]
    text: str
    places: tuple[str, ...] = ()  # file:line of the first few

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"places": list(self.places)}


def find_oddities(prepared: Prepared, data: Data, *, begin: int | None) -> list[Oddity]:
    """Findings over all data sets; `begin`: the tokenizer's begin-of-text token, if it has one."""
    pool, oddities = prepared.pool, []
    for index, store in enumerate(pool.stores):
        odd = dict(_by_store(store, data, begin))
        oddities += [_warning(pool, index, members, text) for text, members in odd.items() if len(members)]
    oddities += list(_copies(prepared))
    oddities += [Oddity("note", note) for note in prepared.notes]
    return oddities


def _by_store(store: StoredDocuments, data: Data, begin: int | None) -> Iterator[tuple[str, np.ndarray]]:
    """(the finding, its documents in the data set)"""
    if begin is not None:
        yield "two begin-of-text tokens at the start; remove the text's own from the row", doubled_begin(store, begin)
    if data.train_on != "all":  # then every last line break is learned, and ends nothing
        truncated, silent = unfinished(store, store.facts["stops"], data.max_length)
        yield "an answer truncated at data.max_length teaches no end; raise it, or set truncation: drop", truncated
        yield "an answer whose end of turn is not learned: the model would not stop; look at the template", silent


def doubled_begin(store: StoredDocuments, begin: int) -> np.ndarray:
    """Documents whose first two tokens are both `begin`; int64 [documents found]."""
    starts = store.offsets[:-1]
    long = np.flatnonzero(np.diff(store.offsets) > 1)
    first, second = store.tokens[starts[long]], store.tokens[starts[long] + 1]
    doubled: np.ndarray = long[(first == begin) & (second == begin)]
    return doubled


def unfinished(store: StoredDocuments, stops: Collection[int], max_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents with a last supervised stretch that does not end with the model's stop token: truncated ones, and all
    others. Other control tokens, such as those around a call, end no turn.

    An earlier stretch may lack it, because the template ends that turn with a token that the model does not write.
    """
    learned = np.asarray(store.is_supervised)
    ends = learned.copy()
    ends[:-1] &= ~learned[1:]
    ends[store.offsets[1:] - 1] |= learned[store.offsets[1:] - 1]  # the next token belongs to another document
    where = np.flatnonzero(ends & ~np.isin(store.tokens, list(stops)))
    last = np.flatnonzero(ends)[np.searchsorted(np.flatnonzero(ends), store.offsets[1:]) - 1]  # of each document
    where = np.intersect1d(where, last)
    documents = np.searchsorted(store.offsets, where, side="right") - 1
    full = np.diff(store.offsets)[documents] == max_length
    truncated = full & (where == store.offsets[documents + 1] - 1)
    return np.unique(documents[truncated]), np.unique(documents[~truncated])


def _warning(pool: DocumentPool, store: int, members: np.ndarray, text: str) -> Oddity:
    name = pool.stores[store].names[0]
    several = pool.group(store)[members[:PLACES]].tolist()
    return Oddity(
        "warning",
        f"{counted(len(members), 'document')} of {name}: {text}",
        tuple(pool.place(index) for index in several),
    )


def _copies(prepared: Prepared) -> Iterator[Oddity]:
    """Documents that are the same as an earlier one of the training set."""
    pool, trained = prepared.pool, np.unique(prepared.split.train)
    _, first = np.unique(pool.digests[trained], return_index=True)
    again = np.delete(trained, first)
    if len(again):
        places = tuple(pool.place(index) for index in again[:PLACES].tolist())
        yield Oddity(
            "warning", f"{counted(len(again), 'training document')} with the same tokens as another one", places
        )


def length_histogram(lengths: np.ndarray, max_length: int, bins: int = 12) -> list[tuple[int, int, int]]:
    """(from, below, documents) for equal bins from 0 to max_length. max_length belongs to the last bin."""
    edges = np.unique(np.linspace(0, max_length + 1, bins + 1).round().astype(int))
    counts, _ = np.histogram(lengths, edges)
    return [(int(low), int(high), int(count)) for low, high, count in zip(edges, edges[1:], counts, strict=False)]
