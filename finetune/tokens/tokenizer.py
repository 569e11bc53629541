"""Tokenises texts with marked spans into token ids and labels.

Ordinary texts go to the tokenizer in one piece. Three kinds are split before they are tokenised:

- a text that spells a control token, because it stays text;
- an answer that would join its first characters with the header's last token. The model is prompted with the header
  alone, so it must learn to continue from there;
- an answer after white space that the tokenizer cuts in another way at a text's end. GPT-2's pattern reads
  "\\n\\nHi" as "\\n", "\\n", "Hi", and a prompt's last "\\n\\n" as one token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from finetune.data.cells import BadRow
from finetune.errors import FinetuneError
from finetune.tokens.marks import Span, any_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORE = -100
REMEMBERED_HEADER = 100  # letters; longer headers are not remembered


@dataclass(frozen=True, slots=True)
class Document:
    """One tokenised row."""

    input_ids: list[int]
    labels: list[int]  # as long; labels[i] is input_ids[i] or IGNORE (unshifted); labels[0] is always IGNORE


@dataclass(frozen=True, slots=True)
class Script:
    """A row before it is tokenised: its text, and character spans in it."""

    text: str
    supervised: list[Span]
    literals: list[Span]  # look like control tokens, but are text
    is_text: bool = False  # a text without a prompt; it may be split into pieces
    affixes: bool = False  # whether the tokenizer's start tokens and a supervised end-of-text token go around it
    stops: tuple[str, ...] = ()  # the stop tokens of its supervised spans
    remarks: tuple[str, ...] = ()  # facts for the data's owner, counted for each data set


class TextTokenizer:
    """A tokenizer, always called with the same arguments. Needs no torch."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises FinetuneError for a slow tokenizer."""
        if not tokenizer.is_fast:
            raise FinetuneError(
                "model.name_or_path: its tokenizer does not report character positions; it needs a tokenizer.json"
            )
        self._tokenizer = tokenizer
        added_tokens = tokenizer.added_tokens_decoder.values()
        self.special = {str(token) for token in added_tokens if token.special} | set(tokenizer.all_special_tokens)
        self._pattern = any_of(self.special)
        self._headers: dict[str, list[int]] = {}  # a header's tokens, without what follows
        ids = tokenizer.convert_tokens_to_ids(sorted(self.special))
        if isinstance(ids, int):
            ids = [ids]
        self.special_ids: set[int] = set(ids)
        # The tokenizer's start tokens: usually begin-of-text, or none.
        plain, with_start = self.call(["a"]).input_ids[0], tokenizer("a").input_ids
        positions = range(len(with_start))
        start = next((position for position in positions if with_start[position:][: len(plain)] == plain), 0)
        self.start_ids: list[int] = list(with_start[:start])
        self._puts_space = self.call(["\na"]).input_ids[0][-len(plain) :] != plain

    def literals(self, text: str) -> list[Span]:
        """The spans where a text spells control tokens."""
        return [match.span() for match in self._pattern.finditer(text)]

    def tokenise(self, scripts: Sequence[Script]) -> list[Document | BadRow]:
        """Tokenise many rows, the ordinary ones in one call. A row gives its document or its mistake."""
        ordinary = [script.text for script in scripts if not script.literals]
        encodings: Iterator[Any] = iter(())
        if ordinary:
            encodings = iter(self.call(ordinary).encodings)
        documents: list[Document | BadRow] = []
        for script in scripts:
            encoding, spans = None, None
            if not script.literals:
                encoding = next(encodings)
                spans = _token_spans(encoding, script.supervised)
                if spans and not self._begin_as_prompted(script, encoding.ids, spans):
                    spans = None
            try:
                if encoding is None or spans is None:
                    documents.append(self.tokenise_cut(script))
                else:
                    documents.append(self._finish(script, encoding.ids, spans))
            except BadRow as error:
                documents.append(error)
        return documents

    def _begin_as_prompted(self, script: Script, ids: list[int], spans: list[Span]) -> bool:
        """Whether the tokens before each supervised span are those of the prompt alone.

        Only white space before an answer depends on what follows. The comparison begins at the last control token.
        """
        for (start, _), (first, _) in zip(script.supervised, spans, strict=True):
            if not script.text[:start][-1:].isspace():
                continue
            before = [match.end() for match in self._pattern.finditer(script.text, 0, start)]
            header = script.text[before[-1] if before else 0 : start]
            alone = self._headers.get(header)
            if alone is None:
                alone = self._tokenise_piece(header, as_text=False, first=not before)
                if len(header) < REMEMBERED_HEADER:  # a template has few of them
                    self._headers[header] = alone
            if ids[max(0, first - len(alone)) : first] != alone:
                return False
        return True

    def call(self, texts: list[str], *, as_text: bool = False) -> Any:
        """Call the tokenizer for many texts. Nothing is added or truncated.

        Args:
            as_text: Control tokens are text.
        """
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
        """Tokenise a text in pieces, split at supervised spans' edges and around texts that spell control tokens.

        <user>What is <end>?<end><bot>A token.<end>       the first <end> is a literal
        <user>|What is <end>?|<end><bot>|A token.<end>    the pieces; the second one is tokenised as text
        """
        text = script.text
        # The stretches between the template's own control tokens in which a text spells a control token.
        own_tokens = sorted({*self.literals(text)}.difference(script.literals)) if script.literals else []
        own_edges = [0, *(edge for span in own_tokens for edge in span), len(text)]
        literal_stretches = [
            (begin, end)
            for begin, end in zip(own_edges[::2], own_edges[1::2], strict=True)
            if any(begin <= start and stop <= end for start, stop in script.literals)
        ]
        edges = sorted({0, len(text), *(edge for span in [*script.supervised, *literal_stretches] for edge in span)})
        ids: list[int] = []
        token_at = {0: 0}  # a piece's edge in characters -> in tokens
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

    def _tokenise_piece(self, text: str, *, as_text: bool, first: bool) -> list[int]:
        """Tokenise a piece of a longer text, without a space before it.

        If a tokenizer puts a space before each text (Llama 2), it gets the piece after a line break. The line break's
        tokens are then removed.
        """
        if self._puts_space and not first:
            line_break = self.call(["\n"]).input_ids[0]
            after_break: list[int] = self.call(["\n" + text], as_text=as_text).input_ids[0]
            if after_break[: len(line_break)] == line_break:
                return after_break[len(line_break) :]
        plain: list[int] = self.call([text], as_text=as_text).input_ids[0]
        return plain

    def _finish(self, script: Script, ids: list[int], spans: list[Span]) -> Document:
        """Make the document. Raises BadRow if its supervised tokens do not decode to the rendered text."""
        labels = [IGNORE] * len(ids)
        for (start, end), (first, last) in zip(script.supervised, spans, strict=True):
            labels[first:last] = ids[first:last]
            text, decoded = script.text[start:end], self.decode(ids[first:last])
            if decoded == text or self._tokenizer.unk_token_id in ids[first:last]:
                continue
            expected = text
            if normalizer := self._tokenizer.backend_tokenizer.normalizer:
                expected = normalizer.normalize_str(text)
            if self._puts_space:  # before the text and after each control token; decoding does not remove all
                decoded, expected = ("".join(words.replace("▁", " ").split(" ")) for words in (decoded, expected))
            if decoded != expected:
                shown = f"{text[:40]!r} back as {decoded[:40]!r}"
                raise BadRow(f"the tokenizer reads {shown}; use the model's own tokenizer")
        if script.affixes:
            end_id = self._tokenizer.eos_token_id
            ids, labels = [*self.start_ids, *ids, end_id], [IGNORE] * len(self.start_ids) + [*labels, end_id]
        if labels:
            labels[0] = IGNORE
        return Document(ids, labels)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """These tokens' text."""
        return str(self._tokenizer.decode(ids, skip_special_tokens, clean_up_tokenization_spaces=False))


def _token_spans(encoding: Any, supervised: Sequence[Span]) -> list[Span] | None:
    """Convert character spans to token spans; None if an edge lies inside a token.

    The text Hello<end> has the tokens `Hel` `lo` `<end>`: characters 0 to 10 are tokens 0 to 3, and an edge at 4 lies
    inside `lo`.
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
