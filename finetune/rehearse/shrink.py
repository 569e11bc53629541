"""A small model and its tokenizer, for rehearsals, which download no weights.

`probe/small_model.py` makes the model. The tokenizer is trained on the recipe's own rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.chat import Chat, documents_in
from finetune.data.rows import RowReader
from finetune.data.sources import resolve
from finetune.errors import EnvironmentMismatch
from finetune.model.known_configs import decoder_config
from finetune.recipe.schema import Data
from finetune.tokens.chat_template import read_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LAYERS = 2
VOCABULARY = 1024
SAMPLED_ROWS = 300  # rows that the tokenizer learns from

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END_TOKENS = {"eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"), "pad_token_id": SPECIAL_TOKENS.index("<|endoftext|>")}
CHAT_TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>tools\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['reasoning_content'] %}{{- '<think>' + message['reasoning_content'] + '</think>' }}{% endif %}"
    "{{- message['content'] or '' }}"
    "{%- if message['tool_calls'] %}{{- message['tool_calls'] | tojson }}{% endif %}"
    "{{- '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# Ends and beginnings of turns in a recipe's own chat template, which are special tokens of the real tokenizer.
_MARK = re.compile(r"<[|｜][^|｜<>\s'\"]+[|｜]>|<(?:start|end)_of_turn>|</?s>")
# Texts for the tokenizer when the rows are not on this machine.
BUILT_IN = (
    "Question: which river runs past the old mill? Answer: the one that turns its wheel.",
    "Please write the numbers from one to ten, then say which of them are prime: 2, 3, 5 and 7.",
    "You are a patient assistant. The user asks; the assistant answers briefly and says when it does not know.",
)


@dataclass(frozen=True)
class Shrunk:
    """A small model in a folder, and the real model that it replaces."""

    folder: Path
    architecture: str
    source: str  # where the full configuration was read
    full: Mapping[str, int]  # layers and hidden_size of the real model, 0 where it has other names
    small: Mapping[str, int]
    parameters: int
    vocabulary: int


def shrink_model(
    name_or_path: str, revision: str, data: Data, folder: Path, new_tokens: Iterable[str] = (), layers: int = LAYERS
) -> Shrunk:
    """Write a small model with random float32 weights and its tokenizer, which knows no new token, into `folder`.

    Args:
        layers: Of the small model; where its architecture is made small by the probe, as many as that one has.

    Raises EnvironmentMismatch for a model that is not known here or cannot be made small, DataError for rows that are
    not there.
    """
    from finetune.probe.small_model import CannotShrink, shrunken_model  # with torch

    config, source = decoder_config(name_or_path, revision)
    texts = sample_texts(data)
    for token in new_tokens:  # if the tokenizer learned them here, they would not be new
        texts = [text.replace(token, " ") for text in texts]
    marks = _MARK.findall(read_source(data.chat_template)) if data.chat_template else []
    marks = [mark for mark in marks if mark not in new_tokens]
    tokenizer = train_tokenizer(texts, template_variables(data), marks)
    vocabulary = len(tokenizer)
    try:
        model, small = shrunken_model(config, folder, layers=layers, vocabulary=vocabulary, end_tokens=END_TOKENS)
    except CannotShrink as reason:
        raise EnvironmentMismatch(
            f"model.name_or_path: {name_or_path}: this architecture cannot be made small: {reason}; rehearse with a "
            "small local model of its kind: model.name_or_path=FOLDER"
        ) from None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    full_sizes, small_sizes = (
        {"layers": sizes.get("num_hidden_layers", 0), "hidden_size": sizes.get("hidden_size", 0)}
        for sizes in (config, small)
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Shrunk(folder, type(model).__name__, source, full_sizes, small_sizes, parameters, vocabulary)


def sample_texts(data: Data) -> list[str]:
    """Text of the recipe's own training rows that are on this machine. Raises DataError."""

    def strings(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            for inner in value.values():
                yield from strings(inner)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                yield from strings(inner)

    local = [source for source in map(resolve, data.train) if source.kind != "hub"]
    rows = (row for source in local for row in islice(source.rows(), SAMPLED_ROWS // max(1, len(local))))
    texts = [" ".join(strings(row.values)) for row in rows]  # a bad row has no text; training reports it
    return [*texts, *BUILT_IN]


def template_variables(data: Data) -> list[str]:
    """Variables that the data sets and their first rows give the chat template. Raises DataError."""
    names = [name for entry in data.sets for name in entry.chat_template_kwargs]
    for source in map(resolve, data.sets):
        if source.kind != "hub":
            first_rows = (row.read for row in islice(RowReader(source).rows(), SAMPLED_ROWS))
            documents = (document for row in first_rows if row is not None for document in documents_in(row))
            names += [name for chat in documents if isinstance(chat, Chat) for name in chat.template_kwargs]
    return list(dict.fromkeys(names))


def train_tokenizer(
    texts: Iterable[str], variables: Iterable[str] = (), marks: Iterable[str] = ()
) -> PreTrainedTokenizerFast:
    """Byte-level BPE with at most 1,024 tokens and a template like ChatML; pad and eos differ.

    Args:
        variables: Names that the template mentions and does not use, because the model's own template has them.
        marks: Further special tokens.
    """
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(dict.fromkeys([*SPECIAL_TOKENS, *marks])),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template="".join(f"{{#- {name} #}}" for name in variables) + CHAT_TEMPLATE,
        model_max_length=2048,
    )
