"""Estimates the number of rows in local files by their bytes, where a tokenizer is not on this machine.

A document's tokens are its UTF-8 bytes divided by the bytes a token, plus a chat template's usual tokens around the
document and around each message.

    2,000 bytes at 4 bytes a token, 3 messages with 5 tokens around each, 1 around the document: 500 + 15 + 1 = 516
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np

from finetune.base.location import tokenizer_file
from finetune.data.chat import REASONING, Chat, Passage, by_turn, documents_in, reasoning_of
from finetune.data.rows import RowReader
from finetune.data.sources import Source, resolve
from finetune.errors import DataError
from finetune.recipe.schema import Data, EvalFraction, Recipe
from finetune.tokens.dataset import RowCounts
from finetune.tokens.mixture import HOLD_OUT, seeded_order
from finetune.tokens.packing import pack

MOST_BYTES = 64 * 2**20  # read in a few seconds; `finetune preview` counts larger files
AROUND = (1.0, 5.0)  # tokens around a document and around a message; ChatML and Llama 3 have 5
BYTES_A_TOKEN = 4.0  # for English, and for Korean with three bytes a letter


@dataclass(frozen=True)
class _Texts:
    """The sizes of a data set's documents."""

    nbytes: list[int]
    messages: list[int]


def estimated_rows(recipe: Recipe) -> RowCounts | None:
    """Estimate the rows; None if the data are on the Hub, missing, without a good row, or too large."""
    data = recipe.data
    try:
        sources = [resolve(entry) for entry in data.train]
        if any(source.kind == "hub" for source in sources):
            return None
        if sum(file.stat().st_size for source in sources for file in source.files) > MOST_BYTES:
            return None
        texts_of_sets = [_read_texts(source, data) for source in sources]
    except (DataError, OSError):
        return None
    why = "its tokenizer is not here"
    if tokenizer_file(recipe.model.name_or_path, recipe.model.revision):
        why = "the data are large, or refused"
    estimated_by = f"{BYTES_A_TOKEN:g} bytes a token, because {why}"
    # Shape [rows, documents in a row]. max_length holds for each answer in a pair, together with its prompt.
    documents = [_token_counts(texts).reshape(-1, data.answers_a_row) for texts in texts_of_sets]
    longest_of_rows = np.concatenate([of_rows.max(axis=1) for of_rows in documents])
    longer = int((longest_of_rows > data.max_length).sum())
    lengths = []
    for of_rows in documents:
        row_lengths = np.maximum(of_rows.sum(axis=1), 1)
        if data.truncation == "drop":
            row_lengths[of_rows.max(axis=1) > data.max_length] = 0
        lengths.append(row_lengths)
    trained = _epoch_lengths(recipe, lengths)
    trained = trained[trained > 0]
    if data.truncation == "split":  # whole pieces, and the rest
        whole, rest = trained // data.max_length, trained % data.max_length
        trained = np.concatenate([np.full(int(whole.sum()), data.max_length), rest[rest > 0]])
    trained = np.clip(trained, 1, data.row_tokens)
    if not len(trained):
        return None
    rows, longest = len(trained), int(trained.max())
    if data.packing and data.unit == "documents":
        rows, longest = len(pack(trained, data.max_length)), data.max_length
    too_long: tuple[int, int, int] | None = None
    if longer:
        too_long = (longer, len(longest_of_rows), int(longest_of_rows.max()))
    return RowCounts(rows, int(trained.sum()), longest, estimated_by, too_long)


def _read_texts(source: Source, data: Data) -> _Texts:
    """Measure a data set's documents; a pair has two. Other commands report rows with a mistake."""
    texts = _Texts([], [])
    for _, read, _ in RowReader(source).rows():
        if read is None:
            continue
        documents = documents_in(read)
        if data.train_on == "each_turn" and isinstance(read, Chat) and (turns := by_turn(read)):
            # Templates leave out earlier turns' reasoning.
            documents = tuple(
                replace(chat, messages=[*map(_without_reasoning, chat.messages[:-1]), chat.messages[-1]])
                for chat in turns
            )
        for document in documents:
            text = text_of(document).encode(errors="replace")  # an unsupervised key may contain half a letter
            texts.nbytes.append(len(text))
            texts.messages.append(len(document.messages) if isinstance(document, Chat) else 0)
    return texts


def text_of(document: Chat | Passage) -> str:
    """A document's text as it will be encoded, except the template's own: roles, and words around tools."""
    if isinstance(document, Passage):
        return document.prompt + document.completion
    texts = [json.dumps(tool, ensure_ascii=False) for tool in document.tools or ()]
    for message in document.messages:
        others = {key: value for key, value in message.items() if key not in ("role", "content", "weight") and value}
        text = message.get("content") or ""
        if not isinstance(text, str):
            text = json.dumps(text, ensure_ascii=False)
        if others:
            text += json.dumps(others, ensure_ascii=False)
        texts.append(text)
    return "\n".join(texts)


def _without_reasoning(message: dict[str, object]) -> dict[str, object]:
    others = {key: value for key, value in message.items() if key not in REASONING}
    content = str(message["content"])
    if reasoning_of(others):
        content = content.partition("</think>")[2]
    return others | {"content": content}


def _token_counts(texts: _Texts) -> np.ndarray:
    """The tokens in texts of these sizes with the template's around them, int64."""
    messages = np.asarray(texts.messages, np.float64)
    added = np.where(messages > 0, AROUND[0] + AROUND[1] * messages, 1)  # a passage gets one end-of-text token
    return np.rint(np.asarray(texts.nbytes, np.float64) / BYTES_A_TOKEN + added).astype(np.int64)


def _epoch_lengths(recipe: Recipe, lengths: list[np.ndarray]) -> np.ndarray:
    """One epoch's document lengths, without held-out documents, each data set as often as its weight says."""
    set_of = np.repeat(np.arange(len(lengths)), [len(set_lengths) for set_lengths in lengths])
    all_lengths = np.concatenate(lengths)
    evaluation = recipe.data.eval
    if isinstance(evaluation, EvalFraction) and len(all_lengths) > 1:
        count = max(1, min(len(all_lengths) - 1, round(evaluation.fraction * len(all_lengths))))
        kept = np.sort(seeded_order(len(all_lengths), recipe.training.seed, HOLD_OUT)[count:])
        set_of, all_lengths = set_of[kept], all_lengths[kept]
    weighed = []
    for index, entry in enumerate(recipe.data.train):
        members = all_lengths[set_of == index]
        copies = int(entry.weight)
        weighed += [members] * copies + [members[: round((entry.weight - copies) * len(members))]]
    return np.concatenate(weighed)
