"""Texts with marked spans to token ids and labels.

Ordinary texts get exactly the tokens that the tokenizer makes of them. Two kinds are split before they are tokenised:

- a text that spells a control token, because it stays text;
- an answer whose first characters would join the header's last token. The model is prompted with the header alone, so
  it must learn to continue from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from finetune.data.readers import BadRow
from finetune.errors import FinetuneError
from finetune.tokens.marks import Span, any_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORE = -100


@dataclass(frozen=True, slots=True)
class Document:
    """One tokenised row."""

    input_ids: list[int]
    labels: list[int]  # as long; labels[i] is input_ids[i] or IGNORE (unshifted); labels[0] is always IGNORE


@dataclass(frozen=True, slots=True)
class Script:
    """A row ready to be tokenised: its text, and character spans of it."""

    text: str
    supervised: list[Span]
    literals: list[Span]  # look like control tokens, are text
    is_text: bool = False  # a text without a prompt, of which every piece is a text too
    affixes: bool = False  # the tokenizer's own beginning and a supervised end of text belong around it
    stops: tuple[str, ...] = ()  # the control tokens on which the model ends a supervised stretch
    remarks: tuple[str, ...] = ()  # facts that the owner of the data should know, counted for each data set


class TextTokenizer:
    """A tokenizer, always called with the same arguments. Needs no torch."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises FinetuneError for a tokenizer that is not a fast one."""
        if not tokenizer.is_fast:
            raise FinetuneError(
                "model.name_or_path: its tokenizer does not report character positions; it needs a tokenizer.json"
            )
        self._tokenizer = tokenizer
        added_tokens = tokenizer.added_tokens_decoder.values()
        self.special = {str(token) for token in added_tokens if token.special} | set(tokenizer.all_special_tokens)
        self._pattern = any_of(self.special)
        ids = tokenizer.convert_tokens_to_ids(sorted(self.special))
        self.special_ids: set[int] = {ids} if isinstance(ids, int) else set(ids)
        # Tokens that the tokenizer puts before a text by itself: usually begin-of-text, or none.
        plain, with_start = self.call(["a"]).input_ids[0], tokenizer("a").input_ids
        positions = range(len(with_start))
        start = next((position for position in positions if with_start[position:][: len(plain)] == plain), 0)
        self.start_ids: list[int] = list(with_start[:start])
        self._puts_space = self.call(["\na"]).input_ids[0][-len(plain) :] != plain

    def literals(self, text: str) -> list[Span]:
        """The places where a text spells control tokens."""
        return [match.span() for match in self._pattern.finditer(text)]

    def tokenise(self, scripts: Sequence[Script]) -> list[Document | BadRow]:
        """Documents of many rows, or their mistakes; one call of the tokenizer for all ordinary ones."""
        ordinary = [script for script in scripts if not script.literals]
        encodings = iter(self.call([script.text for script in ordinary]).encodings if ordinary else ())
        documents: list[Document | BadRow] = []
        for script in scripts:
            encoding = None if script.literals else next(encodings)
            try:
                spans = None if encoding is None else _token_spans(encoding, script.supervised)
                if encoding is None or spans is None:
                    documents.append(self.tokenise_cut(script))
                else:
                    documents.append(self._finish(script, encoding.ids, spans))
            except BadRow as error:
                documents.append(error)
        return documents

    def call(self, texts: list[str], *, as_text: bool = False) -> Any:
        """The tokenizer's answer for many texts: nothing added or truncated; `as_text`: control tokens are text."""
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

    def tokenise_cut(self, script: Script) -> Document:
        """Tokens of a text, split at the edges of supervised spans and around texts that spell control tokens.

        <user>What is <end>?<end><bot>A token.<end>       the first <end> is a literal
        <user>|What is <end>?|<end><bot>|A token.<end>    the pieces; the second one is tokenised as text
        """
        text = script.text
        literal_stretches = self._literal_stretches(script)
        edges = sorted({0, len(text), *(edge for span in [*script.supervised, *literal_stretches] for edge in span)})
        ids: list[int] = []
        token_at = {0: 0}  # edge in characters -> edge in tokens
        for start, end in pairwise(edges):
            as_text = any(first <= start < last for first, last in literal_stretches)
            piece = self._tokenise_piece(text[start:end], as_text=as_text, first=start == 0)
            if as_text and (wrong := self.special_ids.intersection(piece)):
                token = self._tokenizer.convert_ids_to_tokens(min(wrong))
                raise BadRow(f"the tokenizer cannot write {token!r} as text; remove it from the row")
            ids += piece
            token_at[end] = len(ids)
        spans = [(token_at[start], token_at[end]) for start, end in script.supervised]
        return self._finish(script, ids, spans)

    def _literal_stretches(self, script: Script) -> list[Span]:
        """Stretches between the template's own control tokens that hold a text spelling one."""
        if not script.literals:
            return []
        own_tokens = sorted(set(self.literals(script.text)).difference(script.literals))
        begins, ends = [0, *(end for _, end in own_tokens)], [*(start for start, _ in own_tokens), len(script.text)]
        return [
            (begin, end)
            for begin, end in zip(begins, ends, strict=True)
            if any(begin <= start and stop <= end for start, stop in script.literals)
        ]

    def _tokenise_piece(self, text: str, *, as_text: bool, first: bool) -> list[int]:
        """Tokens of a text inside of another: without a space before it.

        A tokenizer that puts a space before each text (Llama 2) gets the piece after a line break, whose tokens are
        then taken off.
        """
        if self._puts_space and not first:
            line_break = self.call(["\n"]).input_ids[0]
            after_break: list[int] = self.call(["\n" + text], as_text=as_text).input_ids[0]
            if after_break[: len(line_break)] == line_break:
                return after_break[len(line_break) :]
        plain: list[int] = self.call([text], as_text=as_text).input_ids[0]
        return plain

    def _finish(self, script: Script, ids: list[int], spans: list[Span]) -> Document:
        """The document, after checking that its supervised tokens decode to the rendered text."""
        labels = [IGNORE] * len(ids)
        for (start, end), (first, last) in zip(script.supervised, spans, strict=True):
            self._check_decoded(ids[first:last], script.text[start:end])
            labels[first:last] = ids[first:last]
        if script.affixes:
            end_id = self._tokenizer.eos_token_id
            ids, labels = [*self.start_ids, *ids, end_id], [IGNORE] * len(self.start_ids) + [*labels, end_id]
        if labels:
            labels[0] = IGNORE
        return Document(ids, labels)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """The text of some tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens, clean_up_tokenization_spaces=False))

    def _check_decoded(self, ids: list[int], text: str) -> None:
        """Raises BadRow if tokens decode to another text. A tokenizer of another model would make such tokens."""
        decoded = self.decode(ids)
        if decoded == text or self._tokenizer.unk_token_id in ids:
            return
        normalizer = self._tokenizer.backend_tokenizer.normalizer
        expected = normalizer.normalize_str(text) if normalizer else text
        if self._puts_space:  # before the text and after each control token, and decoding does not take all away
            decoded, expected = ("".join(words.replace("▁", " ").split(" ")) for words in (decoded, expected))
        if decoded != expected:
            raise BadRow(f"the tokenizer reads {text[:40]!r} back as {decoded[:40]!r}; use the model's own tokenizer")


def _token_spans(encoding: Any, supervised: Sequence[Span]) -> list[Span] | None:
    """Convert character spans to token spans; None if an edge lies inside a token.

    Tokens `Hel` `lo` `<end>` of the text Hello<end>: the characters 0 to 10 are the tokens 0 to 3, and an edge at 4 is
    inside of `lo`.
    """
    spans = []
    for start, end in supervised:
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
