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
from finetune.data.splits import check_named_files, files_of_split, read_split
from finetune.errors import DataError
from finetune.output_stream import has_controls, one_line, printable
from finetune.paths import open_regular
from finetune.recipe.schema import DataSet
from finetune.untrusted.library_words import words_of

SUFFIXES = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
BUILDERS = {"json": "json", "jsonl": "json", "csv": "csv", "parquet": "parquet"}


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
        is_sliced = read_split(self.entry.split).is_sliced
        return islice(self._file_rows(), *self._bounds()) if is_sliced else self._file_rows()

    def key(self) -> dict[str, Any]:
        """What the rows follow from: the bytes of the files, or the Hub data set's fingerprint."""
        if self.kind == "hub":
            # A private name, but the only address of a loaded data set's content; tests watch that it is there.
            return {"hub": self.entry.path, "fingerprint": self._hub_data_set._fingerprint}
        hashes = [_hash_file(file) for file in self.files]
        return {
            "kind": self.kind,
            "files": hashes,
            "split": self.entry.split if read_split(self.entry.split).is_sliced else "all",
        }

    @property
    def name(self) -> str:
        """For messages: the files, or the Hub's name."""
        return ", ".join(map(str, self.files[:3])) + (", ..." if len(self.files) > 3 else "") or self.entry.path

    def _file_rows(self) -> Iterator[SourceRow]:
        for file in self.files:
            yield from read_rows(file, self.kind)

    def _bounds(self) -> tuple[int, int]:
        """First row of the slice, and the one after its last; counts the rows where that needs their number."""
        split = read_split(self.entry.split)
        return split.bounds(sum(1 for _ in self._file_rows()) if split.needs_total else 0)

    @cached_property
    def _hub_data_set(self) -> Any:
        from datasets import load_dataset

        entry = self.entry
        try:
            return load_dataset(
                entry.path, entry.name, data_files=entry.data_files, split=entry.split, revision=entry.revision
            )
        except Exception as error:  # of the data set, of a missing library for its address
            raise DataError([f"{entry.path}: {_why_not_loaded(entry, error)}"]) from None

    def _hub_rows(self) -> Iterator[SourceRow]:
        data_set, number = self._hub_data_set, 0
        try:
            for number, values in enumerate(data_set, start=1):
                yield SourceRow(self.entry.path, number, without_filled_nulls(values), None)
        except Exception as error:  # of a column that is decoded when its row is read, of a connection
            problem = f"cannot be read: {words_of(error, 160).rstrip('.')}; check the data set, and the network"
            yield SourceRow(self.entry.path, number + 1, None, problem)


def _why_not_loaded(entry: DataSet, error: Exception) -> str:
    """The library's words in one line; where they name configurations or splits, those to choose from."""
    text = " ".join(str(error).split())
    if found := re.search(r"(?:available configs|Available): \[(.*?)\]", text):
        names = re.findall(r"[^', ]+", found[1])
        return f"name: its configurations are {', '.join(names)}; add name: {names[0] if names else '...'}"
    if found := re.search(r"Unknown split .*?one of \[(.*?)\]", text):
        splits = found[1].replace("'", "")
        return f"split: there is no split {entry.split!r}, but {splits}; write one of them"
    words = str(error).strip().splitlines() or [type(error).__name__]
    return f"cannot be loaded: {one_line(words[0])}; check the name, the network, or name local data_files"


def resolve(entry: DataSet) -> Source:
    """The files of a data entry. Raises DataError when a named file, folder or split is not there."""
    path, builder = Path(entry.path), BUILDERS.get(entry.path)
    patterns = [entry.data_files] if isinstance(entry.data_files, str) else entry.data_files
    if any("://" in pattern for pattern in patterns or ()):
        return Source(entry, "hub", ())
    if builder and patterns is None:
        raise DataError([f"data: path: {entry.path} names a kind of file; name the files too: data_files: chats.jsonl"])
    if _is_folder(path) and not (builder or patterns):
        files = _files_of(path, entry.split)
        return Source(entry, _kind_of(files), _plainly_named(files))
    if builder or _is_file(path) or _is_folder(path):
        named = _named_files(path, builder, patterns or [])
        check_named_files(read_split(entry.split).name, named)
        return Source(entry, builder or _kind_of(named), named)
    if path.suffix in SUFFIXES or entry.path.startswith((".", "/", "~")) or path.suffix == ".gz":
        raise DataError([f"{entry.path}: no such file; paths are relative to the working folder ({Path.cwd()})"])
    return Source(entry, "hub", ())


def _named_files(path: Path, builder: str | None, patterns: list[str]) -> tuple[Path, ...]:
    if builder or path.is_dir():
        return _expand(patterns if builder else [str(path / pattern) for pattern in patterns])
    return (path,)


def _expand(patterns: list[str]) -> tuple[Path, ...]:
    files: list[Path] = []
    for pattern in patterns:
        matches = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))] if glob.has_magic(pattern) else []
        matches = matches or [Path(pattern)]
        for file in matches:
            if not _is_file(file):
                reason = "is a folder" if _is_folder(file) else "no such file"
                raise DataError(
                    [f"{one_line(file)}: {reason}; data_files are relative to the working folder ({Path.cwd()})"]
                )
        files += matches
    return _plainly_named(files)


def _plainly_named(files: list[Path]) -> tuple[Path, ...]:
    """Names of files are in every message about a row. Raises DataError for one that a terminal would obey."""
    for file in files:
        if has_controls(str(file)):
            raise DataError([f"{printable(str(file))}: the name holds a control character; rename the file"])
    return tuple(files)


def _is_file(path: Path) -> bool:
    """Also for a name that is too long for any file."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _files_of(folder: Path, split: str) -> list[Path]:
    """Data files of a folder that belong to the split. Raises DataError."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and _kind(file)]
    if not files:
        raise DataError([f"{folder}: no data files; put .jsonl, .json, .csv or .parquet files there"])
    return files_of_split(read_split(split).name, files, folder)


def _kind(file: Path) -> str | None:
    return SUFFIXES.get(file.with_suffix("").suffix if file.suffix == ".gz" else file.suffix)


def _kind_of(files: list[Path] | tuple[Path, ...]) -> str:
    kinds = {kind for file in files if (kind := _kind(file))}
    if len(kinds) != 1:
        raise DataError([f"{files[0]}: not one known kind of file; name path: json, csv or parquet, and data_files"])
    return kinds.pop()


def _hash_file(file: Path) -> str:
    try:
        with open_regular(file) as stream:
            return hashlib.file_digest(stream, "blake2b").hexdigest()[:32]
    except OSError as error:
        raise DataError([f"{file}: cannot be read: {error.strerror}; check the file"]) from None
