"""What will be learned: some rows token by token, and figures and findings of all of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np

from finetune.batches import Prepared, prepare
from finetune.conversations import IGNORE, Document, Encoder
from finetune.data_sources import resolve
from finetune.errors import DataError
from finetune.model import load_tokenizer
from finetune.pages.findings import Finding, find_oddities, length_histogram
from finetune.recipe import Data, DataSet, Recipe, RowFormat
from finetune.row_check import FormatOfSource, data_entries
from finetune.row_formats import Chat, read_row
from finetune.row_reading import BadRow, SourceRow
from finetune.text_tokens import TextTokenizer

LONGEST = 3  # documents named
CHARACTER = 4  # tokens that one character of UTF-8 may be cut into


@dataclass(frozen=True, slots=True)
class Piece:
    """One token as text, or the few that one character was cut into."""

    text: str
    learned: bool
    special: bool


@dataclass(frozen=True)
class ShownRow:
    """One document."""

    place: str
    roles: dict[str, int]  # messages of each role; empty for a text
    pieces: list[Piece]
    tokens: int
    learned: int


@dataclass(frozen=True)
class Preview:
    """Rows to look at, and the whole of the data in figures."""

    rows: list[ShownRow]
    findings: list[Finding]
    facts: dict[str, Any]  # empty when the data is refused
    roles: dict[str, int]  # messages of each role in all data sets
    histogram: list[tuple[int, int, int]]  # (from, below, training documents), tokens
    longest: list[tuple[str, int]]  # (place, tokens)
    max_length: int

    @property
    def ok(self) -> bool:
        """Whether training would take this data."""
        return not any(finding.severity == "error" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"findings": [finding.as_json() for finding in self.findings], "ok": self.ok}


def preview(recipe: Recipe, rows: int) -> Preview:
    """Look at the data of a recipe. Data that training refuses is shown as far as it can be read.

    Raises FinetuneError when tokenizer or data sets cannot be had at all.
    """
    tokenizer = load_tokenizer(recipe)
    encoder = Encoder(tokenizer, recipe.data)
    refused: list[Finding] = []
    prepared: Prepared | None = None
    try:
        prepared = prepare(recipe, tokenizer)
    except DataError as error:
        refused = [Finding("error", mistake) for mistake in error.mistakes]
    shown = list(islice(_readable(recipe.data, encoder), rows))
    roles = _all_roles(recipe.data)
    if prepared is None:
        return Preview(shown, refused, {}, roles, [], [], recipe.data.max_length)
    trained = np.unique(prepared.split.train)
    lengths = prepared.pool.lengths[trained]
    order = np.argsort(-lengths, kind="stable")[:LONGEST]
    return Preview(
        shown,
        find_oddities(prepared, recipe.data, begin=tokenizer.bos_token_id, special=encoder.texts.special_ids),
        _facts(recipe, prepared, lengths),
        roles,
        length_histogram(lengths, recipe.data.max_length),
        [(prepared.pool.place(int(trained[index])), int(lengths[index])) for index in order],
        recipe.data.max_length,
    )


def pieces(texts: TextTokenizer, document: Document) -> Iterator[Piece]:
    """Tokens as text, each decoded after the one before, so that spaces between words are kept."""
    before: list[int] = []
    held: list[int] = []
    for token, label in zip(document.input_ids, document.labels, strict=True):
        held.append(token)
        text = texts.decode([*before, *held])[len(texts.decode(before)) :]
        if text.endswith("\ufffd") and len(held) < CHARACTER:
            continue
        yield Piece(text, label != IGNORE, token in texts.special_ids)
        before, held = held, []
    if held:
        yield Piece(texts.decode(held), document.labels[-1] != IGNORE, False)


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
    layout = FormatOfSource(entry)
    for row in resolve(entry).rows():
        try:
            if row.values is None:
                continue
            format = layout.of(row)
            document = encoder.encode(row.values, format)
        except BadRow:
            continue
        shown = list(pieces(encoder.texts, document))
        learned = sum(label != IGNORE for label in document.labels)
        yield ShownRow(row.place, _roles(row, format), shown, len(document.labels), learned)


def _roles(row: SourceRow, format: RowFormat) -> dict[str, int]:
    read = read_row(row.values or {}, format)
    return dict(Counter(message["role"] for message in read.messages)) if isinstance(read, Chat) else {}


def _all_roles(data: Data) -> dict[str, int]:
    """Messages of each role; rows that cannot be read have none."""
    counted: Counter[str] = Counter()
    for entry in data_entries(data):
        layout = FormatOfSource(entry)
        for row in resolve(entry).rows():
            try:
                counted.update(_roles(row, layout.of(row)) if row.values is not None else {})
            except BadRow:
                continue
    return dict(counted)


def _facts(recipe: Recipe, prepared: Prepared, lengths: np.ndarray) -> dict[str, Any]:
    """What `prepare` counted, and the arithmetic of an epoch."""
    rows, per_step = prepared.facts["rows"], recipe.training.global_batch_size
    middle, high = np.percentile(lengths, [50, 99])
    return prepared.facts | {
        "tokens_median": float(middle),
        "tokens_99th": float(high),
        "tokens_longest": int(lengths.max()),
        "steps_per_epoch": math.ceil(rows / per_step),
        "tokens_per_step": round(prepared.facts["tokens"] / rows * min(per_step, rows)),
    }
