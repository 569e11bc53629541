"""The errors that a user can meet, each with its exit code.

FinetuneError            2   bad input: place, value, remedy
├── RecipeError          2   every mistake of a recipe at once
├── DataError            2   every mistake found in the data
│   └── BadFile          2   a table's rows cannot be told apart
│       └── UnclearFile  two sheets are plausible
├── NotFinite            2   a loss, a gradient or a trained tensor is NaN or infinite
├── NothingTrained       2   at the end of a run every trained tensor is as it was at its start
├── DoesNotFit           3   more memory is needed than there is, by plan or by measurement
├── EnvironmentMismatch  4   what would run is not what the recipe asks for
│   ├── HubUnreachable   4   the Hub failed again and again, in a way that may pass
│   └── NoRendezvous     4   the ranks did not find each other, or do not share the run's folder
├── (eval --fail-under)  5   a score is below its threshold; no error, the figures are printed
├── RankLost             1   another rank died or froze
└── Stopped            130   stopped by a signal, saved first
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STOPPED = "stopped"  # printed where a signal came before training, or after it: there was nothing to save


class FinetuneError(Exception):
    """A user's mistake or a failed expectation: its text is printed without a traceback."""

    exit_code = 2

    def parts(self) -> tuple[str, str]:
        """The problem and the remedy of a message `problem; remedy`, whose problem may have semicolons of its own."""
        problem, separator, remedy = str(self).rpartition("; ")
        if not separator:
            return remedy, ""
        return problem, remedy


@dataclass(frozen=True)
class Mistake:
    """One mistake in a recipe, and the value or key where it is."""

    # pydantic's kind of error, or: either, cross_check, unknown, misplaced, foreign, yaml, override, folder,
    # stop_after, unfit
    code: str
    path: tuple[str | int, ...]
    text: str  # problem; remedy
    at_key: bool = False  # the key itself is wrong, not its value
    write: tuple[str, ...] = ()  # the keys or the value to write instead, if they are clear

    @property
    def key(self) -> str:
        """`data.train.0.path`."""
        return ".".join(map(str, self.path))


class RecipeError(FinetuneError):
    """All mistakes in a recipe, one entry each: `place: key: problem; remedy`.

    `found` are the same with a code and a field, if the recipe's own values are wrong (recipe/mistakes.py).
    """

    def __init__(self, mistakes: Sequence[str], found: Sequence[Mistake] = (), count: int = 0) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = tuple(mistakes)
        self.count = count or len(mistakes)
        self.found = tuple(found)


class DataError(FinetuneError):
    """All mistakes found in the data, one entry each: `file:line: problem; remedy`.

    Equal mistakes are one entry. `count` are all of them; `more` have no entry.
    """

    def __init__(self, mistakes: Sequence[str], count: int = 0, more: int = 0) -> None:
        self.shown, self.count, self.more = tuple(mistakes), count or len(mistakes), more
        self.mistakes = (*mistakes, f"and {more} more") if more else (*mistakes,)
        super().__init__("\n".join(self.mistakes))


class BadFile(DataError):
    """A file whose rows cannot be told apart: its place and its one problem."""

    def __init__(self, place: str, problem: str) -> None:
        super().__init__([f"{place}: {problem}"])
        self.problem = problem


class UnclearFile(BadFile):
    """A file may be read in several ways: `readings` are values of the entry's `key`, each with words for it."""

    def __init__(self, file: str, key: str, says: str, readings: Sequence[tuple[str, str]]) -> None:
        self.key, self.readings = key, tuple(readings)
        ways = " or ".join(f"{word!r} ({name})" for name, word in readings)
        super().__init__(file, f"{says} {ways}; name the right one: {key}: {readings[0][0]} (init: --{key})")


class NotFinite(FinetuneError):
    """A loss, a gradient norm or a trained tensor is NaN or infinite; such tensors are never saved."""


class NothingTrained(FinetuneError):
    """Training reached its end without changing a bit of any trained tensor."""


class DoesNotFit(FinetuneError):
    """The run needs more memory than there is: `needed` bytes on one GPU, 0 where that is not known."""

    exit_code = 3

    def __init__(self, message: str, needed: int = 0) -> None:
        super().__init__(message)
        self.needed = needed


class EnvironmentMismatch(FinetuneError):
    """The machine, the launcher or the libraries are not what the recipe asks for."""

    exit_code = 4


class HubUnreachable(EnvironmentMismatch):
    """The Hub failed again and again, in a way that may pass."""


class NoRendezvous(EnvironmentMismatch):
    """The ranks did not find each other, or do not share the run's folder: each machine reports its own error."""


class RankLost(FinetuneError):
    """Another rank died, froze or failed, and the run with it."""

    exit_code = 1


class Stopped(FinetuneError):
    """Stopped by a signal after the running step was finished and saved."""

    exit_code = 130
