r"""The letter that an answer to a multiple-choice question chooses.

Read are a letter alone ("B", "(b)", "\\boxed{B}"), a letter before a dot or bracket and its option at the
start ("B) Paris", "B - Paris"), and a letter after a label at the start of a sentence ("Answer: B", "The answer is B").
Labels are English, or stand before the letter and a colon in the references ("Antwort: B"). A text that names another
letter afterwards chooses none.
"""

from __future__ import annotations

from collections.abc import Iterable

import regex

from finetune.scoring.numerals import boxed, unified

ALL = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LEAST_LETTERS = "ABCDE"  # what a question offers, where the references show no later letter
_ENGLISH = (
    r"(?:(?:so|thus|hence|therefore),? )?(?:the |my )?(?:final |correct |best )?(?:answer|choice|option)(?: is|:| is:)"
)
_LABEL = regex.compile(r"(?:^|\n)\W{0,9}(?P<label>\p{L}[\p{L}\p{M} ]{0,40}) ?: ?[(\[]?[A-Z](?![\p{L}\p{N}])")
_BRACKETS = r"[\s(\[.:]*({})[\s)\].:,!]*"


def read_references(references: Iterable[str]) -> tuple[str, str]:
    """The letters that can be chosen (A to the last one that a reference names, at least A to E), and the pattern of
    the labels that may stand before them.
    """
    tidied = [_tidy(boxed(text) or text) for text in references]
    names = {regex.escape(match["label"].strip()) for text in tidied for match in _LABEL.finditer(text)}
    labels = "|".join([_ENGLISH, *(rf"{label} ?:" for label in sorted(names))])
    named = [letter for text in tidied if (letter := chosen_letter(text, ALL, labels))]
    return ALL[: max(ALL.index(max(named, default="A")) + 1, len(LEAST_LETTERS))], labels


def _tidy(text: str) -> str:
    """Without marks of Markdown, LaTeX, HTML and quoting."""
    text = regex.sub(r"\\(?:text|math)[a-z]*\s*\{([^{}]*)\}", r" \1 ", unified(text))
    text = regex.sub(r"\\boxed\s*|\\[a-zA-Z]+|</?[a-z][\w-]*>|[*_$\"{}“”«»„<>|\\]|(?<!\w)'|'(?!\w)", " ", text)
    return str(regex.sub(r"[^\S\n]+", " ", text)).strip()


def chosen_letter(text: str, letters: str, labels: str) -> str | None:
    """The letter that an answer chooses; None if it is unread.

    Args:
        letters, labels: As `read_references` finds them.
    """
    if box := boxed(text):
        # A box that holds more than a letter may be a formula, so words outside it come first.
        rest = text.replace(box, "").replace("\\boxed", "")
        alone = regex.fullmatch(f"(?i){_BRACKETS.format(f'[{letters}]')}", _tidy(box))
        return (
            alone[1].upper() if alone else chosen_letter(rest, letters, labels) or chosen_letter(box, letters, labels)
        )
    text = _tidy(text)
    first, _, below = text.partition("\n")
    alone = regex.fullmatch(f"(?i){_BRACKETS.format(f'[{letters}]')}", first)
    mark = r"\s*[).:\]]\s+(?!(?:is|was|isn't|wasn't)\b)|(?<=[A-Z]) - (?=[\p{Lu}\p{N}])"
    lead = regex.match(rf"[\s(\[]*((?i:[{letters}]))(?:{mark})", text)
    letter = rf"([{letters}](?=[).\],;:!。]|\s*(?:\n|$))|(?i:[{letters}])(?=[)\].]*\s*(?:\n|$)))"
    stated = [*regex.finditer(rf"(?:^|\n|[.!?]\s|。)\W{{0,9}}(?i:{labels})\s*[(\[]?{letter}", text)]
    chosen = {match[1].upper() for match in [alone, *(stated or [lead])] if match is not None}
    if len(chosen) != 1:
        return None
    after = text[stated[-1].end() :] if stated else below if alone else text[lead.end() :]
    # A before a small letter is an article, if no verb follows.
    article = r"A (?!(?:is|was|ist|est|es|because|since|weil|è)\b)\p{Ll}"
    other = rf"(?<![\p{{Latin}}\p{{N}}'&+-])(?!{article})[{letters}](?![\p{{Latin}}\p{{N}}+#&'])"
    return None if {*regex.findall(other, after)} - chosen else chosen.pop()
