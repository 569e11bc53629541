"""The loopback Hub against the installed client: what is put in comes out, and each fault is seen by the client."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from tests.support.hub import Hub, running_hub
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


def test_a_folder_is_uploaded_listed_and_deleted(api: HfApi, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/a.txt").write_bytes(SMALL)
    (tmp_path / "b.safetensors").write_bytes(LARGE)
    api.create_repo("me/made")
    api.upload_folder(repo_id="me/made", folder_path=tmp_path)
    assert set(api.list_repo_files("me/made")) == {".gitattributes", "inner/a.txt", "b.safetensors"}
    api.create_commit("me/made", [CommitOperationDelete("inner/", is_folder=True)], commit_message="less")
    assert set(api.list_repo_files("me/made")) == {".gitattributes", "b.safetensors"}
    api.delete_repo("me/made")
    assert not hub.repositories


def test_private_is_seen_by_its_owner_alone(api: HfApi, hub: Hub) -> None:
    filled(api)
    assert api.model_info("me/made").private is True
    with pytest.raises(RepositoryNotFoundError):
        HfApi(endpoint=hub.url, token=False).model_info("me/made")


def test_an_unchanged_file_is_not_sent_again(api: HfApi, hub: Hub) -> None:
    first = filled(api)
    hub.log.clear()
    assert api.create_commit("me/made", additions(), commit_message="again").oid == first
    assert "lfs_upload" not in hub.calls()
    assert "commit" not in hub.calls()


def test_branches_and_tags(api: HfApi, hub: Hub) -> None:
    first = filled(api)
    api.create_branch("me/made", branch="step-100")
    api.create_tag("me/made", tag="v1")
    change = [CommitOperationAdd("notes/small.txt", b"other\n")]
    api.create_commit("me/made", change, commit_message="there", revision="step-100")
    assert hub.content("me/made", "notes/small.txt", "step-100") == b"other\n"
    assert hub.content("me/made", "notes/small.txt") == SMALL
    refs = api.list_repo_refs("me/made")
    assert {branch.name for branch in refs.branches} == {"main", "step-100"}
    assert refs.tags[0].target_commit == first
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_branch("me/made", branch="step-100")


def test_a_commit_onto_a_branch_that_moved_is_refused(api: HfApi) -> None:
    first = filled(api)
    change = [CommitOperationAdd("a.txt", b"1")]
    api.create_commit("me/made", change, commit_message="moved")
    with pytest.raises(HfHubHTTPError, match="412"):
        api.create_commit("me/made", [CommitOperationAdd("a.txt", b"2")], commit_message="late", parent_commit=first)


def test_the_log_shows_tokens_to_the_test_alone(api: HfApi, hub: Hub) -> None:
    filled(api)
    sent = {request.call: request.headers.get("authorization", "") for request in hub.log}
    assert sent["commit"] == f"Bearer {TOKEN}"
    assert sent["lfs_upload"] == ""  # the file store is another house


def test_a_card_with_a_local_base_is_refused(api: HfApi) -> None:
    api.create_repo("me/made")
    card = [CommitOperationAdd("README.md", b"---\nbase_model: /home/me/llama\n---\n")]
    with pytest.raises(ValueError, match="base_model"):
        api.create_commit("me/made", card, commit_message="card")


@pytest.mark.sample(4)
@pytest.mark.parametrize("status", [401, 403, 409, 500])
@pytest.mark.parametrize("call", ["whoami", "create", "validate", "commit"])
def test_a_status_on_demand_is_seen_once(api: HfApi, hub: Hub, call: str, status: int) -> None:
    work: dict[str, Any] = {"whoami": api.whoami, "create": lambda: api.create_repo("me/other")}
    card = [CommitOperationAdd("README.md", b"# hello\n")]
    filled(api)
    hub.fail(call, status=status, message="on demand")
    run = work.get(call, lambda: api.create_commit("me/made", card, commit_message="card"))
    with pytest.raises(HfHubHTTPError) as caught:
        run()
    assert caught.value.response.status_code == status
    run()


def test_retry_after_reaches_the_client(api: HfApi, hub: Hub) -> None:
    filled(api)
    hub.fail("commit", status=429, retry_after=7)
    with pytest.raises(HfHubHTTPError) as caught:
        api.create_commit("me/made", [CommitOperationAdd("a.txt", b"1")], commit_message="more")
    assert caught.value.response.headers["Retry-After"] == "7"


@pytest.mark.parametrize("where", ["cut_request_at", "cut_answer_at"])
def test_a_cut_connection_is_an_error_and_only_a_cut_answer_has_effect(api: HfApi, hub: Hub, where: str) -> None:
    first = filled(api)
    hub.fail("commit", **{where: 20})
    with pytest.raises(Exception, match=r"(?i)reset|disconnect|peer|incomplete|broken"):
        api.create_commit("me/made", [CommitOperationAdd("a.txt", b"1")], commit_message="more")
    moved = hub.repository("me/made").branches["main"] != first
    assert moved == (where == "cut_answer_at")


def test_the_client_itself_retries_the_large_file(api: HfApi, hub: Hub) -> None:
    hub.fail("lfs_upload", cut_request_at=100_000)
    filled(api)  # the client waits a second
    assert hub.calls().count("lfs_upload") == 2
    assert hub.content("me/made", "model.safetensors") == LARGE


def test_a_large_file_spoilt_on_the_way_is_refused(api: HfApi, hub: Hub) -> None:
    hub.fail("lfs_upload", wrong_hash=True)
    with pytest.raises(RuntimeError, match=r"model.safetensors"):
        filled(api)
    assert not hub.large
    assert "model.safetensors" not in hub.repository("me/made").files()


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


@pytest.mark.slow
def test_a_process_that_knows_only_hf_endpoint_takes_the_xet_way(tmp_path: Path) -> None:
    script = """
import sys
from huggingface_hub import CommitOperationAdd, create_commit, create_repo, hf_hub_download
create_repo("me/made", private=True)
content = bytes(range(256)) * 800
create_commit("me/made", [CommitOperationAdd("model.safetensors", content)], commit_message="xet")
assert open(hf_hub_download("me/made", "model.safetensors"), "rb").read() == content
"""
    (tmp_path / "store").mkdir()
    with running_hub(store=tmp_path / "store") as hub:
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
        process = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        assert "xet_token" in hub.calls()
        assert "lfs_upload" not in hub.calls()
        assert hub.repository("me/made").files()["model.safetensors"].sha256 == hashlib.sha256(LARGE).hexdigest()
