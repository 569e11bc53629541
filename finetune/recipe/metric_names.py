"""The metrics that score an answer, as recipes and `finetune eval --metric` write them: NAME or NAME:OPTION=VALUE.

exact    number:tolerance=0.01    regex:pattern=^\\d{4}    sql:db=shop.sqlite
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Name -> what the score of one answer is, and its options. Every score is between 0 and 1.
METRICS = {
    "exact": "1 if answer and reference are equal, without spaces around them",
    "normalized": "1 if they are equal without case, punctuation, articles and extra spaces",
    "contains": "1 if the answer contains the reference, both normalised",
    "number": "1 if their last numbers agree, whole ones exactly; tolerance=0.01 is relative",
    "choice": "1 if the answer chooses the reference's letter",
    "json_valid": "1 if the answer is one JSON value",
    "json_fields": "share of all fields, of the reference or the answer, that are equal in both",
    "tool_name": "1 if the answer calls the reference's tools, in any order",
    "tool_call": "1 if name and arguments of every call are equal too",
    "sql": "1 if both queries give the same rows; db=FILE is an SQLite file or a script, else the row's column db",
    "regex": "1 if pattern=... is found in the answer",
    "chrf": "overlap of letters (chrF2)",
}
OPTIONS: Mapping[str, tuple[str, ...]] = {"number": ("tolerance",), "sql": ("db",), "regex": ("pattern",)}


@dataclass(frozen=True)
class MetricChoice:
    """A metric's name and options."""

    name: str
    options: Mapping[str, str] = field(default_factory=dict)


class WrongMetric(ValueError):
    """A metric that cannot be read: the problem and the remedy."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem, self.remedy = problem, remedy


def read_metric(text: str) -> MetricChoice:
    """`number:tolerance=0.01` as a name and options. Raises WrongMetric."""
    name, colon, rest = text.partition(":")
    if name not in METRICS:
        raise WrongMetric(f"unknown metric {name!r}", f"known are {', '.join(METRICS)}")
    allowed = OPTIONS.get(name, ())
    if not colon:
        if name == "regex":
            raise WrongMetric("regex needs a pattern", "write regex:pattern=...")
        return MetricChoice(name)
    # One option a metric, so that a pattern may hold colons, commas and equal signs.
    key, equals, value = rest.partition("=")
    if key not in allowed or not equals or not value:
        remedy = f"write {name}:{allowed[0]}=..." if allowed else f"write {name} alone"
        raise WrongMetric(f"{name} has no option {key!r}", remedy)
    if key == "tolerance":
        try:
            valid = float(value) >= 0
        except ValueError:
            valid = False
        if not valid:
            raise WrongMetric(f"tolerance is {value!r}", "write a number from 0 on, as number:tolerance=0.01")
    return MetricChoice(name, {key: value})
