"""The elements of one large JSON array, read from a stream one at a time."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import IO

_SPACE = " \t\n\r"
_CHUNK = 2**16


class JsonArray:
    """Splits `[ {...}, {...} ]` into the texts of its elements; `line` is where the present element begins.

    Memory is one element and one chunk. Raises JSONDecodeError on a mistake in the syntax (its column is counted in
    the element's own line), UnicodeDecodeError (whose position is counted from `decoded_bytes`), RecursionError, and
    OverflowError for an element of more than `limit` characters.
    """

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        self.line = 1
        self.decoded_bytes = 0  # bytes decoded before the present chunk
        self._read_bytes = 0
        self._stream = stream
        self._limit = limit
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._at = 0
        self._ended = False

    def elements(self) -> Iterator[str]:
        """Text of each element in turn."""
        decoder = json.JSONDecoder()
        self._expect("[")
        first = True
        while self._next_char() != "]":
            if not first:
                self._expect(",")
                self._next_char()
            first = False
            end = self._end_of_element(decoder)
            element = self._text[self._at : end]
            yield element
            self._advance(end)
        self._expect("]")
        if self._next_char():
            raise json.JSONDecodeError("Extra data", self._text, self._at)

    def _end_of_element(self, decoder: json.JSONDecoder) -> int:
        """The end of the element at the current position; reads twice as much each time until it is complete."""
        size = _CHUNK
        while True:
            try:
                _, end = decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError:
                if self._ended:
                    raise
            else:
                # A number or literal at the buffer's end may continue in the next chunk.
                if end < len(self._text) or self._ended:
                    return end
            if len(self._text) - self._at > self._limit:
                raise OverflowError
            self._read(size)
            size *= 2

    def _next_char(self) -> str:
        """The next character that is not space, or "" at the end."""
        while True:
            end = self._at
            while end < len(self._text) and self._text[end] in _SPACE:
                end += 1
            self._advance(end)
            if end < len(self._text):
                return self._text[end]
            if self._ended:
                return ""
            self._read(_CHUNK)

    def _expect(self, char: str) -> None:
        if self._next_char() != char:
            raise json.JSONDecodeError(f"Expecting '{char}' delimiter", self._text, self._at)
        self._advance(self._at + 1)

    def _advance(self, to: int) -> None:
        self.line += self._text.count("\n", self._at, to)
        self._at = to

    def _read(self, size: int) -> None:
        raw = self._stream.read(size)
        self.decoded_bytes = self._read_bytes - len(self._decoder.getstate()[0])
        self._read_bytes += len(raw)
        text = self._decoder.decode(raw, final=not raw)
        self._ended = not raw
        # Keep the present line's beginning, for columns in messages, unless it is long.
        keep = self._text.rfind("\n", max(0, self._at - 4096), self._at) + 1 or self._at
        self._text, self._at = self._text[keep:] + text, self._at - keep
