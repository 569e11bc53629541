"""Tokenises each data set once, into a content-addressed folder with memory-mapped arrays.

The address covers everything that decides the tokens: data bytes, tokenizer, template, settings and VERSION. VERSION
goes up when this code makes other tokens from the same row. A folder is written aside and renamed under a lock, so any
number of processes may ask for it at once. A folder that does not read back completely is made again.

    tokens/<address>/   facts.json      counts, and each array's digest; written last
                        tokens.npy      all documents' tokens, one after another
                        learned.npy     as long: whether the token is supervised
                        lengths.npy     each document's number of tokens
                        ...             one value for each document (ARRAYS, and for preferences ANSWER_ARRAYS)

A preference pair counts as one document here: the chosen document, then the rejected one. So it is held out, weighed
and shuffled as a whole.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock
from numpy.lib import format as npy

from finetune.data.readers import SourceRow
from finetune.data.rows import SECONDS_BETWEEN_NOTES, Mistakes, ReadRow, RowReader
from finetune.data.sources import Source
from finetune.errors import DataError, EnvironmentMismatch
from finetune.files import cache_folder, read_sealed, remove_folder, write_sealed
from finetune.paths import open_regular
from finetune.recipe.schema import Data
from finetune.tokens.encoder import IGNORE, REMARKS, Document, Encoder, RowError, Script
from finetune.tokens.marks import OmittedFromHistory
from finetune.wording import counted

VERSION = 9
EARLIER_VERSIONS = (7, 8)  # their runs are resumed, if the rows give as many tokens
# The refusal of judged answers with nothing to measure the KL baseline on.
ONE_ANSWER = "data.train: every judged answer is one text, and kto measures each against another; add other answers"
CHUNK_ROWS = 256  # rows tokenised by one call: enough to spread its fixed cost; and memory holds only these
# Name of a file -> its dtype. The file "learned" keeps its old name: it is StoredDocuments.is_supervised.
ARRAYS = {"tokens": "<i4", "learned": "|b1", "lengths": "<i8", "supervised": "<i8", "digests": "<u8", "lines": "<i8",
          "files": "<i4", "rows": "<i8"}  # fmt: skip
ANSWER_ARRAYS = {"first": "<i8", "first_supervised": "<i8", "desirable": "|b1"}
COUNTS = (
    *"rows_read documents truncated tokens_cut dropped unanswered longest_unanswered identical identical_cut".split(),
    *"texts_split control_token_texts largest_token_id".split(),
    *REMARKS,
)


@dataclass(frozen=True)
class StoredDocuments:
    """A data set's tokenised rows, memory-mapped."""

    tokens: np.ndarray  # int32 [all tokens]
    is_supervised: np.ndarray  # bool [all tokens]: true where the label is the token, else IGNORE
    offsets: np.ndarray  # int64 [documents + 1]
    supervised: np.ndarray  # int64 [documents]: supervised tokens
    digests: np.ndarray  # uint64 [documents]: equal documents have equal digests
    lines: np.ndarray  # int64 [documents]: the row's line in its file
    files: np.ndarray  # int32 [documents]: index into names
    rows: np.ndarray  # int64 [documents]: the document's row, counted from 0; ascending
    names: tuple[str, ...]
    facts: dict[str, Any]
    # Only for preferences: the first document's tokens and supervised tokens, and whether a judged answer is wanted.
    first: np.ndarray | None = None  # int64 [documents]
    first_supervised: np.ndarray | None = None  # int64 [documents]
    desirable: np.ndarray | None = None  # bool [documents]

    def __len__(self) -> int:
        return len(self.supervised)

    def documents(self, index: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """(input_ids, labels), int64: one document's, or both documents' for a pair."""
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        edges = [start, end]
        if self.first is not None and start + int(self.first[index]) < end:
            edges.insert(1, start + int(self.first[index]))
        result = []
        for begin, stop in pairwise(edges):
            ids = self.tokens[begin:stop].astype(np.int64)
            result.append((ids, np.where(self.is_supervised[begin:stop], ids, IGNORE)))
        return result

    def place(self, index: int) -> str:
        """file:line of the document's row."""
        return f"{self.names[int(self.files[index])]}:{int(self.lines[index])}"


def content_key(parts: dict[str, Any]) -> str:
    """The content address for `parts`: 32 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def documents_keys(source: Source, data: Data, encoder: Encoder) -> dict[int, str]:
    """A tokenised data set's address in this VERSION, and in each earlier one. Reads the data's files once."""
    settings = data.model_dump(include={"max_length", "train_on", "truncation", "date_string"})
    reading = source.entry.model_dump(include={"format", "columns", "roles", "chat_template_kwargs"})
    # A new key changes the address only if it is used, so that older caches stay valid.
    reading |= source.entry.model_dump(
        include={"template", "drop", "delimiter", "encoding", "labels", "sheet"}, exclude_defaults=True
    )
    identity = encoder.identity()
    without_ends = {name: digest for name, digest in identity.items() if name != "ends"}
    parts = {"source": source.key(), "reading": reading, **settings}
    keys = {VERSION: content_key({"version": VERSION, "encoder": identity, **parts})}
    for version in EARLIER_VERSIONS:
        keys[version] = content_key({"version": version, "encoder": without_ends, **parts})
    return keys


def stored_documents(source: Source, data: Data, encoder: Encoder) -> tuple[dict[int, str], StoredDocuments]:
    """A data set's (`documents_keys`, documents), tokenised now if the cache lacks them.

    Raises DataError, and EnvironmentMismatch if the cache cannot be written.
    """
    keys = documents_keys(source, data, encoder)
    folder = cache_folder() / "tokens" / keys[VERSION]
    names = tuple(str(file) for file in source.files) or (source.entry.path,)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            documents = _open(folder, names)
            if documents is None:
                _build(folder, source, data, encoder)
                documents = _open(folder, names)
                assert documents is not None, f"{folder} does not read back"
            return keys, documents
    except OSError as error:
        raise EnvironmentMismatch(
            f"{folder.parent}: {error.strerror or error}; set FINETUNE_CACHE to a folder with room that can be written"
        ) from None


def _open(folder: Path, names: tuple[str, ...]) -> StoredDocuments | None:
    """The folder's arrays, or None if anything in it differs from the bytes as written."""
    facts = read_sealed(folder / "facts.json")
    if facts is None:
        return None
    try:
        names_of_arrays = [*ARRAYS, *(name for name in ANSWER_ARRAYS if name in facts["digests"])]
        arrays = {name: read_array(folder / f"{name}.npy", facts["digests"][name]) for name in names_of_arrays}
    except (OSError, ValueError) as error:
        print(f"{folder}: {error}; the rows are tokenised again", file=sys.stderr, flush=True)
        return None
    is_supervised, lengths = arrays.pop("learned"), arrays.pop("lengths")
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return StoredDocuments(is_supervised=is_supervised, offsets=offsets, names=names, facts=facts["facts"], **arrays)


def _build(folder: Path, source: Source, data: Data, encoder: Encoder) -> None:
    """Tokenise a data set into the folder. Raises DataError with every mistake."""
    try:
        encoder.check_variables(source.entry.chat_template_kwargs)
    except RowError as error:
        raise DataError([f"{source.name}: {error}"]) from None
    aside = folder.with_suffix(".partial")  # the lock makes it ours; a killed process may have left files in it
    remove_folder(aside)
    aside.mkdir()
    writer = _Writer(aside, source, answers=data.unit != "documents")
    try:
        mistakes, reader = Mistakes(), RowReader(source)
        units = units_of(reader.rows(), encoder, mistakes)
        rows, last_note = 0, time.monotonic()
        while chunk := list(islice(units, CHUNK_ROWS)):
            rows += len(chunk)
            if time.monotonic() - last_note > SECONDS_BETWEEN_NOTES:
                last_note = time.monotonic()
                print(f"tokenising {source.name}: {counted(rows, 'row')}", file=sys.stderr, flush=True)
            for unit in chunk:
                for script in unit.scripts:
                    writer.counts["control_token_texts"] += bool(script.literals)
                    writer.counts.update(script.remarks)
                    writer.stops.update(script.stops)
            for unit, documents in fitted_units(chunk, encoder, data, mistakes, writer.counts):
                if not mistakes.count:
                    writer.add(unit, documents)
        mistakes.raise_if_any()
        writer.close(reader.facts(lambda key: encoder.template.reads(key)), encoder.token_ids(writer.stops))
        remove_folder(folder)
        aside.rename(folder)
    finally:
        writer.abandon()
        remove_folder(aside)


class Unit(NamedTuple):
    """The source of one document: a row, one of its examples, or two answers."""

    row: SourceRow
    scripts: tuple[Script, ...]  # one, or a pair's chosen and rejected one
    desirable: bool = True  # of a judged answer


def units_of(rows: Iterable[ReadRow], encoder: Encoder, mistakes: Mistakes) -> Iterator[Unit]:
    """Yield each row's units, all or none. A part that the template omits from many rows is reported once."""
    for row, read, problem in rows:
        try:
            if read is None:
                raise RowError(problem or "")
            units = [
                Unit(row, encoder.scripts(example), desirable=getattr(example, "desirable", True))
                for example in encoder.examples(read)
            ]
        except OmittedFromHistory as error:
            mistakes.add(str(error), row.place, kind="left out of earlier turns")
        except RowError as error:
            mistakes.add(str(error), row.place)
        else:
            yield from units


def fitted_units(
    units: Sequence[Unit], encoder: Encoder, data: Data, mistakes: Mistakes, counts: Counter[str]
) -> Iterator[tuple[Unit, list[Document]]]:
    """Yield the units' documents within max_length: once for each unit, or for each piece of a long text.

    A pair whose answers are equal, or become equal by the cut at max_length, is left out and counted.
    """
    for unit, documents in zip(units, encoder.tokenised([unit.scripts for unit in units]), strict=True):
        if isinstance(documents, RowError):
            mistakes.add(str(documents), unit.row.place)
            continue
        if are_alike(documents):
            counts["identical"] += 1
            continue
        row_counts: Counter[str] = Counter()  # a pair that is left out does not count as cut
        fitted = [
            fit(document, unit.row, data, mistakes, row_counts, is_text=script.is_text and len(documents) == 1)
            for document, script in zip(documents, unit.scripts, strict=True)
        ]
        if len(fitted) == 2 and all(fitted) and are_alike([pieces[0] for pieces in fitted]):
            counts["identical_cut"] += 1
            continue
        longest = max(counts["longest_unanswered"], row_counts.pop("longest_unanswered", 0))
        counts.update(row_counts)
        counts["longest_unanswered"] = longest
        # Each piece of a text is a document. A pair keeps both answers, or is left out.
        yield from ((unit, [*pieces]) for pieces in zip(*fitted, strict=False))


def are_alike(documents: Sequence[Document]) -> bool:
    """Whether a pair's two answers are equal up to their last supervised tokens."""
    if len(documents) != 2:
        return False
    compared = []
    for ids, labels in ((document.input_ids, document.labels) for document in documents):
        end = next((place for place in range(len(ids), 0, -1) if labels[place - 1] != IGNORE), 0)
        compared.append((ids[:end], labels[:end]))
    return bool(compared[0][0]) and compared[0] == compared[1]


def nothing_left(key: str, counts: Sequence[Mapping[str, Any]], max_length: int) -> str:
    """The refusal if these data sets have no document left, with the reasons in their counts."""
    names = ("identical", "identical_cut", "dropped")
    equal, cut, dropped = (sum(int(set_counts.get(name, 0)) for set_counts in counts) for name in names)
    longest = max((int(set_counts.get("longest_unanswered", 0)) for set_counts in counts), default=0)
    unanswered = sum(int(set_counts.get("unanswered", 0)) for set_counts in counts)
    reasons, remedy = list[str](), "check data.max_length and data.truncation"
    if equal:
        remedy = "name pairs whose answers differ as the chat template writes them"
        reasons.append(f"{counted(equal, 'pair')} with two equal answers")
    if cut:
        remedy = "raise data.max_length"
        reasons.append(f"{counted(cut, 'pair')} whose answers differ only beyond data.max_length ({max_length:,})")
    if dropped:
        if longest and not reasons:  # an older cache has none
            remedy = f"data.max_length: {longest} keeps all"
        which = "whose question alone is longer than" if unanswered else "longer than"
        reasons.append(f"{counted(dropped, 'document')} {which} data.max_length ({max_length:,})")
    return f"{key}: holds no document{': ' if reasons else ''}{', '.join(reasons)}; {remedy}"


def fit(
    document: Document, row: SourceRow, data: Data, mistakes: Mistakes, counts: Counter[str], *, is_text: bool
) -> list[Document]:
    """Fit a document into max_length as data.truncation says: itself, cut, in pieces, or an empty list."""
    length, limit = len(document.input_ids), data.max_length
    if not any(label != IGNORE for label in document.labels):
        mistakes.add("nothing in this row is supervised; give it a longer text", row.place)
        return []
    if length <= limit:
        return [document]
    if data.truncation == "split" and is_text:
        counts["texts_split"] += 1
        return pieces_of(document.input_ids, limit)
    if data.truncation in ("error", "split"):
        choices = "right, drop or split" if is_text else "right or drop"
        remedy = f"raise it, shorten the row, or set data.truncation: {choices}"
        if data.truncation == "split":
            remedy += ", because only texts without a prompt are split"
        problem = f"{length} tokens are more than data.max_length {limit}; {remedy}"
        mistakes.add(problem, row.place, kind=f"longer than {limit}", size=length)
        return []
    truncated = Document(document.input_ids[:limit], document.labels[:limit])
    if data.truncation == "right" and any(label != IGNORE for label in truncated.labels):
        counts["truncated"] += 1
        counts["tokens_cut"] += length - limit
        return [truncated]
    counts["dropped"] += 1
    counts["longest_unanswered"] = max(counts["longest_unanswered"], length)
    if data.truncation == "right":  # cut before the first supervised token
        counts["unanswered"] += 1
    return []


def pieces_of(ids: list[int], limit: int) -> list[Document]:
    """Split a text's tokens into consecutive documents with at most `limit` tokens. No token is lost.

    Each piece's first token follows nothing, so it is not supervised, as in every document. A single last token would
    be a document without a supervised token, so the piece before it gives one token away.

        17 tokens, limit 8: pieces with 8, 7 and 2
    """
    starts = [*range(0, len(ids), limit)]
    if len(ids) - starts[-1] == 1:
        starts[-1] -= 1
    pieces = [ids[start:end] for start, end in pairwise([*starts, len(ids)])]
    return [Document(piece, [IGNORE, *piece[1:]]) for piece in pieces]


class _Writer:
    """Appends documents to a folder's arrays."""

    def __init__(self, folder: Path, source: Source, *, answers: bool) -> None:
        self.counts = Counter(dict.fromkeys(COUNTS, 0))
        self.stops: set[str] = set()
        self._row: SourceRow | None = None
        self._folder = folder
        self._dtypes = ARRAYS | ANSWER_ARRAYS if answers else ARRAYS
        self._arrays = {name: ArrayWriter(folder / f"{name}.npy", dtype) for name, dtype in self._dtypes.items()}
        self._files = {str(file): index for index, file in enumerate(source.files)}

    def add(self, unit: Unit, documents: Sequence[Document]) -> None:
        row = unit.row
        tokens = np.concatenate([np.asarray(document.input_ids, dtype="<i4") for document in documents])
        is_supervised = np.concatenate([np.asarray(document.labels) for document in documents]) != IGNORE
        first = len(documents[0].input_ids)
        self.counts["rows_read"] += row is not self._row  # with train_on: each_turn, a row has several documents
        self._row = row
        digest = hashlib.blake2b(tokens.tobytes() + is_supervised.tobytes(), digest_size=8).digest()
        values: dict[str, Any] = {
            "tokens": tokens,
            "learned": is_supervised,
            "lengths": len(tokens),
            "supervised": int(is_supervised.sum()),
            "digests": int.from_bytes(digest, "little"),
            "lines": row.line,
            "files": self._files.get(row.file, 0),
            "rows": self.counts["rows_read"] - 1,
            "first": first,
            "first_supervised": int(is_supervised[:first].sum()),
            "desirable": unit.desirable,
        }
        for name in self._dtypes:
            self._arrays[name].append(values[name])
        self.counts["documents"] += 1
        self.counts["largest_token_id"] = max(self.counts["largest_token_id"], int(tokens.max()))

    def abandon(self) -> None:
        """Close the files, finished or not."""
        for array in self._arrays.values():
            array.abandon()

    def close(self, rows: dict[str, Any], stops: list[int]) -> None:
        """Finish the arrays. facts.json is written last, so a folder that has it is complete.

        Args:
            rows: The reader's facts.
            stops: The stop tokens' ids.
        """
        digests = {name: array.close() for name, array in self._arrays.items()}
        facts = {"digests": digests, "facts": {**self.counts, "rows": rows, "stops": stops}}
        write_sealed(self._folder / "facts.json", facts)


_HEADER_BYTES = 128  # numpy pads each one-dimensional array's header to this size


class ArrayWriter:
    """Appends values to an .npy file. The header holds the length, so its 128 bytes are written at the end."""

    def __init__(self, file: Path, dtype: str) -> None:
        self._dtype = np.dtype(dtype)
        self._stream = file.open("wb")
        self._stream.write(b"\0" * _HEADER_BYTES)
        self._digest = hashlib.blake2b(digest_size=16)
        self._length = 0

    def append(self, values: Any) -> None:
        """Append one value, or an array."""
        piece = np.atleast_1d(np.asarray(values, dtype=self._dtype))
        raw = piece.tobytes()
        self._stream.write(raw)
        self._digest.update(raw)
        self._length += len(piece)

    def close(self) -> str:
        """Finish the file. Returns the digest for `read_array`, over the values and then the header."""
        self._stream.seek(0)
        header = {"descr": npy.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self._length,)}
        npy.write_array_header_1_0(self._stream, header)
        assert self._stream.tell() == _HEADER_BYTES, "numpy's header has another size"
        self._stream.close()
        with open(self._stream.name, "rb") as written:
            self._digest.update(written.read(_HEADER_BYTES))
        return self._digest.hexdigest()

    def abandon(self) -> None:
        """Give up on the file; nothing happens after `close`."""
        self._stream.close()


def read_array(file: Path, digest: str) -> np.ndarray:
    """The array, memory-mapped and read-only. Raises OSError or ValueError if its bytes are not the written ones."""
    with open_regular(file) as stream:
        header = stream.read(_HEADER_BYTES)
        actual = hashlib.blake2b(digest_size=16)
        while piece := stream.read(2**20):
            actual.update(piece)
    actual.update(header)  # the writer has it last too
    if actual.hexdigest() != digest:
        raise ValueError(f"{file.name} is not what was written")
    if file.stat().st_size == _HEADER_BYTES:  # an empty file cannot be mapped
        empty: np.ndarray = np.load(file)
        return empty
    array: np.ndarray = np.load(file, mmap_mode="r")
    return array
