"""A row to token ids and labels, -100 where nothing is learned.

A chat is rendered by its template, and what its assistant wrote in it is learned; a text is taken as it is, between
the tokenizer's own beginning and an end of text that is learned. Texts that spell control tokens stay texts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.data.formats import Chat, Passage
from finetune.data.messages import REASONING, reasoning_of
from finetune.data.readers import BadRow
from finetune.recipe.schema import Data
from finetune.tokens.assistant_spans import Rendered, Span, SpanFinder, texts_of
from finetune.tokens.chat_template import ChatTemplate, read_source
from finetune.tokens.tokenizer import IGNORE, Document, Script, TextTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["IGNORE", "Document", "Encoder", "RowError", "SamplePrompt", "Script"]
TEXT_PROMPT_TOKENS = 32  # of a plain text, which is trained on completely, that serve as its prompt
MOST_FINDERS = 16  # kept at once; rows that each have variables of their own would keep one for each
RowError = BadRow


@dataclass(frozen=True, slots=True)
class SamplePrompt:
    """What the model is given, as tokens and as text, and the data's own answer if there is one."""

    prompt_ids: list[int]
    prompt: str
    reference: str | None


class Encoder:
    """Tokenises rows with one tokenizer and one data section. Needs neither model nor torch."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: Data) -> None:
        """Raises FinetuneError for a tokenizer that is not a fast one."""
        self._tokenizer = tokenizer
        self._data = data
        self.texts = TextTokenizer(tokenizer)
        self._template: ChatTemplate | None = None
        self._finders: dict[str, SpanFinder] = {}  # by the template's variables

    def document(self, read: Chat | Passage) -> Document:
        """Encode a row that was read. Raises RowError."""
        document = self.texts.tokenise([self.script(read)])[0]
        if isinstance(document, RowError):
            raise document
        return document

    def script(self, read: Chat | Passage) -> Script:
        """The row's text and its learned spans. Raises RowError."""
        script = self._passage(read) if isinstance(read, Passage) else self._chat(read)
        if not script.learned:
            raise RowError("nothing in this row is learned; give an assistant turn the weight 1, or remove the row")
        return script

    def prompt_ids(self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Tokens of a chat up to where the assistant answers. Raises RowError."""
        variables = self._data.chat_template_kwargs
        finder = self._finder(variables)
        text = self.template.render(messages, tools, generation_prompt=True, variables=variables)
        document = self.texts.tokenise_cut(Script(text, [], finder.find_literals(messages, tools, text)))
        return document.input_ids

    def sample_prompt(self, text: str) -> SamplePrompt:
        """A user's message as a prompt; as plain text when there is no chat template."""
        if self._tokenizer.chat_template or self._data.chat_template:
            ids = self.prompt_ids([{"role": "user", "content": text}])
        else:
            literals = self.texts.literals(text)
            ids = [*self.texts.start_ids, *self.texts.tokenise_cut(Script(text, [], literals)).input_ids]
        return SamplePrompt(ids, text, None)

    def prompt_of(self, ids: np.ndarray, labels: np.ndarray) -> SamplePrompt:
        """A document up to its last answer, and that answer. A text without a prompt is split in its first half."""
        learned = np.flatnonzero(labels != IGNORE)
        gaps = np.flatnonzero(np.diff(learned) > 1)
        start, end = int(learned[gaps[-1] + 1] if len(gaps) else learned[0]), int(learned[-1]) + 1
        if start <= 1:
            start = max(1, min(TEXT_PROMPT_TOKENS, len(ids) // 2))
        prompt = ids[:start].tolist()
        reference = self.texts.decode(ids[start:end].tolist(), skip_special_tokens=True)
        return SamplePrompt(prompt, self.texts.decode(prompt), reference)

    def identity(self) -> dict[str, str]:
        """What else than data and settings decides tokens and masks, each as a digest."""
        self.texts.call([""])  # brings the backend's truncation and padding, which are part of its text, into one state
        parts = {
            "tokenizer": self._tokenizer.backend_tokenizer.to_str(),
            "special": repr(sorted(self._tokenizer.special_tokens_map.items(), key=str)),
            "template": repr(self._data.chat_template and read_source(self._data.chat_template))
            + repr(self._tokenizer.chat_template),
        }
        return {name: hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for name, text in parts.items()}

    def _passage(self, passage: Passage) -> Script:
        prompt, completion = passage.prompt, passage.completion
        end = self._tokenizer.eos_token
        if not end:
            raise RowError("the tokenizer has no end-of-text token to learn; use one that has an eos_token")
        completion = completion.removesuffix(end)  # written into the data by hand; ours is added below
        text = prompt + completion
        learned = [(len(prompt), len(text))]
        if self._data.train_on == "all":
            learned = [(0, len(text))]
        literals = self.texts.literals(text)
        return Script(text, learned, literals, affixes=True)

    def _chat(self, chat: Chat) -> Script:
        finder = self._finder(chat.template_kwargs)
        rendered = finder.find(self._as_read_by_template(chat.messages), chat.tools)
        chosen = self._chosen(chat, rendered)
        for index in chosen:
            _check_reasoning(chat.messages, index, rendered)
        return Script(rendered.text, self._learned(chosen, rendered), rendered.literals)

    def _chosen(self, chat: Chat, rendered: Rendered) -> list[int]:
        """The turns that are learned."""
        chosen = [index for index in rendered.turns if chat.learned[index]]
        if self._data.train_on == "completion":
            return [index for index in chosen if index == max(rendered.turns)]
        return chosen

    def _learned(self, chosen: list[int], rendered: Rendered) -> list[Span]:
        turns = rendered.turns
        if self._data.train_on != "all":
            return [turns[index] for index in chosen]
        if not chosen:
            return []
        edges = [0]
        for index, span in turns.items():
            if index not in chosen:
                edges += span
        edges.append(len(rendered.text))
        return [span for span in zip(edges[::2], edges[1::2], strict=True) if span[0] < span[1]]

    @property
    def template(self) -> ChatTemplate:
        """The chat template of tokenizer or recipe. Raises DataError where there is none."""
        if self._template is None:
            self._template = ChatTemplate(self._tokenizer, self._data.chat_template, self._data.date_string)
        return self._template

    def template_reads(self, key: str) -> bool:
        """Whether the chat template looks at this key of a message."""
        return self.template.reads(key)

    def check_variables(self, variables: Mapping[str, Any]) -> None:
        """Raises RowError for a variable that the chat template does not have, or a text that would end a turn."""
        for name, value in variables.items():
            if not self.template.takes(name):
                raise RowError(
                    f"chat_template_kwargs: the chat template has no variable {name!r}; remove it, or give "
                    "data.chat_template one that has"
                )
            if token := next((part for part in texts_of(value) if self.texts.literals(part)), None):
                raise RowError(f"chat_template_kwargs: {name} spells a control token in {token[:40]!r}; remove it")

    def _finder(self, variables: Mapping[str, Any]) -> SpanFinder:
        """Finds spans in what the template renders with these variables."""
        key = json.dumps(variables, sort_keys=True, default=str)
        if key not in self._finders:
            self.check_variables(variables)
            if len(self._finders) == MOST_FINDERS:
                self._finders.clear()
            self._finders[key] = SpanFinder(partial(self.template.render, variables=variables), self.texts.special)
        return self._finders[key]

    def _as_read_by_template(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages whose reasoning has the key that the template reads, where it reads one."""
        if not any(key in message for message in messages for key in REASONING):
            return messages
        read = [key for key in REASONING if self.template.reads(key)]
        renamed = []
        for message in messages:
            key = next((key for key in REASONING if message.get(key)), None)
            if key is not None and read and key not in read:
                others = {name: value for name, value in message.items() if name not in REASONING}
                renamed.append(others | {read[0]: message[key]})
            else:
                renamed.append(message)
        return renamed


def _check_reasoning(messages: list[dict[str, Any]], index: int, rendered: Rendered) -> None:
    """Raises BadRow where a turn is learned without the reasoning that its row has."""
    thought = reasoning_of(messages[index])
    start, end = rendered.turns[index]
    if "".join(thought.split()) in "".join(rendered.text[start:end].split()):
        return
    own_key = any(messages[index].get(key) for key in REASONING)
    instead = "write it into the content as <think>...</think>" if own_key else "remove it from the row"
    remedy = f"{instead}, or give data.chat_template one that writes it"
    if index != max(rendered.turns):  # templates for reasoning write that of the last turn alone, as at inference
        remedy = "set data.train_on: completion, or weight 0 on that turn"
    raise RowError(f"the chat template leaves out the reasoning of turn {index + 1}, which is learned; {remedy}")
