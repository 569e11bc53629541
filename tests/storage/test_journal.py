"""Two writers, lost answers, torn uploads: the journal's newest entry is always whole, and has one owner."""

from __future__ import annotations

import errno
import json
import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from finetune.errors import FinetuneError
from finetune.storage import backends, journal
from finetune.storage.backends import ObjectStorage, Storage
from finetune.storage.journal import Entry, Lease, Saved, newest_entry, take_lease
from tests.support.runs.faulty_storage import FaultyStorage


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture
def leases() -> Iterator[list[Lease]]:
    opened: list[Lease] = []
    yield opened
    for lease in opened:
        lease.close()


def taken(url: str, leases: list[Lease], before: Entry | None = None) -> Lease:
    lease = take_lease(FaultyStorage(url), before, lambda _: None)
    leases.append(lease)
    return lease


def publish(lease: Lease, step: int) -> None:
    """A checkpoint whose one file says which owner wrote it."""
    lease.refresh()
    content = f"{lease.entry.owner} {step}".encode()
    saved = Saved(step, lease.next_folder, {"state.json": len(content)})
    files = {f"checkpoints/step-{step:08d}/state.json": content}
    lease.publish(files, [*lease.entry.checkpoints[-1:], saved], {})  # type: ignore[arg-type]


def check_whole(url: str) -> Entry:
    """Every file of the newest entry is there with its size. Returns the entry."""
    storage = FaultyStorage(url)
    entry = newest_entry(storage)
    assert entry is not None
    for saved in entry.checkpoints:
        for name, size in saved.files.items():
            assert len(storage.read(saved.path(name))) == size
    return entry


def test_a_living_owner_is_not_superseded(url: str, leases: list[Lease]) -> None:
    first = taken(url, leases)
    publish(first, 2)
    with pytest.raises(FinetuneError, match=r"store: process \d+ on .* writes there; wait for it, stop it, or name"):
        taken(url, leases, newest_entry(first.storage))
    publish(first, 4)
    assert check_whole(url).owner == 1


def test_an_owner_that_ended_is_followed_at_once(
    url: str, leases: list[Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = taken(url, leases)
    publish(first, 2)
    first.close()
    monkeypatch.setattr(journal, "WATCH_SECONDS", 1e9)
    second = taken(url, leases, newest_entry(first.storage))
    assert [saved.step for saved in second.entry.checkpoints] == [2]


def test_an_end_during_a_renewal_is_said(url: str, leases: list[Lease]) -> None:
    """The renewal that is on its way arrives first, and does not replace the word that the owner ended."""
    lease = taken(url, leases)
    on_its_way, renewed = threading.Event(), []

    def arrive_late(operation: str, path: str) -> None:
        if operation == "put" and path.startswith("lease") and not renewed:
            renewed.append(path)
            on_its_way.set()
            time.sleep(0.2)

    lease.storage.before = arrive_late  # type: ignore[attr-defined]
    assert on_its_way.wait(5)
    lease.close()
    time.sleep(0.3)
    assert journal.read_lease(lease.storage, lease.entry)["closed"]


def test_the_clocks_of_two_machines_do_not_matter(
    url: str, leases: list[Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner whose clock is a year ahead is alive, one whose clock is a year behind too, and a dead one dead."""
    for skew in (3e7, -3e7):
        with monkeypatch.context() as clock:
            clock.setattr(journal.time, "time", lambda skew=skew: 1.8e9 + skew)
            lease = taken(url, leases, newest_entry(FaultyStorage(url)))
            with pytest.raises(FinetuneError, match="writes there"):
                taken(url, leases, newest_entry(lease.storage))
            lease.stop_renewing()  # as after SIGKILL
    assert taken(url, leases, newest_entry(FaultyStorage(url))).entry.number == 3


def test_a_superseded_owner_publishes_nothing_and_names_the_other(url: str, leases: list[Lease]) -> None:
    first = taken(url, leases)
    publish(first, 2)
    first.stop_renewing()  # as after SIGKILL
    second = taken(url, leases, newest_entry(first.storage))
    with pytest.raises(FinetuneError, match=r"another start has taken over this run \(process \d+ on .*\); this one"):
        publish(first, 4)
    assert first.lost is not None
    assert [saved.step for saved in check_whole(url).checkpoints] == [2]
    publish(second, 3)
    assert [saved.step for saved in check_whole(url).checkpoints] == [2, 3]


def test_a_living_owner_notices_by_itself_that_it_was_superseded(url: str, leases: list[Lease]) -> None:
    """It slept for longer than the other watched. It need not wait for its next save, which may be hours away."""
    first = taken(url, leases)
    newer = Entry(2, 2, "process 7 on another", token="x")
    assert first.storage.create(newer.name, newer.as_bytes())
    end = time.monotonic() + 5
    while first.lost is None and time.monotonic() < end:
        time.sleep(0.02)
    assert first.lost is not None
    assert "another start has taken over this run (process 7 on another)" in first.lost


@pytest.mark.parametrize("at", ["put", "create"])
def test_a_take_over_in_the_middle_of_a_publication(url: str, leases: list[Lease], at: str) -> None:
    """The old owner has looked, and uploads. The new one chooses its start then: no later checkpoint may appear."""
    first = taken(url, leases)
    publish(first, 2)
    first.stop_renewing()  # as after SIGKILL
    chosen: list[Entry] = []

    def take_over(operation: str, path: str) -> None:
        if operation == at and not chosen and "lease" not in path:
            second = taken(url, leases, newest_entry(FaultyStorage(url)))
            chosen.append(second.entry)
            publish(second, 3)

    first.storage.before = take_over  # type: ignore[attr-defined]
    with pytest.raises(FinetuneError, match="has taken over"):
        publish(first, 4)
    assert [saved.step for saved in chosen[0].checkpoints] == [2]
    entry = check_whole(url)
    assert [saved.step for saved in entry.checkpoints] == [2, 3]
    storage = FaultyStorage(url)
    assert storage.read(entry.checkpoints[-1].path("state.json")) == b"3 3", "not the old owner's file"


def test_a_publication_in_the_middle_of_a_take_over(url: str, leases: list[Lease]) -> None:
    """The new start has read entry 2, and the old owner, long asleep, publishes entry 3 first: the start is refused."""
    first = taken(url, leases)
    publish(first, 2)
    first.stop_renewing()  # as after SIGKILL
    storage, done = FaultyStorage(url), []

    def publish_first(operation: str, path: str) -> None:
        if operation == "create" and not done:
            done.append(path)
            publish(first, 4)

    storage.before = publish_first
    with pytest.raises(FinetuneError, match=r"began at the same moment|writes there"):
        take_lease(storage, newest_entry(storage), lambda _: None)
    assert done
    assert [saved.step for saved in check_whole(url).checkpoints] == [2, 4]
    publish(first, 6)


def test_of_starts_at_one_moment_one_wins(url: str, leases: list[Lease]) -> None:
    barrier, refused = threading.Barrier(6), []

    def start() -> None:
        barrier.wait()
        try:
            taken(url, leases)
        except FinetuneError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(leases) == 1
    assert len(refused) == 5
    assert all("\n" not in line for line in refused)


def test_a_lost_answer_is_a_success_and_the_next_attempt_goes_on_from_it(url: str, leases: list[Lease]) -> None:
    lease, failed = taken(url, leases), []

    def lose(operation: str, path: str) -> None:
        if operation == "create" and not failed:
            failed.append(path)
            raise TimeoutError("no answer")

    lease.storage.after = lose  # type: ignore[attr-defined]
    with pytest.raises(TimeoutError):
        publish(lease, 2)
    assert [saved.step for saved in check_whole(url).checkpoints] == [2]
    publish(lease, 4)
    entry = check_whole(url)
    assert [saved.step for saved in entry.checkpoints] == [2, 4]
    assert (entry.number, entry.owner) == (3, 1)


def test_kills_at_random_places_leave_a_whole_storage(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 owners, each killed at a random operation of its publications."""
    monkeypatch.setattr("finetune.storage.backends.sync", lambda path: None)  # a kill is no loss of power
    rng, step, published = random.Random(58), 0, 0

    class Killed(BaseException):
        pass

    for _ in range(60):
        countdown = [rng.randrange(1, 12)]

        def kill(operation: str, path: str) -> None:
            if operation in ("put", "create", "remove") and not path.startswith("lease"):
                countdown[0] -= 1  # noqa: B023  # used in this turn
                if countdown[0] <= 0:  # noqa: B023
                    raise Killed

        storage = FaultyStorage(url)
        before = newest_entry(storage)
        owner = take_lease_quickly(storage, before)
        storage.before = kill
        try:
            while True:
                publish(owner, step := step + 1)
                published = step
        except Killed:
            pass
        finally:
            owner.stop_renewing()  # as after SIGKILL
        entry = check_whole(url)
        newest = max((saved.step for saved in entry.checkpoints), default=0)
        assert newest in (published, step), "the last complete one, or the one during whose publication the kill came"
        published = newest
    names = FaultyStorage(url).names()
    assert len([name for name in names if "lease" in name]) <= 12
    assert len([name for name in names if name.endswith(".json")]) <= journal.KEPT_ENTRIES + 14
    last = take_lease_quickly(FaultyStorage(url), newest_entry(FaultyStorage(url)))
    publish(last, step + 1)
    last.close()
    folders = {name for name in last.storage.names() if not name.endswith(".json")}
    assert folders == last.entry.folders, "a folder of an owner that was killed stays"


@pytest.mark.parametrize(
    "other",
    [
        "00000000/left.png",
        "00000001/frame.jpg",
        "00000002",
        "20250331/notes.txt",
        "lease-00000007.json",
        "٠٠٠٠٠٠٠١.json",
        "notes.txt",
        ".hidden",
    ],
)
def test_a_place_with_other_files_is_no_runs(url: str, tmp_path: Path, other: str) -> None:
    file = tmp_path / "store" / other
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    with pytest.raises(
        FinetuneError, match=rf"store: holds other files \({file.relative_to(tmp_path / 'store').parts[0]}\)"
    ):
        take_lease(FaultyStorage(url), None, lambda _: None)
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == [file]


def test_what_no_entry_listed_is_never_deleted(
    url: str, tmp_path: Path, leases: list[Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody puts folders and files beside a run, named as its own. Three owners write 70 entries."""
    monkeypatch.setattr("finetune.storage.backends.sync", lambda path: None)
    lease = taken(url, leases)
    others = ["00000000/a", "00000001/a", "00000500/a", "20250331/a", "lease-00000000.json", "lease-00000099.json"]
    for name in others:
        (tmp_path / "store" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "store" / name).write_text("mine")
    for owner in range(3):
        for step in range(1, 24):
            publish(lease, owner * 100 + step)
        lease.close()
        lease = taken(url, leases, check_whole(url))
    assert [name for name in others if not (tmp_path / "store" / name).is_file()] == []
    entries = [name for name in lease.storage.names() if name.endswith(".json") and "lease" not in name]
    assert len(entries) <= journal.KEPT_ENTRIES + 3, "old entries are deleted"


def test_an_entry_that_asks_to_delete_other_names_is_refused(url: str, tmp_path: Path, leases: list[Lease]) -> None:
    lease = taken(url, leases)
    publish(lease, 2)
    file = tmp_path / "store" / lease.entry.name
    for name in ("../elsewhere", "notes.txt", "checkpoints", "00000001/x", ""):
        value = json.loads(file.read_text("utf-8"))
        file.write_text(json.dumps({**value, "gone": [name]}))
        with pytest.raises(FinetuneError, match="is not what a run writes"):
            newest_entry(FaultyStorage(url))


def test_an_entry_of_release_1_0_0_is_read(url: str, tmp_path: Path, leases: list[Lease]) -> None:
    lease = taken(url, leases)
    publish(lease, 2)
    file = tmp_path / "store" / lease.entry.name
    value = json.loads(file.read_text("utf-8"))
    del value["gone"]
    file.write_text(json.dumps(value))
    assert check_whole(url).checkpoints == lease.entry.checkpoints


def take_lease_quickly(storage: FaultyStorage, before: Entry | None) -> Lease:
    """`take_lease` after the watch, which 60 owners would wait for."""
    if before is not None:
        storage.put(f"lease-{before.owner:08d}.json", b'{"closed": true}')
    return take_lease(storage, before, lambda _: None)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (PermissionError(errno.EACCES, "denied"), "refuses this user"),
        (PermissionError(errno.EACCES, "denied", "00000507.json"), "refuses this user"),
        (OSError(errno.ENOSPC, "No space left on device"), "is full"),
        (OSError(errno.EFBIG, "File too large"), "cannot be used"),
        (OSError(errno.EROFS, "Read-only file system"), "cannot be used"),
        (OSError(errno.ELOOP, "is a link, not a file"), "cannot be used"),
        (FileNotFoundError(errno.ENOENT, "No such file"), "cannot be used"),
        (OSError(errno.ESTALE, "Stale file handle"), "cannot be reached"),
    ],
)
def test_a_folders_fault_is_one_line_with_its_remedy(url: str, error: Exception, line: str) -> None:
    check_fault(FaultyStorage(url), error, line, "network" if "reached" in line else "folder|free some space")


@pytest.mark.parametrize(
    ("error", "line", "remedy"),
    [
        (FileNotFoundError(errno.ENOENT, "NoSuchBucket"), "is not there", "make the bucket"),
        (PermissionError("Access Denied"), "refuses this user", "credentials"),
        (OSError(errno.EIO, "An error occurred (Unauthorized), HTTP Status code: 401"), "refuses this user", "AWS_ACC"),
        (OSError(5, "XMinioStorageFull: Storage backend has reached its minimum free drive"), "is full", "quota"),
        (OSError(errno.ENOSYS, "A header implies functionality that is not implemented"), "does not know", "CHECKSUM"),
        (
            OSError(errno.EINVAL, "'x-amz-content-sha256' header does not match"),
            "does not know",
            "CHECKSUM",
        ),
        (OSError(errno.EINVAL, "Missing required header for this request: Content-MD5"), "does not know", "CHECKSUM"),
        (PermissionError("SignatureDoesNotMatch"), "refuses this user", "for a store other than AWS .*_CHECKSUM_CALC"),
        (OSError(errno.EINVAL, "Unsupported header 'x-amz-checksum-crc32'"), "does not know", "to when_required"),
        (OSError(errno.EINVAL, "the region 'us-east-1' is wrong; expecting 'eu-central-1'"), "is in another", "REGION"),
        (PermissionError("IllegalLocationConstraintException: unspecified"), "is in another region", "REGION"),
        (TimeoutError("read timed out"), "cannot be reached", "network"),
        (ConnectionResetError("reset"), "cannot be reached", "network"),
    ],
)
def test_an_object_stores_fault_is_one_line_with_its_remedy(error: Exception, line: str, remedy: str) -> None:
    check_fault(ObjectStorage("s3://bucket/run", MemoryFileSystem()), error, line, remedy)


def check_fault(storage: Storage, error: Exception, line: str, remedy: str) -> None:
    found, may_pass = backends.explain(storage, error)
    assert str(found).startswith(f"{storage.url}: {line}")
    assert re.search(f"; [^;]*({remedy})", str(found)), str(found)
    assert "\n" not in str(found)
    assert may_pass == (line == "cannot be reached")


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"owner": 1, "by": "", "checkpoints": [{"step": 1}]}', "\x00"])
def test_an_entry_that_no_run_wrote_is_one_line(tmp_path: Path, url: str, text: str) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "00000001.json").write_text(text)
    with pytest.raises(FinetuneError, match=r"00000001\.json: is not what a run writes"):
        newest_entry(FaultyStorage(url))


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", ".."])
def test_an_entry_names_no_file_elsewhere(tmp_path: Path, url: str, leases: list[Lease], name: str) -> None:
    lease = taken(url, leases)
    entry = lease.entry.as_bytes().replace(b'"records": {}', f'"records": {{"{name}": 1}}'.encode())
    (tmp_path / "store" / "00000001.json").write_bytes(entry)
    with pytest.raises(FinetuneError, match="is not what a run writes"):
        newest_entry(lease.storage)


class Renewed(MemoryFileSystem):  # type: ignore[misc]
    """A client that reads its token when it is made."""

    token = "1"
    cachable = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.mine = Renewed.token

    def put_file(self, source: str, target: str, **options: Any) -> None:
        if self.mine != "3":
            raise PermissionError("The provided token has expired., HTTP Status code: 400")


@pytest.mark.parametrize("token", ["2", "3"])
def test_credentials_that_expired_are_read_again(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run outlives its token. Somebody renews it in the profile's file; else the line says what to do."""
    storage = ObjectStorage("s3://bucket/run", Renewed(use_listings_cache=False))
    for newer in ("2", token):
        monkeypatch.setattr(Renewed, "token", newer)
        if newer == "3":
            backends.attempt(storage, lambda: storage.put("a", Path(__file__)))
            return
        with pytest.raises(FinetuneError, match=r"the credentials have expired .*; renew them"):
            backends.attempt(storage, lambda: storage.put("a", Path(__file__)))


@pytest.mark.parametrize("kept", [b"5\r\n%s\r\n0\r\nx-amz-checksum-crc32:6da4RA==\r\n\r\n", b"nothing at all"])
def test_a_store_that_keeps_something_else_is_found_out_at_once(url: str, tmp_path: Path, kept: bytes) -> None:
    """Some stores write the client's checksum into the object, and answer 200."""
    storage = FaultyStorage(url)

    def spoil(operation: str, path: str) -> None:
        if operation == "create":
            file = tmp_path / "store" / path
            file.write_bytes(kept.replace(b"%s", file.read_bytes()))

    storage.after = spoil
    remedy = "AWS_REQUEST_CHECKSUM_CALCULATION" if b"amz" in kept else "name another place"
    with pytest.raises(FinetuneError, match=rf"00000001\.json: is not what a run writes .*{remedy}"):
        take_lease(storage, None, lambda _: None)


@pytest.mark.parametrize(
    ("lost", "when"),
    [
        ("put lease-00000001.json", "before"),
        ("put lease-00000001.json", "after"),
        ("create 00000001.json", "before"),
        ("create 00000001.json", "after"),
        ("read 00000001.json", "before"),
    ],
)
def test_a_start_outlives_a_dropped_connection(
    lost: str, when: str, url: str, leases: list[Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the write, or after it, so that only the answer is lost."""
    storage, calls = FaultyStorage(url), list[str]()
    monkeypatch.setattr(backends, "FIRST_WAIT_SECONDS", 0.0)

    def drop_once(operation: str, path: str) -> None:
        calls.append(f"{operation} {path}")
        if calls.count(lost) == 1 and calls[-1] == lost:
            raise ConnectionResetError(errno.ECONNRESET, "Server disconnected without sending a response")

    setattr(storage, when, drop_once)
    lease = take_lease(storage, None, lambda _: None)
    leases.append(lease)
    assert newest_entry(FaultyStorage(url)) == lease.entry
    assert calls.count(lost) == 2
