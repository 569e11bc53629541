"""How a table's file is written: its delimiter and its character encoding, found from its bytes.

Encoding: a byte order mark says it. Else a file that is UTF-8 from the first byte to the last is UTF-8. Else its lines
with bytes above 127 are compared with the encodings below: cp1252 (Windows in Western Europe) if they then hold only
letters and signs of Western languages, else what charset-normalizer finds most plausible.

Delimiter: the one that the header has most often among those that divide most of the first lines into as many cells:

    name;preis;text            ';' divides both lines into three cells, ',' into one and two
    Säge;12,50;"klein, leicht"
"""

from __future__ import annotations

import csv
import gzip
from codecs import BOM_UTF16_BE, BOM_UTF16_LE, getincrementaldecoder
from collections.abc import Iterator
from contextlib import contextmanager
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
# Encodings that spreadsheet programs write where they do not write UTF-8.
OTHERS = ("cp1250", "cp1251", "cp1253", "cp1254", "cp949", "shift_jis", "gb18030", "big5")
_WESTERN = frozenset(
    "äöüßÄÖÜéèêëàâáãåæçñíìîïóòôõøœúùûýÿÉÈÊËÀÂÁÃÅÆÇÑÍÌÎÏÓÒÔÕØŒÚÙÛÝðþÐÞšžŠŽ"
    "€£¥§©®°±²½¼¾µ×÷¿¡«»‹›“”„‘’‚–—…•™ªº·´`¨\u00a0\u00ad"
)
COMMON_CONTROLS = frozenset(b"\t\n\r\x0c\x1a")


class Dialect(NamedTuple):
    """A table's delimiter and encoding, as Python names it."""

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
    """A table's dialect; what is given is not looked for. Raises OSError."""
    encoding = encoding or found_encoding(file)
    return Dialect(delimiter or _found_delimiter(file, encoding), encoding)


def checked_encoding(name: str) -> str:
    """Python's name for an encoding of texts. Raises DataError for an unknown one."""
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
    # One wrong byte in a UTF-8 file is a damaged file: its readable rows, and a line about the other one.
    if is_utf8 or _is_mostly_utf8(bytes(sample)):
        return "utf-8"
    return _single_byte_encoding(bytes(sample))


def _is_mostly_utf8(sample: bytes) -> bool:
    """Whether most characters above 127 are right in UTF-8: é is two bytes there, and a lone byte in cp1252."""
    text = sample.decode("utf-8", errors="replace")
    wrong = text.count("\N{REPLACEMENT CHARACTER}")
    right = sum(not character.isascii() for character in text) - wrong
    return right > wrong


def _single_byte_encoding(sample: bytes) -> str:
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
    return best.encoding if best is not None else "cp1252"


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
    """Count the cells in each first record, divided by a delimiter. The last record may be cut off."""
    records = csv.reader(text.splitlines(keepends=True), delimiter=delimiter)
    widths = []
    try:
        for record in islice(records, RECORDS):
            if record:
                widths.append(len(record))
    except csv.Error:
        pass
    if not whole and len(widths) < RECORDS and len(widths) > 1:
        widths.pop()
    return widths
