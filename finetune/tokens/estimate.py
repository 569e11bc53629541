"""Estimates the number of rows in local files without torch, in less time than a tokenizer's import takes.

A document's tokens are its UTF-8 bytes divided by the bytes a token, plus the chat template's tokens around the
document and around each message. If the model's tokenizer.json and template are on this machine, both figures are
measured with them.

    2,000 bytes at 4 bytes a token, 3 messages with 5 tokens around each, 1 around the document: 500 + 15 + 1 = 516
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.chat import REASONING, Chat, Passage, by_turn, documents_in, reasoning_of
from finetune.data.rows import RowReader
from finetune.data.sources import Source, resolve
from finetune.errors import DataError, FinetuneError
from finetune.model.packaged import tokenizer_file
from finetune.recipe.schema import Data, EvalFraction, Recipe
from finetune.tokens.dataset import RowCounts
from finetune.tokens.mixture import HOLD_OUT, seeded_order
from finetune.tokens.packing import pack
from finetune.untrusted.json_files import read_bounded, read_object
from finetune.untrusted.programs import look_at_tokenizer, template_problem

MOST_BYTES = 64 * 2**20  # read for an estimate in a few seconds; `finetune preview` counts larger files
SAMPLED = 200  # documents that are tokenised in each data set
AROUND = (1.0, 5.0)  # tokens around a document and around a message; ChatML and Llama 3 have 5
BYTES_A_TOKEN = 4.0  # for English, and for Korean with three bytes a letter


@dataclass(frozen=True)
class _Texts:
    """The sizes of a data set's documents, and some texts to tokenise."""

    nbytes: list[int]
    messages: list[int]
    questions: list[int]  # bytes before the first answer; 0 in a document that fits anyway
    sample: list[str]


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
    file = tokenizer_file(recipe.model.name_or_path, recipe.model.revision)
    around, estimated_by = AROUND, f"{BYTES_A_TOKEN:g} bytes a token, because its tokenizer is not here"
    if file:
        around, estimated_by = _tokens_around(file), "the model's tokenizer"
    # Shape [rows, documents in a row]. max_length holds for each answer in a pair, together with its prompt.
    documents: list[np.ndarray] = []
    asked: list[np.ndarray] = []
    for texts in texts_of_sets:
        bytes_a_token = _bytes_a_token(texts, file)
        for sizes, found in ((texts.nbytes, documents), (texts.questions, asked)):
            found.append(_token_counts(sizes, texts.messages, bytes_a_token, around).reshape(-1, data.answers_a_row))
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
    is_answered = np.concatenate([of_rows.max(axis=1) < data.max_length for of_rows in asked])
    tokens = np.concatenate(documents)[is_answered]
    beyond = float(np.maximum(tokens - data.max_length, 0).sum() / max(1, tokens.sum()))
    return RowCounts(rows, int(trained.sum()), longest, estimated_by, too_long, beyond, int((~is_answered).sum()))


def _read_texts(source: Source, data: Data) -> _Texts:
    """Measure a data set's documents; a pair has two. Other commands report rows with a mistake."""
    texts = _Texts([], [], [], [])
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
            question = ""
            if len(text) > data.max_length:  # no token is shorter than a byte
                question = _question_of(document)
            texts.questions.append(len(question.encode(errors="replace")))
            if len(texts.sample) < SAMPLED:
                texts.sample.append(text.decode())
    return texts


def _question_of(document: Chat | Passage) -> str:
    """The text before a document's first answer."""
    if isinstance(document, Passage):
        return document.prompt
    answers = [index for index, supervised in enumerate(document.supervised) if supervised]
    return text_of(replace(document, messages=document.messages[: answers[0]])) if answers else ""


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


def _bytes_a_token(texts: _Texts, file: Path | None) -> float:
    if file is not None and texts.sample:
        encoded = _load_tokenizer(file).encode_batch_fast(texts.sample, add_special_tokens=False)
        tokens = sum(len(encoding.ids) for encoding in encoded)
        return max(sum(texts.nbytes[: len(encoded)]) / max(1, tokens), 0.1)
    return BYTES_A_TOKEN


def _load_tokenizer(file: Path) -> Any:
    """Look at the file in a child, then load it. It is kept: an estimate asks twice, and loading takes 0.15 s."""
    look_at_tokenizer(file.parent)
    state = file.stat()
    return _read_tokenizer(file, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=1)
def _read_tokenizer(file: Path, modified: int, size: int) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file))


def _token_counts(
    nbytes: list[int], of_messages: list[int], bytes_a_token: float, around: tuple[float, float]
) -> np.ndarray:
    """The tokens in texts of these sizes with the template's around them, int64."""
    messages = np.asarray(of_messages, np.float64)
    added = np.where(messages > 0, around[0] + around[1] * messages, 1)  # a passage gets one end-of-text token
    return np.rint(np.asarray(nbytes, np.float64) / bytes_a_token + added).astype(np.int64)


def _tokens_around(file: Path) -> tuple[float, float]:
    """Tokens that the template adds to a document (a default system turn) and to each message.

    Measured by chats with one and two exchanges, with the template beside tokenizer.json. AROUND if the template cannot
    be rendered here. If one exchange has 13 tokens beside its words and two have 23, each message gets 5 and the
    document 3.
    """
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals |= {"strftime_now": lambda form: "26 Jul 2024", "raise_exception": lambda text: text}
    folder = file.parent
    tokenizer = _load_tokenizer(file)
    with suppress(FinetuneError, TemplateError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError):
        if (folder / "chat_template.jinja").is_file():
            source = read_bounded(folder / "chat_template.jinja").decode("utf-8")
        else:
            stored = read_object(folder / "tokenizer_config.json")["chat_template"]
            source = stored
            if not isinstance(stored, str):  # several templates, each with a name
                source = str(stored[0]["template"])
        if template_problem(source):
            return AROUND
        template = environment.from_string(source)
        exchange = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        one, two = (
            len(tokenizer.encode(template.render(messages=chat, bos_token="", eos_token="")).ids) - len(chat)
            for chat in (exchange, exchange * 2)
        )
        if two - one >= 0:
            return max(0.0, 2.0 * one - two), (two - one) / 2
    return AROUND


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
