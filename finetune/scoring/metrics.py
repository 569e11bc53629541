"""Score a list of answers by the chosen metrics."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from finetune.errors import DataError
from finetune.output_stream import one_line
from finetune.recipe.metric_names import MetricChoice
from finetune.scoring import structured, texts
from finetune.scoring.letters import read_references
from finetune.scoring.numerals import Unclear, decimal_mark, last_number
from finetune.scoring.sql import execution_scores

SHORT_LETTERS = 40  # longest reference that is compared as a whole by default
MOST_SHOWN = 3  # rows with a bad reference, or unread answers
MOST_OPTIONS = 20  # distinct answers that are taken for options where a recipe names none
READS_THE_ROW = ("sql",)


OwnFunction = Callable[[str, str, Mapping[str, Any]], float]  # of answer, reference and row; raises ValueError


class Unread(float):
    """The score 0 of an answer that its metric cannot read. Means, intervals and paired tests count the 0."""

    def __init__(self, why: str = "") -> None:
        self.why = why  # how a function of the user's own failed

    def __new__(cls, why: str = "") -> Unread:
        return super().__new__(cls)


@dataclass(frozen=True)
class Scored:
    """A reference to score answers against, and its row."""

    reference: str
    place: str  # file:line, for messages
    row: Mapping[str, Any] = field(default_factory=dict)  # the row's columns, if a metric reads them


@dataclass(frozen=True)
class Metric:
    """A metric that was chosen, or a function of the user's own."""

    name: str
    options: Mapping[str, str] = field(default_factory=dict)
    function: OwnFunction | None = None

    @classmethod
    def of(cls, choice: MetricChoice) -> Metric:
        return cls(choice.name, choice.options)

    @property
    def reads_the_row(self) -> bool:
        """Whether it needs columns besides the reference."""
        return self.function is not None or (self.name in READS_THE_ROW and "db" not in self.options)


def scores_of(
    metric: Metric, answers: Sequence[str], items: Sequence[Scored], among: Sequence[Scored] = ()
) -> list[float]:
    """Each answer's score, between 0 and 1; an `Unread` for an answer that the metric cannot read.

    Args:
        among: All rows, if `items` are a part. Their references together show the decimal mark, or the letters.

    Raises:
        DataError: references that the metric cannot read; a line each.
        EnvironmentMismatch: a library is not installed.
    """
    answered = [texts.without_thoughts(answer) for answer in answers]
    expected = [texts.without_thoughts(item.reference) for item in items]
    results: list[float | ValueError | None] = []
    if metric.name == "sql" and metric.function is None:
        databases = [metric.options.get("db", item.row.get("db")) for item in items]
        results += execution_scores(answered, expected, databases)
    else:
        shown: Any = None  # what all references show together
        if metric.function is None and metric.name in ("number", "choice"):
            shows = {"number": decimal_mark, "choice": read_references}[metric.name]
            shown = shows([texts.without_thoughts(item.reference) for item in among or items])
        results += [_one(metric, *row, shown) for row in zip(answered, expected, items, strict=True)]
    mistakes = [
        f"{item.place}: metric {metric.name}: {result}"
        for item, result in zip(items, results, strict=True)
        if isinstance(result, ValueError)
    ]
    if mistakes:
        raise DataError(mistakes[:MOST_SHOWN], len(mistakes), max(0, len(mistakes) - MOST_SHOWN))
    return [Unread() if result is None else result for result in results]  # type: ignore[misc]


def options_among(answers: Mapping[str, int]) -> list[str]:
    """The distinct answers, by how often they occur, if they are options: few, short, and each repeated; else none."""
    few = 2 <= len(answers) <= MOST_OPTIONS and 2 * len(answers) <= sum(answers.values())
    if not few or min(answers.values()) < 2 or not all(0 < len(answer) <= SHORT_LETTERS for answer in answers):
        return []
    return sorted(answers)


def unread(answers: Sequence[str], scores: Sequence[float]) -> dict[str, Any]:
    """How many answers were not read, the first of them, and why the first failed in a function of the user's own."""
    not_read = [
        (texts.without_thoughts(answer), score.why)
        for answer, score in zip(answers, scores, strict=True)
        if isinstance(score, Unread)
    ]
    examples = [one_line(text[:400], 80) for text, _ in not_read[:MOST_SHOWN]]
    return {
        "count": len(not_read),
        "examples": examples,
        **({"why": not_read[0][1]} if not_read and not_read[0][1] else {}),
    }


def unread_in_words(figures: Mapping[str, Any]) -> str:
    """unread: 12 (scored 0), as 'forty-two', '3/4', 'I do not know'"""
    why = f"; the first: {figures['why']}" if "why" in figures else ""
    return f"unread: {figures['count']:,} (scored 0), as {', '.join(map(repr, figures['examples']))}{why}"


def _one(metric: Metric, answered: str, expected: str, item: Scored, shown: Any) -> float | ValueError | None:
    try:
        if metric.function is not None:
            return metric.function(answered, expected, item.row)
        match metric.name:
            case "exact":
                return texts.exact(answered, expected)
            case "normalized":
                return texts.normalized_match(answered, expected)
            case "contains":
                return texts.contains(answered, expected)
            case "number":
                tolerance = metric.options.get("tolerance")
                return texts.number(answered, expected, Fraction(tolerance) if tolerance else None, shown)
            case "choice":
                return texts.choice(answered, expected, *shown)
            case "json_valid":
                return structured.json_valid(answered)
            case "json_fields":
                return structured.json_fields(answered, expected)
            case "tool_name":
                return structured.tool_name(answered, expected)
            case "tool_call":
                return structured.tool_call(answered, expected)
            case "regex":
                return texts.matches(answered, texts.compiled_pattern(metric.options["pattern"]))
            case "chrf":
                return texts.chrf(answered, expected)
    except ValueError as error:
        return Unread(one_line(error)) if metric.function is not None else error
    raise AssertionError(metric.name)


def fitting_metrics(items: Sequence[Scored]) -> list[Metric]:
    """The metrics for references of this kind, where the user names none.

    Tool calls, JSON, SQL with a database, letters, numbers and short texts are recognised when every reference is one.
    Long texts have no exact answer, so their overlap of letters is measured.
    """
    references = [texts.without_thoughts(item.reference) for item in items]

    def every(test: Callable[[str], Any]) -> bool:
        return all(test(reference) for reference in references)

    if every(structured.is_tool_call):
        return [Metric("tool_name"), Metric("tool_call")]
    if every(structured.is_object):
        return [Metric("json_valid"), Metric("json_fields")]
    if every(re.compile(r"(?i)\s*(select|with)\b").match) and all(item.row.get("db") for item in items):
        return [Metric("sql"), Metric("exact")]
    if every(re.compile(r"\s*[(（]?[A-HＡ-Ｈ][)）]?[.。]?\s*").fullmatch):
        return [Metric("choice")]
    if every(re.compile(r"[\s(]*[-+−–]?\s*[$€£¥₹]?\s*[\d.,'’ \xa0\u202f]*\d\s*[%€$£]?\s*").fullmatch):
        mark = decimal_mark(references)
        try:
            if every(lambda text: last_number(text, mark) is not None):
                return [Metric("number"), Metric("exact")]
        except Unclear:  # a date, or a numeral that can be read in two ways
            pass
    if every(lambda text: len(text) <= SHORT_LETTERS):
        return [Metric("exact"), Metric("normalized")]
    return [Metric("chrf"), Metric("normalized")]
