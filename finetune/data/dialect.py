"""Finds a table's delimiter and character encoding from the file's bytes.

Encoding, the first rule that holds:

- A byte order mark says it.
- A file that is UTF-8 from the first byte to the last is UTF-8.
- cp1252 (Windows in Western Europe), if the lines with bytes above 127 then hold only Western letters and signs.
- Else charset-normalizer chooses the most plausible encoding below.

Delimiter: it must divide most of the first lines into as many cells as the header. The largest share wins, then the
most cells:

    name;preis;text            ';' divides both lines into three cells, ',' into one and two
    Säge;12,50;"klein, leicht"
"""

from __future__ import annotations

import csv
import gzip
from codecs import BOM_UTF16_BE, BOM_UTF16_LE, getincrementaldecoder
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple

from finetune.errors import DataError
from finetune.paths import open_regular

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
DELIMITERS = (",", ";", "\t", "|")
HEAD_OF_TABLE = 256 * 1024  # from which the delimiter is found
SAMPLE_BYTES = 64 * 1024  # of lines with bytes above 127
MOST_SCANNED = 512 * 2**20  # a second or two; a larger file is taken for what its first half gigabyte is
RECORDS = 100
# Encodings that spreadsheet programs write instead of UTF-8.
OTHERS = ("cp1250", "cp1251", "cp1253", "cp1254", "cp949", "shift_jis", "gb18030", "big5")
_WESTERN = frozenset(
    "äöüßÄÖÜéèêëàâáãåæçñíìîïóòôõøœúùûýÿÉÈÊËÀÂÁÃÅÆÇÑÍÌÎÏÓÒÔÕØŒÚÙÛÝðþÐÞšžŠŽ"
    "€£¥§©®°±²½¼¾µ×÷¿¡«»‹›“”„‘’‚–—…•™ªº·´`¨\u00a0\u00ad"
)
COMMON_CONTROLS = frozenset(b"\t\n\r\x0c\x1a")


class Dialect(NamedTuple):
    """A table's delimiter, and Python's name for its encoding."""

    delimiter: str
    encoding: str

    @property
    def separator(self) -> str:
        """The delimiter for messages: a tab is called tabs."""
        return self.delimiter.replace("\t", "tabs")

    def in_words(self) -> str:
        """`cp1252, separated by ;`; empty for a table in UTF-8 with commas."""
        parts = []
        if self.encoding != "utf-8":
            parts.append(self.encoding)
        if self.delimiter != ",":
            parts.append(f"separated by {self.separator}")
        return ", ".join(parts)


@contextmanager
def open_bytes(file: Path) -> Iterator[IO[bytes]]:
    """A file's bytes, decompressed if its name ends with .gz. Raises OSError, also for a pipe or a device."""
    with open_regular(file) as stored, gzip.open(stored, "rb") if file.suffix == ".gz" else stored as stream:
        yield stream  # type: ignore[misc]  # gzip's stream reads bytes like any other


def csv_dialect(file: Path, delimiter: str | None = None, encoding: str | None = None) -> Dialect:
    """A table's dialect. A given delimiter or encoding is taken as it is. Raises OSError."""
    encoding = encoding or found_encoding(file)
    return Dialect(delimiter or _found_delimiter(file, encoding), encoding)


def checked_encoding(name: str) -> str:
    """Python's name for a text encoding. Raises DataError for an unknown one."""
    import codecs

    try:
        found = codecs.lookup(name)
        "a".encode(found.name)
    except (LookupError, ValueError, TypeError):
        raise DataError([f"data: encoding: {name!r} is not known; write utf-8, cp1252 or cp949"]) from None
    return found.name


def found_encoding(file: Path) -> str:
    """Return utf-8, utf-16, or a spreadsheet program's encoding. Raises OSError."""
    sample, decoder, is_utf8 = bytearray(), getincrementaldecoder("utf-8")(), True
    with open_bytes(file) as stream:
        head = stream.read(4)
        # UTF-32's mark begins with UTF-16's.
        if head.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) and head != BOM_UTF16_LE + b"\0\0":
            return "utf-16"
        stream.seek(0)
        scanned = 0
        while (chunk := stream.read(2**20)) and scanned < MOST_SCANNED:
            scanned += len(chunk)
            if chunk.isascii():
                continue
            try:
                if is_utf8:
                    decoder.decode(chunk)
            except UnicodeDecodeError:
                is_utf8 = False
            if len(sample) < SAMPLE_BYTES:
                for line in chunk.splitlines(keepends=True):
                    if not line.isascii():
                        sample += line[:SAMPLE_BYTES]
                    if len(sample) >= SAMPLE_BYTES:
                        break
            if not is_utf8:
                break
    if is_utf8:
        return "utf-8"
    return _likely_encoding(bytes(sample))


def _likely_encoding(sample: bytes) -> str:
    """The most plausible encoding, by the lines with bytes above 127 in a file that is not valid UTF-8."""
    text = sample.decode("utf-8", errors="replace")
    wrong = text.count("\N{REPLACEMENT CHARACTER}")
    right = sum(not character.isascii() for character in text) - wrong
    if right > wrong:  # a damaged UTF-8 file: its other rows are still right, and a mistake names the byte
        return "utf-8"
    text = sample.decode("cp1252", errors="replace")
    above = [character for character in text if not character.isascii()]
    # In Western languages most letters are ASCII. Russian in cp1251 looks like Western letters too, and nothing else.
    is_western = {*above} <= _WESTERN and len(above) < 0.4 * sum(character.isalpha() for character in text)
    if any(byte < 32 and byte not in COMMON_CONTROLS for byte in sample):
        return "utf-8"  # not a text: the reader will name the byte
    if is_western:
        return "cp1252"
    from charset_normalizer import from_bytes

    best = from_bytes(sample, cp_isolation=[*OTHERS, "cp1252"], steps=10, threshold=0.5).best()
    if best is None:
        return "cp1252"
    return best.encoding


def _found_delimiter(file: Path, encoding: str) -> str:
    with open_bytes(file) as stream:
        head = stream.read(HEAD_OF_TABLE)
    whole = len(head) < HEAD_OF_TABLE
    text = head.removeprefix(BYTE_ORDER_MARK).decode(encoding, errors="replace")
    best: tuple[float, int] = (0.0, 0)
    chosen = ","
    for delimiter in DELIMITERS:
        widths = _widths(text, delimiter, whole)
        if not widths or widths[0] < 2:
            continue
        agreeing = sum(width == widths[0] for width in widths) / len(widths)
        if agreeing >= 0.5 and (agreeing, widths[0]) > best:
            best, chosen = (agreeing, widths[0]), delimiter
    return chosen


def _widths(text: str, delimiter: str, whole: bool) -> list[int]:
    """Count the cells of the first records. The last record may be cut off, so it does not count."""
    records = csv.reader(text.splitlines(keepends=True), delimiter=delimiter)
    widths = []
    with suppress(csv.Error):
        for record in islice(records, RECORDS):
            if record:
                widths.append(len(record))
    if not whole and len(widths) < RECORDS and len(widths) > 1:
        widths.pop()
    return widths
