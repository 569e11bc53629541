"""Whether an object store's client writes a new object exclusively is asked of its class."""

from __future__ import annotations

from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from finetune.errors import FinetuneError
from finetune.storage.backends import ObjectStorage, open_storage


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
