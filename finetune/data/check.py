"""Finds every mistake in the data before anything heavy is loaded: file, line, what is wrong, remedy.

Needs neither tokenizer nor torch; memory holds a few rows. Only a chat template or a tokenizer knows some mistakes (a
role order that it refuses, a length). Tokenising reports these in the same form, still before the model is loaded.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from finetune.data.formats import Content, Judged, Pair, Passage
from finetune.data.row_reader import RowReader, notes_of
from finetune.data.sources import asked_entry, resolve
from finetune.errors import DataError
from finetune.recipe.schema import Data
from finetune.recipe.sections.results import Generate
from finetune.scoring.metrics import Metric, Scored, scores_of
from finetune.wording import counted

SHOWN_MISTAKES = 20  # different ones
SHOWN_PLACES = 3  # of one mistake
MOST_TRIED = 2_000  # training rows whose answers are read by the metrics; SQL takes 5 ms each
FIRST_NOTE_SECONDS, SECONDS_BETWEEN_NOTES = 2.0, 10.0  # a file of 91 kB may hold 30 million equal rows
_MORE = re.compile(r"and (\d+) more")


@dataclass
class _Group:
    """One mistake, and the places of its rows."""

    problem: str
    places: list[str]  # the first SHOWN_PLACES
    count: int = 1
    size: int = 0

    def line(self) -> str:
        """`faq.csv:7: problem`, or `faq.csv:7, 12, 19 and 4 more rows: problem`."""
        places = [place for place in self.places if place]
        if not places:
            return self.problem
        file = places[0].rpartition(":")[0]
        places = list(dict.fromkeys(places))  # a JSON array may be one line
        text = places[0]
        for place in places[1:]:
            text += f", {place.removeprefix(f'{file}:')}"
        if self.count > len(places):
            text += f" and {counted(self.count - len(places), 'more row')}"
        return f"{text}: {self.problem}"


class Mistakes:
    """Collects the first SHOWN_MISTAKES different mistakes, each with its first places, and counts all."""

    def __init__(self) -> None:
        self.count = 0
        self._groups: dict[str, _Group] = {}

    def add(self, problem: str, place: str = "", *, kind: str | None = None, size: int = 0) -> None:
        """Count a mistake. Equal problems are one line.

        Args:
            place: `file:line`; empty for a mistake of the whole data set.
            kind: Problems of one kind are one line, even if their numbers differ.
            size: The problem with the largest size is shown for its kind.
        """
        self.count += 1
        group = self._groups.get(kind or problem)
        if group is None:
            if len(self._groups) < SHOWN_MISTAKES:
                self._groups[kind or problem] = _Group(problem, [place], size=size)
            return
        group.count += 1
        if size > group.size:
            group.problem, group.size = problem, size
        if len(group.places) < SHOWN_PLACES:
            group.places.append(place)

    def raise_if_any(self) -> None:
        """Raises DataError with a line for each different mistake, and a count of the mistakes that are not shown."""
        if not self.count:
            return
        lines = [group.line() for group in self._groups.values()]
        hidden = self.count - sum(group.count for group in self._groups.values())
        if hidden:
            lines.append(f"and {hidden} more")
        raise DataError(lines)

    def take(self, error: DataError) -> None:
        """Add an error's mistakes. "and 7 more" in its last line counts as 7."""
        mistakes = list(error.mistakes)
        match = _MORE.fullmatch(mistakes[-1])
        if match:
            self.count += int(match[1])
            mistakes.pop()
        for mistake in mistakes:
            self.add(mistake)


def check_rows(
    data: Data, log: Callable[[str], object] = lambda note: None, scored: Generate | None = None
) -> dict[str, int]:
    """Check every local row. Returns each data set's number of rows, and logs notes for the data's owner.

    Args:
        scored: Its metrics read the references too, and its file is checked as well.

    Raises DataError with every mistake.
    """
    mistakes = Mistakes()
    entries, metrics, items = [*data.sets], list[Metric](), list[Scored]()
    # Without rows of their own the references are a share of the training rows, which the seed draws.
    asked, most = data.train if data.eval is not None else [], MOST_TRIED
    is_certain = False
    if scored is not None:
        metrics = [Metric.of(choice) for choice in scored.choices]
        if scored.file is not None:
            asked = [asked_entry(data.train[0], scored.file)]
            entries += asked
        elif isinstance(data.eval, list):
            asked = data.eval
        if asked is not data.train:
            most, is_certain = scored.limit, True
    counts: dict[str, int] = {}
    notes: list[str] = []
    for entry in entries:
        try:
            source = resolve(entry)
            if source.kind == "hub":
                continue
            reader = RowReader(source)
            counts[source.name] = 0
            next_note = time.monotonic() + FIRST_NOTE_SECONDS
            for number, row in enumerate(reader.rows(), start=1):
                if time.monotonic() > next_note:
                    next_note = time.monotonic() + SECONDS_BETWEEN_NOTES
                    print(f"checking {source.name}: {counted(number, 'row')}", file=sys.stderr, flush=True)
                if row.read is None:
                    mistakes.add(row.problem or "", row.place)
                    continue
                counts[source.name] += 1
                if metrics and len(items) < most and any(entry is each for each in asked):
                    reference = reference_in(row.read)
                    if reference is not None:
                        items.append(Scored(reference, row.place, row.row.values or {}))
            facts = reader.facts()
            notes += notes_of(source.name, facts)
            if entry.format == "preference" and (equal := facts["answers"]["equal"]):  # `prepare` tells it by itself
                notes.append(f"{source.name}: pairs of two equal answers: {equal:,}; they are left out")
        except DataError as error:
            mistakes.take(error)
    for metric in metrics:
        try:
            scores_of(metric, [item.reference for item in items], items)
        except DataError as error:
            if is_certain:
                mistakes.take(error)
            else:
                notes.append(f"{error.mistakes[0]}; a run refuses such a row if it holds it out")
    mistakes.raise_if_any()
    for note in notes:
        log(note)
    return counts


def reference_in(content: Content) -> str | None:
    """A row's last answer as text; None if it is unwanted, has no question, or is a call, which a template writes."""
    match content:
        case Pair():
            return reference_in(content.chosen)
        case Judged():
            return reference_in(content.answer) if content.desirable else None
        case Passage():
            return content.completion if content.prompt else None
    last = content.messages[-1]
    is_text = content.supervised[-1] and not last.get("tool_calls")
    return str(last["content"]) if is_text else None
