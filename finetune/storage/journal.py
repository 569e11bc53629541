"""The journal of a run on a storage: who may write there, and which checkpoints are complete.

    00000007.json     an entry: the owner, its checkpoints and records, each file with its size. The newest one counts
    00000007/         what this entry added, laid out as a run folder: checkpoints/step-00000020/, metrics.jsonl, ...
    lease-00000005.json   a counter that the owner of entry 5 and later ones moves while it lives

Entries are only created, each with the number after the one before, so two writers contend for every number:

    owner A   creates 7 (a checkpoint)         fails to create 8: it is superseded, and ends
    start B                       creates 8 (it owns the run, and begins from what 7 lists)

If A creates 8 first, B fails, and refuses to start. So a checkpoint that A publishes is either in the entry from which
B begins, or in none. A's late files lie in 00000008/, to which no entry refers, because an entry that takes over adds
none. No clock is compared: B watches the counter with its own clock.

Nothing is deleted by the form of its name: each entry lists what its owner still has to delete (`gone`). A journal
begins only where nothing else lies.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.output_stream import one_line
from finetune.storage.backends import MOST_SMALL_BYTES, WHEN_REQUIRED, Storage, attempt

RENEW_SECONDS = 10.0
WATCH_SECONDS = 45.0  # a renewal may wait for a slow network; a start after a clean end does not watch
SETTLE_SECONDS = 5.0  # without conditional writes: longest time between another start's list and its write
KEPT_ENTRIES = 50  # an owner that slept for more looks at the newest entry too
CLOSE_SECONDS = 10.0
_ENTRY = re.compile(r"([0-9]{8})\.json")
_LISTED = re.compile(r"[0-9]{8}|[0-9]{8}\.json|lease-[0-9]{8}\.json")
_OTHER_PREFIX = "name another place in run.storage"


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint on the storage."""

    step: int
    folder: str  # the numbered folder that holds it
    files: Mapping[str, int]  # name -> bytes

    def path(self, name: str) -> str:
        return f"{self.folder}/checkpoints/step-{self.step:08d}/{name}"


@dataclass(frozen=True)
class Entry:
    """One entry. `owner` is the number of the entry with which the owner took the run."""

    number: int
    owner: int
    by: str  # process and host of the owner; empty on the Hub, which may be public
    checkpoints: tuple[Saved, ...] = ()  # in the order of their steps
    records: Mapping[str, int] = field(default_factory=dict)  # name -> bytes, in `records_folder`
    records_folder: str = ""
    token: str = ""  # random: tells this entry from another writer's
    gone: tuple[str, ...] = ()  # names that earlier entries made and no entry needs; the owner deletes them

    @property
    def name(self) -> str:
        return entry_name(self.number)

    @property
    def folders(self) -> set[str]:
        """The folders that this entry refers to."""
        return {self.records_folder, *(saved.folder for saved in self.checkpoints)} - {""}

    def as_bytes(self) -> bytes:
        return json.dumps({"format": 1, **asdict(self)}, indent=1).encode()


def entry_name(number: int) -> str:
    return f"{number:08d}.json"


def newest_entry(storage: Storage) -> Entry | None:
    """The newest entry; None: no run is there. Raises FinetuneError for one that no run wrote."""
    for _ in range(3):  # the owner may delete an old entry that was the newest when it was listed
        numbers = _numbers(storage.names())
        if not numbers:
            return None
        with suppress(FileNotFoundError):
            return _entry(storage, max(numbers))
    raise EnvironmentMismatch(f"{storage.url}: its newest entry cannot be read; try again later")


def _numbers(names: Iterable[str]) -> list[int]:
    return [int(match[1]) for name in names if (match := _ENTRY.fullmatch(name))]


def _read_small(storage: Storage, path: str) -> bytes:
    """An entry or a lease. Raises FileNotFoundError, and FinetuneError for an object that is too large to be one."""
    if storage.size(path) > MOST_SMALL_BYTES:
        raise FinetuneError(f"{storage.url}/{path}: is larger than a run's; {_OTHER_PREFIX}")
    return storage.read(path)


def _entry(storage: Storage, number: int) -> Entry:
    content = _read_small(storage, entry_name(number))
    try:
        value = json.loads(content)
        checkpoints = tuple(
            Saved(int(item["step"]), str(item["folder"]), dict(item["files"])) for item in value["checkpoints"]
        )
        entry = Entry(
            number,
            int(value["owner"]),
            one_line(value["by"], 120),  # it reaches the terminal
            checkpoints,
            dict(value["records"]),
            str(value["records_folder"]),
            str(value["token"]),
            tuple(map(str, value.get("gone", ()))),  # absent in entries of release 1.0.0
        )
        names = [*entry.records, *(name for saved in checkpoints for name in saved.files)]
        folders = [entry.records_folder or "00000000", *(saved.folder for saved in checkpoints)]
        if not all(re.fullmatch(r"[\w-][\w.-]*", name) for name in names):
            raise ValueError("a file's name")
        if not all(re.fullmatch(r"[0-9]{8}", folder) for folder in folders):
            raise ValueError("a folder's name")
        numbers = [*entry.records.values(), *(size for saved in checkpoints for size in saved.files.values())]
        if not all(type(size) is int and size >= 0 for size in [*numbers, *(saved.step for saved in checkpoints)]):
            raise ValueError("a size, or a step")
        if not all(_LISTED.fullmatch(name) for name in entry.gone):
            raise ValueError("a name to delete")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        # A store that does not know the checksum saves it inside the object.
        remedy = WHEN_REQUIRED if b"x-amz-checksum" in content else _OTHER_PREFIX
        place = f"{storage.url}/{entry_name(number)}"
        raise FinetuneError(f"{place}: is not what a run writes ({one_line(error, 80)}); {remedy}") from None
    return entry


class Lease:
    """The right to write a run on a storage, and the journal's newest entry as this owner knows it."""

    def __init__(self, storage: Storage, entry: Entry) -> None:
        self.storage, self.entry = storage, entry
        self.lost: str | None = None  # the line that says who took the run
        self._counter, self._closed = 0, threading.Event()
        self._renewals = threading.Thread(target=self._renew, name="lease on the storage", daemon=True)
        if storage.is_shared:
            self._renewals.start()

    def publish(
        self, files: Mapping[str, Path | bytes], checkpoints: Sequence[Saved], records: Mapping[str, int]
    ) -> None:
        """Add one entry: first its files (path below `next_folder` -> content), then the entry, then delete what no
        entry needs any more. `checkpoints` are all that the storage holds afterwards.

        Raises FinetuneError if another start has taken the run; then nothing of this refers to any file.
        """
        entry = replace(
            self.entry,
            number=self.entry.number + 1,
            checkpoints=tuple(sorted(checkpoints, key=lambda saved: saved.step)),
            records=dict(records),
            records_folder=self.next_folder,
            token=os.urandom(8).hex(),
        )
        entry = replace(entry, gone=self._not_needed(entry))
        self.storage.begin()
        for path, source in files.items():
            self.storage.put(f"{entry.records_folder}/{path}", source)
        if self.storage.in_one_commit:
            self.storage.remove(entry.gone)
        # An entry that is there already is this one if its answer was lost on the way. Else it is a newer owner's.
        is_new = self.storage.create(entry.name, entry.as_bytes())
        if not is_new and _entry(self.storage, entry.number).token != entry.token:
            self.refresh()
            raise AssertionError("an entry of this owner that it did not write")
        self.entry = entry
        self.refresh()
        if not self.storage.in_one_commit:
            with suppress(Exception):  # the next entry deletes them
                self.storage.remove(entry.gone)

    @property
    def next_folder(self) -> str:
        """The folder of the next entry."""
        return f"{self.entry.number + 1:08d}"

    def refresh(self) -> None:
        """Go on from the newest entry of this owner. Call it before each attempt to `publish`.

        Raises FinetuneError if another start has taken the run.
        """
        newest = self._newest()
        if newest is not None and newest.number > self.entry.number:
            self.entry = newest  # written by an attempt whose answer was lost

    def _newest(self) -> Entry | None:
        newest = newest_entry(self.storage)
        if newest is not None and newest.number > self.entry.number and newest.owner != self.entry.owner:
            writer = f" ({newest.by})" if newest.by else ""
            self.lost = (
                f"{self.storage.url}: another start has taken over this run{writer}; this one ends, and its later "
                f"checkpoints are in its own folder alone; stop one of the two, or {_OTHER_PREFIX}"
            )
        if self.lost is not None:
            raise FinetuneError(self.lost)
        return newest

    def close(self) -> None:
        """Give the run back, so that the next start need not watch."""
        if self._closed.is_set() or not self.storage.is_shared:
            return
        self.stop_renewing()
        if self.lost is None:
            with suppress(Exception):
                self.storage.put(_lease_name(self.entry.owner), _lease(self._counter, closed=True))

    def stop_renewing(self) -> None:
        """Move the counter no more. A renewal on its way arrives first, if that takes CLOSE_SECONDS at most."""
        self._closed.set()
        self._renewals.join(CLOSE_SECONDS)

    def _not_needed(self, entry: Entry) -> tuple[str, ...]:
        """What earlier entries listed and `entry` does not need, as far as it is there.

        The folder with the owner's own number belongs to the owner before: it may have been writing there when it lost
        the run, and an entry that takes over adds none.
        """
        names = set(self.storage.names())
        listed = {*self.entry.gone, *self.entry.folders}
        if entry.owner > 1:
            listed.add(f"{entry.owner:08d}")
        # This journal created each number up to this entry's, because `create` succeeds for one writer alone.
        listed |= {entry_name(number) for number in _numbers(names) if number < entry.number - KEPT_ENTRIES}
        return tuple(sorted((listed - entry.folders) & names))

    def _renew(self) -> None:
        while not self._closed.wait(RENEW_SECONDS):
            self._counter += 1
            # A network that fails now may work at the next turn. The entries' numbers decide, not this counter.
            with suppress(Exception):
                self._newest()
                self.storage.put(_lease_name(self.entry.owner), _lease(self._counter, closed=False))
            if self.lost is not None:
                return


def _lease_name(owner: int) -> str:
    return f"lease-{owner:08d}.json"


def _lease(counter: int, *, closed: bool) -> bytes:
    return json.dumps({"counter": counter, "closed": closed, "seconds": time.time()}).encode()


def read_lease(storage: Storage, entry: Entry) -> Mapping[str, Any]:
    """The owner's counter; empty if it wrote none."""
    try:
        value = json.loads(_read_small(storage, _lease_name(entry.owner)))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def take_lease(storage: Storage, before: Entry | None, say: Callable[[str], None]) -> Lease:
    """Own the run from the entry `before` on. Raises FinetuneError if its owner lives, or another start was first."""
    if before is not None and storage.is_shared:
        _watch(storage, before, say)
    number = 1 if before is None else before.number + 1
    writer = f"process {os.getpid()} on {socket.gethostname()}" if storage.is_shared else ""
    entry = replace(
        before or Entry(number, number, writer), number=number, owner=number, by=writer, token=os.urandom(8).hex()
    )
    if before is None:
        attempt(storage, lambda: check_empty(storage))
    else:
        entry = replace(entry, gone=(*before.gone, _lease_name(before.owner), f"{number:08d}"))
    storage.begin()
    if storage.is_shared:
        attempt(storage, lambda: storage.put(_lease_name(number), _lease(0, closed=False)))
    # If the answer to a write was lost, the next attempt finds the entry there: its token says that it is ours.
    attempt(storage, lambda: storage.create(entry.name, entry.as_bytes()))
    if not storage.is_atomic:  # another start may have looked before this one wrote; the later entry counts
        time.sleep(SETTLE_SECONDS)
    # Read back always: a store may keep something else than it was given, and answer that all is well.
    if attempt(storage, lambda: _entry(storage, number)).token != entry.token:
        raise _in_use(storage, newest_entry(storage), "began at the same moment")
    return Lease(storage, entry)


def check_empty(storage: Storage) -> None:
    """Raise FinetuneError for a place without a journal that holds other things. A new branch is a copy of main."""
    names = [] if storage.in_one_commit else storage.names()
    others = [name for name in names if name != _lease_name(1)]  # of a start that ended before its first entry
    if others:
        named = ", ".join(one_line(name, 60) for name in others[:3])
        raise FinetuneError(f"{storage.url}: holds other files ({named}) and no run; {_OTHER_PREFIX}")


def is_conditional(lease: Lease) -> bool:
    """Whether the store keeps an object that exists, as asked: some have no condition, or ignore it and overwrite."""
    return lease.storage.is_atomic and not lease.storage.create(lease.entry.name, lease.entry.as_bytes())


def _watch(storage: Storage, entry: Entry, say: Callable[[str], None]) -> None:
    """Raise FinetuneError if the entry's owner has not given the run back, and shows life within WATCH_SECONDS."""
    lease, until = read_lease(storage, entry), time.monotonic() + WATCH_SECONDS
    if lease.get("closed"):
        return
    counter = lease.get("counter")
    left = f"{storage.url}: {entry.by} did not say that it ended"
    say(f"{left}; watching for {WATCH_SECONDS:g} s whether it still writes")
    while True:
        time.sleep(min(1.0, WATCH_SECONDS / 10))
        lease = read_lease(storage, entry)
        if lease.get("closed"):
            return
        newest = newest_entry(storage)
        if lease.get("counter") != counter or newest is None or newest.number != entry.number:
            raise _in_use(storage, newest, "writes there")
        if time.monotonic() >= until:
            return


def _in_use(storage: Storage, entry: Entry | None, doing: str) -> FinetuneError:
    writer = entry.by if entry is not None and entry.by else "another start"
    return FinetuneError(f"{storage.url}: {writer} {doing}; wait for it, stop it, or {_OTHER_PREFIX}")
