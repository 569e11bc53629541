"""`run.stop_after`: what is a time, by the machine's own zones, and the line for everything else."""

from __future__ import annotations

import subprocess
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from finetune.cli.main import main
from finetune.errors import RecipeError
from finetune.recipe.loader import load_recipe
from finetune.recipe.stop_time import DATE_WITH_ZONE, TIME_EXAMPLES, date_problem, form_problem, seconds_of, stop_time
from tests.support.runs.recipes import least, write_recipe


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3h50m", 13800), ("90m", 5400), ("45s", 45), ("2d", 172800), ("1d2h3m4s", 93784), ("3h 50m", None)],
)
def test_a_duration(text: str, seconds: int | None) -> None:
    assert seconds_of(text) == seconds
    if seconds is not None:
        assert (form_problem(text), date_problem(text)) == (None, None)
        time_ = stop_time(text, started_at=100.0)
        assert (time_.at, time_.is_date) == (100.0 + seconds, False)


@pytest.mark.parametrize(
    "text",
    [
        "2031-06-01T18:00Z",
        "2031-06-01T18:00:30+05:45",
        "2031-06-01 18:00 Europe/Berlin",
        "2031-12-01 18:00 America/Argentina/Buenos_Aires",
    ],
)
def test_a_date_is_the_moment_that_date_says(text: str) -> None:
    """By the system's own `date`, which reads zones by itself."""
    assert (form_problem(text), date_problem(text)) == (None, None)
    found = DATE_WITH_ZONE.fullmatch(text)
    assert found is not None
    day, clock, zone = found.groups()
    words = f"{day} {clock}{zone}"
    if zone[0] not in "Z+-":
        words = f'TZ="{zone}" {day} {clock}'
    said = subprocess.run(["date", "-d", words, "+%s"], capture_output=True, text=True, check=True)
    assert stop_time(text, 0.0).at == int(said.stdout)


def test_each_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    soon = datetime.now().astimezone() + timedelta(seconds=90)
    date, lasting = stop_time(soon.isoformat(timespec="seconds"), 0), stop_time("90s", time.monotonic())
    assert (date.has_come, lasting.has_come) == (False, False)
    now, monotonic = time.time(), time.monotonic()
    monkeypatch.setattr("time.time", lambda: now + 100)  # the machine slept: its other clock stood still
    assert (date.has_come, lasting.has_come) == (True, False)
    monkeypatch.setattr("time.monotonic", lambda: monotonic + 100)
    assert lasting.has_come


WRONG = [
    ("soon", f"soon is neither a duration nor a date with its zone; {TIME_EXAMPLES}"),
    ("0m", f"0m is no time at all; {TIME_EXAMPLES}"),
    ("2031-06-01T18:00", "has no zone, and machines differ in theirs; write 2031-06-01T18:00Z for UTC"),
    ("2031-02-30T18:00Z", "is no date: day is out of range"),
    ("2031-06-01T25:00Z", "is no date: hour must be in 0..23"),
    ("2031-06-01T18:00+25:00", "is no date: offset must be"),
    ("2031-06-01 18:00 Europe/Atlantis", "Europe/Atlantis is no zone that this machine knows; write its offset: 2031-"),
    ("2031-06-01 18:00 Europe", "Europe is no zone that this machine knows"),
    ("2026-10-25 02:30 Europe/Berlin", "write 2026-10-25T02:30+02:00 or 2026-10-25T02:30+01:00"),
    ("2027-03-28 02:30 Europe/Berlin", "does not exist in Europe/Berlin, where clocks go forward; write an hour"),
    ("2020-01-01T00:00Z", "has passed; write a later date, or a duration; now it is 20"),
]


@pytest.mark.parametrize(("text", "says"), WRONG)
def test_another_text_is_one_line(text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, least("acme/tiny", run={"stop_after": text}))
    assert main(["check", str(recipe)]) == 2
    line, *excerpt = capsys.readouterr().err.splitlines()
    assert ": run.stop_after: " in line
    assert says in line
    assert len(excerpt) == 2  # the recipe's own line, and the caret


def test_numbers_are_refused_with_units(tmp_path: Path) -> None:
    value: Any = 90
    with pytest.raises(RecipeError, match=r"run\.stop_after: .*text"):
        load_recipe(write_recipe(tmp_path, least("acme/tiny", run={"stop_after": value})))


def test_a_recipe_of_a_run_is_read_after_its_date(tmp_path: Path) -> None:
    """eval, chat and report read it months later, on machines with other zones."""
    for text in ("2020-01-01T00:00Z", "2020-06-01 18:00 Europe/Atlantis"):
        recipe = write_recipe(tmp_path, least("acme/tiny", run={"stop_after": text}))
        assert load_recipe(recipe).recipe.run.stop_after == text
        with pytest.raises(RecipeError):
            load_recipe(recipe, here=True)
