"""Which files (or Hub data set) a recipe's data entry names, their rows, and their content address.

Local JSON, JSON Lines, CSV and Parquet files are read by readers.py; everything else goes to `datasets`.
"""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from finetune.data.readers import SourceRow, read_rows, without_filled_nulls
from finetune.errors import DataError
from finetune.recipe.schema import DataSet

SUFFIXES = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
BUILDERS = {"json": "json", "jsonl": "json", "csv": "csv", "parquet": "parquet"}
_SPLIT = re.compile(r"(?P<name>[\w.-]+)(\[(?P<first>-?\d+%?)?:(?P<last>-?\d+%?)?\])?")


@dataclass(frozen=True)
class Source:
    """One data entry, resolved: local files of one kind, or a Hub data set."""

    entry: DataSet
    kind: str  # json, csv, parquet, hub
    files: tuple[Path, ...]

    def rows(self) -> Iterator[SourceRow]:
        """Every row of the split, in the order of the files; unreadable rows as mistakes."""
        if self.kind == "hub":
            return self._hub_rows()
        return islice(self._file_rows(), *self._bounds()) if self._slice() else self._file_rows()

    def key(self) -> dict[str, Any]:
        """What the rows follow from: the bytes of the files, or the Hub data set's fingerprint."""
        if self.kind == "hub":
            # A private name, but the only address of a loaded data set's content; tests watch that it is there.
            return {"hub": self.entry.path, "fingerprint": self._hub_data_set._fingerprint}
        hashes = [_hash_file(file) for file in self.files]
        return {"kind": self.kind, "files": hashes, "split": self.entry.split if self._slice() else "all"}

    @property
    def name(self) -> str:
        """For messages: the files, or the Hub's name."""
        return ", ".join(map(str, self.files[:3])) + (", ..." if len(self.files) > 3 else "") or self.entry.path

    def _file_rows(self) -> Iterator[SourceRow]:
        for file in self.files:
            yield from read_rows(file, self.kind)

    def _slice(self) -> tuple[str | None, str | None] | None:
        match = _SPLIT.fullmatch(self.entry.split)
        if match is None:
            raise DataError([f"data: split: {self.entry.split!r} is not readable; write train, or train[:1000]"])
        first, last = match["first"], match["last"]
        return None if first is None and last is None else (first, last)

    def _bounds(self) -> tuple[int, int]:
        """First and last row of a split like train[10%:-5]; counts the rows where that needs their number."""
        parts = self._slice() or (None, None)
        needs_total = parts[1] is None or any(part and (part[0] == "-" or part[-1] == "%") for part in parts)
        total = sum(1 for _ in self._file_rows()) if needs_total else 0

        def bound(part: str | None, otherwise: int) -> int:
            if part is None:
                return otherwise
            value = round(int(part[:-1]) * total / 100) if part.endswith("%") else int(part)
            return max(0, value + total) if value < 0 else value

        first = bound(parts[0], 0)
        return first, max(first, bound(parts[1], total))

    @cached_property
    def _hub_data_set(self) -> Any:
        from datasets import load_dataset

        entry = self.entry
        try:
            return load_dataset(
                entry.path, entry.name, data_files=entry.data_files, split=entry.split, revision=entry.revision
            )
        except (OSError, ValueError, RuntimeError, ConnectionError) as error:
            words = str(error).strip().splitlines() or [type(error).__name__]
            raise DataError(
                [f"{entry.path}: cannot be loaded: {words[0]}; check the name, the network, or name local data_files"]
            ) from None

    def _hub_rows(self) -> Iterator[SourceRow]:
        for number, values in enumerate(self._hub_data_set, start=1):
            yield SourceRow(self.entry.path, number, without_filled_nulls(values), None)


def resolve(entry: DataSet) -> Source:
    """The files of a data entry. Raises DataError when a named file or folder is not there."""
    path, builder = Path(entry.path), BUILDERS.get(entry.path)
    patterns = [entry.data_files] if isinstance(entry.data_files, str) else entry.data_files
    if any("://" in pattern for pattern in patterns or ()):
        return Source(entry, "hub", ())
    if builder and patterns is None:
        raise DataError([f"data: path: {entry.path} names a kind of file; name the files too: data_files: chats.jsonl"])
    if builder and patterns is not None:
        return Source(entry, builder, _expand(patterns))
    if path.is_file():
        return Source(entry, _kind_of([path]), (path,))
    if path.is_dir():
        files = _expand([str(path / pattern) for pattern in patterns]) if patterns else _files_of(path, entry.split)
        return Source(entry, _kind_of(files), tuple(files))
    if path.suffix in SUFFIXES or entry.path.startswith((".", "/", "~")) or path.suffix == ".gz":
        raise DataError([f"{entry.path}: no such file; paths are relative to the working folder ({Path.cwd()})"])
    return Source(entry, "hub", ())


def _expand(patterns: list[str]) -> tuple[Path, ...]:
    files: list[Path] = []
    for pattern in patterns:
        matches = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))] if glob.has_magic(pattern) else []
        matches = matches or [Path(pattern)]
        for file in matches:
            if not file.is_file():
                reason = "is a folder" if file.is_dir() else "no such file"
                raise DataError([f"{file}: {reason}; data_files are relative to the working folder ({Path.cwd()})"])
        files += matches
    return tuple(files)


def _files_of(folder: Path, split: str) -> list[Path]:
    """Data files of a folder; those named after the split when there are such, as the Hub does it."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and _kind(file)]
    name = split.split("[")[0].lower()
    named = [file for file in files if name in re.split(r"[\W_]+", str(file.relative_to(folder)).lower())]
    if not files:
        raise DataError([f"{folder}: no data files; put .jsonl, .json, .csv or .parquet files there"])
    return named or files


def _kind(file: Path) -> str | None:
    return SUFFIXES.get(file.with_suffix("").suffix if file.suffix == ".gz" else file.suffix)


def _kind_of(files: list[Path] | tuple[Path, ...]) -> str:
    kinds = {kind for file in files if (kind := _kind(file))}
    if len(kinds) != 1:
        raise DataError([f"{files[0]}: not one known kind of file; name path: json, csv or parquet, and data_files"])
    return kinds.pop()


def _hash_file(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "blake2b").hexdigest()[:32]
    except OSError as error:
        raise DataError([f"{file}: cannot be read: {error.strerror}; check the file"]) from None
