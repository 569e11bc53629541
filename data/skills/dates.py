"""Dates as people write them, in English and in German, and their ISO 8601 form."""

from __future__ import annotations

import calendar
import datetime
import random

FIRST, LAST = datetime.date(1900, 1, 1), datetime.date(2060, 12, 31)
GERMAN_MONTHS = "Januar Februar März April Mai Juni Juli August September Oktober November Dezember".split()
GERMAN_DAYS = "Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag".split()
FORMS = (
    "{day} {month} {year}",
    "{month} {day}, {year}",
    "{nth} {month} {year}",
    "the {nth} of {month} {year}",
    "{month} {nth}, {year}",
    "{mon} {day}, {year}",
    "{day} {mon} {year}",
    "{day:02}-{mon}-{year}",
    "{weekday}, {day} {month} {year}",
    "{weekday}, {month} {nth}, {year}",
    "{monthnumber}/{day}/{year} (month first)",
    "{day}/{monthnumber}/{year} (day first)",
    "{day:02}.{monthnumber:02}.{year}",
    "{day}. {monat} {year}",
    "{tag}, {day}. {monat} {year}",
    "am {day}. {monat} {year}",
)
ORDERS = (
    "Write this date in ISO 8601: {}",
    "Convert to ISO 8601: {}",
    "What is {} in the form YYYY-MM-DD?",
)


def written(date: datetime.date, form: str) -> str:
    """The date in one of FORMS: "the 3rd of March 2021", "Mittwoch, 3. März 2021"."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(date.day % 10, "th")
    if date.day in (11, 12, 13):
        ending = "th"
    return form.format(
        day=date.day,
        nth=f"{date.day}{ending}",
        month=calendar.month_name[date.month],
        mon=calendar.month_abbr[date.month],
        monthnumber=date.month,
        monat=GERMAN_MONTHS[date.month - 1],
        weekday=calendar.day_name[date.weekday()],
        tag=GERMAN_DAYS[date.weekday()],
        year=date.year,
    )


def rows(rng: random.Random, training: int, held_out: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Rows with `instruction` and `output`. Every date occurs once; each form occurs equally often in both parts."""
    days = rng.sample(range((LAST - FIRST).days + 1), training + held_out)
    made = []
    for index, day in enumerate(days):
        date = FIRST + datetime.timedelta(days=day)
        question = rng.choice(ORDERS).format(written(date, FORMS[index % len(FORMS)]))
        made.append({"instruction": question, "output": date.isoformat()})
    return made[:training], made[training:]
