"""A row to token ids and labels, -100 where nothing is learned.

Ordinary rows get the very tokens that the tokenizer makes of the rendered chat. Two kinds are cut before they are
tokenised: a text that spells a control token (it stays text), and an answer whose first characters would melt into the
header's last token (the model is prompted with the header alone, so it must learn to go on from there).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.answer_spans import Rendered, Span, SpanFinder, any_of
from finetune.chat_template import ChatTemplate, read_source
from finetune.errors import FinetuneError
from finetune.recipe import Data, RowFormat
from finetune.row_formats import Chat, Passage, read_row
from finetune.row_reading import BadRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORE = -100
TEXT_PROMPT_TOKENS = 32  # of a plain text, all of which is learned, given as its prompt
RowError = BadRow


@dataclass(frozen=True, slots=True)
class Document:
    """One tokenised row."""

    input_ids: list[int]
    labels: list[int]  # as long; labels[i] is input_ids[i] or IGNORE (unshifted); labels[0] is always IGNORE


@dataclass(frozen=True, slots=True)
class Script:
    """A row ready to be tokenised: its text, and character spans of it."""

    text: str
    learned: list[Span]
    literals: list[Span]  # look like control tokens, are text
    affixes: bool = False  # the tokenizer's own beginning and a learned end of text belong around it


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
        if not tokenizer.is_fast:
            raise FinetuneError(
                "model.name_or_path: its tokenizer knows no character positions; it needs a tokenizer.json"
            )
        self._tokenizer = tokenizer
        self._data = data
        added = tokenizer.added_tokens_decoder.values()
        self._special = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
        self._special_pattern = any_of(self._special)
        self._special_ids = {tokenizer.convert_tokens_to_ids(token) for token in self._special}
        self._finder: SpanFinder | None = None
        self._template: ChatTemplate | None = None
        self._start_ids = _start_ids(tokenizer)
        alone, inside = self._call(["a"]).input_ids[0], self._call(["\na"]).input_ids[0]
        self._puts_space = inside[-len(alone) :] != alone

    # -- rows ---------------------------------------------------------------------------------------------------

    def encode(self, row: Mapping[str, Any], format: RowFormat) -> Document:
        """One row. Raises RowError: what is wrong; remedy."""
        document = self.tokenise([self.script(row, format)])[0]
        if isinstance(document, RowError):
            raise document
        return document

    def script(self, row: Mapping[str, Any], format: RowFormat) -> Script:
        """The row's text and what of it is learned. Raises RowError."""
        read = read_row(row, format)
        script = self._passage(read) if isinstance(read, Passage) else self._chat(read)
        if not script.learned:
            raise RowError("nothing in this row is learned; give an assistant turn the weight 1, or take the row away")
        return script

    def prompt_ids(self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Tokens of a chat up to where the assistant answers. Raises RowError."""
        template, finder = self._chat_tools()
        text = template.render(messages, tools, generation_prompt=True)
        document = self._tokenise_cut(Script(text, [], finder.find_literals(messages, tools, text)))
        return document.input_ids

    def sample_prompt(self, text: str) -> SamplePrompt:
        """A user's message as a prompt; as plain text when there is no chat template."""
        if self._tokenizer.chat_template or self._data.chat_template:
            ids = self.prompt_ids([{"role": "user", "content": text}])
        else:
            literals = [found.span() for found in self._special_pattern.finditer(text)]
            ids = [*self._start_ids, *self._tokenise_cut(Script(text, [], literals)).input_ids]
        return SamplePrompt(ids, text, None)

    def prompt_of(self, ids: np.ndarray, labels: np.ndarray) -> SamplePrompt:
        """A document up to its last answer, and that answer. A text without a prompt is cut in its first half."""
        learned = np.flatnonzero(labels != IGNORE)
        gaps = np.flatnonzero(np.diff(learned) > 1)
        start, end = int(learned[gaps[-1] + 1] if len(gaps) else learned[0]), int(learned[-1]) + 1
        if start <= 1:
            start = max(1, min(TEXT_PROMPT_TOKENS, len(ids) // 2))
        prompt = ids[:start].tolist()
        reference = self._decode(ids[start:end].tolist(), skip_special_tokens=True)
        return SamplePrompt(prompt, self._decode(prompt), reference)

    def identity(self) -> dict[str, str]:
        """What tokens and masks follow from besides data and settings, each as a digest."""
        self._call([""])  # brings the backend's truncation and padding, which are part of its text, into one state
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
        literals = [found.span() for found in self._special_pattern.finditer(text)]
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
            self._finder = SpanFinder(self._template.render, sorted(self._special))
        return self._template, self._finder

    # -- tokens -------------------------------------------------------------------------------------------------

    def tokenise(self, scripts: Sequence[Script]) -> list[Document | RowError]:
        """Documents of many rows, or why not; one call of the tokenizer for all ordinary ones."""
        ordinary = [script for script in scripts if not script.literals]
        encodings = iter(self._call([script.text for script in ordinary]).encodings if ordinary else ())
        made: list[Document | RowError] = []
        for script in scripts:
            encoding = None if script.literals else next(encodings)
            try:
                spans = None if encoding is None else _token_spans(encoding, script.learned)
                if encoding is None or spans is None:
                    document = self._tokenise_cut(script)
                else:
                    document = self._finish(script, encoding.ids, spans)
                made.append(document)
            except RowError as error:
                made.append(error)
        return made

    def _call(self, texts: list[str], *, as_text: bool = False) -> Any:
        return self._tokenizer(
            texts,
            add_special_tokens=False,
            split_special_tokens=as_text,
            return_attention_mask=False,
            return_token_type_ids=False,
            padding=False,
            truncation=False,
            verbose=False,
        )

    def _tokenise_cut(self, script: Script) -> Document:
        """Tokens of a text cut at the edges of what is learned and around texts that spell control tokens."""
        text = script.text
        apart = self._apart(script)
        edges = sorted({0, len(text), *(edge for span in [*script.learned, *apart] for edge in span)})
        ids: list[int] = []
        token_at = {0: 0}
        for start, end in pairwise(edges):
            as_text = any(first <= start < last for first, last in apart)
            piece = self._piece(text[start:end], as_text=as_text, first=start == 0)
            if as_text and (wrong := self._special_ids.intersection(piece)):
                token = self._tokenizer.convert_ids_to_tokens(min(wrong))
                raise RowError(f"the tokenizer cannot write {token!r} as text; take it out of the row")
            ids += piece
            token_at[end] = len(ids)
        spans = [(token_at[start], token_at[end]) for start, end in script.learned]
        return self._finish(script, ids, spans)

    def _apart(self, script: Script) -> list[Span]:
        """Stretches between the template's own control tokens that hold a text spelling one."""
        if not script.literals:
            return []
        spelt = {found.span() for found in self._special_pattern.finditer(script.text)}
        own = sorted(spelt.difference(script.literals))
        begins, ends = [0, *(end for _, end in own)], [*(start for start, _ in own), len(script.text)]
        return [
            (begin, end)
            for begin, end in zip(begins, ends, strict=True)
            if any(begin <= start and stop <= end for start, stop in script.literals)
        ]

    def _piece(self, text: str, *, as_text: bool, first: bool) -> list[int]:
        """Tokens of a text that stands inside of another: no space is put before it."""
        if self._puts_space and not first:
            line_break = self._call(["\n"]).input_ids[0]
            after_break: list[int] = self._call(["\n" + text], as_text=as_text).input_ids[0]
            if after_break[: len(line_break)] == line_break:
                return after_break[len(line_break) :]
        plain: list[int] = self._call([text], as_text=as_text).input_ids[0]
        return plain

    def _finish(self, script: Script, ids: list[int], spans: list[Span]) -> Document:
        """The document, after checking that what is learned reads as it was rendered."""
        labels = [IGNORE] * len(ids)
        for (start, end), (first, last) in zip(script.learned, spans, strict=True):
            self._check_decoded(ids[first:last], script.text[start:end])
            labels[first:last] = ids[first:last]
        if script.affixes:
            end_id = self._tokenizer.eos_token_id
            ids, labels = [*self._start_ids, *ids, end_id], [IGNORE] * len(self._start_ids) + [*labels, end_id]
        if labels:
            labels[0] = IGNORE
        return Document(ids, labels)

    def _decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens, clean_up_tokenization_spaces=False))

    def _check_decoded(self, ids: list[int], text: str) -> None:
        decoded = self._decode(ids)
        if decoded == text or self._tokenizer.unk_token_id in ids:
            return
        normalizer = self._tokenizer.backend_tokenizer.normalizer
        wanted = normalizer.normalize_str(text) if normalizer else text
        if self._puts_space:  # before the text and after each control token, and decoding does not take all away
            decoded, wanted = ("".join(text.replace("▁", " ").split(" ")) for text in (decoded, wanted))
        if decoded != wanted:
            raise RowError(f"the tokenizer reads {text[:40]!r} back as {decoded[:40]!r}; use the model's own tokenizer")


def _token_spans(encoding: Any, learned: Sequence[Span]) -> list[Span] | None:
    """Token spans of character spans; None where an edge lies inside of a token."""
    spans = []
    for start, end in learned:
        if start == end:
            return None
        first, last = encoding.char_to_token(start), encoding.char_to_token(end - 1)
        if first is None or last is None or encoding.token_to_chars(first)[0] != start:
            return None
        while last + 1 < len(encoding) and encoding.token_to_chars(last + 1)[1] <= end:
            last += 1  # further bytes of the last character
        if encoding.token_to_chars(last)[1] != end:
            return None
        spans.append((first, last + 1))
    return spans


def _start_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before a text by itself: usually the begin-of-text token, or nothing."""
    plain, whole = tokenizer("a", add_special_tokens=False).input_ids, tokenizer("a").input_ids
    where = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
    return list(whole[:where])
