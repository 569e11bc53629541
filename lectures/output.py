"""What every lecture hands over: sections of text, facts for the JSON file, and a picture. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.files import write_json

MEASURED = " [measured here]"  # ends the title of a section whose figures differ from machine to machine
GAP = "  "  # between two columns


@dataclass(frozen=True)
class LectureRequest:
    """What a lecture was asked for."""

    recipe: Path
    overrides: tuple[str, ...]  # of the recipe
    settings: Mapping[str, str]  # the lecture's own, each as it was typed or its default
    folder: Path  # exists, and is the lecture's
    note: Callable[[str], None] = print  # told of the progress of what takes seconds


@dataclass(frozen=True)
class Chapter:
    """A titled part of the output."""

    title: str
    lines: Sequence[str]
    measured: bool = False  # its figures are of this machine and minute, else they are the same everywhere

    def __str__(self) -> str:
        return "\n".join([self.title + MEASURED * self.measured, *self.lines])


@dataclass(frozen=True)
class LectureResult:
    """A lecture, held."""

    sections: Sequence[Chapter]
    facts: Mapping[str, Any]  # the same figures, in full precision; bytes are integers
    draw: Callable[[Path], None] = field(repr=False)  # writes the picture
    # Further pictures, by what follows the lecture's name in their files'.
    more: Mapping[str, Callable[[Path], None]] = field(default_factory=dict, repr=False)

    def text(self) -> str:
        """The sections with an empty line between them."""
        return "\n\n".join(map(str, self.sections))


def columns(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> list[str]:
    """A table in lines: the first `left` columns begin below each other, the others end so."""
    table = [tuple(head), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = (
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append(GAP.join(cells).rstrip())
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def write_lecture(name: str, result: LectureResult, folder: Path) -> list[Path]:
    """The pictures and the facts as files of `folder`; returns them, the facts last."""
    pictures = {folder / f"{name}.png": result.draw}
    pictures |= {folder / f"{name}_{each}.png": draw for each, draw in result.more.items()}
    for picture, draw in pictures.items():
        draw(picture)
    facts = folder / f"{name}.json"
    write_json(facts, {"lecture": name, **result.facts})
    return [*pictures, facts]


def whole_number(settings: Mapping[str, str], name: str, *, least: int = 1) -> int:
    """A setting of a lecture that is a count. Raises FinetuneError."""
    text = settings[name]
    if not text.isdecimal() or int(text) < least:
        raise FinetuneError(f"{name}: {text}: is not a whole number from {least} on; write {name}={max(least, 12)}")
    return int(text)
