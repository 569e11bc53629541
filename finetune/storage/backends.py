"""The places that keep a run: a folder, an object store (fsspec), a branch or a bucket on the Hub.

Each has six operations on paths below its address. `create` is the only one that decides anything between two writers:
it writes a small object if there is none with that name, and only one of two writers succeeds.
"""

from __future__ import annotations

import errno
import inspect
import os
import re
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.files import TEMPORARY_PREFIX, remove_folder, sync
from finetune.hub.branch import HubBranch
from finetune.hub.bucket import HubBucket
from finetune.hub.client import classify_error
from finetune.output_stream import one_line
from finetune.recipe.storage_address import HUB_BRANCH, HUB_BUCKET
from finetune.redaction import hide_secrets, known_secrets
from finetune.wording import install_command

CONNECT_SECONDS, READ_SECONDS = 10, 300  # of one request to an object store
FULL_BUCKET = re.compile(r"quota|storage ?full|storage limit|insufficientstorage|\b507\b|no space")


class Storage(Protocol):
    """A place that keeps one run."""

    url: str
    is_shared: bool  # an owner can show life by small writes; else each write is a commit
    is_atomic: bool  # `create` is one operation of the store; else another writer may come in between
    in_one_commit: bool  # `create` also does the puts and removals before it, and readers see all of them or none

    def names(self) -> list[str]:
        """The names at the top, of objects and folders; empty if nothing is there."""

    def read(self, path: str) -> bytes:
        """A small object. Raises FileNotFoundError."""

    def get(self, path: str, target: Path) -> None:
        """Copy an object into a file. Raises FileNotFoundError."""

    def begin(self) -> None:
        """Forget puts and removals that wait, of a publication that failed."""

    def put(self, path: str, source: Path | bytes) -> None:
        """Write an object, or replace it."""

    def create(self, path: str, content: bytes) -> bool:
        """Write an object if there is none. Returns whether this call wrote it."""

    def remove(self, names: Sequence[str]) -> None:
        """Delete names at the top, folders with their content."""


def open_storage(url: str, *, private: bool = True) -> Storage:
    """The storage at an address whose form was checked. Asks nothing of a network. Raises FinetuneError: an extra is
    missing."""
    if url.startswith("file://"):
        return FolderStorage(url)
    if HUB_BRANCH.fullmatch(url):
        return HubBranch(url, private=private)
    try:
        if HUB_BUCKET.fullmatch(url):
            return HubBucket(url, private=private)
        import fsspec

        scheme = url.partition("://")[0]
        options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
        if scheme == "s3":
            options["config_kwargs"] = {"connect_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS}
        storage = ObjectStorage(url, fsspec.filesystem(scheme, **options))
    except ImportError as error:
        needed = {"gs": "gcsfs", "az": "adlfs", "hf": "hf_xet"}.get(url.partition("://")[0])
        remedy = f"pip install {needed}" if needed else f"in the checkout: {install_command('storage')}"
        raise FinetuneError(f"{url}: a package is missing ({' '.join(str(error).split())}); {remedy}") from None
    if scheme == "s3" and not storage.is_atomic:
        raise FinetuneError(
            f"{url}: this s3fs looks before it writes, so it keeps no two writers apart; pip install 's3fs>=2024.12'"
        )
    return storage


class FolderStorage:
    """A folder, perhaps on a network's file system. Each file is complete or absent."""

    is_shared, in_one_commit, is_atomic = True, False, True

    def __init__(self, url: str) -> None:
        self.url, self._root = url, Path(url.removeprefix("file://"))

    def names(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self._root) if not name.startswith(TEMPORARY_PREFIX))
        except FileNotFoundError:
            return []

    def read(self, path: str) -> bytes:
        return (self._root / path).read_bytes()

    def get(self, path: str, target: Path) -> None:
        shutil.copyfile(self._root / path, target)

    def begin(self) -> None:
        """Nothing waits here."""

    def put(self, path: str, source: Path | bytes) -> None:
        temporary = self._written(path, source)
        os.replace(temporary, self._root / path)

    def create(self, path: str, content: bytes) -> bool:
        temporary = self._written(path, content)
        try:
            os.link(temporary, self._root / path)  # complete at once, and fails if the name exists
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        sync(self._root)
        return True

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            remove_folder(self._root / name)

    def _written(self, path: str, source: Path | bytes) -> Path:
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")
        try:
            if isinstance(source, bytes):
                temporary.write_bytes(source)
            else:
                shutil.copyfile(source, temporary)
            sync(temporary)
        except OSError:  # a full disk gets its space back
            temporary.unlink(missing_ok=True)
            raise
        return temporary


class ObjectStorage:
    """A bucket, by an fsspec file system.

    `create` is fsspec's `mode="create"`: If-None-Match on S3. storage/journal.py tries once whether the store obeys it.
    A file system whose own write knows no mode gets fsspec's: look, then write. It is not atomic.
    """

    is_shared, in_one_commit = True, False

    def __init__(self, url: str, system: Any) -> None:
        self.url, self._system, self._root = url, system, url.rstrip("/")
        write = getattr(type(system), "_pipe_file", None)
        self.is_atomic = write is not None and "mode" in inspect.signature(write).parameters

    def names(self) -> list[str]:
        try:
            found = self._system.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return sorted({path.rstrip("/").rpartition("/")[2] for path in found})

    def read(self, path: str) -> bytes:
        return cast("bytes", self._system.cat_file(f"{self._root}/{path}"))

    def get(self, path: str, target: Path) -> None:
        self._system.get_file(f"{self._root}/{path}", str(target))

    def begin(self) -> None:
        """Nothing waits here."""

    def put(self, path: str, source: Path | bytes) -> None:
        if isinstance(source, bytes):
            self._system.pipe_file(f"{self._root}/{path}", source)
        else:
            self._system.put_file(str(source), f"{self._root}/{path}")

    def create(self, path: str, content: bytes) -> bool:
        try:
            self._system.pipe_file(f"{self._root}/{path}", content, mode="create")
        except FileExistsError:
            return False
        return True

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._system.rm(f"{self._root}/{name}", recursive=True)


def explain(storage: Storage, error: BaseException) -> tuple[FinetuneError, bool]:
    """A failed operation as one line, and whether another try may succeed."""
    if isinstance(error, FinetuneError):
        return error, False
    reason = hide_secrets(one_line(f"{type(error).__name__}: {error}", 300), known_secrets())
    url, number = storage.url, getattr(error, "errno", None)
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return FinetuneError(f"{url}: is not there ({reason}); make the bucket first, or correct its name"), False
    if isinstance(storage, HubBranch | HubBucket):
        found = classify_error(error)
        if found is None:
            return EnvironmentMismatch(f"{url}: {reason}; report this"), False
        text = hide_secrets(f"{url}: {one_line(found.reason, 300)}", known_secrets())
        if found.status != 429 and FULL_BUCKET.search(found.reason.lower()):
            return FinetuneError(f"{text}; free some space there, or raise its quota"), False
        remedy = "try again later" if found.transient else "check the token's rights (hf auth login) and the name"
        if isinstance(storage, HubBucket) and found.status == 404:
            remedy = f"make the bucket first (hf buckets create {storage.bucket} --private), or correct its name"
        return EnvironmentMismatch(f"{text}; {remedy}"), found.transient
    if number in (errno.ENOSPC, errno.EDQUOT) or FULL_BUCKET.search(str(error).lower()):
        return FinetuneError(f"{url}: is full ({reason}); free some space there, or raise its quota"), False
    if "request time" in str(error).lower():
        return FinetuneError(f"{url}: refuses this machine's clock ({reason}); set the clock right"), False
    if isinstance(error, PermissionError) or type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
        remedy = "check the rights of the folder"
        if not isinstance(storage, FolderStorage):
            remedy = "check the credentials, for S3 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE"
        return FinetuneError(f"{url}: refuses this user ({reason}); {remedy}"), False
    if isinstance(error, NotImplementedError | TypeError):
        return FinetuneError(f"{url}: this kind of storage cannot do it ({reason}); use s3://, hf:// or file://"), False
    return EnvironmentMismatch(f"{url}: cannot be reached ({reason}); check the network and the address"), True
