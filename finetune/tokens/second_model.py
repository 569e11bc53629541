"""Compares a second model's vocabulary with the run's: a reference with other tokens gives noise, unseen in curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from finetune.base.location import folder_of
from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.library_errors import library_errors, not_loaded
from finetune.recipe.schema import ModelSection, Recipe
from finetune.recipe.sections.preferences import names_second_model
from finetune.recipe.yaml_text import shown
from finetune.tokens.dataset import tokenizer_here, unused_ids
from finetune.untrusted.model_folder import look_at_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def reference_section(recipe: Recipe) -> ModelSection:
    """The recipe's `model` with the reference in place of the model."""
    assert recipe.preferences is not None
    changes = {"name_or_path": recipe.preferences.reference, "revision": "main", "adapter": None}
    return recipe.model.model_copy(update=changes)


def check_reference(recipe: Recipe, used: Sequence[np.ndarray] = ()) -> list[str]:
    """`refuse_other_tokens` before a run, if the model's tokenizer is on this machine. Nothing is downloaded."""
    section = recipe.preferences
    if section is None or not names_second_model(section) or (local := tokenizer_here(recipe)) is None:
        return []
    return [*refuse_other_tokens(recipe, local[1], used, offline=True)]


@contextmanager
def as_reference(recipe: Recipe) -> Iterator[None]:
    """Within the block, errors about a model name the recipe's reference as their place."""
    place = f"{recipe.training.objective}.reference"
    try:
        yield
    except FinetuneError as error:
        if type(error) not in (FinetuneError, EnvironmentMismatch):
            raise
        text = str(error).replace("model.name_or_path", place)
        if place not in text:
            text = f"{place}: {text}"
        raise type(error)(text) from error


def refuse_other_tokens(
    recipe: Recipe, own: PreTrainedTokenizerBase, used: Sequence[np.ndarray], *, offline: bool = False
) -> Iterator[str]:
    """Compare the reference's vocabulary with the model's. Yields a note if there is nothing to compare.

    Args:
        used: The data's token ids. A token that was added to the vocabulary may differ if the data do not use it.
        offline: Download nothing.

    Raises FinetuneError if a token differs, or for a folder that holds no model.
    """
    from finetune.model.new_tokens import TOKENIZER_FILES, read_tokenizer

    section = recipe.preferences
    if section is None or not names_second_model(section):
        return
    model = reference_section(recipe)
    name, place = section.reference, f"{recipe.training.objective}.reference"
    with as_reference(recipe):
        folder = folder_of(name, model.revision)
        if folder is None and offline:
            yield f"{place}: {name} is not on this machine; training compares its tokens with the model's"
            return
        if folder is not None and Path(name).is_dir():
            look_at_model(folder, whole=True)
            if not any(True for pattern in TOKENIZER_FILES for _ in folder.glob(pattern)):
                yield f"{place}: {name} has no tokenizer to compare; see that it reads the model's own tokens"
                return
        with library_errors(partial(not_loaded, "tokenizer", name)):
            theirs = {number: token for token, number in read_tokenizer(model).get_vocab().items()}
    differing = {number: token for token, number in own.get_vocab().items() if theirs.get(number) != token}
    added = [number for number in differing if number in own.added_tokens_decoder]
    if wrong := sorted(differing.keys() - unused_ids(added, used)):
        other_token = shown(theirs[wrong[0]]) if wrong[0] in theirs else "none"
        raise FinetuneError(
            f"{place}: {name} has another tokenizer: token {wrong[0]} is {shown(differing[wrong[0]])} in the model's "
            f"vocabulary and {other_token} in the reference's; name a model with the same tokens, or set {place}: start"
        )
