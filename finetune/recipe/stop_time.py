"""`run.stop_after`: a time from the start, 3h50m, or a date with its zone."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from datetime import datetime
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

DURATION_PARTS = re.compile(r"(?:(\d{1,3})d)?(?:(\d{1,4})h)?(?:(\d{1,6})m)?(?:(\d{1,8})s)?")
DATE_WITH_ZONE = re.compile(
    r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d(?::\d\d)?) ?(Z|[+-]\d\d:\d\d|[A-Za-z][\w+-]*(?:/[\w+-]+)*)?"
)
TIME_EXAMPLES = "write 3h50m, 2026-11-28T18:00+01:00, or 2026-11-28 18:00 Europe/Berlin"


@dataclass(frozen=True)
class StopTime:
    """When a run is asked to stop."""

    text: str  # as in the recipe
    at: float  # seconds on the monotonic clock, or since 1970 for a date
    is_date: bool

    @property
    def has_come(self) -> bool:
        # A machine that slept, or was moved, has lost time on its monotonic clock. A date holds all the same.
        return (time.time() if self.is_date else time.monotonic()) >= self.at


def seconds_of(text: str) -> int | None:
    """A duration in seconds; None for any other text."""
    match = DURATION_PARTS.fullmatch(text)
    if not text or match is None:
        return None
    days, hours, minutes, seconds = (int(number or 0) for number in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def form_problem(text: str) -> tuple[str, str] | None:
    """The problem with the text and the remedy; None if it is a duration, or a date with a zone."""
    if (seconds := seconds_of(text)) is not None:
        return None if seconds else ("is no time at all", TIME_EXAMPLES)
    match = DATE_WITH_ZONE.fullmatch(text)
    if match is None:
        return "is neither a duration nor a date with its zone", TIME_EXAMPLES
    try:
        datetime.fromisoformat(f"{match[1]}T{match[2]}{match[3] if match[3] and match[3][0] in '+-' else ''}")
    except ValueError as error:
        return f"is no date: {error}", TIME_EXAMPLES
    if match[3] is None:
        return "has no zone, and machines differ in theirs", f"write {match[1]}T{match[2]}Z for UTC, or +01:00 for Z"
    return None


def date_problem(text: str) -> tuple[str, str] | None:
    """The problem with a well-formed text on this machine, now, and the remedy: zones, clock changes, the past."""
    if seconds_of(text) is not None:
        return None
    try:
        moment = _moment(text)
    except _UnclearMoment as error:
        return error.problem, error.remedy
    if moment.timestamp() <= time.time():
        now = datetime.now(moment.tzinfo)
        return "has passed", f"write a later date, or a duration; now it is {now:%Y-%m-%dT%H:%M%z}"
    return None


def stop_time(text: str, started_at: float) -> StopTime:
    """The time of a text that has no problem. `started_at`: seconds on the monotonic clock."""
    seconds = seconds_of(text)
    if seconds is not None:
        return StopTime(text, started_at + seconds, is_date=False)
    return StopTime(text, _moment(text).timestamp(), is_date=True)


class _UnclearMoment(ValueError):
    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.problem, self.remedy = problem, remedy


def _moment(text: str) -> datetime:
    """A date with its zone as one moment. Raises _UnclearMoment."""
    match = DATE_WITH_ZONE.fullmatch(text)
    assert match is not None, "form_problem looked at it"
    day, clock, zone = match.groups()
    if zone == "Z" or zone[0] in "+-":
        return datetime.fromisoformat(f"{day}T{clock}{zone}")
    try:
        earlier = datetime.fromisoformat(f"{day}T{clock}").replace(tzinfo=ZoneInfo(zone), fold=0)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        remedy = f"write its offset: {day}T{clock}+01:00"
        raise _UnclearMoment(f"{zone} is no zone that this machine knows", remedy) from None
    later = earlier.replace(fold=1)
    # The two readings differ while clocks change. When they go back, the earlier one is summer time, with the larger
    # offset. When they go forward, both are times that no clock shows.
    before, after = (f"{day}T{clock}{moment:%z}" for moment in (earlier, later))
    difference = earlier.utcoffset() - later.utcoffset()  # type: ignore[operator]  # a zone has an offset
    if difference.total_seconds() > 0:
        raise _UnclearMoment(f"comes twice in {zone}, where clocks go back", f"write {_iso(before)} or {_iso(after)}")
    if difference.total_seconds() < 0:
        remedy = f"write an hour that is there, or an offset: {_iso(before)}"
        raise _UnclearMoment(f"does not exist in {zone}, where clocks go forward", remedy)
    return earlier


def _iso(text: str) -> str:
    return f"{text[:-2]}:{text[-2:]}"  # +0200 is +02:00
