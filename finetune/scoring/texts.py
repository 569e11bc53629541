"""Metrics that compare two texts. Each returns 1 or 0, None for an answer that it cannot read; chrF returns a share."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

import regex  # its searches can be given a time limit

from finetune.errors import FinetuneError
from finetune.scoring.letters import chosen_letter
from finetune.scoring.numerals import Unclear, last_number, same_number, unified

PATTERN_SECONDS = 1.0  # of a regular expression's search through one answer
LONGEST_GRAM, RECALL_WEIGHT = 6, 2  # of chrF2
_ARTICLE = re.compile(r"(?:\b(?:[Aa]n|AN|[Tt]he|THE|a)|(?:^|(?<=[.!?:\n]\s))A)\b(?=\s+[^\W_]|\s+[^\w\s]+\w)")
# A mark that changes what is meant: a sign, a decimal mark, an operator between digits, C#, 5 %, R&B, a grade's A-, A*
_MEANT = regex.compile(
    r"(?<![\p{L}\p{N}])-(?=\d)|(?<=\d)[.,/](?=\d)|(?<=\w)#|#(?=\d)|(?<=\d\s?)%|&"
    r"|(?<=(?<![\w*-])(?:\p{L}{1,2}|\p{Lu}{3}))[-*](?![\w*-])"
)
_GRADED = regex.compile(r"\+\+|[-+#*](?![\p{L}\p{N}])")  # goes on a name: C++, C#, B+
_UNSPACED = regex.compile(r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]")
_BLOCKS = {f"<{word}>": f"</{word}>" for word in "think thinking thought thoughts reasoning seed:think".split()} | {
    "[THINK]": "[/THINK]",
    "<|channel>thought": "<channel|>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "◁think▷": "◁/think▷",
}
# A block's start, its end, and its end within a sentence, which closes if nothing else does.
_TAGS = [
    [re.compile(tag, re.IGNORECASE) for tag in (rf"\s*{start}", rf"(?<![ \t`'\"(]){end}", rf"(?<![`'\"(]){end}")]
    for start, end in ((re.escape(opening), rf"{re.escape(closing)}(?![`'\"])") for opening, closing in _BLOCKS.items())
]
_HARMONY = re.compile(r"^\s*(?:<\|start\|>assistant)?(?:<\|channel\|>)?(?:analysis|commentary)(?=<\||[A-Z])", re.DOTALL)
_FINAL = re.compile(r"(?:assistant(?:<\|channel\|>)?|<\|channel\|>)final(?:<\|message\|>)?")


def without_thoughts(text: str) -> str:
    """The answer after its thinking blocks. A block that never ends leaves no answer.

    A block stands at the answer's start. Its opening tag may be in the prompt. Elsewhere a tag is only mentioned.
    """
    if _HARMONY.match(text):  # gpt-oss, with its special tokens or decoded without them
        return _FINAL.split(text)[-1].strip() if _FINAL.search(text) else ""
    opened = True
    while opened:
        opened = False
        for opening, closing, loose in _TAGS:
            start = opening.match(text)
            end = closing.search(text, start.end() if start else 0)
            if end is None and start is not None:
                end = loose.search(text, start.end())
            if end is not None:
                text, opened = text[end.end() :], True
            elif start is not None:
                return ""
    return text.strip()


def with_opened_block(text: str) -> str:
    """The answer with its thinking block's opening tag, which may be in the prompt that a row does not have."""
    ends = [end.start() if (end := closing.search(text)) else len(text) for _, closing, _ in _TAGS]
    if any(opening.match(text) for opening, _, _ in _TAGS) or min(ends) == len(text):
        return text
    return f"{[*_BLOCKS][ends.index(min(ends))]}\n{text}"


def normalized(text: str) -> str:
    """Lower case, no punctuation, no English articles, single spaces; as SQuAD compares answers (Rajpurkar 2016).

    A mark that belongs to a number or a name stays: -5, 3.14, C#. A text of marks alone stays as it is.
    """
    text = unified(text).strip()
    marked = [match.start() for match in _MEANT.finditer(text)]
    letters = [
        " " if unicodedata.category(letter)[0] == "P" and index not in marked else letter
        for index, letter in enumerate(_ARTICLE.sub(lambda match: " " * len(match[0]), text))
    ]
    return " ".join("".join(letters).casefold().split()) or " ".join(text.casefold().split())


def exact(answer: str, reference: str) -> float:
    return float(_composed(answer) == _composed(reference))


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text).strip("\ufeff \t\r\n\f\v\xa0\u3000")


def normalized_match(answer: str, reference: str) -> float:
    return float(normalized(answer) == normalized(reference))


def contains(answer: str, reference: str) -> float:
    """1 if the reference's words follow one another in the answer. Scripts without spaces have no ends of words."""
    words, text = normalized(reference), normalized(answer)
    if not words:
        raise ValueError("the reference is empty; write an answer")
    return float(any(_whole_words(text, words, at) for at in _places(text, words)))


def _places(text: str, words: str) -> Iterator[int]:
    at = text.find(words)
    while at >= 0:
        yield at
        at = text.find(words, at + 1)


def _whole_words(text: str, words: str, at: int) -> bool:
    """Whether no word and no number goes on beyond the place."""
    end = at + len(words)
    before, after = text[:at][-2:], text[end : end + 2]
    if before and _goes_on(before[-1], words[0]):
        return False
    if words[0].isdigit() and before and (before[-1] == "-" or (before[-1] in ".,/" and before[0].isdigit())):
        return False
    if words[-1].isdigit() and after[:1] and after[0] in ".,/" and after[1:].isdigit():
        return False
    if words[-1].isalpha() and _GRADED.match(after):
        return False
    # A particle follows a Korean word without a space.
    return not (after and _goes_on(words[-1], after[0]) and not regex.match(r"\p{Hangul}", words[-1]))


def _goes_on(first: str, second: str) -> bool:
    both = first + second
    if not (first.isalnum() and second.isalnum()) or _UNSPACED.search(both):
        return False
    return (first.isascii() == second.isascii()) or not regex.search(r"\p{Hangul}", both)


def number(answer: str, reference: str, tolerance: Fraction | None, mark: str | None) -> float | None:
    """1 if the last numbers agree within `tolerance` times the reference. None: whole numbers exactly.

    Args:
        mark: The decimal mark of the references, as `decimal_mark` finds it.
    """
    try:
        expected = last_number(reference, mark)
    except Unclear as error:
        raise ValueError(
            f"the reference {reference[:40]!r}: {error}; write one number, or take another metric"
        ) from None
    if expected is None:
        raise ValueError(f"the reference {reference[:40]!r} holds no number; take another metric")
    try:
        given = last_number(answer, mark)
    except Unclear:
        return None
    return None if given is None else float(same_number(given, expected, tolerance))


def choice(answer: str, reference: str, letters: str, labels: str) -> float | None:
    """1 if the answer chooses the reference's letter, one of `letters`."""
    expected = chosen_letter(reference, letters, labels)
    if expected is None:
        raise ValueError(f"the reference {reference[:40]!r} names no letter; write A, B, C or so")
    given = chosen_letter(answer, letters, labels)
    return None if given is None else float(given == expected)


def compiled_pattern(pattern: str) -> regex.Pattern[str]:
    """Raises FinetuneError for text that is no regular expression."""
    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError, MemoryError) as error:
        reason = str(error) if isinstance(error, regex.error) else "it is nested too deeply or too large"
        raise FinetuneError(f"metric regex: {pattern[:80]!r} is no regular expression: {reason}; correct it") from None


def matches(answer: str, pattern: regex.Pattern[str]) -> float:
    """1 if the pattern is found in the answer. Raises FinetuneError if the search takes too long."""
    try:
        return float(pattern.search(answer, timeout=PATTERN_SECONDS) is not None)
    except TimeoutError:
        problem = f"the pattern searched one answer for more than {PATTERN_SECONDS:g} s"
        raise FinetuneError(f"metric regex: {problem}; write one without nested repetitions") from None


def chrf(answer: str, reference: str) -> float:
    """chrF2 (Popović 2015) between 0 and 1: precision and recall of letter sequences, means over the lengths 1 to 6."""
    texts = ["".join(unicodedata.normalize("NFC", text).split()) for text in (answer, reference)]
    if not texts[1]:
        raise ValueError("the reference is empty; write an answer")
    precision, recall, lengths = 0.0, 0.0, 0
    for length in range(1, LONGEST_GRAM + 1):
        given, expected = (Counter(text[at : at + length] for at in range(len(text) - length + 1)) for text in texts)
        if given and expected:  # lengths that one of the texts does not reach count for nothing
            equal = (given & expected).total()
            precision, recall, lengths = (
                precision + equal / given.total(),
                recall + equal / expected.total(),
                lengths + 1,
            )
    if not precision + recall:
        return 0.0
    precision, recall, weight = precision / lengths, recall / lengths, RECALL_WEIGHT**2
    return (1 + weight) * precision * recall / (weight * precision + recall)
