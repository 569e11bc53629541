"""About how many rows local files make, without torch: for commands that answer before a tokenizer could be imported.

A document's tokens are its UTF-8 bytes over the bytes of a token, and what the chat template adds to a document and to
each message. Both are measured with the model's own tokenizer.json and template where these are on this machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from finetune.data.formats import Chat, Passage, by_turn
from finetune.data.messages import REASONING, reasoning_of
from finetune.data.row_reader import RowReader
from finetune.data.sources import Source, resolve
from finetune.errors import DataError, FinetuneError
from finetune.model.packaged import tokenizer_file
from finetune.recipe.schema import EvalFraction, Recipe
from finetune.tokens.mixture import HOLD_OUT, seeded_order
from finetune.tokens.packing import pack
from finetune.untrusted.json_files import read_bounded, read_object
from finetune.untrusted.programs import look_at_tokenizer, template_problem

MOST_BYTES = 64 * 2**20  # of files read for an estimate: a few seconds; `finetune preview` counts larger ones
SAMPLED = 200  # documents of each data set that are tokenised
AROUND = (1.0, 5.0)  # tokens around a document and around a message; ChatML and Llama 3 have 5
BYTES_A_TOKEN = 4.0  # of English, and of Korean, whose letters have three bytes


@dataclass(frozen=True)
class RowCounts:
    """The training rows of one epoch."""

    rows: int
    tokens: int
    longest: int  # tokens that the longest row may have
    estimated_by: str = ""  # empty where they were counted
    too_long: tuple[int, int, int] | None = None  # documents beyond max_length, all documents, the longest


@dataclass(frozen=True)
class _Texts:
    """The documents of one data set: what they are made of, not the texts themselves."""

    nbytes: list[int]
    messages: list[int]
    sample: list[str]


def estimated_rows(recipe: Recipe) -> RowCounts | None:
    """The estimate; None where the data are not at hand: on the Hub, missing, without a good row, or too large."""
    data = recipe.data
    try:
        sources = [resolve(entry) for entry in data.train]
        if any(source.kind == "hub" for source in sources):
            return None
        if sum(file.stat().st_size for source in sources for file in source.files) > MOST_BYTES:
            return None
        texts = [_read(source, by_turns=data.train_on == "each_turn") for source in sources]
    except (DataError, OSError):
        return None
    file = tokenizer_file(recipe.model.name_or_path, recipe.model.revision)
    around = _around(file) if file else AROUND
    lengths = [_lengths(each, file, around) for each in texts]
    trained = _weighed(recipe, lengths)
    every = np.concatenate(lengths)
    longer = int((every > data.max_length).sum())
    if data.truncation == "drop":
        trained = trained[trained <= data.max_length]
    trained = np.clip(trained, 1, data.max_length)
    if not len(trained):
        return None
    rows = len(pack(trained, data.max_length)) if data.packing else len(trained)
    by = "the model's tokenizer" if file else f"{BYTES_A_TOKEN:g} bytes a token, for its tokenizer is not here"
    longest = data.max_length if data.packing else int(trained.max())
    too_long = (longer, len(every), int(every.max())) if longer else None
    return RowCounts(rows, int(trained.sum()), longest, by, too_long)


def _read(source: Source, *, by_turns: bool) -> _Texts:
    """Rows that cannot be read are passed over: other places name them."""
    found = _Texts([], [], [])
    for _, read, _ in RowReader(source).rows():
        for example in _examples(read, by_turns=by_turns):
            text = text_of(example).encode(errors="replace")  # an unsupervised key may contain half a letter
            found.nbytes.append(len(text))
            found.messages.append(len(example.messages) if isinstance(example, Chat) else 0)
            if len(found.sample) < SAMPLED:
                found.sample.append(text.decode())
    return found


def text_of(example: Chat | Passage) -> str:
    """All encoded text of a document, except the template's own: roles, and words around tools."""
    if isinstance(example, Passage):
        return example.prompt + example.completion
    tools = [json.dumps(tool, ensure_ascii=False) for tool in example.tools or ()]
    return "\n".join([*tools, *_parts(example.messages)])


def _examples(read: Chat | Passage | None, *, by_turns: bool) -> Iterator[Chat | Passage]:
    """What a row is encoded as; by turns without the reasoning of earlier ones, which templates leave out."""
    chats = by_turn(read) if by_turns and isinstance(read, Chat) else []
    for chat in chats:
        yield replace(chat, messages=[*map(_without_reasoning, chat.messages[:-1]), chat.messages[-1]])
    if read is not None and not chats:
        yield read


def _without_reasoning(message: dict[str, object]) -> dict[str, object]:
    others = {key: value for key, value in message.items() if key not in REASONING}
    content = str(message["content"])
    return others | {"content": content.partition("</think>")[2] if reasoning_of(others) else content}


def _parts(messages: list[dict[str, object]]) -> Iterator[str]:
    for message in messages:
        others = {key: value for key, value in message.items() if key not in ("role", "content", "weight") and value}
        content = message.get("content") or ""
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        yield text + (json.dumps(others, ensure_ascii=False) if others else "")


def _lengths(texts: _Texts, file: Path | None, around: tuple[float, float]) -> np.ndarray:
    """Tokens of each document, int64."""
    ratio = BYTES_A_TOKEN
    if file is not None and texts.sample:
        from tokenizers import Tokenizer

        look_at_tokenizer(file.parent)
        encoded = Tokenizer.from_file(str(file)).encode_batch_fast(texts.sample, add_special_tokens=False)
        ratio = sum(texts.nbytes[: len(encoded)]) / max(1, sum(len(each.ids) for each in encoded))
    messages = np.asarray(texts.messages, np.float64)
    added = np.where(messages > 0, around[0] + around[1] * messages, 1)  # a passage has its end
    return np.rint(np.asarray(texts.nbytes, np.float64) / max(ratio, 0.1) + added).astype(np.int64)


def _around(file: Path) -> tuple[float, float]:
    """Tokens that the template beside tokenizer.json adds to a document (a default system turn) and to each message:
    from chats of one and of two exchanges. AROUND where it cannot be rendered here."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from tokenizers import Tokenizer

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals |= {"strftime_now": lambda form: "26 Jul 2024", "raise_exception": lambda text: text}
    look_at_tokenizer(file.parent)
    tokenizer = Tokenizer.from_file(str(file))
    with suppress(FinetuneError, TemplateError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError):
        source = _template(file.parent)
        if template_problem(source):
            return AROUND
        template = environment.from_string(source)
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        one, two = (
            len(tokenizer.encode(template.render(messages=each, bos_token="", eos_token="")).ids) - len(each)
            for each in (chat, chat * 2)
        )
        if two - one >= 0:
            return max(0.0, 2.0 * one - two), (two - one) / 2
    return AROUND


def _template(folder: Path) -> str:
    own = folder / "chat_template.jinja"
    if own.is_file():
        return read_bounded(own).decode("utf-8")
    template = read_object(folder / "tokenizer_config.json")["chat_template"]
    return template if isinstance(template, str) else str(template[0]["template"])


def _weighed(recipe: Recipe, lengths: list[np.ndarray]) -> np.ndarray:
    """Lengths of the training documents of one epoch: held-out ones left out, each data set as often as its weight."""
    of_set = np.repeat(np.arange(len(lengths)), [len(each) for each in lengths])
    every = np.concatenate(lengths)
    evaluation = recipe.data.eval
    if isinstance(evaluation, EvalFraction) and len(every) > 1:
        count = max(1, min(len(every) - 1, round(evaluation.fraction * len(every))))
        kept = np.sort(seeded_order(len(every), recipe.training.seed, HOLD_OUT)[count:])
        of_set, every = of_set[kept], every[kept]
    weighed = []
    for index, entry in enumerate(recipe.data.train):
        members = every[of_set == index]
        copies = int(entry.weight)
        weighed += [members] * copies + [members[: round((entry.weight - copies) * len(members))]]
    return np.concatenate(weighed)
