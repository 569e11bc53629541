"""What an object store's client can do is asked of its class, and what the store answers has a line of its own."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from finetune.cli.main import main
from finetune.errors import FinetuneError
from finetune.recipe.sections.results import RunLimits
from finetune.storage import backends, journal
from finetune.storage.backends import ObjectStorage, open_storage
from finetune.storage.journal import take_lease


class OfItsOwn(MemoryFileSystem):  # type: ignore[misc]
    """As s3fs since 2024.12."""

    async def _pipe_file(self, path: str, data: bytes, chunksize: int = 1, mode: str = "overwrite") -> None: ...


class WithoutMode(MemoryFileSystem):  # type: ignore[misc]
    """As s3fs 2024.10: what it is not told about, it swallows."""

    async def _pipe_file(self, path: str, data: bytes, chunksize: int = 1, **kwargs: Any) -> None: ...


class Synchronous(MemoryFileSystem):  # type: ignore[misc]
    """As s3fs 0.4: fsspec's own write, which looks for the name and then opens the file."""


@pytest.mark.parametrize(("system", "is_atomic"), [(OfItsOwn, True), (WithoutMode, False), (Synchronous, False)])
def test_an_imitated_exclusive_write_is_found_out(
    monkeypatch: pytest.MonkeyPatch, system: type[Any], is_atomic: bool
) -> None:
    monkeypatch.setattr(fsspec, "filesystem", lambda scheme, **options: system())
    storage = open_storage("gs://bucket/run")
    assert isinstance(storage, ObjectStorage)
    assert storage.is_atomic == is_atomic  # if not, a start waits and the later entry counts
    if is_atomic:
        assert isinstance(open_storage("s3://bucket/run"), ObjectStorage)
        return
    with pytest.raises(FinetuneError, match=r"keeps no two writers apart; pip install 's3fs>=2024.12'"):
        open_storage("s3://bucket/run")


@pytest.mark.parametrize("operation", ["put", "create"])
def test_a_files_bytes_are_on_the_disk_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """A power cut between the two leaves no named file without its bytes."""
    done: list[tuple[str, str]] = []
    monkeypatch.setattr(backends, "sync", lambda path: done.append(("sync", Path(path).name)))
    for name in ("link", "replace"):
        act = getattr(os, name)
        monkeypatch.setattr(os, name, lambda a, b, act=act: [done.append(("name", Path(a).name)), act(a, b)])
    getattr(open_storage(f"file://{tmp_path}/store"), operation)("00000001.json", b"content")
    assert done[0][0] == "sync"
    assert done[1] == ("name", done[0][1])


CONFLICT = OSError(errno.EIO, "An error occurred (ConditionalRequestConflict) when calling the PutObject operation")
NO_CONDITION = OSError(errno.ENOSYS, "A header you provided implies functionality that is not implemented, code: 501")


class Answering(OfItsOwn):
    """An exclusive write gets these answers of S3 first, as s3fs raises them; then the object is written."""

    answers: ClassVar[list[OSError]] = []

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if mode == "create" and self.answers:
            raise self.answers.pop(0)
        super().pipe_file(path, value, mode=mode, **kwargs)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        if path.startswith("s3://none/"):
            raise FileNotFoundError("The specified bucket does not exist")
        return super().ls(path, detail, **kwargs)


@pytest.fixture
def at_s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    monkeypatch.setattr(fsspec, "filesystem", lambda scheme, **options: Answering())
    monkeypatch.setattr(backends, "CONFLICT_SECONDS", 0.0)
    monkeypatch.setattr(backends, "FIRST_WAIT_SECONDS", 0.0)
    yield f"s3://bucket/{tmp_path.name}"
    Answering.answers, MemoryFileSystem.store, MemoryFileSystem.pseudo_dirs = [], {}, [""]


@pytest.mark.parametrize(
    ("answers", "is_conditional", "is_refused"),
    [
        ([CONFLICT], True, False),
        ([CONFLICT, CONFLICT], True, False),
        ([CONFLICT] * 9, True, True),  # three tries of a write, and three of these
        ([NO_CONDITION], False, False),
        ([CONFLICT, NO_CONDITION], False, False),
        ([PermissionError("Access Denied")], True, True),
    ],
)
def test_what_s3_answers_to_an_exclusive_write(
    at_s3: str, answers: list[OSError], is_conditional: bool, is_refused: bool
) -> None:
    """409 asks for another try. 501: the store has no conditional writes, as one that ignores the condition."""
    Answering.answers = [*answers]
    storage = open_storage(at_s3)
    if is_refused:
        with pytest.raises(FinetuneError, match=re.escape(answers[0].args[-1])):
            take_lease(storage, None, lambda _: None)
        return
    lease = take_lease(storage, None, lambda _: None)
    lease.close()
    assert journal.is_conditional(lease) == is_conditional
    assert not storage.create(lease.entry.name, b"another's")
    Answering.answers = [NO_CONDITION] * (not is_conditional)
    assert storage.create("00000002.json", b"new")
    assert storage.names() == ["00000001.json", "00000002.json", "lease-00000001.json"]


def test_a_bucket_that_is_not_there_is_said(at_s3: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "s3://none/run"]) == 2
    assert capsys.readouterr().err.startswith("s3://none/run: is not there (FileNotFoundError: The specified bucket")
    assert main(["status", f"{at_s3}/"]) == 2
    assert capsys.readouterr().err.startswith(f"{at_s3}: no run is or was here; ")


@pytest.mark.parametrize("url", ["s3://bucket/run/", "hf://buckets/me/runs/a/", "file:///data/store/"])
def test_a_slash_at_the_end_is_no_part_of_the_address(url: str) -> None:
    limits = RunLimits(storage=url)
    assert limits.storage == url[:-1]
