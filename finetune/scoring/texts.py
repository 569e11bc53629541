"""Metrics that compare two texts. Each returns 1 or 0; chrF returns a share."""

from __future__ import annotations

import math
import re
import unicodedata

import regex  # its searches can be given a time limit

from finetune.errors import EnvironmentMismatch, FinetuneError

PATTERN_SECONDS = 1.0  # of a regular expression's search through one answer
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NUMBER = re.compile(r"(?<![\w.])[-+−]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+)?(?:[eE][-+]?\d{1,3}\b)?")
_FENCE = re.compile(r"```[\w+-]*\s*\n?(.*?)```", re.DOTALL)
_THOUGHT = re.compile(r"^.*</think(?:ing)?>", re.DOTALL)
# A letter that the answer names as its choice, by decreasing clearness.
_NAMED = re.compile(r"(?:answer|choice|option)(?:\s+is)?\s*:?\s*[*_(\[{]*([A-Z])\b(?![’'])", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\{\s*(?:\\text\{)?([A-Z])\b")
_FIRST = re.compile(r"^[\s*_(\[]*([A-Za-z])(?:[\s*_]*[)\].:,]|[\s*_]*$)")
_MARKED = re.compile(r"\(([A-Z])\)|\b([A-Z])\)|\*\*([A-Z])\*\*")


def without_thoughts(text: str) -> str:
    """The answer after its thinking block. A block that never ends leaves no answer."""
    text = _THOUGHT.sub("", text)
    before, opened, _ = text.partition("<think>")
    return (before if opened else text).strip()


def without_fence(text: str) -> str:
    """The code in the first ``` block, or the whole text if there is none."""
    match = _FENCE.search(text)
    return (match[1] if match else text).strip()


def normalized(text: str) -> str:
    """Lower case, no punctuation, no English articles, single spaces; as SQuAD compares answers (Rajpurkar 2016)."""
    text = unicodedata.normalize("NFKC", text).casefold()
    text = "".join(" " if unicodedata.category(letter)[0] == "P" else letter for letter in text)
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact(answer: str, reference: str) -> float:
    return float(answer.strip() == reference.strip())


def normalized_match(answer: str, reference: str) -> float:
    return float(normalized(answer) == normalized(reference))


def contains(answer: str, reference: str) -> float:
    """1 if the reference's words follow one another in the answer."""
    return float(f" {normalized(reference)} " in f" {normalized(answer)} ")


def last_number(text: str) -> float | None:
    """The last number in a text: 1,234.5 and 1e3 are numbers, a full stop after one is not part of it."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    return float(found[-1].replace(",", "").replace("−", "-"))


def number(answer: str, reference: str, tolerance: float) -> float:
    """1 if the last numbers agree within `tolerance` times the reference."""
    expected, given = last_number(reference), last_number(answer)
    if expected is None:
        raise ValueError(f"the reference {reference[:40]!r} holds no number; take another metric")
    return float(given is not None and math.isclose(given, expected, rel_tol=tolerance, abs_tol=1e-12))


def chosen_letter(text: str) -> str | None:
    """The letter that an answer to a multiple-choice question chooses: B, (B), B) text, "The answer is B"."""
    for pattern in (_BOXED, _NAMED):
        if found := pattern.findall(text):
            return str(found[-1]).upper()
    if match := _FIRST.match(text):
        return match[1].upper()
    if match := _MARKED.search(text):
        return str(next(filter(None, match.groups()))).upper()
    return None


def choice(answer: str, reference: str) -> float:
    expected = chosen_letter(reference)
    if expected is None:
        raise ValueError(f"the reference {reference[:40]!r} names no letter; write A, B, C or so")
    return float(chosen_letter(answer) == expected)


def compiled_pattern(pattern: str) -> regex.Pattern[str]:
    """Raises FinetuneError for text that is no regular expression."""
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise FinetuneError(f"metric regex: {pattern!r} is no regular expression: {error}; correct it") from None


def matches(answer: str, pattern: regex.Pattern[str]) -> float:
    """1 if the pattern is found in the answer. Raises FinetuneError if the search takes too long."""
    try:
        return float(pattern.search(answer, timeout=PATTERN_SECONDS) is not None)
    except TimeoutError:
        problem = f"the pattern searched one answer for more than {PATTERN_SECONDS:g} s"
        raise FinetuneError(f"metric regex: {problem}; write one without nested repetitions") from None


def chrf(answer: str, reference: str) -> float:
    """chrF2 (Popović 2015) between 0 and 1. Raises EnvironmentMismatch without sacrebleu."""
    try:
        from sacrebleu import sentence_chrf
    except ImportError as error:
        raise EnvironmentMismatch(f"metric chrf: {error}; install it with: pip install 'finetune[eval]'") from error
    return float(sentence_chrf(answer, [reference]).score) / 100
