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
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.files import TEMPORARY_PREFIX, remove_folder, sync
from finetune.hub.branch import HubBranch
from finetune.hub.bucket import HubBucket
from finetune.hub.client import classify_error
from finetune.output_stream import one_line
from finetune.paths import open_regular, read_regular
from finetune.recipe.storage_address import HUB_BRANCH, HUB_BUCKET, OBJECT_STORES
from finetune.redaction import hide_secrets, known_secrets
from finetune.wording import install_command

MOST_SMALL_BYTES = 16 * 2**20  # of an entry or a lease: 1,024 ranks' files are 200 kB
CONNECT_SECONDS, READ_SECONDS = 10, 300  # of one request to an object store
ATTEMPTS, FIRST_WAIT_SECONDS = 3, 2.0  # of one operation
CONFLICT_SECONDS, CONFLICTS = 1.0, 3  # S3 answers 409 while another request for the name is on its way
NO_BUCKET = re.compile(r"(?i)bucket does not exist|NoSuchBucket")
WHEN_REQUIRED = "set AWS_REQUEST_CHECKSUM_CALCULATION and AWS_RESPONSE_CHECKSUM_VALIDATION to when_required"
STORE_ANSWERS = (  # of object stores: their words, what is wrong, the remedy
    ("request time", "refuses this machine's clock", "set the clock right"),
    ("region .* wrong|Redirect|LocationConstraint|code: 301", "is in another region", "set AWS_DEFAULT_REGION to it"),
    ("checksum|trailer|sha256|MD5|implement|code: 501", "does not know what this client sends", WHEN_REQUIRED),
)
# A folder on a network may recover from these errors. Others are not tried again.
MAY_PASS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.EHOSTDOWN, errno.ECONNRESET)
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
        """A small object. Raises FileNotFoundError. storage/journal.py looks at its size first."""

    def size(self, path: str) -> int:
        """An object's bytes. Raises FileNotFoundError."""

    def get(self, path: str, target: Path) -> None:
        """Copy an object into a file. Raises FileNotFoundError. storage/restart.py looks at its size first."""

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
        needed = {**OBJECT_STORES, "hf": "hf_xet"}[url.partition("://")[0]]
        remedy = f"in the checkout: {install_command('storage')}" if needed == "s3fs" else f"pip install {needed}"
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
        return read_regular(self._root / path, MOST_SMALL_BYTES, follow=False)

    def size(self, path: str) -> int:
        with open_regular(self._root / path, follow=False) as file:
            return os.fstat(file.fileno()).st_size

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
            entries = self._system.ls(self._root, detail=False)
        except FileNotFoundError as error:
            if NO_BUCKET.search(str(error)):  # no place to begin a run in
                raise
            return []
        return sorted({path.rstrip("/").rpartition("/")[2] for path in entries})

    def read(self, path: str) -> bytes:
        return cast("bytes", self._system.cat_file(f"{self._root}/{path}"))

    def get(self, path: str, target: Path) -> None:
        self._system.get_file(f"{self._root}/{path}", str(target))

    def size(self, path: str) -> int:
        return int(self._system.info(f"{self._root}/{path}")["size"])

    def begin(self) -> None:
        """Nothing waits here."""

    def put(self, path: str, source: Path | bytes) -> None:
        if isinstance(source, bytes):
            self._system.pipe_file(f"{self._root}/{path}", source)
        else:
            self._system.put_file(str(source), f"{self._root}/{path}")

    def create(self, path: str, content: bytes) -> bool:
        for number in range(1, CONFLICTS + 1):
            try:
                self._system.pipe_file(f"{self._root}/{path}", content, mode="create")
                return True
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno == errno.ENOSYS:  # the condition, because writes without it have succeeded before
                    self.is_atomic = False
                    break
                if number == CONFLICTS or not re.search(r"RequestConflict|OperationAborted|code: 409", str(error)):
                    raise
                time.sleep(CONFLICT_SECONDS)
        if self._system.exists(f"{self._root}/{path}"):
            return False
        self.put(path, content)
        return True

    def renew(self) -> None:
        """Read the credentials again: a profile's file may have newer ones."""
        system = self._system
        self._system = type(system)(*system.storage_args, skip_instance_cache=True, **system.storage_options)

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._system.rm(f"{self._root}/{name}", recursive=True)


def explain(storage: Storage, error: BaseException) -> tuple[FinetuneError, bool]:
    """A failed operation as one line, and whether another try may succeed. Expired credentials are read again."""
    if isinstance(error, FinetuneError):
        return error, False
    reason = hide_secrets(one_line(f"{type(error).__name__}: {error}", 300), known_secrets())
    url, number = storage.url, getattr(error, "errno", None)
    in_folder = isinstance(storage, FolderStorage) and isinstance(error, OSError) and number not in (None, *MAY_PASS)
    if isinstance(error, FileNotFoundError | NotADirectoryError) and not in_folder:
        return FinetuneError(f"{url}: is not there ({reason}); make the bucket first, or correct its name"), False
    if isinstance(storage, HubBranch | HubBucket):
        hub_error = classify_error(error)
        if hub_error is None:
            return EnvironmentMismatch(f"{url}: {reason}; report this"), False
        text = hide_secrets(f"{url}: {one_line(hub_error.reason, 300)}", known_secrets())
        if hub_error.status != 429 and FULL_BUCKET.search(hub_error.reason.lower()):
            return FinetuneError(f"{text}; free some space there, or raise its quota"), False
        remedy = "try again later" if hub_error.transient else "check the token's rights (hf auth login) and the name"
        if isinstance(storage, HubBucket) and hub_error.status == 404:
            remedy = f"make the bucket first (hf buckets create {storage.bucket} --private), or correct its name"
        return EnvironmentMismatch(f"{text}; {remedy}"), hub_error.transient
    if number in (errno.ENOSPC, errno.EDQUOT) or FULL_BUCKET.search(str(error).lower()):
        return FinetuneError(f"{url}: is full ({reason}); free some space there, or raise its quota"), False
    if in_folder:
        doing = "refuses this user" if isinstance(error, PermissionError) else "cannot be used"
        return FinetuneError(f"{url}: {doing} ({reason}); check the folder, its rights and its disk"), False
    for words, problem, remedy in STORE_ANSWERS:
        if isinstance(storage, ObjectStorage) and re.search(words, str(error), re.I):
            return FinetuneError(f"{url}: {problem} ({reason}); {remedy}"), False
    if isinstance(storage, ObjectStorage) and re.search("ExpiredToken|token.* expired", str(error)):
        storage.renew()
        return EnvironmentMismatch(f"{url}: the credentials have expired ({reason}); renew them"), True
    refused = isinstance(error, PermissionError) or re.search(r"code: 401|Unauthorized", str(error))
    if refused or type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
        remedy = "check the credentials, for S3 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE"
        if "SignatureDoesNotMatch" in str(error) or "signature" in str(error).lower():
            remedy += f"; for a store other than AWS {WHEN_REQUIRED}"
        return FinetuneError(f"{url}: refuses this user ({reason}); {remedy}"), False
    if isinstance(error, NotImplementedError | TypeError):
        return FinetuneError(f"{url}: this kind of storage cannot do it ({reason}); use s3://, hf:// or file://"), False
    return EnvironmentMismatch(f"{url}: cannot be reached ({reason}); check the network and the address"), True


def attempt(storage: Storage, work: Callable[[], Any], pause: Callable[[float], None] = time.sleep) -> Any:
    """Call `work` until it succeeds, three times at most. Raises FinetuneError, one line."""
    for number in range(1, ATTEMPTS + 1):
        try:
            return work()
        except Exception as error:
            line, may_pass = explain(storage, error)
            if not may_pass or number == ATTEMPTS:
                raise line from error
            pause(FIRST_WAIT_SECONDS * number)
    raise AssertionError
