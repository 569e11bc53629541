"""A bucket on the Hub as a run's storage (storage/backends.py): files that are overwritten in place.

Contents go by Xet (the package hf_xet), names by the Hub's API. huggingface_hub's file system is not used: it answers
from listings that it made before, so an owner would not see that another start took its run, and 1.5's takes
`buckets` for a user's name.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.recipe.storage_address import HUB_BUCKET


class HubBucket:
    """A place in a bucket. The Hub has no conditional writes there, so `create` looks first and then writes."""

    is_shared, in_one_commit, is_atomic = True, False, False

    def __init__(self, url: str, *, private: bool, endpoint: str | None = None) -> None:
        import hf_xet  # noqa: F401  # not on every platform
        from huggingface_hub import HfApi, constants

        match = HUB_BUCKET.fullmatch(url)
        assert match is not None, url
        if constants.HF_HUB_OFFLINE:
            raise EnvironmentMismatch(f"{url}: HF_HUB_OFFLINE is set, so the Hub cannot be asked; unset it")
        self.url, self.bucket, self._root = url, match[1], match[2]
        self._private, self._api = private, HfApi(endpoint=endpoint)

    def check(self) -> None:
        """Raise FinetuneError if the bucket is public and was not to be."""
        if self._private and not self._api.bucket_info(self.bucket).private:
            raise FinetuneError(
                f"{self.url}: the bucket is public, which was not requested; name a private one, or set "
                "hub.private: false"
            )

    def names(self) -> list[str]:
        below = len(self._root) + 1
        return sorted({path[below:].partition("/")[0] for path in self._paths(recursive=False)})

    def read(self, path: str) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            self.get(path, Path(folder) / "object")
            return (Path(folder) / "object").read_bytes()

    def size(self, path: str) -> int:
        for facts in self._api.get_bucket_paths_info(self.bucket, [f"{self._root}/{path}"]):
            return int(facts.size)
        raise FileNotFoundError(f"{self.url}/{path}")

    def get(self, path: str, target: Path) -> None:
        from huggingface_hub.errors import EntryNotFoundError

        source = f"{self._root}/{path}"
        try:
            with _without_bars():
                self._api.download_bucket_files(self.bucket, [(source, target)], raise_on_missing_files=True)
        except EntryNotFoundError as error:
            raise FileNotFoundError(f"{self.url}/{path}") from error

    def begin(self) -> None:
        """Nothing waits here."""

    def put(self, path: str, source: Path | bytes) -> None:
        # One at a time: a client before 2.4 passes over a file that the Hub refused beside others.
        with _without_bars():
            self._api.batch_bucket_files(self.bucket, add=[(source, f"{self._root}/{path}")])

    def create(self, path: str, content: bytes) -> bool:
        if list(self._api.get_bucket_paths_info(self.bucket, [f"{self._root}/{path}"])):
            return False
        self.put(path, content)
        return True

    def remove(self, names: Sequence[str]) -> None:
        below = len(self._root) + 1
        paths = [path for path in self._paths(recursive=True) if path[below:].partition("/")[0] in names]
        if paths:
            self._api.batch_bucket_files(self.bucket, delete=paths)

    def _paths(self, *, recursive: bool) -> Iterator[str]:
        """Paths of files, and of folders if not `recursive`. The Hub matches letters: `run` names `run2/a` too."""
        from huggingface_hub.errors import EntryNotFoundError

        inside = f"{self._root}/"
        try:
            for entry in self._api.list_bucket_tree(self.bucket, inside, recursive=recursive):
                if entry.path.startswith(inside):
                    yield entry.path
        except EntryNotFoundError:
            return


@contextmanager
def _without_bars() -> Iterator[None]:
    """Show no progress bars: the client draws them for each small object, also into a file."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # imported there under their own names
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()
