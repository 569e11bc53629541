"""Finds rows that training would refuse, by training's encoder with the tokenizer that is on this machine.

Nothing is downloaded or written, and no code from a model's folder runs. Each data set's first rows are encoded. If
rows longer than data.max_length are refused, every row that may be too long is encoded as well. `finetune preview`
encodes every row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.data.check import Mistakes
from finetune.data.row_reader import ReadRow, RowReader
from finetune.data.sources import Source, resolve
from finetune.errors import DataError, FinetuneError
from finetune.model.packaged import tokenizer_file
from finetune.recipe.schema import Data, EvalFraction, Recipe
from finetune.tokens.cache import CHUNK_ROWS, check_set_variables, fit, scripts_of
from finetune.tokens.encoder import Encoder, RowError
from finetune.tokens.estimate import text_of
from finetune.untrusted.library_words import in_one_line, not_loaded
from finetune.wording import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIRST_ROWS = 1000  # in each data set; about two seconds
MOST_ENCODED_BYTES = 16 * 2**20  # of text encoded in each data set; about ten seconds
LEAST_BYTES_A_TOKEN = 2  # assumed for a text that may be too long; English has 4, Chinese 3, digits 1 to 3


@dataclass
class _Seen:
    rows: int = 0
    encoded: int = 0
    bytes: int = 0
    kept: int = 0  # rows with a document that is trained on

    @property
    def all(self) -> bool:
        return self.encoded == self.rows


def check_documents(recipe: Recipe) -> list[str] | None:
    """Encode rows of local data sets. Raises DataError with every mistake.

    Returns one line for each data set that was not encoded completely, or None if no tokenizer is on this machine.
    """
    data, file = recipe.data, tokenizer_file(recipe.model.name_or_path, recipe.model.revision)
    sources = [resolve(entry) for entry in data.sets]
    if file is None or recipe.model.trust_remote_code or all(source.kind == "hub" for source in sources):
        return None
    try:
        encoder = Encoder(_tokenizer(recipe, file.parent), data)
    except FinetuneError:
        if Path(recipe.model.name_or_path).is_dir():
            raise
        return None  # the Hub's cache may hold only some files, and training fetches the others
    mistakes, notes, train = Mistakes(), [], []
    for index, source in enumerate(sources):
        seen = _Seen()
        if source.kind == "hub":
            seen.rows = 1  # at least
        else:
            try:
                _check_set(source, data, encoder, mistakes, seen)
            except DataError as error:
                mistakes.take(error)
            if not seen.all:
                notes.append(
                    f"{source.name}: {seen.encoded:,} of {counted(seen.rows, 'row')} were encoded; `finetune preview` "
                    "encodes all"
                )
        train += [seen] if index < len(data.train) else []
    mistakes.raise_if_any()
    if all(seen.all for seen in train):
        kept = sum(seen.kept for seen in train)
        if not kept:
            raise DataError(["data.train: holds no document; check data.max_length and data.truncation"])
        if kept == 1 and isinstance(data.eval, EvalFraction):
            raise DataError(["data.eval: one document cannot be split; give more rows, or eval: null"])
    return notes


def _tokenizer(recipe: Recipe, folder: Path) -> PreTrainedTokenizerBase:
    """A folder's tokenizer. Only this function imports transformers, because that takes two seconds."""
    from finetune.model.new_tokens import add_to_tokenizer, read_tokenizer

    here = recipe.model.model_copy(update={"name_or_path": str(folder)})
    with in_one_line(partial(not_loaded, "tokenizer", recipe.model.name_or_path)):
        tokenizer = read_tokenizer(here)
    if recipe.model.new_tokens:
        add_to_tokenizer(tokenizer, recipe.model)
    return tokenizer


def _check_set(source: Source, data: Data, encoder: Encoder, mistakes: Mistakes, seen: _Seen) -> None:
    check_set_variables(source, encoder)
    scripts = scripts_of(_chosen(RowReader(source), data, seen), encoder, mistakes)
    counts: Counter[str] = Counter()
    last = None
    while chunk := list(islice(scripts, CHUNK_ROWS)):
        documents = encoder.texts.tokenise([script for _, script in chunk])
        for (row, _), document in zip(chunk, documents, strict=True):
            if isinstance(document, RowError):
                mistakes.add(f"{row.place}: {document}")
            elif fit(document, row, data, mistakes, counts):
                seen.kept += row is not last
                last = row


def _chosen(reader: RowReader, data: Data, seen: _Seen) -> Iterator[ReadRow]:
    """The rows to encode. Rows with a mistake were reported before."""
    for each in reader.rows():
        seen.rows += 1
        if each.read is None:
            continue
        nbytes = len(text_of(each.read).encode(errors="replace"))
        may_be_long = data.truncation == "error" and nbytes > LEAST_BYTES_A_TOKEN * data.max_length
        if (seen.encoded < FIRST_ROWS or may_be_long) and seen.bytes < MOST_ENCODED_BYTES:
            seen.encoded += 1
            seen.bytes += nbytes
            yield each
