"""Reads a large JSON array from a stream, one element at a time."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import IO

_SPACE = " \t\n\r"
_CHUNK_BYTES = 2**16
_KEPT_CHARACTERS = 4096  # of the present line, so that messages can count columns


class JsonArray:
    """Splits `[ {...}, {...} ]` into its elements' texts. The present element begins in line `line`.

    Memory is one element and one chunk:

        file   [ {"a": 1}, {"b": 2}, {"c": 3} ]
        _text        ......2}, {"c......            the chunks in memory
        _position           ^                       everything before is done
    """

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        """`limit`: an element's most characters."""
        self.line = 1
        self.decoded_bytes = 0  # bytes decoded before the present chunk
        self._read_bytes = 0
        self._stream = stream
        self._limit = limit
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._position = 0
        self._ended = False

    def elements(self) -> Iterator[str]:
        """Yield each element's text in turn.

        Raises:
            JSONDecodeError: A syntax mistake; its column counts from the start of the element's line.
            UnicodeDecodeError: Its position counts from `decoded_bytes`.
            RecursionError: The element is nested too deep.
            OverflowError: The element is above the limit.
        """
        decoder = json.JSONDecoder()
        self._expect("[")
        is_first = True
        while self._next_character() != "]":
            if not is_first:
                self._expect(",")
                self._next_character()
            is_first = False
            end = self._end_of_element(decoder)
            yield self._text[self._position : end]
            self._advance(end)
        self._expect("]")
        if self._next_character():
            raise json.JSONDecodeError("Extra data", self._text, self._position)

    def _end_of_element(self, decoder: json.JSONDecoder) -> int:
        """Find where the present element ends, and read until it is complete.

        Each read is twice as large as the last one, so an element with n bytes is parsed about log2(n / 64 kB) times.
        """
        size = _CHUNK_BYTES
        while True:
            try:
                _, end = decoder.raw_decode(self._text, self._position)
            except json.JSONDecodeError:
                if self._ended:
                    raise
            else:
                # A number or literal at the buffer's end may continue in the next chunk.
                if end < len(self._text) or self._ended:
                    return end
            if len(self._text) - self._position > self._limit:
                raise OverflowError
            self._read(size)
            size *= 2

    def _next_character(self) -> str:
        """Skip white space; return the next character, or "" at the end."""
        while True:
            end = self._position
            while end < len(self._text) and self._text[end] in _SPACE:
                end += 1
            self._advance(end)
            if end < len(self._text):
                return self._text[end]
            if self._ended:
                return ""
            self._read(_CHUNK_BYTES)

    def _expect(self, character: str) -> None:
        if self._next_character() != character:
            raise json.JSONDecodeError(f"Expecting '{character}' delimiter", self._text, self._position)
        self._advance(self._position + 1)

    def _advance(self, position: int) -> None:
        self.line += self._text.count("\n", self._position, position)
        self._position = position

    def _read(self, size: int) -> None:
        raw = self._stream.read(size)
        # If the chunk ends inside a character, the character's bytes wait in the decoder.
        self.decoded_bytes = self._read_bytes - len(self._decoder.getstate()[0])
        self._read_bytes += len(raw)
        text = self._decoder.decode(raw, final=not raw)
        self._ended = not raw
        # Keep the present line's beginning, for columns in messages, unless it is long.
        line_start = self._text.rfind("\n", max(0, self._position - _KEPT_CHARACTERS), self._position) + 1
        kept_from = line_start or self._position
        self._text, self._position = self._text[kept_from:] + text, self._position - kept_from
