"""The split of a data set: its slice, and which local files belong to it, as the Hub decides it by their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from finetune.data.messages import nearest
from finetune.errors import DataError

_SPLIT = re.compile(r"(?P<name>[\w.-]+)(\[(?P<first>-?\d+%?)?:(?P<last>-?\d+%?)?\])?")
_SHARD = re.compile(r"(?P<name>.+)-\d{5}-of-\d{5,}")
# The words by which the Hub knows the splits of files, in its order.
_WORDS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "dev", "val"},
    "test": {"test", "testing", "eval", "evaluation"},
}


class SplitSlice(NamedTuple):
    """A split like train[10%:-5]: its name, and the bounds as they are written."""

    name: str
    first: str | None
    last: str | None

    @property
    def is_sliced(self) -> bool:
        return self.first is not None or self.last is not None

    @property
    def needs_total(self) -> bool:
        """Whether the bounds follow from the number of all rows."""
        return self.last is None or any(part and (part[0] == "-" or part[-1] == "%") for part in self[1:])

    def bounds(self, total: int) -> tuple[int, int]:
        """First row and the one after the last, of `total` rows."""
        first = _bound(self.first, 0, total)
        return first, max(first, _bound(self.last, total, total))


def _bound(part: str | None, otherwise: int, total: int) -> int:
    if part is None:
        return otherwise
    value = round(int(part[:-1]) * total / 100) if part.endswith("%") else int(part)
    return max(0, value + total) if value < 0 else value


def read_split(text: str) -> SplitSlice:
    """The parts of `train[:1000]`. Raises DataError."""
    match = _SPLIT.fullmatch(text)
    if match is None:
        raise DataError([f"data: split: {text!r} is not readable; write train, or train[:1000]"])
    return SplitSlice(match["name"], match["first"], match["last"])


def files_of_split(name: str, files: Sequence[Path], folder: Path) -> list[Path]:
    """Those of a folder's files that belong to a split. Raises DataError with the splits that there are."""
    splits = _splits(files, folder)
    if chosen := splits.get(name) or [file for file in files if name.lower() in _words(file, folder)]:
        return chosen
    raise DataError([_no_split(str(folder), name, list(splits))])


def check_named_files(name: str, files: Sequence[Path]) -> None:
    """Files that the recipe names are the split `train`, or the one that is in their names. Raises DataError."""
    if name != "train" and not all({name, *_WORDS.get(name, ())} & _words(file, file.parent) for file in files):
        known = dict.fromkeys(["train", *(word for file in files for word in _splits([file], file.parent))])
        raise DataError([_no_split(str(files[0]), name, list(known))])


def _no_split(where: str, name: str, splits: list[str]) -> str:
    near = nearest(name, splits) or splits[0]
    return f"{where}: there is no split {name!r}, but {', '.join(splits)}; write split: {near}"


def _splits(files: Sequence[Path], folder: Path) -> dict[str, list[Path]]:
    """Split -> its files: by the names of shards, else by words in names and folders; without either all are train."""
    splits: dict[str, list[Path]] = {}
    shards = [_SHARD.fullmatch(file.name.split(".")[0]) for file in files]
    if all(shards):
        for file, shard in zip(files, shards, strict=True):
            splits.setdefault(shard["name"] if shard else "", []).append(file)
        return splits
    for name, words in _WORDS.items():
        if named := [file for file in files if words & _words(file, folder)]:
            splits[name] = named
    return splits or {"train": list(files)}


def _words(file: Path, folder: Path) -> set[str]:
    return set(re.split(r"[\W_\d]+", str(file.relative_to(folder)).lower()))
