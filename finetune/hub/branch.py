"""A branch on the Hub as a run's storage (storage/backends.py): a commit adds a checkpoint and deletes the old one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.errors import EnvironmentMismatch
from finetune.files import TEMPORARY_PREFIX
from finetune.hub.client import check_permission, check_visibility, ensure_repository
from finetune.recipe.storage_address import HUB_BRANCH


class HubBranch:
    """A branch of a model repository. Puts and removals wait for `create`, which sends all of them as one commit.

    The commit names its parent, so the Hub refuses it if another client has written in between.
    """

    is_shared, in_one_commit, is_atomic = False, True, True

    def __init__(self, url: str, *, private: bool, endpoint: str | None = None) -> None:
        from huggingface_hub import HfApi, constants

        match = HUB_BRANCH.fullmatch(url)
        assert match is not None, url
        if constants.HF_HUB_OFFLINE:
            raise EnvironmentMismatch(f"{url}: HF_HUB_OFFLINE is set, so the Hub cannot be asked; unset it")
        self.url, self._repo, self._branch = url, match[1], match[2]
        self._private, self._is_ready = private, False
        self._api = HfApi(endpoint=endpoint)
        self._puts: dict[str, Path | bytes] = {}
        self._removals: list[str] = []

    def check(self) -> None:
        """Raise FinetuneError if this token cannot write there, or the repository is public and was not to be."""
        check_permission(self._api, self._repo)
        check_visibility(self._api, self._repo, public=not self._private)

    def names(self) -> list[str]:
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        try:
            entries = self._api.list_repo_tree(self._repo, revision=self._branch)
            return sorted(entry.path for entry in entries)
        except (RepositoryNotFoundError, RevisionNotFoundError):
            return []

    def read(self, path: str) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            self.get(path, Path(folder) / "object")
            return (Path(folder) / "object").read_bytes()

    def size(self, path: str) -> int:
        for facts in self._api.get_paths_info(self._repo, path, revision=self._branch):
            return int(facts.size)  # type: ignore[union-attr]  # a file's: no folder has an entry's name
        raise FileNotFoundError(f"{self.url}/{path}")

    def get(self, path: str, target: Path) -> None:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=TEMPORARY_PREFIX) as folder:
            # Not into the cache, which would keep a second copy.
            file = self._api.hf_hub_download(self._repo, path, revision=self._branch, local_dir=folder)
            os.replace(file, target)

    def put(self, path: str, source: Path | bytes) -> None:
        self._puts[path] = source

    def remove(self, names: Sequence[str]) -> None:
        self._removals += names

    def create(self, path: str, content: bytes) -> bool:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete
        from huggingface_hub.errors import HfHubHTTPError

        puts, removals = {**self._puts, path: content}, list(dict.fromkeys(self._removals))
        if not self._is_ready:
            ensure_repository(self._api, self._repo, public=not self._private)
            self._api.create_branch(self._repo, branch=self._branch, exist_ok=True)
            self._is_ready = True
        head = self._api.repo_info(self._repo, revision=self._branch).sha
        present = {entry.path for entry in self._api.list_repo_tree(self._repo, revision=head)}
        if path in present:
            return False
        changes: list[Any] = [
            CommitOperationAdd(name, source if isinstance(source, bytes) else str(source))
            for name, source in puts.items()
        ]
        for name in removals:
            if name in present:
                changes.append(CommitOperationDelete(name, is_folder=not name.endswith(".json")))
        try:
            self._api.create_commit(
                self._repo, changes, commit_message=f"run: {path}", revision=self._branch, parent_commit=head
            )
        except HfHubHTTPError as error:
            if error.response.status_code != 412 or path not in self.names():
                raise
            return False
        self._puts, self._removals = {}, []
        return True

    def begin(self) -> None:
        self._puts, self._removals = {}, []
