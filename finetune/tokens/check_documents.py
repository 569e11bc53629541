"""Finds rows that training would refuse, with training's encoder and the tokenizer on this machine.

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
from finetune.data.formats import Passage, documents_in
from finetune.data.row_reader import ReadRow, RowReader
from finetune.data.sources import Source, resolve
from finetune.errors import DataError, FinetuneError
from finetune.model.packaged import tokenizer_file
from finetune.recipe.schema import Data, EvalFraction, ModelSection, Recipe
from finetune.tokens.cache import CHUNK_ROWS, check_set_variables, fitted_units, units_of
from finetune.tokens.encoder import Encoder
from finetune.tokens.estimate import text_of
from finetune.untrusted.library_words import in_one_line, not_loaded
from finetune.wording import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIRST_ROWS = 1000  # in each data set; about two seconds
MOST_ENCODED_BYTES = 16 * 2**20  # text encoded in each data set; about ten seconds
LEAST_BYTES_A_TOKEN = 2  # assumed for a text that may be too long; English has 4, Chinese 3, digits 1 to 3


@dataclass
class _Progress:
    """How far one data set was checked."""

    rows: int = 0
    encoded: int = 0
    nbytes: int = 0
    kept: int = 0  # rows with a document for training

    @property
    def is_complete(self) -> bool:
        return self.encoded == self.rows


def check_documents(recipe: Recipe) -> list[str] | None:
    """Encode local data sets' rows. Raises DataError with every mistake.

    Returns one line for each data set that was not encoded completely, or None if no tokenizer is on this machine.
    """
    data, file = recipe.data, tokenizer_file(recipe.model.name_or_path, recipe.model.revision)
    sources = [resolve(entry) for entry in data.sets]
    if file is None or recipe.model.trust_remote_code or all(source.kind == "hub" for source in sources):
        return None
    try:
        model = recipe.model.model_copy(update={"name_or_path": str(file.parent)})
        encoder = Encoder(_tokenizer(recipe, model), data, model)
    except FinetuneError:
        if Path(recipe.model.name_or_path).is_dir():
            raise
        return None  # the Hub's cache may hold only some files, and training fetches the others
    mistakes, notes, progress_of_sets = Mistakes(), [], []
    for source in sources:
        progress = _Progress()
        progress_of_sets.append(progress)
        if source.kind == "hub":
            progress.rows = 1  # at least
            continue
        try:
            _check_set(source, data, encoder, mistakes, progress)
        except DataError as error:
            mistakes.take(error)
        if not progress.is_complete:
            rows = f"{progress.encoded:,} of {counted(progress.rows, 'row')}"
            notes.append(f"{source.name}: {rows} were encoded; `finetune preview` encodes all")
    mistakes.raise_if_any()
    train = progress_of_sets[: len(data.train)]
    if all(progress.is_complete for progress in train):
        kept = sum(progress.kept for progress in train)
        if not kept:
            raise DataError(["data.train: holds no document; check data.max_length and data.truncation"])
        if kept == 1 and isinstance(data.eval, EvalFraction):
            raise DataError(["data.eval: one document cannot be split; give more rows, or eval: null"])
    return notes


def _tokenizer(recipe: Recipe, model: ModelSection) -> PreTrainedTokenizerBase:
    """The tokenizer in `model`'s folder. Only this function imports transformers, because that takes two seconds."""
    from finetune.model.new_tokens import add_to_tokenizer, read_tokenizer

    with in_one_line(partial(not_loaded, "tokenizer", recipe.model.name_or_path)):
        tokenizer = read_tokenizer(model)
    if recipe.model.new_tokens:
        add_to_tokenizer(tokenizer, recipe.model)
    return tokenizer


def _check_set(source: Source, data: Data, encoder: Encoder, mistakes: Mistakes, progress: _Progress) -> None:
    """Encode a data set's chosen rows, and count them in `progress`."""
    check_set_variables(source, encoder)
    units = units_of(_rows_to_encode(RowReader(source), data, progress), encoder, mistakes)
    counts: Counter[str] = Counter()
    last_row = None
    while chunk := list(islice(units, CHUNK_ROWS)):
        for unit, _ in fitted_units(chunk, encoder, data, mistakes, counts):
            progress.kept += unit.row is not last_row  # with train_on: each_turn, a row has several documents
            last_row = unit.row


def _rows_to_encode(reader: RowReader, data: Data, progress: _Progress) -> Iterator[ReadRow]:
    """The first rows, and every row that may be too long. Rows with a mistake were reported before."""
    for row in reader.rows():
        progress.rows += 1
        if row.read is None:
            continue
        sizes = [len(text_of(document).encode(errors="replace")) for document in documents_in(row.read)]
        is_text = isinstance(row.read, Passage) and not row.read.prompt
        refuses_long = data.truncation == "error" or (data.truncation == "split" and not is_text)
        may_be_long = refuses_long and max(sizes) > LEAST_BYTES_A_TOKEN * data.max_length
        if (progress.encoded < FIRST_ROWS or may_be_long) and progress.nbytes < MOST_ENCODED_BYTES:
            progress.encoded += 1
            progress.nbytes += sum(sizes)
            yield row
