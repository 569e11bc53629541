"""A storage in front of another one, whose operations a test can fail, delay or interleave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from finetune.storage.backends import FolderStorage


class FaultyStorage(FolderStorage):
    """A folder whose operations call `before` and `after` first, with their name and path. Either may raise."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.before: Callable[[str, str], None] = lambda operation, path: None
        self.after: Callable[[str, str], None] = lambda operation, path: None

    def read(self, path: str) -> bytes:
        self.before("read", path)
        return super().read(path)

    def get(self, path: str, target: Path) -> None:
        self.before("get", path)
        super().get(path, target)

    def put(self, path: str, source: Path | bytes) -> None:
        self.before("put", path)
        super().put(path, source)
        self.after("put", path)

    def create(self, path: str, content: bytes) -> bool:
        self.before("create", path)
        made = super().create(path, content)
        self.after("create", path)
        return made

    def remove(self, names: Sequence[str]) -> None:
        self.before("remove", " ".join(names))
        super().remove(names)
