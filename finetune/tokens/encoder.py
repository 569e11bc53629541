"""A row to token ids and labels, -100 where nothing is learned.

A chat is rendered by its template, and what its assistant wrote in it is learned; a text is taken as it is, between
the tokenizer's own beginning and an end of text that is learned. Texts that spell control tokens stay texts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.data.columns import layout_of
from finetune.data.formats import Chat, Passage, read_row
from finetune.data.readers import BadRow
from finetune.recipe.schema import Data, DataSet, RowFormat
from finetune.tokens.assistant_spans import Rendered, Span, SpanFinder
from finetune.tokens.chat_template import ChatTemplate, read_source
from finetune.tokens.tokenizer import IGNORE, Document, Script, TextTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["IGNORE", "Document", "Encoder", "RowError", "SamplePrompt", "Script"]
TEXT_PROMPT_TOKENS = 32  # of a plain text, which is trained on completely, that serve as its prompt
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
        self._finder: SpanFinder | None = None
        self._template: ChatTemplate | None = None

    def encode(self, row: Mapping[str, Any], format: RowFormat) -> Document:
        """Encode a row with the columns of a layout. Raises RowError (mistake; remedy)."""
        return self.document(read_row(row, layout_of(DataSet(path="json", format=format), [row])))

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
        template, finder = self._chat_tools()
        text = template.render(messages, tools, generation_prompt=True)
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
        _, finder = self._chat_tools()
        rendered = finder.find(chat.messages, chat.tools)
        return Script(rendered.text, self._learned(chat, rendered), rendered.literals)

    def _learned(self, chat: Chat, rendered: Rendered) -> list[Span]:
        turns = rendered.turns
        chosen = [index for index in turns if chat.learned[index]]
        match self._data.train_on:
            case "assistant":
                return [turns[index] for index in chosen]
            case "completion":
                return [turns[index] for index in chosen if index == max(turns)]
            case "all":
                if not chosen:
                    return []
                edges = [0]
                for index, span in turns.items():
                    if index not in chosen:
                        edges += span
                edges.append(len(rendered.text))
                return [span for span in zip(edges[::2], edges[1::2], strict=True) if span[0] < span[1]]

    def _chat_tools(self) -> tuple[ChatTemplate, SpanFinder]:
        if self._template is None or self._finder is None:
            self._template = ChatTemplate(self._tokenizer, self._data.chat_template, self._data.date_string)
            self._finder = SpanFinder(self._template.render, self.texts.special)
        return self._template, self._finder
