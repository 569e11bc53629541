"""Tokens that a recipe adds: known to its tokenizer, with rows in embeddings and head that start as a mean.

A new token's text was encoded into pieces before. Its row starts as the mean of those pieces' rows, which the model has
read there so far. With adapters only these rows are trained, by peft's trainable tokens (adapters.py). Otherwise they
are weights like all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from finetune.base.location import folder_of, refuse_unreachable, resolve_model_path
from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.library_errors import library_errors, not_loaded, words_of
from finetune.output_stream import one_line
from finetune.recipe.schema import ModelSection, Recipe
from finetune.recipe.yaml_text import shown
from finetune.untrusted.programs import look_at_tokenizer

TOKENIZER_FILES = "tokenizer*", "*.model", "vocab*"


@dataclass(frozen=True)
class NewRows:
    """The new rows in embeddings and head, and each one's starting value."""

    starts: Mapping[int, tuple[int, ...]]  # row -> the rows that it is the mean of; none: all earlier rows
    vocabulary: int  # rows in all

    @property
    def ids(self) -> list[int]:
        return list(self.starts)


def load_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """The base model's tokenizer, with its chat template and the recipe's new tokens.

    Raises FinetuneError if there is none, or if it already has one of these tokens.
    """
    with library_errors(partial(not_loaded, "tokenizer", recipe.model.name_or_path)):
        tokenizer = read_tokenizer(recipe.model)
    if recipe.model.new_tokens:
        add_to_tokenizer(tokenizer, recipe.model)
    return tokenizer


def read_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises FinetuneError for an unusable tokenizer.json, and transformers' own error if there
    is none.
    """
    source = resolve_model_path(section.name_or_path)
    if (folder := folder_of(source, section.revision)) is not None:
        look_at_tokenizer(folder)
    refuse_unreachable(source, section.revision)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        source, revision=section.revision, trust_remote_code=section.trust_remote_code
    )
    tokenizer("a")  # with a setting of the wrong kind, its own and not the text's, it raises here
    return tokenizer


def add_to_tokenizer(tokenizer: PreTrainedTokenizerBase, section: ModelSection) -> dict[int, tuple[int, ...]]:
    """Add the recipe's tokens; returns the pieces that each, by its id, was encoded into before.

    Texts are matched as they stand, before the tokenizer normalises anything. Raises FinetuneError, a line for each
    token that the vocabulary has already.
    """
    vocabulary, unknown = tokenizer.get_vocab(), tokenizer.unk_token_id
    pieces = {token: tuple(tokenizer.encode(token, add_special_tokens=False)) for token in section.new_tokens}
    mistakes = []
    for key in ("add_tokens", "add_special_tokens"):
        for token in getattr(section, key):
            own = vocabulary.get(token, pieces[token][0] if len(pieces[token]) == 1 else unknown)
            if own != unknown:
                mistakes.append(f"model.{key}: {shown(token)} is token {own} of the vocabulary already; remove it")
    if mistakes:
        raise FinetuneError("\n".join(mistakes))
    for special, tokens in ((False, section.add_tokens), (True, section.add_special_tokens)):
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=special) for token in tokens], special)
    added = tokenizer.get_vocab()
    return {added[token]: pieces[token] for token in section.new_tokens}


def new_rows(section: ModelSection, rows: int) -> NewRows | None:
    """The recipe's new rows for a model with `rows` rows; None if there are none.

    A vocabulary with room keeps its size, and new tokens take rows that no token had. If a tokenizer counts further
    than its model, the rows between start as the mean of all rows.
    """
    if not section.new_tokens:
        return None
    pieces = _pieces_by_id(section.model_dump_json())
    starts: dict[int, tuple[int, ...]] = dict.fromkeys(range(rows, rows + len(section.new_tokens)), ())
    if pieces is not None:
        starts = dict.fromkeys(range(rows, max(pieces) + 1), ())
        starts |= {row: tuple(piece for piece in own if piece < rows) for row, own in pieces.items()}
    return NewRows(dict(sorted(starts.items())), max(rows, max(starts) + 1))


@lru_cache(maxsize=8)
def _pieces_by_id(section: str) -> dict[int, tuple[int, ...]] | None:
    """The pieces of each new token, in the tokenizer that a section names. None if its folder holds a model's structure
    alone, as plans and probes write it."""
    read = ModelSection.model_validate_json(section)
    folder = Path(resolve_model_path(read.name_or_path))
    if folder.is_dir() and not any(any(folder.glob(name)) for name in TOKENIZER_FILES):
        return None
    place = f"model.add_tokens: no tokenizer of {one_line(read.name_or_path)} to add to"
    with library_errors(lambda error: EnvironmentMismatch(f"{place}: {words_of(error, 200)}")):
        return add_to_tokenizer(read_tokenizer(read), read)


def add_rows(model: PreTrainedModel, section: ModelSection, *, fill: bool = True) -> list[int]:
    """Give the model a row for each new token. Returns these rows; an empty list if the recipe adds no token.

    Args:
        fill: Set each row to the mean of its pieces. False: the rows have their values, or get them later (on meta).

    Raises FinetuneError if the architecture has other tables by token.
    """
    embeddings: Any = model.get_input_embeddings()
    old = int(getattr(embeddings.weight, "ds_shape", embeddings.weight.shape)[0])  # ZeRO-3 leaves an empty vector
    new = new_rows(section, old)
    if new is None:
        return []
    tables = {old, getattr(model.config.get_text_config(), "vocab_size_per_layer_input", None)}
    for path, module in model.named_modules():  # transformers resizes embeddings and head alone
        if isinstance(module, nn.Embedding) and module is not embeddings and module.num_embeddings in tables:
            raise FinetuneError(
                f"model.add_tokens: {type(model).__name__} has another table by token, {path}, which gets no rows; "
                "remove the new tokens, or choose another model"
            )
    # Of random values, which are drawn without disturbing the run's; always, for under ZeRO-3 it also unshards.
    with torch.random.fork_rng(devices=[]):
        model.resize_token_embeddings(new.vocabulary, mean_resizing=False)
    head: Any
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()  # the head is another module
    if not fill or model.device.type == "meta":
        return new.ids
    with torch.no_grad():
        distinct = {id(tensor): tensor for tensor in (embeddings.weight, head.weight, head.bias) if tensor is not None}
        for tensor in distinct.values():  # [rows, hidden], or [rows] of a bias; means are computed in float32
            whole: Tensor | None = None
            for row, pieces in new.starts.items():
                if pieces:
                    mean = tensor[list(pieces)].float().mean(0)
                else:  # a sum in float32 without a float32 copy of the whole, 2.1 GB of Llama 3 8B
                    whole = tensor[:old].sum(0, dtype=torch.float32) / old if whole is None else whole
                    mean = whole
                tensor[row] = mean.to(tensor.dtype)
    return new.ids
