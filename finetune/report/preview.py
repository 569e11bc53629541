"""The training data: some rows token by token, with figures and findings over all rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, Literal

import numpy as np

from finetune.data.cells import BadRow
from finetune.data.chat import Chat, Content, Judged, Pair, documents_in
from finetune.data.rows import RowReader
from finetune.data.sources import resolve
from finetune.errors import DataError
from finetune.model.new_tokens import load_tokenizer
from finetune.recipe.schema import Data, DataSet, Recipe
from finetune.tokens.cache import StoredDocuments, are_alike
from finetune.tokens.dataset import Prepared, prepare
from finetune.tokens.encoder import IGNORE, Document, Encoder
from finetune.tokens.mixture import DocumentPool, shares
from finetune.tokens.tokenizer import TextTokenizer
from finetune.wording import counted

LONGEST = 3  # documents named
PLACES = 3  # shown for each finding
UNITS = {"documents": "document", "pairs": "pair", "judged": "judged answer"}
CHARACTER = 4  # tokens at most for one character of UTF-8, one for each byte


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token as text, or the few tokens that make one character."""

    text: str
    learned: bool  # supervised
    special: bool


@dataclass(frozen=True)
class ShownAnswer:
    """One of a pair's two answers, without the prompt."""

    name: str  # chosen or rejected
    pieces: list[TokenText]
    learned: int  # supervised tokens


@dataclass(frozen=True)
class ShownRow:
    """One document, or a pair: its prompt, and the two answers."""

    place: str
    roles: dict[str, int]  # messages by role; empty for a text
    pieces: list[TokenText]
    tokens: int
    learned: int  # supervised tokens
    answers: tuple[ShownAnswer, ...] = ()  # of a pair
    label: str = ""  # of a judged answer: wanted or unwanted


@dataclass(frozen=True)
class Oddity:
    """One thing to know. Training refuses an error, and trains on a warning's rows as they are."""

    severity: Literal["error", "warning", "note"]
    text: str
    places: tuple[str, ...] = ()  # file:line of the first few

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"places": list(self.places)}


@dataclass(frozen=True)
class Preview:
    """Rows to look at, and figures for all data."""

    rows: list[ShownRow]
    findings: list[Oddity]
    facts: dict[str, Any]  # empty when the data is refused
    roles: dict[str, int]  # messages by role in all data sets
    histogram: list[tuple[int, int, int]]  # (from, below, training documents), tokens
    longest: list[tuple[str, int]]  # (place, tokens)
    max_length: int
    batches: dict[str, Any] = field(default_factory=dict)  # a training's batch plan, and its notes
    unit: str = "document"  # that is counted: a document, a pair of answers, or a judged answer

    @property
    def ok(self) -> bool:
        """Whether training would take this data."""
        return not any(finding.severity == "error" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"findings": [finding.as_json() for finding in self.findings], "ok": self.ok}


def preview(recipe: Recipe, rows: int, batches: Callable[[Prepared], dict[str, Any]] | None = None) -> Preview:
    """Look at a recipe's data. If training would refuse the data, show the rows that can be read.

    Raises FinetuneError if tokenizer or data sets cannot be had at all.

    Args:
        rows: How many documents to show; the data sets take turns.
        batches: Turns the data into a training's batch plan. The first of its `notes` is a line, each other a finding.
    """
    tokenizer = load_tokenizer(recipe)
    refused: list[Oddity] = []
    prepared: Prepared | None = None
    try:
        prepared = prepare(recipe, tokenizer)
    except DataError as error:
        refused = [Oddity("error", mistake) for mistake in error.mistakes]
    shown_rows = list(islice(_rows_in_turn(recipe.data, Encoder(tokenizer, recipe.data, recipe.model)), rows))
    roles: Counter[str] = Counter()
    for entry in recipe.data.sets:
        for _, example, _ in RowReader(resolve(entry)).rows():
            roles.update(_roles_of(example))
    if prepared is None:
        return Preview(shown_rows, refused, {}, dict(roles), [], [], recipe.data.max_length)
    trained = np.unique(prepared.split.train)  # each document once, whatever its data set's weight
    lengths, of_units = document_lengths(prepared.pool, trained)
    longest = np.argsort(-of_units, kind="stable")[:LONGEST]
    batch_plan = batches(prepared) if batches else {"notes": []}
    oddities = find_oddities(prepared, recipe.data, begin=tokenizer.bos_token_id)
    return Preview(
        shown_rows,
        [*oddities, *(Oddity("warning", note) for note in batch_plan["notes"][1:])],
        _facts(recipe, prepared, lengths),
        dict(roles),
        length_histogram(lengths, recipe.data.max_length),
        [(prepared.pool.place(int(trained[index])), int(of_units[index])) for index in longest],
        recipe.data.max_length,
        batch_plan,
        UNITS[recipe.data.unit],
    )


def pieces(texts: TextTokenizer, document: Document) -> Iterator[TokenText]:
    """Tokens as text, each decoded after its predecessor, so that spaces between words are kept."""
    before: list[int] = []
    pending: list[int] = []
    for token, label in zip(document.input_ids, document.labels, strict=True):
        pending.append(token)
        text = texts.decode([*before, *pending])[len(texts.decode(before)) :]
        if text.endswith("\ufffd") and len(pending) < CHARACTER:  # an incomplete character: wait for its next token
            continue
        yield TokenText(text, label != IGNORE, token in texts.special_ids)
        before, pending = pending, []
    if pending:
        yield TokenText(texts.decode(pending), document.labels[-1] != IGNORE, False)


def _rows_in_turn(data: Data, encoder: Encoder) -> Iterator[ShownRow]:
    """Good rows; the data sets take turns."""
    sources = [_rows_of(entry, encoder, data) for entry in data.train]
    while sources:
        for source in list(sources):
            if (row := next(source, None)) is not None:
                yield row
            else:
                sources.remove(source)


def _rows_of(entry: DataSet, encoder: Encoder, data: Data) -> Iterator[ShownRow]:
    """A data set's documents. Rows that cannot be read are skipped; `preview` reports them as errors."""
    for row, content, _ in RowReader(resolve(entry)).rows():
        if content is None:
            continue
        try:
            examples = encoder.examples(content)
            documents = [encoder.documents(example) for example in examples]
        except BadRow:
            continue
        for number, (example, parts) in enumerate(zip(examples, documents, strict=True), 1):
            place = row.place
            if len(examples) > 1:
                place += f", example {number} of {len(examples)}"
            limit = data.max_length if data.truncation == "right" else None
            if are_alike([Document(part.input_ids[:limit], part.labels[:limit]) for part in parts]):
                continue  # a pair of two equal answers is left out
            yield _shown(place, example, parts, encoder.texts)


def _shown(place: str, example: Content, documents: Sequence[Document], texts: TextTokenizer) -> ShownRow:
    """A document, or of a pair the prompt and what follows it in each of the two."""
    tokens = [list(pieces(texts, document)) for document in documents]
    supervised = [sum(label != IGNORE for label in document.labels) for document in documents]
    label, answers, shown = "", [], tokens[0]
    if isinstance(example, Judged):
        label = "wanted" if example.desirable else "unwanted"
    if isinstance(example, Pair):
        # Both begin with the same prompt. A character of several tokens may end it, and then belongs to the answers.
        start = min(next(index for index, piece in enumerate(answer) if piece.learned) for answer in tokens)
        shown = tokens[0][:start]
        answers = [
            ShownAnswer(name, answer[start:], count)
            for name, answer, count in zip(("chosen", "rejected"), tokens, supervised, strict=True)
        ]
    count = sum(len(document.labels) for document in documents)
    return ShownRow(place, _roles_of(example), shown, count, sum(supervised), tuple(answers), label)


def _roles_of(example: Content | None) -> dict[str, int]:
    """Messages by role, a pair's prompt once for each answer; none for a text, or for a row that cannot be read."""
    if example is None:
        return {}
    chats = [document for document in documents_in(example) if isinstance(document, Chat)]
    return dict(Counter(message["role"] for chat in chats for message in chat.messages))


def _facts(recipe: Recipe, prepared: Prepared, lengths: np.ndarray) -> dict[str, Any]:
    """`prepare`'s counts, each data set's share, and one epoch's arithmetic."""
    data_sets = []
    parts = shares(prepared.pool, prepared.split, len(recipe.data.train))
    for entry, part in zip(recipe.data.train, parts, strict=True):
        words = [resolve(entry).name, entry.name]
        if entry.split != "train":
            words.append(entry.split)
        data_sets.append({"name": " ".join(filter(None, words)), "weight": entry.weight} | part)
    rows, per_step = prepared.facts["rows"], recipe.training.global_batch_size
    median, percentile_99 = np.percentile(lengths, [50, 99])
    answers: dict[str, float] = {}
    if recipe.data.unit == "pairs" and prepared.pool.first_supervised is not None:
        pairs = np.unique(prepared.split.train)
        chosen = prepared.pool.first_supervised[pairs]
        answers["chosen_tokens_mean"] = float(chosen.mean())
        answers["rejected_tokens_mean"] = float((prepared.pool.supervised[pairs] - chosen).mean())
    return (
        prepared.facts
        | answers
        | {
            "data_sets": data_sets,
            "tokens_median": float(median),
            "tokens_99th": float(percentile_99),
            "tokens_longest": int(lengths.max()),
            "steps_per_epoch": math.ceil(rows / per_step),
            "tokens_per_step": round(prepared.facts["tokens"] / rows * min(per_step, rows)),
        }
    )


def find_oddities(prepared: Prepared, data: Data, *, begin: int | None) -> list[Oddity]:
    """Findings over all data sets.

    Args:
        begin: The tokenizer's begin-of-text token; None if it has none.
    """
    pool, oddities = prepared.pool, []
    for index, store in enumerate(pool.stores):
        odd: dict[str, np.ndarray] = {}  # a finding's text: its documents in this data set
        if begin is not None:
            text = "two begin-of-text tokens at the start; remove the text's own from the row"
            odd[text] = doubled_begin(store, begin)
        if data.train_on != "all":  # with `all`, the line break after the last turn is supervised and ends no turn
            truncated, silent = unfinished(store, store.facts["stops"], data.max_length)
            if store.facts["texts_split"]:  # the end of such a text is in a later piece
                continued = np.flatnonzero(store.rows[:-1] == store.rows[1:])
                truncated, silent = np.setdiff1d(truncated, continued), np.setdiff1d(silent, continued)
            odd["an answer truncated at data.max_length teaches no end; raise it, or set truncation: drop"] = truncated
            text = "an answer's end of turn is not supervised, so the model would not stop; look at the template"
            odd[text] = silent
        for text, documents in odd.items():
            if len(documents):
                places = tuple(pool.place(place) for place in pool.group(index)[documents[:PLACES]].tolist())
                count = counted(len(documents), UNITS[data.unit])
                oddities.append(Oddity("warning", f"{count} of {store.names[0]}: {text}", places))
    trained = np.unique(prepared.split.train)
    _, first = np.unique(pool.digests[trained], return_index=True)
    copies = np.delete(trained, first)  # documents of the training set that equal an earlier one
    if len(copies):
        text = f"{counted(len(copies), f'training {UNITS[data.unit]}')} with the same tokens as another one"
        oddities.append(Oddity("warning", text, tuple(pool.place(index) for index in copies[:PLACES].tolist())))
    return oddities + [Oddity("note", note) for note in prepared.notes]


def document_edges(store: StoredDocuments) -> np.ndarray:
    """Where each document begins, and where the last one ends; int64. A pair is two documents, stored as one unit."""
    if store.first is None:
        return store.offsets
    return np.union1d(store.offsets, store.offsets[:-1] + store.first)


def document_lengths(pool: DocumentPool, units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each document in these units, and of each unit's longest document; int64. A pair has two documents."""
    lengths, first = pool.lengths[units], [store.first for store in pool.stores]
    if any(part is None for part in first):
        return lengths, lengths
    first_lengths = np.concatenate([part for part in first if part is not None])[units]
    second = lengths - first_lengths
    return np.concatenate([first_lengths, second[second > 0]]), np.maximum(first_lengths, second)


def doubled_begin(store: StoredDocuments, begin: int) -> np.ndarray:
    """Units with a document that begins with the token `begin` twice; int64 [units found]."""
    edges = document_edges(store)
    starts = edges[:-1][np.diff(edges) > 1]
    doubled = starts[(store.tokens[starts] == begin) & (store.tokens[starts + 1] == begin)]
    return _units_at(store, doubled)


def _units_at(store: StoredDocuments, positions: np.ndarray) -> np.ndarray:
    """The units that hold these tokens; int64 [units found]."""
    units: np.ndarray = np.unique(np.searchsorted(store.offsets, positions, side="right") - 1)
    return units


def unfinished(store: StoredDocuments, stops: Collection[int], max_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Units with a document whose last supervised stretch does not end with the model's stop token: truncated ones, and
    all others. Other control tokens, such as those around a call, end no turn.

    Earlier stretches do not count, because a template may end those turns with a token that the model does not write.
    """
    supervised = np.asarray(store.is_supervised)
    edges = document_edges(store)
    document_ends = edges[1:]  # one past each document's last token
    # A stretch ends at a supervised token if the next token is not supervised, or belongs to another document.
    stretch_ends = supervised.copy()
    stretch_ends[:-1] &= ~supervised[1:]
    stretch_ends[document_ends - 1] |= supervised[document_ends - 1]
    positions = np.flatnonzero(stretch_ends)
    last_of_documents = positions[np.searchsorted(positions, document_ends) - 1]
    without_stop = np.flatnonzero(stretch_ends & ~np.isin(store.tokens, list(stops)))
    without_stop = np.intersect1d(without_stop, last_of_documents)
    documents = np.searchsorted(edges, without_stop, side="right") - 1
    truncated = (np.diff(edges)[documents] == max_length) & (without_stop == edges[documents + 1] - 1)
    return _units_at(store, without_stop[truncated]), _units_at(store, without_stop[~truncated])


def length_histogram(lengths: np.ndarray, max_length: int, bins: int = 12) -> list[tuple[int, int, int]]:
    """(from, below, documents) for equal bins from 0 to max_length. max_length belongs to the last bin."""
    edges = np.unique(np.linspace(0, max_length + 1, bins + 1).round().astype(int))
    counts, _ = np.histogram(lengths, edges)
    return [(int(low), int(high), int(count)) for low, high, count in zip(edges, edges[1:], counts, strict=False)]
