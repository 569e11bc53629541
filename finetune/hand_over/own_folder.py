"""A folder that an export may replace: one that holds what an earlier export wrote, and nothing of the user's."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.files import TEMPORARY_PREFIX, write_json
from finetune.output_stream import one_line
from finetune.untrusted.json_files import read_object

HASHED_BYTES = 2**20  # of a file that a user may edit; larger ones are known by their size
OTHER_FOLDER = "name another folder: --to FOLDER"


def write_record(folder: Path, name: str, record: dict[str, Any], *, key: str = "files") -> None:
    """Write an export's record with the list of its files under `key`. Call it last."""
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    write_json(folder / name, record | {key: {path: _known_by(folder / path) for path in files}})


def refuse_foreign(
    folder: Path,
    name: str,
    *,
    below: Path,
    later: Collection[str] = (),
    made_by: str = "run",
    key: str = "files",
    remedy: str = OTHER_FOLDER,
) -> None:
    """Raise FinetuneError unless an export may write `folder`: it is absent, empty, or an unchanged earlier export.

    Args:
        name: The record's file. A file of that name alone makes no export: its list must name every file.
        below: The run's folder. Under it, `folder` may be reached through no link.
        later: Names in the folder that other verbs write after the export, and that go with it.
        made_by, key: Keys of the record: one that every export writes, and the list of files.
    """
    inside = [path for path in (folder, *folder.parents) if path != below and below in path.parents]
    if link := next((path for path in (folder, *inside) if path.is_symlink()), None):
        raise FinetuneError(f"{link}: is a link, through which nothing is written; remove it, or {remedy}")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    record: dict[str, Any] = {}
    with suppress(FinetuneError):  # a file that cannot be read makes no export either
        record = read_object(folder / name)
    listed = record.get(key)
    if made_by not in record:
        raise FinetuneError(f"{folder}: is there and is not an earlier export; {remedy}")
    if not isinstance(listed, dict) and not later:
        raise FinetuneError(f"{folder}: its {name} does not list what was exported; delete the folder, or {remedy}")
    written: dict[str, Any] = listed if isinstance(listed, dict) else {}
    folders = {str(parent) for path in written for parent in Path(path).parents}
    for path in sorted(folder.rglob("*")):
        place = str(path.relative_to(folder))
        if any(part.startswith(TEMPORARY_PREFIX) for part in place.split("/")):  # of a process that was killed
            continue
        if place == name or place.split("/")[0] in later or (place in folders and not path.is_symlink()):
            continue
        if place not in written:
            raise FinetuneError(f"{folder}: holds {one_line(place, 100)}, which no export wrote; move it, or {remedy}")
        if not path.is_file() or _known_by(path) != written[place]:
            raise FinetuneError(
                f"{folder / place}: was changed after the export, which would be lost; move it, or {remedy}"
            )


def _known_by(path: Path) -> str:
    size = path.stat().st_size
    if size > HASHED_BYTES:
        return f"{size} bytes"
    return hashlib.sha256(path.read_bytes()).hexdigest()
