"""A start on an empty machine: the run's newest complete checkpoint and its records, from the storage.

recorded_folder   every rank, before anything is chosen: the records alone, into a temporary folder
take_over         rank 0, before it claims the run folder: the lease, then checkpoint and records into that folder
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.files import TEMPORARY_PREFIX, publish_folder, remove_folder
from finetune.hub.branch import HubBranch
from finetune.hub.bucket import HubBucket
from finetune.launch.launcher import Launch
from finetune.output_stream import one_line
from finetune.recipe.schema import Recipe
from finetune.redaction import hide_secrets, known_secrets
from finetune.run_folder.checkpoint import Checkpoint, checkpoint_steps, examine, read_state_of
from finetune.run_folder.facts import STATE, read_state
from finetune.run_folder.folder import RunIdentity
from finetune.storage.backends import Storage, attempt, explain, open_storage
from finetune.storage.journal import Entry, check_empty, is_conditional, newest_entry, take_lease
from finetune.storage.mirror import MIRRORED_FILES, Mirror, with_own_paths


def check_storage(recipe: Recipe) -> None:
    """Raise FinetuneError, one line, if the recipe's storage cannot be read now, or is no run's. Every rank may ask."""
    assert recipe.storage is not None
    storage = open_storage(recipe.storage, private=recipe.hub.private)
    try:
        if isinstance(storage, HubBranch | HubBucket):
            attempt(storage, storage.check)
        if attempt(storage, lambda: newest_entry(storage)) is None:
            attempt(storage, lambda: check_empty(storage))
    except FinetuneError as error:
        raise type(error)(f"{recipe.storage_key}: {hide_secrets(str(error), known_secrets())}") from error.__cause__


def recorded_folder(recipe: Recipe) -> Path:
    """A folder with the records of the run that this start continues: the run folder, or a temporary one with the
    storage's. Every rank may call it. Raises FinetuneError if the storage cannot be read."""
    run_dir, url = Path(recipe.run_dir), recipe.storage
    if url is None or recipe.training.resume == "never" or (run_dir / STATE).exists():
        return run_dir
    return _fetched_records(url, recipe.hub.private)


@functools.cache
def _fetched_records(url: str, private: bool) -> Path:
    folder, storage = Path(tempfile.mkdtemp(prefix="finetune-storage-")), open_storage(url, private=private)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    attempt(storage, lambda: fetch_records(storage, newest_entry(storage), folder))
    return folder


def _fetch(storage: Storage, path: str, target: Path, size: int) -> bool:
    """Copy an object of `size` bytes into a file. False: it has another size; a larger one is not copied."""
    if storage.size(path) != size:
        return False
    storage.get(path, target)
    return target.stat().st_size == size


def fetch_records(
    storage: Storage, entry: Entry | None, folder: Path, names: Collection[str] = (*MIRRORED_FILES, STATE)
) -> None:
    """Copy an entry's records into a folder, run_state.json last. Raises FinetuneError for one that is torn."""
    for name in names:
        if entry is None or name not in entry.records:
            continue
        temporary = folder / f"{TEMPORARY_PREFIX}{name}"
        if not _fetch(storage, f"{entry.records_folder}/{name}", temporary, entry.records[name]):
            raise FinetuneError(f"{storage.url}/{entry.records_folder}/{name}: has another size than was written")
        os.replace(temporary, folder / name)


def take_over(recipe: Recipe, launch: Launch, identity: RunIdentity, say: Callable[[str], None]) -> Mirror:
    """Own the run on the recipe's storage, and bring its newest checkpoint into the run folder if that has none as new.

    Only rank 0 calls it, with the run folder locked.

    Raises FinetuneError: another run, or another process's, is there; a damaged one; the storage cannot be used.
    """
    assert recipe.storage is not None
    storage = open_storage(recipe.storage, private=recipe.hub.private)
    entry = attempt(storage, lambda: newest_entry(storage))
    run_dir, previous, local = Path(recipe.run_dir), None, None
    if entry is not None and entry.checkpoints:
        if recipe.training.resume == "never":
            raise FinetuneError(
                f"{storage.url}: holds a run, saved at step {entry.checkpoints[-1].step}, and training.resume is "
                f"never; name another place in {recipe.storage_key}, or delete that run yourself"
            )
        if STATE in entry.records:
            with tempfile.TemporaryDirectory() as folder:
                attempt(storage, lambda: fetch_records(storage, entry, Path(folder), [STATE]))
                previous = read_state(Path(folder), f"of {storage.url}; name another place in run.storage")
    if previous is not None:
        # This start's own paths where they are the same.
        previous |= {"identity": with_own_paths(previous["identity"], identity.values)}
        identity.refuse_other(storage.url, previous, f"or name another place in {recipe.storage_key}")
        local = read_state(run_dir)
        if local is not None and local["state"] != "finished":
            identity.refuse_other(run_dir, local, "or choose another output_dir")
    try:
        lease = take_lease(storage, entry, say)
        try:
            if storage.is_shared and not attempt(storage, lambda: is_conditional(lease)):
                line = f"{storage.url}: has no conditional writes, so it keeps no two writers apart"
                if launch.nodes > 1:
                    raise FinetuneError(f"{line}; several machines need another storage, or a run folder that all see")
                say(f"{line}; start this run once at a time")
            if previous is not None and (local is None or local["state"] != "finished"):
                _bring(storage, lease.entry, recipe, previous, say)
        except BaseException:
            lease.close()
            raise
    except Exception as error:
        raise explain(storage, error)[0] from error
    return Mirror(recipe, lease)


def _bring(
    storage: Storage, entry: Entry, recipe: Recipe, state: Mapping[str, Any], say: Callable[[str], None]
) -> None:
    """Fetch the newest complete checkpoint, the best one and the records, unless the folder's own are as new."""
    run_dir, stored = Path(recipe.run_dir), {saved.step: saved for saved in entry.checkpoints}
    local_steps = checkpoint_steps(run_dir)
    here = max(local_steps, default=0)
    if here >= max(stored):
        return
    staging = run_dir / f"{TEMPORARY_PREFIX}storage"
    damaged: list[str] = []

    def fetch_step(step: int) -> Checkpoint | None:
        saved, folder = stored[step], staging / f"step-{step:08d}"
        remove_folder(folder)
        folder.mkdir(parents=True)
        problem: Checkpoint | str
        try:
            places = [(saved.path(name), folder / name, size) for name, size in saved.files.items()]
            fits = all(attempt(storage, functools.partial(_fetch, storage, *place)) for place in places)
            problem = examine(folder) if fits else "a file has another size than was written"
        except FinetuneError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            problem = "a file is missing"
        if isinstance(problem, Checkpoint):
            return problem
        remove_folder(folder)  # what is left there moves into the run folder
        damaged.append(f"{storage.url}/{saved.folder}: step {step}: damaged, not used: {one_line(problem, 300)}")
        say(damaged[-1])
        return None

    try:
        newest = next(filter(None, (fetch_step(step) for step in sorted(stored, reverse=True) if step > here)), None)
        if newest is None and here == 0:
            raise FinetuneError("\n".join([*damaged, f"{storage.url}: none of its checkpoints is complete; delete it"]))
        if newest is None:
            return
        best = read_state_of(newest).get("best_step") if recipe.training.exports_best else None
        steps = [newest.step]
        if best in stored and best != newest.step and best not in local_steps and fetch_step(best):
            steps.append(best)
        (run_dir / "checkpoints").mkdir(exist_ok=True)
        for step in steps:
            name = f"step-{step:08d}"
            publish_folder(staging / name, run_dir / "checkpoints" / name)
        fetch_records(storage, entry, staging, MIRRORED_FILES)
        (staging / STATE).write_text(json.dumps(state), "utf-8")
        for path in sorted(staging.iterdir(), key=lambda path: path.name == STATE):
            os.replace(path, run_dir / path.name)
        say(f"{storage.url}: the checkpoint of step {newest.step} is in {run_dir} now")
    finally:
        remove_folder(staging)
