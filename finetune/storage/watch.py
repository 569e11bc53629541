"""`finetune status URL`: how a run is doing, from its storage alone."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from finetune.errors import FinetuneError
from finetune.output_stream import one_line
from finetune.recipe.storage_address import storage_address, storage_problem
from finetune.run_folder.facts import STATE
from finetune.run_folder.status import Mirrored, RunStatus, read_status
from finetune.storage.backends import Storage, attempt, open_storage
from finetune.storage.journal import newest_entry, read_lease
from finetune.storage.restart import fetch_records


def stored_status(url: str) -> RunStatus:
    """The status of the run on a storage, as of its last save. Raises FinetuneError: no run is there."""
    url = storage_address(url)
    if (problem := storage_problem(url)) is not None:
        raise FinetuneError(f"{one_line(url, 200)} {problem[0]}; {problem[1]}")
    storage = open_storage(url)
    with tempfile.TemporaryDirectory() as name:
        return attempt(storage, lambda: _read(storage, Path(name)))  # type: ignore[no-any-return]


def _read(storage: Storage, folder: Path) -> RunStatus:
    for tries_left in (2, 1, 0):
        entry = newest_entry(storage)
        if entry is None:
            raise FinetuneError(f"{storage.url}: no run is or was here; name a recipe's run.storage")
        try:
            fetch_records(storage, entry, folder)
            break
        except FileNotFoundError:  # the run has published a newer entry meanwhile, and deleted this one's files
            if not tries_left:
                raise
    assert entry is not None
    lease, silent, checkpoint = read_lease(storage, entry), None, None
    if lease and not lease.get("closed") and isinstance(lease.get("seconds"), int | float):
        silent = max(0.0, time.time() - min(max(lease["seconds"], 0), 2**53))
    if entry.checkpoints:
        newest = entry.checkpoints[-1]
        checkpoint = {"step": newest.step, "where": f"{storage.url}/{newest.path('')}".rstrip("/")}
    if not (folder / STATE).exists():  # a run before its first save
        (folder / STATE).write_text('{"state": "running", "step": 0, "command": "", "identity": {}}', "utf-8")
    return read_status(folder, Mirrored(storage.url, checkpoint, silent))
