"""Finds a table's delimiter and character encoding from the file's bytes.

Encoding, the first rule that holds:

- A byte order mark says it.
- A file that is UTF-8 from the first byte to the last is UTF-8.
- NUL bytes and line ends that only one order of UTF-16 or UTF-32 explains are that.
- Else chardet ranks the code pages by letter pairs of 40 languages. Readings that no language has are struck off:
  "S„ge", "fЃr", "situЋ". If two different readings remain close, nobody guesses: `UnclearFile` shows both.

Delimiter: it must divide most of the first lines into as many cells as the header. The largest share wins, then the
most cells:

    name;preis;text            ';' divides both lines into three cells, ',' into one and two
    Säge;12,50;"klein, leicht"
"""

from __future__ import annotations

import codecs
import csv
import io
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from finetune.errors import BadFile, DataError, UnclearFile
from finetune.paths import BYTE_ORDER_MARK, open_bytes

# UTF-32's mark begins with UTF-16's.
WIDE_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
WIDE = ("utf-16", "utf-32")
DELIMITERS = (",", ";", "\t", "|")
HEAD_OF_TABLE = 256 * 1024  # from which the delimiter is found
MOST_SCANNED = 512 * 2**20  # a second or two; a larger file is taken for what its first half gigabyte is
RECORDS = 100
MOST_ABOVE = 20  # lines above a header
# Excel's own first line. It names the delimiter and is no row.
SEPARATOR_LINE = re.compile(r'"?sep=(.|\\t)"?\s*', re.IGNORECASE)
COLUMN_NAME = re.compile(r"\s*[^\W\d]([\w ./()-]{0,40}[\w)])?\s*")  # of a column
_NAME = re.compile(r"[^\W\d][^\n]{0,39}|[#№]")  # the same below a title: `Nr.`, `Done?`, `Share %`
SAMPLE_LINES, SAMPLE_BYTES = 512, 2048  # chardet 6 needs half a second
LONGEST_LINE = 400  # bytes of one line in the sample
# Names that mean a part of a larger code page, by the page that Windows writes.
WIDER_PAGES = {
    "iso8859-1": "cp1252", "iso8859-9": "cp1254", "iso8859-11": "cp874", "tis-620": "cp874", "gb2312": "gb18030",
    "gbk": "gb18030", "euc_kr": "cp949", "shift_jis": "cp932", "shift_jis_2004": "cp932", "big5": "cp950",
}  # fmt: skip
USUAL_PAGES = (
    "cp1252",
    "cp1250",
    "cp1251",
    "cp1254",
    "cp1257",
    "cp1253",
    "cp1256",
    "cp1255",
    "cp866",
    "koi8-r",
    "cp850",
)
# In use in ISO's and mainframes' catalogues alone; they differ from Windows' pages by few letters.
RARE_PAGES = ("iso8859-3", "iso8859-4", "iso8859-10", "iso8859-14", "iso8859-16", "hp-roman8", "kz1048", "ptcp154")
MOST_ODD = 0.1  # share of odd characters in a reading that is plausible
# Readings above this share of the best one's confidence are plausible too. Letters that Western Europe shares count for
# cp1252, because chardet knows too few of the languages that are written in it: Albanian looks Lithuanian.
CLOSE, CLOSE_BEHIND_WESTERN, CLOSE_WESTERN = 0.95, 0.98, 0.55
WESTERN_LETTERS = frozenset(
    "äöüßÄÖÜéèêëàâáãåæçñíìîïóòôõøœúùûÉÈÊËÀÂÁÃÅÆÇÑÍÌÎÏÓÒÔÕØŒÚÙÛšžŠŽ€£¥§©®°±²³½¼¾µ×÷¿¡«»‹›“”„‘’‚–—…•™ªº·´\u00a0\u00ad"
)
WINDOWS_SIGNS = frozenset("€£°±²³½¼¾µ×“”„‘’‚–—…•\u00a0")
_CONTROLS = {*range(32)} - {*b"\t\n\r\x0c\x1a\x1b"}
_ASCII = frozenset(map(chr, range(128)))
_SCRIPTS = ("LATIN", "CYRILLIC", "GREEK", "ARABIC", "HEBREW", "THAI")


# A table's record: its line or row, its cells, and what is wrong with it.
Record = tuple[int, list[str], str | None]


class Dialect(NamedTuple):
    """How a table is written: its delimiter, Python's name for its encoding, and how its quotes are read."""

    delimiter: str
    encoding: str
    is_quoted: bool = True  # else a quote is a character like any other, as in many files with tabs
    is_spaced: bool = False  # spaces after a delimiter are not part of the cell: `"question", "answer"`

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
        return ", ".join([*parts, *self.quotes_in_words()])

    def quotes_in_words(self) -> list[str]:
        """Unusual quoting, in words."""
        spaced = ["without the spaces after a separator"] * self.is_spaced
        return ["quotes as characters"] * (not self.is_quoted) + spaced

    def records(self, lines: Iterable[str]) -> Any:
        """csv's reader: the cells of each record, and `line_num`. It raises csv.Error."""
        quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if self.is_quoted else csv.QUOTE_NONE
        return csv.reader(
            lines, delimiter=self.delimiter, quoting=quoting, skipinitialspace=self.is_spaced, strict=True
        )


def csv_dialect(file: Path, delimiter: str | None = None, encoding: str | None = None) -> Dialect:
    """A table's dialect. A given delimiter or encoding is taken as it is. Raises OSError and UnclearFile."""
    encoding = encoding or found_encoding(file)
    with open_bytes(file) as stream:
        head = stream.read(HEAD_OF_TABLE)
    text = codecs.getincrementaldecoder(encoding)("replace").decode(head.removeprefix(BYTE_ORDER_MARK))
    lines = io.StringIO(text, newline="").readlines()
    if len(head) == HEAD_OF_TABLE and len(lines) > 1:
        lines.pop()  # it may be cut off
    if lines and (named := SEPARATOR_LINE.fullmatch(lines[0])):
        delimiter, lines = delimiter or named[1].replace("\\t", "\t"), lines[1:]
    best: tuple[float, int] = (0.0, 0)
    chosen = Dialect(delimiter or ",", encoding)
    for candidate in [delimiter] if delimiter else DELIMITERS:
        dialect = _with_quotes(Dialect(candidate, encoding), lines)
        agreeing, width = _agreement(dialect, lines)
        if agreeing >= 0.5 and width > 1 and (agreeing, width) > best:
            best, chosen = (agreeing, width), dialect
    if best[1] > 1 or delimiter:
        return chosen
    for candidate in DELIMITERS:
        first, *below = _first_records(chosen._replace(delimiter=candidate), lines)[0] or [[]]
        # A header that is surely divided: the rows that are not are mistakes.
        if len(first) > 1 and all(map(COLUMN_NAME.fullmatch, first)):
            return chosen._replace(delimiter=candidate)
        is_table = len(below) > 1 and len({*map(len, below)}) == 1 < len(below[0]) and len(first) == 1
        if is_table and candidate != "," and _are_names(below[0]):
            cells = f"has one cell, and the lines below have {len(below[0])}, separated by {candidate!r}"
            remedy = 'if it is a title, remove it; if each line is one text, write delimiter: ","'
            raise BadFile(f"{file}:1", f"{cells}; {remedy}")
    return chosen


def _with_quotes(dialect: Dialect, lines: Sequence[str]) -> Dialect:
    """How the head's quotes are read: as quotes, unless the head is a table only if they are read otherwise."""
    other = dialect._replace(is_spaced=True)
    if dialect.delimiter == "\t":
        other = dialect._replace(is_quoted=False)
    cells = [cell for record in _first_records(dialect, lines)[0] for cell in record[1:] if cell]
    has_spaces = other.is_spaced and len(cells) > 2 and all(cell.startswith(" ") for cell in cells)
    if has_spaces or _agreement(other, lines)[0] > _agreement(dialect, lines)[0]:
        return other
    return dialect


def _first_records(dialect: Dialect, lines: Sequence[str]) -> tuple[list[list[str]], bool]:
    """The first records that are not empty, and whether the quotes hold as far as that."""
    records: list[list[str]] = []
    try:
        records.extend(islice(filter(without_blank_end, dialect.records(lines)), RECORDS))
    except csv.Error:
        return records, False
    return records, True


def _agreement(dialect: Dialect, lines: Sequence[str]) -> tuple[float, int]:
    """The share of the first records with as many cells as the header, and the header's cells."""
    records, is_sound = _first_records(dialect, lines)
    start = header_at(records)
    if not records or start is None:
        return 0.0, 0
    width = len(without_blank_end(records[start]))
    # A quote that is never closed takes the records that follow into its cell.
    agreeing = sum(
        width <= len(record)
        and len(without_blank_end(record)) <= width
        and not any("\n" in cell and "\t" in cell for cell in record)
        for record in records[start:]
    )
    lost = 0 if is_sound else len(lines) - len(records)
    return agreeing / (len(records) - start + lost), width


def without_blank_end(cells: Sequence[str]) -> Sequence[str]:
    """The cells up to the last one that holds something."""
    end = len(cells)
    while end and not cells[end - 1].strip():
        end -= 1
    return cells[:end]


def header_at(records: Sequence[Sequence[str]]) -> int | None:
    """The place of the header: the first row with a cell in every column. None if a lone first cell is not clear.

    Rows above it are a title, notes, or names over groups of columns, if the row looks like names: short, different
    from the cells below it. Otherwise the first row is the header, and its nameless columns are a mistake.

        Export of May 2026;;           text
        Customer;;Ticket               Yes, of course
        Name;City;Question             No, never
    """
    ends = [len(without_blank_end(record)) for record in records]
    counts = Counter(ends[next((place for place, end in enumerate(ends) if end > 1), 0) :])
    usual = max(counts, key=lambda end: (counts[end], end), default=0)
    wide = [record[:end] for end, record in zip(ends, records, strict=True) if end >= usual]
    begins = [next(place for place, cell in enumerate(cells) if cell.strip()) for cells in wide if cells]
    # The first cell may be empty: a data frame's row numbers have no name.
    left = max(1, min(begins, default=0))
    full = (place for place, end in enumerate(ends) if end >= usual and all(map(str.strip, records[place][left:end])))
    start = next(full, 0)
    # If the first row has a cell where most rows have one, it is the header of a table with an empty column.
    filled = Counter(
        tuple(bool(cell.strip()) for cell in record[:end]) for record, end in zip(records, ends, strict=True)
    )
    is_usual = ends[:1] != [1] and list(filled)[:1] == [cells for cells, _ in filled.most_common(1)]
    if not start or start > MOST_ABOVE or usual < 2 or is_usual:
        return 0
    above, header, below = records[:start], records[start][: ends[start]], records[start + 1 :]
    titles = [cells[0].strip() for cells, end in zip(above, ends, strict=False) if end == 1]
    if len(titles) == start and all(title.startswith(("#", "//", "%")) for title in titles):
        return start
    have_words = len(titles) == start and all(re.search(r"[\s\d]", title) for title in titles)
    is_padded = any(len(cells) > 1 for cells in above)
    if _are_names(header) and (have_words or (is_padded and _differ_from(header, below))):
        return start
    return 0 if all(len(cells) > 1 for cells in above) else None


def _are_names(cells: Sequence[str]) -> bool:
    """Whether these may be columns' names: short, beginning with a letter, all different."""
    names = [cell.strip() for cell in cells if cell.strip()]
    return len({*names}) == len(names) and all(_NAME.fullmatch(name) and len(name.split()) < 6 for name in names)


def _differ_from(names: Sequence[str], below: Sequence[Sequence[str]]) -> bool:
    """Whether a column holds numbers or longer texts below its name, and no column repeats its name."""
    differ = False
    for place, name in enumerate(names):
        values = [record[place].strip() for record in below if len(record) > place and record[place].strip()]
        if name.strip() in values:
            return False
        length = sorted(map(len, values))[len(values) // 2] if values else 0
        are_numbers = bool(values) and not any(any(map(str.isalpha, value)) for value in values)
        differ |= are_numbers or length >= 2 * len(name) + 4
    return differ


def checked_encoding(name: str) -> str:
    """Python's name for a text encoding. Raises DataError for an unknown one."""
    try:
        codec = codecs.lookup(name)
        "a".encode(codec.name)
    except (LookupError, ValueError, TypeError):
        raise DataError([f"data: encoding: {name!r} is not known; write utf-8, cp1252 or cp949"]) from None
    return codec.name


def found_encoding(file: Path) -> str:
    """Python's name for a file's encoding.

    Raises OSError, DataError if lines are in two encodings, and UnclearFile if two code pages are plausible.
    """
    about = file.stat()
    readings = _readings(file, about.st_mtime_ns, about.st_size)
    if not readings[0][0]:
        raise BadFile(str(file), f"some lines are UTF-8 ({readings[0][1]}; save each part as UTF-8")
    if len(readings) > 1:
        raise UnclearFile(str(file), "encoding", "is not UTF-8, and may say", readings)
    return readings[0][0]


@lru_cache(256)
def _readings(file: Path, changed: int, size: int) -> tuple[tuple[str, str], ...]:
    """The plausible encodings, each with one word as it reads it. The file is scanned once until it changes."""
    lines: list[bytes] = []  # spread over the file
    first_ones: list[bytes] = []  # each line with a byte that none before it has
    seen: set[int] = set()
    is_utf8, has_utf8, has_japanese, scanned, step, number = True, False, False, 0, 1, 0
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open_bytes(file) as stream:
        # Whole lines, because a code page with two bytes a letter cannot be read from a letter's middle.
        while scanned < MOST_SCANNED and (chunk := stream.read(2**20) + stream.readline(2**20)):
            wide = next((name for mark, name in WIDE_MARKS.items() if chunk.startswith(mark)), None)
            if b"\0" in chunk[:HEAD_OF_TABLE] and wide is None:
                wide = _wide_encoding(chunk[:HEAD_OF_TABLE])
            if wide and not scanned:
                return ((wide, ""),)
            scanned += len(chunk)
            has_japanese |= b"\x1b$" in chunk
            try:
                if is_utf8:
                    decoder.decode(chunk)
                    has_utf8 |= not chunk.isascii()
                    continue
            except UnicodeDecodeError:
                is_utf8 = False
                if has_utf8:
                    break
            if seen.issuperset(chunk):
                chunk = chunk[: chunk.find(b"\n", 2**14)]  # nothing new in it: some lines will do
            for line in filter(lambda line: not line.isascii(), chunk.splitlines()):
                number += 1
                if not seen.issuperset(line[:LONGEST_LINE]):
                    seen.update(line[:LONGEST_LINE])
                    first_ones.append(line[:LONGEST_LINE])
                elif number % step == 0:
                    lines.append(line[:LONGEST_LINE])
            while len(lines) > SAMPLE_LINES:
                lines, step = lines[::2], step * 2
    if has_japanese and is_utf8 and not has_utf8:
        return (("iso2022_jp", ""),)
    if is_utf8 or has_utf8:  # a damaged file is still UTF-8: a mistake names the byte
        return (("utf-8", ""),)
    return _likely_encodings([*first_ones, *lines])


def is_binary(head: bytes) -> bool:
    """Whether a file's head is no text: controls are 2 % of it, and neither UTF-16 nor UTF-32 explains them."""
    is_odd = 50 * sum(map(_CONTROLS.__contains__, head)) > len(head)
    return is_odd and not head.startswith(tuple(WIDE_MARKS)) and _wide_encoding(head) is None


def _wide_encoding(head: bytes) -> str | None:
    """UTF-16 or UTF-32 without a mark: the one order of bytes in which the head is text with line ends."""
    names = []
    for name in ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"):
        with suppress(UnicodeDecodeError):
            signs = {*codecs.getincrementaldecoder(name)().decode(head)}
            if "\n" in signs and {*map(unicodedata.category, signs - {*"\t\r\n"})}.isdisjoint(("Cn", "Co", "Cc")):
                names.append(name)
    if len(names) == 1:
        return names[0]
    return None


def _likely_encodings(lines: Sequence[bytes]) -> tuple[tuple[str, str], ...]:
    """The plausible encodings of a file that is not UTF-8, by its lines with bytes above 127."""
    import chardet
    from chardet.enums import EncodingEra

    if not _CONTROLS.isdisjoint(byte for line in lines for byte in line):
        return (("utf-8", ""),)  # not a text: the reader will name the byte
    in_utf8 = [line for line in lines if _decoded([line], "utf-8") is not None]
    if len(in_utf8) > len(lines) / 2:  # a damaged UTF-8 file: its other rows are right, and a mistake names the byte
        return (("utf-8", ""),)
    lines = [line for line in lines if line not in in_utf8]
    sample = lines[:: math.ceil(sum(map(len, lines)) / SAMPLE_BYTES)]
    guesses = chardet.detect_all(b"\n".join(sample), ignore_threshold=True, encoding_era=EncodingEra.ALL)
    confidences = dict.fromkeys(USUAL_PAGES, 0.0)
    for guess in guesses:
        with suppress(LookupError):  # a code page that Python does not have
            name = codecs.lookup(guess["encoding"] or "").name
            name = WIDER_PAGES.get(name, name)
            if name in RARE_PAGES:
                continue
            confidences[name] = max(confidences.get(name, 0.0), guess["confidence"])
    # Pages that read all lines alike are one reading, called by the most usual page.
    readings: dict[str, tuple[str, float, float]] = {}
    for name, confidence in confidences.items():
        text = _decoded(lines, name)
        if text is None or b"abcXYZ,;09".decode(name) != "abcXYZ,;09":
            continue
        first, best, oddness = readings.get(text) or (name, 0.0, _oddness(_decoded(sample, name) or ""))
        readings[text] = (first, max(best, confidence), oddness)
    if not readings:
        return (("utf-8", ""),)
    most = max(MOST_ODD, min(oddness for _, _, oddness in readings.values()))
    ranked = sorted(
        ((confidence * (1 - 2 * oddness), name, text) for text, (name, confidence, oddness) in readings.items()
         if oddness <= most),
        reverse=True,
    )  # fmt: skip
    best, first, _ = ranked[0]
    western = ""
    if (
        (text := _decoded(lines, "cp1252"))
        and (above := {*text} - _ASCII) <= WESTERN_LETTERS
        and readings[text][2] <= most
    ):
        western = "cp1252"
        if above <= WINDOWS_SIGNS and readings[text][2] == 0:
            return ((western, ""),)  # quotes, dashes and degrees: only the Windows pages have them there
    close = CLOSE_BEHIND_WESTERN if first == western else CLOSE
    plausible = [
        (name, text) for value, name, text in ranked if value >= best * (CLOSE_WESTERN if name == western else close)
    ][:3]
    # Kazakh's letters qa and eng look Macedonian in cp1251, which has no yery.
    if plausible[0][0] == "cp1251" and "ы" in plausible[0][1] and not {*"ќѕ"}.isdisjoint(plausible[0][1]):
        plausible.insert(0, ("kz1048", _decoded(lines, "kz1048") or ""))
    # A line in UTF-8 among others is no accident: Ã¤, Ã© are not words. Four characters are none in any code page.
    if in_utf8 and (western or any(len(line.decode("utf-8", "ignore")) + 4 <= len(line) for line in in_utf8)):
        return (("", f"{in_utf8[0].decode('utf-8', 'ignore').strip()[:40]!r}) and some are {first}"),)
    texts = [text for _, text in plausible]
    return tuple((name, _differing_word(texts, index)) for index, (name, _) in enumerate(plausible))


def _decoded(lines: Sequence[bytes], encoding: str) -> str | None:
    """The lines as text, or None if a byte has no meaning. A line may be cut inside its last character."""
    try:
        return "\n".join(
            codecs.getincrementaldecoder(encoding)().decode(line, len(line) < LONGEST_LINE) for line in lines
        )
    except UnicodeError:
        return None


def _oddness(text: str) -> float:
    """The share of characters above 127 that no language has there.

    "S„ge" has a sign between letters, "fЃr" another alphabet, "CAFŽ" is right and "cafŽ" is not, "½uvre" begins with a
    number, and frames, controls and unused code points are no text.
    """
    odd = total = 0
    for before, sign, after in zip(" " + text, text, text[1:] + " ", strict=False):
        if sign.isascii():
            continue
        total += 1
        kind = unicodedata.category(sign)
        if kind in ("Cc", "Cn", "Co", "Cs"):
            odd += 10
        elif "\u2500" <= sign <= "\u259f" or "\uff61" <= sign <= "\uff9f":
            odd += 1
        elif sign in "ªº":
            odd += not before.isdigit()
        elif kind[0] == "L":
            scripts = {_script(letter) for letter in (before, sign, after) if letter.isalpha()}
            is_mixed = len(scripts.intersection(_SCRIPTS)) > 1 or scripts >= {"HANGUL", "CJK"}
            is_lone = before.isdigit() and not after.isalpha() and _script(sign) in _SCRIPTS
            small_after_capital = sign.islower() and before.isupper() and after.isupper()
            odd += is_mixed or is_lone or (sign.isupper() and before.islower()) or small_after_capital
        elif kind[0] in "SPN":
            is_joined = sign in "–—" and after.isalpha() and not before.isalpha()
            is_inside = before.isalpha() and after.isalpha() and sign not in "’·‐–—…־"
            is_sign = kind in ("Sm", "So", "Sk", "Sc") and (before.isalpha() or after.isalpha()) and sign not in "°®™"
            odd += is_joined or is_inside or is_sign or sign in "‡†¶¤¦¬¨¸¯" or (kind == "No" and after.isalpha())
    return odd / max(1, total)


@lru_cache(4096)
def _script(letter: str) -> str:
    return unicodedata.name(letter, "").partition(" ")[0]


def _differing_word(texts: Sequence[str], index: int) -> str:
    """The first word that the texts spell in different ways, as one of them spells it."""
    spelled: list[list[str]] = [re.split(r"[\s,;|]+", text) for text in texts]
    for words in zip(*spelled, strict=False):
        if len({*words}) == len(texts) and all(len(word) > 2 for word in words):
            return str(words[index])[:30]
    return texts[index].strip()[:30]
