"""Finds rows that training would refuse, with training's encoder and the tokenizer on this machine.

Nothing is downloaded or written, and no code from a model's folder runs. Each data set's first rows are encoded. If
rows longer than data.max_length are refused, every row that may be too long is encoded as well. `finetune preview`
encodes every row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from finetune.data.chat import Passage, documents_in
from finetune.data.rows import Mistakes, ReadRow, RowReader
from finetune.data.sources import Source, resolve
from finetune.errors import DataError, FinetuneError
from finetune.model.packaged import tokenizer_file
from finetune.recipe.schema import Data, EvalFraction, ModelSection, Recipe
from finetune.tokens.cache import (
    CHUNK_ROWS,
    ONE_ANSWER,
    check_set_variables,
    fitted_units,
    nothing_left,
    units_of,
)
from finetune.tokens.encoder import Encoder, answer_of
from finetune.tokens.estimate import text_of
from finetune.tokens.second_model import refuse_other_tokens
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
    counts: Counter[str] = field(default_factory=Counter)  # of documents left out, by reason
    answers: set[tuple[int, ...]] = field(default_factory=set)  # the first two that differ, if answers are judged

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
        tokenizer = _tokenizer(recipe, model)
        encoder = Encoder(tokenizer, data, model)
    except FinetuneError:
        if Path(recipe.model.name_or_path).is_dir():
            raise
        return None  # the Hub's cache may hold only some files, and training fetches the others
    mistakes, notes, progress_of_sets = Mistakes(), list[str](), list[_Progress]()
    used: set[int] = set()
    for source in sources:
        progress = _Progress()
        progress_of_sets.append(progress)
        if source.kind == "hub":
            progress.rows = 1  # at least
            continue
        try:
            _check_set(source, data, encoder, mistakes, progress, used)
        except DataError as error:
            mistakes.take(error)
        if not progress.is_complete:
            rows = f"{progress.encoded:,} of {counted(progress.rows, 'row')}"
            notes.append(f"{source.name}: {rows} were encoded; `finetune preview` encodes all")
    mistakes.raise_if_any()
    for key in ("train", "eval"):
        part = progress_of_sets[: len(data.train)] if key == "train" else progress_of_sets[len(data.train) :]
        if not part or not all(progress.is_complete for progress in part):
            continue
        kept = sum(progress.kept for progress in part)
        if not kept:
            counts = [progress.counts for progress in part]
            raise DataError([nothing_left(f"data.{key}", counts, data.max_length)])
        if key == "train" and data.unit == "judged" and len(set().union(*(each.answers for each in part))) == 1:
            raise DataError([ONE_ANSWER])
        if kept == 1 and key == "train" and isinstance(data.eval, EvalFraction):
            raise DataError(["data.eval: one document cannot be split; give more rows, or eval: null"])
    tokens = np.fromiter(used, np.int64, len(used))
    return [*notes, *refuse_other_tokens(recipe, tokenizer, [tokens], offline=True)]


def check_reference(recipe: Recipe) -> list[str]:
    """Compare the vocabulary of a reference that is a model of its own, if the model's tokenizer is on this machine.

    Returns notes. Raises FinetuneError for another tokenizer.
    """
    file = tokenizer_file(recipe.model.name_or_path, recipe.model.revision)
    if recipe.preferences is None or file is None or recipe.model.trust_remote_code:
        return []
    model = recipe.model.model_copy(update={"name_or_path": str(file.parent)})
    return [*refuse_other_tokens(recipe, _tokenizer(recipe, model), [], offline=True)]


def _tokenizer(recipe: Recipe, model: ModelSection) -> PreTrainedTokenizerBase:
    """The tokenizer in `model`'s folder. Only this function imports transformers, because that takes two seconds."""
    from finetune.model.new_tokens import add_to_tokenizer, read_tokenizer

    with in_one_line(partial(not_loaded, "tokenizer", recipe.model.name_or_path)):
        tokenizer = read_tokenizer(model)
    if recipe.model.new_tokens:
        add_to_tokenizer(tokenizer, recipe.model)
    return tokenizer


def _check_set(
    source: Source, data: Data, encoder: Encoder, mistakes: Mistakes, progress: _Progress, used: set[int]
) -> None:
    """Encode a data set's chosen rows, count them in `progress`, and add their token ids to `used`."""
    check_set_variables(source, encoder)
    units = units_of(_rows_to_encode(RowReader(source), data, progress), encoder, mistakes)
    last_row = None
    while chunk := list(islice(units, CHUNK_ROWS)):
        for unit, documents in fitted_units(chunk, encoder, data, mistakes, progress.counts):
            if data.unit != "documents":
                used.update(*(document.input_ids for document in documents))
            if data.unit == "judged" and len(progress.answers) < 2:
                progress.answers.add(tuple(answer_of(documents[0].input_ids, documents[0].labels)))
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
