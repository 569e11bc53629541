"""The loopback Hub against the installed client and git: what is put in comes out. Pushes meet its faults."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, HfApi

from tests.support.hub import Hub
from tests.support.hub.server import TOKEN
from tests.support.hub.state import Blob, git_object, tree_oids

SMALL = b"a small text file\n"
LARGE = bytes(range(256)) * 800


@pytest.fixture
def api(hub: Hub) -> HfApi:
    return HfApi(endpoint=hub.url, token=TOKEN)


def additions() -> list[CommitOperationAdd]:
    files = {"notes/small.txt": SMALL, "model.safetensors": LARGE}
    return [CommitOperationAdd(path, content) for path, content in files.items()]


def filled(api: HfApi, name: str = "me/made") -> str:
    api.create_repo(name, private=True)
    return api.create_commit(name, additions(), commit_message="both kinds").oid


def test_what_is_committed_is_read_back(api: HfApi, hub: Hub, tmp_path: Path) -> None:
    oid = filled(api)
    folder = Path(api.snapshot_download("me/made", cache_dir=tmp_path))
    assert folder.name == oid
    assert (folder / "notes/small.txt").read_bytes() == SMALL
    assert (folder / "model.safetensors").read_bytes() == LARGE
    assert hub.repository("me/made").files()["model.safetensors"].sha256 == hashlib.sha256(LARGE).hexdigest()
    kinds = {entry.path: getattr(entry, "lfs", None) is not None for entry in api.list_repo_tree("me/made")}
    assert kinds == {".gitattributes": False, "model.safetensors": True, "notes": False}
    assert [commit.title for commit in api.list_repo_commits("me/made")] == ["both kinds", "initial commit"]


def test_git_says_the_same_hashes(tmp_path: Path) -> None:
    files = {"b.txt": b"two\n", "b/c.txt": b"deep\n", "a.txt": b"one\n", "b-d": b""}
    for path, content in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(content)
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    tree = subprocess.run([*git, "write-tree"], check=True, capture_output=True, text=True).stdout.strip()
    assert tree_oids({path: Blob(content) for path, content in files.items()})[""] == tree
    assert git_object("blob", b"one\n") == "5626abf0f72e58d7a153368ba57db4c673c0e171"
