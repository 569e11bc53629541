"""The last number of a text: digits with a sign, separators, a unit or percent. Anything else is unread.

A numeral is taken with everything that ties it to other digits. `12,50`, `1/4`, `5 x 10^3` and `3-5` are one piece
each. A piece that is no plain number makes the text unread; its last digits are not taken instead.

`1,234` and `1.234` can be read in two ways. The other numerals of a data set decide (`decimal_mark`): 12,50 shows a
decimal comma. Without such a numeral the mark is a point.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from fractions import Fraction

import regex

LONGEST_NUMERAL = 400  # of one numeral
EXACT_DECIMALS = Fraction(1, 10**9)  # a relative difference that counts as none

_SUPERSCRIPT = re.compile("[⁺⁻]?[⁰¹²³⁴-⁹]+")
_SAME = str.maketrans(
    dict.fromkeys("−–‐‑‒⁻", "-") | dict.fromkeys("⁄∕", "/") | dict.fromkeys("’‘ʼ´`٬", "'")
    | dict.fromkeys("\xa0\u202f\u2009\u2007\u2008\t", " ") | dict.fromkeys("∙⋅", "·")
    | {"—": ";", "✕": "×", "✖": "×", "،": ","}
    | dict.fromkeys("\ufeff\u200b\u200c\u200d\u200e\u200f\u2060\u061c\xad\u202a\u202b\u202c\u2066\u2067\u2068\u2069")
)  # fmt: skip
_MINUS = r"[^\S\n]*\b(?:[Mm]inus|[Nn]egative) (?=[$€£]?\d)"
# Each pattern with what it becomes, in this order; ' ties groups of digits.
_WRITTEN = [
    (re.compile(pattern), becomes)
    for pattern, becomes in (
        (r"\{,\}|(?<=\d),?\\[,;:!](?=\d{3})", "'"),
        (r"\\[,;:!]", " "),
        (r"\\([$%])", r"\1"),
        (r"\\(?:text|math)[a-z]*\s*\{([^{}]*)\}", r" \1 "),
        (r"\^\s*[({]\s*([-+]?\d+)\s*[)}]", r"^\1"),
        (r"\\[a-zA-Z]+\s*(?=[-+]?[\d{])", " √"),  # a fraction, a root, a product: no plain number
        (r"(?<![\d*])(?<!\d )\*+|\*++(?!\s*[-+(]?\d)", ""),  # Markdown's bold
        # In words; between two numbers it may take away, so that is unclear.
        (rf"(?:^|(?<=[=:(,;.#\n≈→])|(?<=\bis|\bbe|\bto)){_MINUS}", " -"),
        (_MINUS, " ±"),
        (r"(?<![\d.,'])(?<!\d )\d{1,3}(?: \d{3})+(?![\d'])", lambda match: match[0].replace(" ", "'")),
    )
]
_GAP = r"[^\S\n]{0,2}"
_PIECE = regex.compile(
    rf"(?:\d|(?<![\w.,)])[.,٫]\d)(?:\d|[.,٫:'_&](?=\d)|[eE][-+]?\d+|{_GAP}(?:\*\*|[/^*×·÷xX+-]){_GAP}[-+]?(?=\d))*+"
)
_PLAIN = re.compile(r"[\d.,٫'_]+")
_WESTERN = re.compile(r"\d{1,3}([.,'_])\d{3}(?:\1\d{3})*")
_INDIAN = re.compile(r"\d{1,2}(?:,\d{2})+,\d{3}")
_CURRENCY = r"(?:(?:\b(?:US|A|C|HK|NT|NZ|S|R))?\p{Sc}|\b(?:USD|EUR|GBP|CHF|JPY|CNY|RMB|INR|KRW|BRL|PLN|Rs\.?))"
_BEFORE = regex.compile(rf"(?P<sign>[-+±])?(?P<gap>[^\S\n]*){_CURRENCY}?[^\S\n]?(?P<inner>[-+])?$")
_IN_WORD = regex.compile(r"[\p{Latin}\p{Cyrillic}\p{Greek}_](?:[-^_]|\^-)?$")
_UNCLEAR_AFTER = regex.compile(
    r"\s?(?:\^|π|√|\\[a-zA-Z])|[^\S\n]?[/*×÷][^\S\n]?[({√π]|\p{Sc}\d|(?![kcdm]?m[23]\b)\p{Latin}+\d"
    # A word that multiplies: 3 million is not 3.
    r"|(?:[kKM]|[^\S\n]?(?:thousands?|[Tt]ausend|mille|mila|mil|[Tt]sd\.?|тыс\.|tys\.|тысяч[аи]?|千|천|万|萬|만|lakhs?|lacs?|लाख|mn"
    r"|[Mm]io\.?|[Mm]ill?i?[oó]n(?:en|s|es|i|e)?|milh(?:ão|ões)|млн\.?|миллион(?:а|ов)?|百万|백만|crores?|करोड़|亿|億|억|bn"
    r"|[Bb]illions?|[Mm]rd\.?|[Mm]illiard(?:en?|s)?|млрд\.?|миллиард(?:а|ов)?|十亿|십억|[Tt]rillions?|兆|조|трлн\.?))(?!\p{L})"
)
_BOXED = re.compile(r"\\f?boxed\s*\{")
_MARKED = re.compile(r"####[^\S\n]*((?:\W{0,3}|[A-Z]{3}|[Mm]inus |[Nn]egative )\d[^\n]*)")


class Unclear(ValueError):
    """A numeral that is no number, or that can be read in two ways."""


def unified(text: str) -> str:
    """One form for digits, signs, fractions and powers of all scripts; other letters by NFKC."""
    text = _SUPERSCRIPT.sub(lambda match: "^" + match[0], text)
    text = re.sub(r"(?<=\d)(?=[¼-¾⅐-⅞])", " ", text)
    text = unicodedata.normalize("NFKC", text).translate(_SAME)
    return "".join(
        str(unicodedata.decimal(letter)) if letter > "\x7f" and letter.isdecimal() else letter for letter in text
    )


def boxed(text: str) -> str | None:
    """The content of the last \\boxed{...}."""
    starts = [match.end() for match in _BOXED.finditer(text)]
    if not starts:
        return None
    depth = 1
    for index in range(starts[-1], len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if not depth:
            return text[starts[-1] : index]
    return text[starts[-1] :]


def _pieces(text: str) -> tuple[str, list[regex.Match[str]]]:
    """The text in one form, and its pieces with digits that are not a part of a word (x2, F-16)."""
    text = unified(text)
    for pattern, becomes in _WRITTEN:
        text = pattern.sub(becomes, text)
    pieces = []
    for piece in _PIECE.finditer(text):
        before = text[max(0, piece.start() - 8) : piece.start()]
        if not _IN_WORD.search(before) or regex.search(_CURRENCY + "$", before):
            pieces.append(piece)
    return text, pieces


def decimal_mark(texts: Iterable[str]) -> str | None:
    """The mark between units and tenths in these texts: a point or a comma; "" if no numeral shows it, None if both."""
    marks = set()
    for text in texts:
        for plain in (piece[0] for piece in _pieces(text)[1] if _PLAIN.fullmatch(piece[0])):
            signs = [mark for mark in plain if mark in ".,"]
            if not signs or (len(plain) == len(signs) + sum(map(str.isdigit, plain)) and _two_ways(plain)):
                continue
            repeated = signs.count(signs[-1]) > 1
            marks.add({".": ",", ",": "."}[signs[-1]] if repeated else signs[-1])
    return None if len(marks) > 1 else next(iter(marks), "")


def _two_ways(plain: str) -> bool:
    return re.fullmatch(r"[1-9]\d{0,2}[.,]\d{3}", plain) is not None


def _value(text: str, piece: regex.Match[str], mark: str | None) -> Fraction:
    """The number that a piece is. Raises Unclear."""
    before, after = text[max(0, piece.start() - 40) : piece.start()], text[piece.end() : piece.end() + 40]
    if len(piece[0]) > LONGEST_NUMERAL or not _PLAIN.fullmatch(piece[0]) or _UNCLEAR_AFTER.match(after):
        raise Unclear(f"{piece[0][:40]} is no number")
    # A numeral without signs and operators.
    plain = piece[0]
    head, tail = plain, ""
    marks = re.findall(r"[.,٫]", plain)
    if _two_ways(plain):
        if mark is None:
            raise Unclear(f"{plain} can be read in two ways, because other references have both 1.5 and 1,5")
        if plain[-4] == (mark or "."):
            head, tail = plain[:-4], plain[-3:]
    elif marks and marks.count(marks[-1]) == 1 and plain[-1].isdigit():
        head, tail = plain[: plain.rindex(marks[-1])], plain[plain.rindex(marks[-1]) + 1 :]
    if not (head.isdigit() or _WESTERN.fullmatch(head) or _INDIAN.fullmatch(head) or (tail and not head)):
        raise Unclear(f"{plain} is no number")
    value = Fraction(f"{re.sub(r'[^0-9]', '', head) or 0}.{tail or 0}")
    signs = _BEFORE.search(before)
    assert signs is not None
    sign, left = signs["sign"], before[: signs.start()]
    unsigned = sign is None and signs["inner"] is None
    if regex.search(r"√\{?$|\}\{$", left) or (unsigned and regex.search(r"[/^*×÷√±≤≥]\s?[{(]?$|-\s?\($", before)):
        raise Unclear(f"{before[-8:]}{piece[0][:40]} is no number")
    if sign is not None:
        # A minus apart from its digits may be a dash or a list's mark. It is a sign at the start and after = : (
        is_separate = signs["gap"] and left.strip(" ") and not regex.search(r"[=:(,≈→;][^\S\n]*$", left)
        if sign == "±" or is_separate or regex.search(r"[\p{Latin}\p{Cyrillic}\p{Greek}\p{N})\]%]$", left):
            raise Unclear(f"{sign} before {piece[0][:40]} may be a sign or a dash")
    return -value if (sign == "-") != (signs["inner"] == "-") else value


def last_number(text: str, mark: str | None = "") -> Fraction | None:
    """The number after ####, in \\boxed{}, or else the last of the text; None if it has none. Raises Unclear."""
    parts = [boxed(text), *(match[1] for match in [*_MARKED.finditer(text)][-1:]), text]
    for part in parts:
        if part is not None:
            written, pieces = _pieces(part)
            if pieces:
                first = part is not text and part is not parts[0]  # words may follow the number after ####
                return _value(written, pieces[0 if first else -1], mark)
    return None


def same_number(given: Fraction, expected: Fraction, tolerance: Fraction | None) -> bool:
    """Equal within `tolerance` times `expected`. None: whole numbers exactly, others to nine digits."""
    if tolerance is None and given.denominator == expected.denominator == 1:
        return given == expected
    return abs(given - expected) <= (EXACT_DECIMALS if tolerance is None else tolerance) * abs(expected)
