"""Prepares the data as a training does, where the tokenizer is on this machine, before anything is trained.

`check --data`, `init` and `plan` print a training's own counts and refuse its rows. Nothing is downloaded, and no code
from a model's folder runs. The tokens are cached, so a training finds them. Large data sets' first rows alone are
encoded; `finetune preview` encodes every row.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.base.location import tokenizer_file
from finetune.data.sources import read_split, resolve
from finetune.errors import FinetuneError
from finetune.recipe.schema import DataSet, Recipe
from finetune.tokens.dataset import Prepared, prepare
from finetune.tokens.second_model import refuse_other_tokens
from finetune.untrusted.library_words import in_one_line, not_loaded
from finetune.wording import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIRST_ROWS = 1000  # of each large data set; about two seconds
MOST_ENCODED_BYTES = 16 * 2**20  # of all data sets that are encoded whole; about ten seconds


def prepared_here(recipe: Recipe) -> Prepared | None:
    """A training's data; None if the tokenizer is not on this machine, or the data are on the Hub or large.

    Raises DataError with every mistake.
    """
    if not _is_whole(recipe) or (tokenizer := _tokenizer_here(recipe)) is None:
        return None
    return prepare(_local(recipe), tokenizer)


def check_documents(recipe: Recipe) -> tuple[Prepared | None, list[str] | None]:
    """Encode local data sets' rows. Raises DataError with every mistake.

    Returns the prepared data if all rows were encoded, and notes; None for the notes if no row was.
    """
    local = [_head_of(entry) for entry in recipe.data.train if resolve(entry).kind != "hub"]
    if not local or (tokenizer := _tokenizer_here(recipe)) is None:
        return None, None
    notes, encoded = [], recipe
    if not (is_whole := _is_whole(recipe)):
        changes: dict[str, object] = {"train": local}
        if isinstance(recipe.data.eval, list):
            changes["eval"] = [_head_of(entry) for entry in recipe.data.eval if resolve(entry).kind != "hub"] or None
        encoded = recipe.model_copy(update={"data": recipe.data.model_copy(update=changes)})
        some = f"the first {counted(FIRST_ROWS, 'row')} of each local data set were encoded"
        notes = [f"{some}; `finetune preview` encodes all"]
    prepared = prepare(_local(encoded), tokenizer)
    used = [store.tokens for store in prepared.pool.stores]
    notes += refuse_other_tokens(recipe, tokenizer, used, offline=True)
    return (prepared if is_whole else None), [*notes, *prepared.notes]


def check_reference(recipe: Recipe) -> list[str]:
    """Compare the vocabulary of a reference that is a model of its own, if the model's tokenizer is on this machine.

    Returns notes. Raises FinetuneError for another tokenizer.
    """
    file = tokenizer_file(recipe.model.name_or_path, recipe.model.revision)
    if recipe.preferences is None or file is None or recipe.model.trust_remote_code:
        return []
    return [*refuse_other_tokens(recipe, _load(_local(recipe)), [], offline=True)]


def _is_whole(recipe: Recipe) -> bool:
    """Whether all rows are on this machine, and few enough to encode them."""
    sources = [resolve(entry) for entry in recipe.data.sets]
    nbytes = sum(file.stat().st_size for source in sources for file in source.files)
    return nbytes <= MOST_ENCODED_BYTES and all(source.kind != "hub" for source in sources)


def _head_of(entry: DataSet) -> DataSet:
    """The data set's first rows; a part that a recipe chose stays as it is."""
    if read_split(entry.split).is_sliced:
        return entry
    return entry.model_copy(update={"split": f"{entry.split}[:{FIRST_ROWS}]"})


def _local(recipe: Recipe) -> Recipe:
    """The recipe with the model's folder on this machine as its model, so that nothing is downloaded."""
    file = tokenizer_file(recipe.model.name_or_path, recipe.model.revision)
    assert file is not None
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"name_or_path": str(file.parent)})})


def _tokenizer_here(recipe: Recipe) -> PreTrainedTokenizerBase | None:
    """The tokenizer, if it is on this machine."""
    file = tokenizer_file(recipe.model.name_or_path, recipe.model.revision)
    if file is None or recipe.model.trust_remote_code:
        return None
    try:
        return _load(_local(recipe))
    except FinetuneError:
        if Path(recipe.model.name_or_path).is_dir():
            raise
        return None  # the Hub's cache may hold only some files, and training fetches the others


def _load(recipe: Recipe) -> PreTrainedTokenizerBase:
    """The tokenizer in the model's folder. Only this function imports transformers, because that takes two seconds."""
    from finetune.model.new_tokens import add_to_tokenizer, read_tokenizer

    with in_one_line(partial(not_loaded, "tokenizer", recipe.model.name_or_path)):
        tokenizer = read_tokenizer(recipe.model)
    if recipe.model.new_tokens:
        add_to_tokenizer(tokenizer, recipe.model)
    return tokenizer
