"""Finds the files or the Hub data set of a recipe's data entry, its split, its rows and its content address.

readers.py reads local files; `datasets` reads data sets on the Hub. The Hub finds a file's split by the file's name,
and so does this module.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from finetune.data.cells import BadRow, nearest
from finetune.data.layout import layout_of
from finetune.data.readers import SourceRow, read_rows, without_filled_nulls
from finetune.data.readings import readings
from finetune.errors import DataError
from finetune.library_errors import library_errors, words_of
from finetune.output_stream import has_controls, one_line, printable
from finetune.paths import open_regular
from finetune.recipe.schema import DataSet
from finetune.untrusted.json_files import read_object

SUFFIXES = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet",
            ".xlsx": "excel", ".arrow": "arrow"}  # fmt: skip
# These files are rows only if the recipe says `path: text`, or names a folder without other data files.
TEXT_SUFFIXES = (".txt", ".md")
BUILDERS = {"json": "json", "jsonl": "json", "csv": "csv", "tsv": "csv", "parquet": "parquet", "excel": "excel",
            "xlsx": "excel", "text": "text", "arrow": "arrow"}  # fmt: skip
# The program that unpacks a file that is not read; .gz is read.
UNPACKED_BY = {".bz2": "bunzip2", ".xz": "unxz", ".zst": "unzstd", ".zip": "unzip", ".7z": "7z x"}
MOST_FILES = 100_000  # in a folder and below it
ASKED_ROWS_LOOKED_AT = 1000  # of a file to answer, for its columns
_SPLIT = re.compile(r"(?P<name>[\w.-]+)(\[(?P<first>-?\d+%?)?:(?P<last>-?\d+%?)?\])?")
_SHARD = re.compile(r"(?P<name>.+)-\d{5}-of-\d{5,}")
# The Hub's words for splits in file names, in its order.
_SPLIT_WORDS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "dev", "val"},
    "test": {"test", "testing", "eval", "evaluation"},
}


@dataclass(frozen=True)
class Source:
    """One data entry, resolved: local files of one kind, or a Hub data set."""

    entry: DataSet
    kind: str  # json, csv, parquet, arrow, excel, text, hub
    files: tuple[Path, ...]
    # Notes about the last reading for the rows' owner, with their counts; 0: a note without a count.
    notes: Counter[str] = field(default_factory=Counter, compare=False, repr=False)
    hidden: int = field(default=0, compare=False)  # files of the folder whose names begin with a dot

    def rows(self) -> Iterator[SourceRow]:
        """Yield the split's rows in file order. An unreadable row is a mistake."""
        if self.kind == "hub":
            return self._hub_rows()
        split = read_split(self.entry.split)
        total, bounds = 0, f"{split.first}{split.last}"
        if split.is_sliced and (split.last is None or "-" in bounds or "%" in bounds):  # they depend on all rows
            total = sum(1 for _ in self._file_rows())
        self.notes.clear()
        if self.hidden:
            self.notes["hidden files (names that begin with a dot), left out"] = self.hidden
        if not split.is_sliced:
            return self._file_rows()
        return islice(self._file_rows(), *split.bounds(total))

    def key(self) -> dict[str, Any]:
        """The rows' content address: the files' digests, or the Hub data set's fingerprint."""
        if self.kind == "hub":
            # A private name, but the only address of a loaded data set's content; tests watch that it is there.
            return {"hub": self.entry.path, "fingerprint": self.hub_data_set._fingerprint}
        hashes = []
        for file in self.files:
            with library_errors(reading=file, kind=DataError), open_regular(file) as stream:
                hashes.append(hashlib.file_digest(stream, "blake2b").hexdigest()[:32])
        split = "all"  # the digests stand for whole files already; only a slice changes the rows
        if read_split(self.entry.split).is_sliced:
            split = self.entry.split
        return {"kind": self.kind, "files": hashes, "split": split}

    @property
    def name(self) -> str:
        """For messages: the files, or the Hub's name."""
        names = ", ".join(map(str, self.files[:3])) or self.entry.path
        if len(self.files) > 3:
            return f"{names}, ..."
        return names

    def _file_rows(self) -> Iterator[SourceRow]:
        for file in self.files:
            entry = self.entry
            yield from read_rows(file, self.kind, entry.delimiter, entry.encoding, entry.sheet, self.notes)

    @cached_property
    def hub_data_set(self) -> Any:
        """The Hub's data set, loaded. Raises DataError."""
        from datasets import load_dataset

        entry = self.entry
        try:
            return load_dataset(
                entry.path, entry.name, data_files=entry.data_files, split=entry.split, revision=entry.revision
            )
        except Exception as error:  # about the data set, or a library that is missing for its address
            # If the library's message names configurations or splits, the line says to choose one.
            lines, text = str(error).strip().splitlines() or [type(error).__name__], " ".join(str(error).split())
            problem = f"cannot be loaded: {one_line(lines[0])}; check the name, the network, or name local data_files"
            if match := re.search(r"(?:available configs|Available): \[(.*?)\]", text):
                names = re.findall(r"[^', ]+", match[1])
                first = next(iter(names), "...")
                problem = f"name: its configurations are {', '.join(names)}; add name: {first}"
            elif match := re.search(r"Unknown split .*?one of \[(.*?)\]", text):
                splits = match[1].replace("'", "")
                problem = f"split: there is no split {entry.split!r}, but {splits}; write one of them"
            raise DataError([f"{entry.path}: {problem}"]) from None

    def _hub_rows(self) -> Iterator[SourceRow]:
        data_set, number = self.hub_data_set, 0
        try:
            for number, values in enumerate(data_set, start=1):
                yield SourceRow(self.entry.path, number, without_filled_nulls(values), None)
        except Exception as error:  # a column that is decoded when its row is read, or the connection
            problem = f"cannot be read: {words_of(error, 160).rstrip('.')}; check the data set, and the network"
            yield SourceRow(self.entry.path, number + 1, None, problem)


def resolve(entry: DataSet) -> Source:
    """Find a data entry's files. Raises DataError if a named file, folder or split is not there."""
    source = _resolve(entry)
    names = {"hub": "a data set on the Hub", "json": "JSON", "csv": "CSV", "parquet": "Parquet", "arrow": "Arrow",
             "excel": "Excel", "text": "texts"}  # fmt: skip
    for key, kinds, words in (
        ("delimiter", ("csv",), "CSV files"),
        ("sheet", ("excel",), "Excel files"),
        ("encoding", ("csv", "text"), "CSV and text files"),
    ):
        if getattr(entry, key) is not None and source.kind not in kinds:
            raise DataError([f"{source.name}: {key}: is for {words}, these are {names[source.kind]}; remove it"])
    if entry.encoding is not None:
        from finetune.data.dialect import checked_encoding

        checked_encoding(entry.encoding)
    return source


def asked_entry(entry: DataSet, file: str | DataSet) -> DataSet:
    """A data file to answer as an entry: read as `entry` is, or by its own columns, as `init` does, if it lacks those.

    A question that comes twice is asked twice. An entry in place of the file says itself how it is read. Raises
    DataError for columns that may be read in several ways.
    """
    if isinstance(file, DataSet):
        return file.model_copy(update={"drop": [kind for kind in file.drop if kind != "duplicate"]})
    changed: dict[str, Any] = {"path": file, "name": None, "data_files": None, "split": "train", "revision": "main"}
    questions = entry.model_copy(update={**changed, "drop": [kind for kind in entry.drop if kind != "duplicate"]})
    try:
        rows = [row.values for row in islice(resolve(questions).rows(), ASKED_ROWS_LOOKED_AT) if row.values is not None]
        layout_of(questions, rows)
    except DataError:  # who reads the rows says so, with other mistakes
        return questions
    except BadRow:
        by_itself = questions.model_copy(update={"format": "auto", "columns": {}, "template": {}})
        result = readings("auto", rows)
        if len(result.plausible) == 1 and not result.obstacle and result.plausible[0].objective == "supervised":
            columns, template = dict(result.plausible[0].columns), dict[str, str]()
            answer = columns.get("output", "")
            if any(column.name == answer and column.kind == "number" for column in result.columns):
                template = {"output": f"{{{columns.pop('output')}}}"}  # a template makes texts of numbers
            return by_itself.model_copy(update={"columns": columns, "template": template})
        if len(result.plausible) > 1:
            ways = [reading.in_words() for reading in result.plausible]
            problem = (
                f"{file}: the columns may be read in {len(ways)} ways: {' or '.join(ways)}; rename them, or say which"
            )
            raise DataError([f"{problem}: --columns {shlex.quote(ways[0])}"]) from None
        return questions if entry.columns or entry.template else by_itself
    return questions


def _resolve(entry: DataSet) -> Source:
    path, builder = Path(entry.path), BUILDERS.get(entry.path)
    patterns = [entry.data_files] if isinstance(entry.data_files, str) else entry.data_files
    if any("://" in pattern for pattern in patterns or ()):  # `datasets` fetches addresses
        return Source(entry, "hub", ())
    if builder and patterns is None:
        raise DataError([f"data: path: {entry.path} names a kind of file; name the files too: data_files: chats.jsonl"])
    if builder:
        files = _expand(patterns or [], texts=builder == "text")
    elif _is_folder(path) and patterns:
        files = _expand([str(path / pattern) for pattern in patterns])
    elif _is_folder(path):
        if saved := _saved_files(path, read_split(entry.split).name):
            _check_names(saved)
            return Source(entry, "arrow", tuple(saved))
        below, hidden = files_below(path)
        candidates = [file for file in below if _kind(file)]
        if not candidates and (texts := _texts_in(path)):
            _check_names(texts)
            return Source(entry, "text", tuple(texts), hidden=hidden)
        if not candidates:
            raise DataError([f"{path}: no data files; put .jsonl, .json, .csv, .parquet, .xlsx or .txt files there"])
        split, splits = read_split(entry.split).name, _splits(candidates, path)
        files = splits.get(split) or [file for file in candidates if split.lower() in _words(file, path)]
        if not files:
            raise DataError([_no_such_split(path, split, list(splits))])
        kind = _common_kind(files)
        _check_names(files)
        return Source(entry, kind, tuple(files), hidden=hidden)
    elif _is_file(path):
        files = [path]
    elif path.suffix.lower() in SUFFIXES or entry.path.startswith((".", "/", "~")) or path.suffix == ".gz":
        raise DataError([f"{entry.path}: no such file; paths are relative to the working folder ({Path.cwd()})"])
    else:
        return Source(entry, "hub", ())
    # Files that a recipe names are the split `train`, or the split in their names.
    split = read_split(entry.split).name
    words_of_split = {split, *_SPLIT_WORDS.get(split, ())}
    if split != "train" and not all(words_of_split & _words(file, file.parent) for file in files):
        known = dict.fromkeys(["train", *(name for file in files for name in _splits([file], file.parent))])
        raise DataError([_no_such_split(files[0], split, list(known))])
    folders = [Path(pattern) for pattern in patterns or () if builder == "text" and _is_folder(Path(pattern))]
    hidden = sum(files_below(folder)[1] for folder in folders)
    return Source(entry, builder or _common_kind(files), tuple(files), hidden=hidden)


def _texts_in(folder: Path) -> list[Path]:
    """The text files in a folder and below it, by name."""
    return [file for file in files_below(folder)[0] if file.suffix.lower() in TEXT_SUFFIXES]


def files_below(folder: Path) -> tuple[list[Path], int]:
    """The files in a folder and below it, by name, and how many hidden ones are left out: editors' second copies.

    Raises DataError if one of the folders may not be entered.
    """

    def refuse(error: OSError) -> None:
        place = printable(str(error.filename))
        raise DataError([f"{place}: cannot be read: {error.strerror}; change its permissions, or name the data files"])

    files: list[Path] = []
    for place, _, names in os.walk(folder, onerror=refuse):
        if not os.access(place, os.X_OK):
            refuse(PermissionError(13, "the folder may not be entered", place))
        files += [file for name in names if (file := Path(place, name)).is_file()]
        if len(files) > MOST_FILES:
            raise DataError([f"{folder}: has more than {MOST_FILES:,} files; name the data files"])
    shown = [file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts)]
    return sorted(shown), sum(bool(_kind(file)) or file.suffix in TEXT_SUFFIXES for file in {*files} - {*shown})


def _saved_files(folder: Path, split: str) -> list[Path]:
    """The files of a data set that `datasets` saved with save_to_disk, in order; none for another folder.

    data/dataset_dict.json, data/train/state.json        a DatasetDict: a folder for each split
    data/state.json, data/data-00000-of-00001.arrow      a Dataset
    """
    splits = folder / "dataset_dict.json"
    if _is_file(splits):
        names = [str(name) for name in read_object(splits).get("splits") or []]
        if split not in names:
            raise DataError([_no_such_split(folder, split, names or ["train"])])
        folder = folder / split
    if not _is_file(folder / "state.json") or not _is_file(folder / "dataset_info.json"):
        return []
    state = read_object(folder / "state.json")
    if split not in ("train", state.get("_split")) and not _is_file(splits):
        raise DataError([_no_such_split(folder, split, [state.get("_split") or "train"])])
    stored = state.get("_data_files")
    names = [str(stored_file.get("filename")) for stored_file in stored or [] if isinstance(stored_file, dict)]
    files = [folder / Path(name).name for name in names]
    if missing := next((file for file in files if not _is_file(file)), None if files else folder / "*.arrow"):
        raise DataError([f"{missing}: no such file, and state.json names it; save the data set again"])
    return files


def _expand(patterns: list[str], *, texts: bool = False) -> list[Path]:
    """Find the files that `data_files` names, in order. Raises DataError.

    Args:
        texts: A folder stands for its text files.
    """
    files: list[Path] = []
    for pattern in patterns:
        names = []
        if glob.has_magic(pattern):
            names = sorted(glob.glob(pattern, recursive=True))
        if texts and _is_folder(Path(pattern)):
            names = [str(file) for file in _texts_in(Path(pattern))]
        for file in map(Path, names or [pattern]):
            if not _is_file(file):
                reason = "is a folder" if _is_folder(file) else "no such file"
                raise DataError(
                    [f"{one_line(file)}: {reason}; data_files are relative to the working folder ({Path.cwd()})"]
                )
            files.append(file)
    _check_names(files)
    return files


def _check_names(files: Sequence[Path]) -> None:
    """Raises DataError for a name that a terminal would obey, because messages about rows show the file's name."""
    for file in files:
        if has_controls(str(file)):
            raise DataError([f"{printable(str(file))}: the name holds a control character; rename the file"])


def _is_file(path: Path) -> bool:
    """`path.is_file()`, or False for a name that is too long for any file."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _kind(file: Path) -> str | None:
    """The kind that a file's suffix means: json for rows.jsonl.gz and ROWS.JSON; None if it is not known."""
    if file.suffix == ".gz":
        file = file.with_suffix("")
    return SUFFIXES.get(file.suffix.lower())


def _common_kind(files: Sequence[Path]) -> str:
    for file in files:
        refuse_packed(file)
    kinds = {kind for file in files if (kind := _kind(file))}
    if len(kinds) != 1:
        raise DataError(
            [f"{files[0]}: not one known kind of file; name path: json, csv, parquet, excel or text, and data_files"]
        )
    return kinds.pop()


def refuse_packed(file: Path) -> None:
    """Raises DataError for a compressed file or an archive that is not read."""
    if command := UNPACKED_BY.get(file.suffix.lower()):
        raise DataError([f"{file}: {file.suffix} is not read; unpack it: {command} {shlex.quote(str(file))}"])


# -- splits ------------------------------------------------------------------------------------------------------------


class SplitSlice(NamedTuple):
    """A split like train[10%:50%]: its name, and its bounds as written."""

    name: str
    first: str | None
    last: str | None

    @property
    def is_sliced(self) -> bool:
        return self.first is not None or self.last is not None

    def bounds(self, total: int) -> tuple[int, int]:
        """The first row, and the row after the last: train[10%:] with 200 rows is (20, 200).

        If one bound is a percentage, `datasets` reads both as percentages.
        """
        is_share = "%" in f"{self.first}{self.last}"

        def position(bound: str | None, default: int) -> int:
            if bound is None:
                return default
            value = int(bound.removesuffix("%"))
            if is_share:
                value = round(value * total / 100)
            if value < 0:
                return max(0, value + total)
            return value

        first = position(self.first, 0)
        return first, max(first, position(self.last, total))


def read_split(text: str) -> SplitSlice:
    """Split `train[:1000]` into its parts. Raises DataError."""
    match = _SPLIT.fullmatch(text)
    if match is None:
        several = "; write each part as a data set of its own" * ("+" in text)
        raise DataError([f"data: split: {text!r} is not readable; write train, or train[:1000]{several}"])
    split = SplitSlice(match["name"], match["first"], match["last"])
    if any(bound and "%" in bound and abs(int(bound.removesuffix("%"))) > 100 for bound in split[1:]):
        raise DataError([f"data: split: {text!r} has a share above 100 %; write train[:100%], or rows: train[:1000]"])
    return split


def _no_such_split(place: Path, name: str, splits: list[str]) -> str:
    near = nearest(name, splits) or splits[0]
    return f"{place}: there is no split {name!r}, but {', '.join(splits)}; write split: {near}"


def _splits(files: Sequence[Path], folder: Path) -> dict[str, list[Path]]:
    """Split -> its files.

    train-00000-of-00002.parquet           the name of a shard says it
    data/validation/a.jsonl, dev.jsonl     else a word in a name or folder: both are validation
    a.jsonl, b.jsonl                       else all files are train
    """
    splits: dict[str, list[Path]] = {}
    shards = [match for file in files if (match := _SHARD.fullmatch(file.name.split(".")[0]))]
    if len(shards) == len(files):
        for file, shard in zip(files, shards, strict=True):
            splits.setdefault(shard["name"], []).append(file)
        return splits
    for name, words in _SPLIT_WORDS.items():
        if members := [file for file in files if words & _words(file, folder)]:
            splits[name] = members
    return splits or {"train": list(files)}


def _words(file: Path, folder: Path) -> set[str]:
    return set(re.split(r"[\W_\d]+", str(file.relative_to(folder)).lower()))
