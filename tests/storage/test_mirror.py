"""The newest checkpoint on a storage, whatever the storage or the pruning does meanwhile."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.cli.main import main
from finetune.errors import FinetuneError
from finetune.hub.branch import HubBranch
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Recipe
from finetune.storage import mirror as mirror_module
from finetune.storage.backends import Storage
from finetune.storage.journal import Entry, newest_entry, take_lease
from finetune.storage.mirror import Mirror, hidden, with_own_paths
from tests.support.hub import Hub
from tests.support.hub.server import TOKEN
from tests.support.runs.faulty_storage import FaultyStorage

SECRET = "hf_" + "Q" * 34


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "recipe.yaml").write_text(
        f"model: {{name_or_path: {tmp_path}/base}}\n"
        "data: {train: [{path: json, data_files: rows.jsonl}]}\n"
        f"output_dir: {tmp_path}/run\n"
        f"run: {{storage: 'file://{tmp_path}/store'}}\n"
    )
    (tmp_path / "run").mkdir()
    state = {"state": "running", "step": 0, "command": f"finetune train {tmp_path}/recipe.yaml", "process": 1}
    identity = {"model.name_or_path": f"{tmp_path}/base", "training.seed": 1, "base": {"name": f"{tmp_path}/base"}}
    (tmp_path / "run" / "run_state.json").write_text(json.dumps(state | {"identity": identity}))
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    return load_recipe(tmp_path / "recipe.yaml").recipe


def on_the_hub(recipe: Recipe) -> Recipe:
    hub = recipe.hub.model_copy(update={"checkpoints": "steps", "repo_id": "me/devils"})
    return recipe.model_copy(update={"hub": hub, "run": recipe.run.model_copy(update={"storage": None})})


def checkpoint(recipe: Recipe, step: int) -> Path:
    folder = Path(recipe.run_dir) / "checkpoints" / f"step-{step:08}"
    folder.mkdir(parents=True)
    (folder / "model-00000.safetensors").write_bytes(b"\0" * 5000 + bytes([step]))
    (folder / "MANIFEST.json").write_text(json.dumps({"step": step}))
    return folder


def mirror_of(recipe: Recipe, lines: list[str], storage: Storage | None = None, **options: Any) -> Mirror:
    storage = storage or FaultyStorage(str(recipe.run.storage))
    lease = take_lease(storage, newest_entry(storage), lambda _: None)
    return Mirror(recipe, lease, lines.append, **{"pause": lambda _: None} | options)


def entry_in(recipe: Recipe) -> Entry:
    entry = newest_entry(FaultyStorage(str(recipe.run.storage)))
    assert entry is not None
    return entry


def steps_in(recipe: Recipe) -> list[int]:
    """The checkpoints on the storage, each file compared with the one that was saved."""
    storage, entry = FaultyStorage(str(recipe.run.storage)), entry_in(recipe)
    for saved in entry.checkpoints:
        assert storage.read(saved.path("model-00000.safetensors"))[-1] == saved.step
        assert set(saved.files) == {"model-00000.safetensors", "MANIFEST.json"}
    return [saved.step for saved in entry.checkpoints]


def push_each(mirror: Mirror, recipe: Recipe, steps: list[int], best: Callable[[int], int | None]) -> None:
    for step in steps:
        checkpoint(recipe, step)
        mirror.push(step, best(step))
        thread = mirror._thread
        if thread is not None:
            thread.join()


def test_it_keeps_as_many_as_the_folder_and_the_best(recipe: Recipe) -> None:
    lines: list[str] = []
    mirror = mirror_of(recipe, lines)
    push_each(mirror, recipe, [2, 4, 6, 8], lambda step: 2)
    mirror.close(wait=True)
    assert steps_in(recipe) == [2, 6, 8]
    assert lines == []
    left = {path.name for path in Path(recipe.run_dir).iterdir()}
    assert left == {"checkpoints", "run_state.json", "metrics.jsonl"}, "nothing staged is left"
    store = Path(str(recipe.run.storage).removeprefix("file://"))
    held = list(store.rglob("*.safetensors"))
    assert len(held) == 3, "no file of a checkpoint that is not listed"


def test_the_best_one_that_was_passed_over_is_sent_later(recipe: Recipe) -> None:
    mirror = mirror_of(recipe, [])
    for step in (2, 4, 6, 8):
        checkpoint(recipe, step)
    mirror.push(8, 4)
    mirror.close(wait=True)
    assert steps_in(recipe) == [4, 8]


def test_a_checkpoint_pruned_while_it_is_sent_arrives_whole(recipe: Recipe) -> None:
    mirror = mirror_of(recipe, [])
    folder = checkpoint(recipe, 2)
    mirror.push(2, None)
    shutil.rmtree(folder)
    mirror.close(wait=True)
    assert steps_in(recipe) == [2]


def test_training_never_waits_and_only_the_newest_is_sent(recipe: Recipe) -> None:
    """The network stands still in the first upload: three saves return at once."""
    lines: list[str] = []
    storage = FaultyStorage(str(recipe.run.storage))
    waiting, go_on = threading.Event(), threading.Event()
    mirror = mirror_of(recipe, lines, storage)

    def stand_still(operation: str, path: str) -> None:
        if operation == "put" and not path.startswith("lease"):
            waiting.set()
            assert go_on.wait(30)

    storage.before = stand_still
    for step in (2, 4, 6):
        checkpoint(recipe, step)
    mirror.push(2, None)
    assert waiting.wait(30)
    mirror.push(4, None)
    mirror.push(6, None)
    go_on.set()
    mirror.close(wait=True)
    assert steps_in(recipe) == [2, 6]
    assert lines[0] == "run.storage: step 4 is replaced by the next one and is not sent"


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_fault_that_passes_is_tried_again_and_then_reported(recipe: Recipe, times: int) -> None:
    lines: list[str] = []
    storage = FaultyStorage(str(recipe.run.storage))
    mirror = mirror_of(recipe, lines, storage)
    left = [times]

    def fail(operation: str, path: str) -> None:
        if operation == "put" and path.endswith("MANIFEST.json") and left[0]:
            left[0] -= 1
            raise ConnectionResetError("reset by peer")

    storage.before = fail
    push_each(mirror, recipe, [2, 4], lambda step: None)
    mirror.close(wait=True)
    assert steps_in(recipe) == ([2, 4] if times < 3 else [4])
    assert ("step 2 was not sent" in "\n".join(lines)) == (times == 3)
    assert all("; the training continues" in line for line in lines if "not sent" in line)


def test_after_the_bound_the_run_ends_and_says_what_is_missing(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_module, "END_SECONDS", 0.2)
    lines: list[str] = []
    storage, hold = FaultyStorage(str(recipe.run.storage)), threading.Event()
    mirror = mirror_of(recipe, lines, storage)
    storage.before = lambda operation, path: None if path.startswith("lease") else (hold.wait(30), None)[1]
    checkpoint(recipe, 2)
    mirror.push(2, None)
    mirror.close(wait=True)
    hold.set()
    assert lines[0].startswith("waiting for the last checkpoint to reach file:///")
    assert lines[1] == f"run.storage: not all has arrived after 0.2 s; it is in {recipe.run_dir}"


def test_a_stop_waits_for_half_of_the_grace_period(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_GRACE_SECONDS", "30")
    lines: list[str] = []
    storage, hold = FaultyStorage(str(recipe.run.storage)), threading.Event()
    mirror = mirror_of(recipe, lines, storage)
    state = Path(recipe.run_dir) / "run_state.json"
    state.write_text(state.read_text().replace("running", "stopped"))
    storage.before = lambda operation, path: None if path.startswith("lease") else (hold.wait(0.3), None)[1]
    checkpoint(recipe, 2)
    mirror.push(2, None)
    mirror.close(wait=True)
    assert lines[0].endswith(", 15 s at most")


def test_a_superseded_run_ends_with_one_line(recipe: Recipe) -> None:
    mirror = mirror_of(recipe, [])
    push_each(mirror, recipe, [2], lambda step: None)
    mirror._lease.stop_renewing()  # it was asleep for a while
    mirror_of(recipe, [])
    checkpoint(recipe, 4)
    mirror.push(4, None)
    with pytest.raises(FinetuneError, match="has taken over this run") as caught:
        mirror.close(wait=True)
    assert "\n" not in str(caught.value)
    assert steps_in(recipe) == [2]


class TestWhatIsSent:
    def test_no_local_path(self, recipe: Recipe, tmp_path: Path) -> None:
        (tmp_path / "run" / "recipe.yaml").write_text((tmp_path / "recipe.yaml").read_text())
        mirror = mirror_of(recipe, [])
        push_each(mirror, recipe, [2], lambda step: None)
        mirror.close(wait=True)
        sent = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
        assert {"recipe.yaml", "run_state.json", "metrics.jsonl", "MANIFEST.json"} <= {path.name for path in sent}
        for path in sent:
            if path.name != "recipe.yaml":  # it names the storage itself
                assert str(tmp_path).encode() not in path.read_bytes(), path

    def test_the_same_path_is_the_same_run_and_another_is_not(self, tmp_path: Path) -> None:
        stored = {"dpo.reference": hidden("/models/a"), "base": {"name": hidden("/models/b")}, "list": [hidden("/c")]}
        own = {"dpo.reference": "/models/a", "base": {"name": "/models/b"}, "list": ["/c"]}
        assert with_own_paths(stored, own) == own
        assert with_own_paths(stored, {"dpo.reference": "/models/x"})["dpo.reference"] == hidden("/models/a")
        assert hidden("/models/a").endswith(hashlib.sha256(b"/models/a").hexdigest()[:16])

    @pytest.mark.parametrize("name", ["samples.jsonl", "metrics.jsonl", "report.html", "receipt.json"])
    def test_no_secret(self, recipe: Recipe, name: str) -> None:
        """The file with the secret stays here; the checkpoint goes. A growing file is searched to its end."""
        lines: list[str] = []
        mirror = mirror_of(recipe, lines)
        file = Path(recipe.run_dir) / name
        file.write_text('{"step": 1}\n')
        push_each(mirror, recipe, [2], lambda step: None)
        assert name in entry_in(recipe).records
        file.write_text(f'{{"step": 1}}\n{{"answer": "{SECRET}"}}\n')
        push_each(mirror, recipe, [4], lambda step: None)
        mirror.close(wait=True)
        assert steps_in(recipe) == [2, 4]
        assert name not in entry_in(recipe).records
        assert len(lines) == 1
        assert lines[0].startswith(f"run.storage: {name}:")
        assert lines[0].endswith("it is not sent")
        store = Path(str(recipe.run.storage).removeprefix("file://"))
        assert not any(SECRET.encode() in path.read_bytes() for path in store.rglob("*") if path.is_file())

    def test_no_link_is_followed(self, recipe: Recipe, tmp_path: Path) -> None:
        (tmp_path / "private.txt").write_text("private")
        os.symlink(tmp_path / "private.txt", Path(recipe.run_dir) / "report.html")
        mirror = mirror_of(recipe, [])
        push_each(mirror, recipe, [2], lambda step: None)
        mirror.close(wait=True)
        assert "report.html" not in entry_in(recipe).records


class TestHubBranch:
    """hub.checkpoints: one commit adds the new checkpoint and deletes the old one."""

    @pytest.fixture(autouse=True)
    def client(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    def on_branch(self, hub: Hub) -> set[str]:
        return {path for path in hub.repository("me/devils").files("steps") if path.endswith(".safetensors")}

    def branch(self, hub: Hub) -> HubBranch:
        return HubBranch("hf://me/devils@steps", private=True, endpoint=hub.url)

    def test_it_holds_the_newest_and_main_nothing(self, recipe: Recipe, hub: Hub) -> None:
        recipe = on_the_hub(recipe)
        mirror = mirror_of(recipe, [], self.branch(hub))
        push_each(mirror, recipe, [2, 4], lambda step: None)
        mirror.close(wait=True)
        (path,) = self.on_branch(hub)
        assert path == "00000003/checkpoints/step-00000004/model-00000.safetensors"
        assert hub.content("me/devils", path, "steps")[-1] == 4
        assert set(hub.repository("me/devils").files()) <= {".gitattributes"}
        assert hub.repository("me/devils").private
        assert hub.calls().count("commit") == 4, "the start, two checkpoints, the last records"

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("status", [403, 500])
    def test_a_refusal_is_reported_and_the_next_is_sent(self, recipe: Recipe, hub: Hub, status: int) -> None:
        lines: list[str] = []
        recipe = on_the_hub(recipe)
        mirror = mirror_of(recipe, lines, self.branch(hub))
        hub.fail("commit", status=status, times=1 if status == 403 else 3)
        push_each(mirror, recipe, [2, 4], lambda step: None)
        mirror.close(wait=True)
        told = "\n".join(lines)
        assert f"hub.checkpoints: step 2 was not sent: hf://me/devils@steps: the Hub answered {status}" in told
        assert len(self.on_branch(hub)) == 1
        assert TOKEN not in told

    def test_a_commit_between_is_seen(self, recipe: Recipe, hub: Hub) -> None:
        """Another start commits after this owner has read the branch's head: the Hub refuses this one's commit."""
        recipe = on_the_hub(recipe)
        mine, other = self.branch(hub), self.branch(hub)
        mirror = mirror_of(recipe, [], mine)
        push_each(mirror, recipe, [2], lambda step: None)
        commit = mine._api.create_commit

        def commit_late(*words: Any, **options: Any) -> Any:
            if not hub.repository("me/devils").files("steps").get("00000003.json"):
                take_lease(other, newest_entry(other), lambda _: None)
            return commit(*words, **options)

        mine._api.create_commit = commit_late  # type: ignore[method-assign]
        checkpoint(recipe, 4)
        mirror.push(4, None)
        with pytest.raises(FinetuneError, match="hf://me/devils@steps: another start has taken over this run;"):
            mirror.close(wait=True)
        entry = newest_entry(self.branch(hub))
        assert entry is not None
        assert (entry.owner, [saved.step for saved in entry.checkpoints]) == (3, [2])
        assert entry.by == "", "a branch may be public, so it names no host"

    def test_what_was_sent_comes_back(self, recipe: Recipe, hub: Hub, tmp_path: Path) -> None:
        recipe = on_the_hub(recipe)
        mirror = mirror_of(recipe, [], self.branch(hub))
        push_each(mirror, recipe, [2], lambda step: None)
        storage = self.branch(hub)
        entry = newest_entry(storage)
        assert entry is not None
        storage.get(entry.checkpoints[0].path("model-00000.safetensors"), tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == b"\0" * 5000 + b"\2"
        assert [path.name for path in tmp_path.glob(".tmp-*")] == []


SECTIONS = "model: {name_or_path: m}\ndata: {train: [{path: json, data_files: r.jsonl}]}\n"


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ("hub: {checkpoints: steps}", "hub.checkpoints: hub.repo_id is not set; add hub.repo_id: owner/name"),
        ("hub: {repo_id: a/b, checkpoints: main}", "hub.checkpoints: is also hub.revision, the result's branch"),
        ("run: {storage: s3://bucket}", "run.storage: s3://bucket names a bucket and no place in it for this run; "),
        ("run: {storage: hf://me/devils}", "names a repository and no branch; write hf://me/devils@BRANCH"),
        ("run: {storage: /mnt/bucket/run}", "run.storage: /mnt/bucket/run is no address of a storage; write s3://"),
        ("run: {storage: https://bucket.s3.amazonaws.com/x}", "is no address of a storage; write s3://"),
        ("run: {storage: s3://bucket/../x}", "is no address of a storage"),
        ("run: {storage: file://relative/x}", "is no address of a storage"),
        ("run: {storage: file:///}", "is no address of a storage"),
        ("run: {storage: hf://me/devils@main}\nhub: {repo_id: me/devils, push: true}", "is also hub.revision"),
        (
            "run: {storage: hf://buckets/me/runs/devils}\nbudget: {nodes: 2}",
            "run.storage: a Hub bucket does not keep two writers apart, and budget.nodes is 2; name an s3:// bucket",
        ),
        (
            "run: {storage: s3://b/x}\nhub: {repo_id: a/b, checkpoints: steps}",
            "run.storage: hub.checkpoints names a place too; remove one of the two",
        ),
    ],
)
def test_bad_sections_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], section: str, text: str) -> None:
    (tmp_path / "r.yaml").write_text(f"{SECTIONS}{section}\n")
    assert main(["check", str(tmp_path / "r.yaml")]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/runs/devils",
        "gs://bucket/x",
        "az://container/x",
        "hf://buckets/me/runs/devils",
        "hf://me/devils@steps",
        "file:///mnt/shared/runs store/devils",
    ],
)
def test_good_addresses(tmp_path: Path, url: str) -> None:
    (tmp_path / "r.yaml").write_text(f"{SECTIONS}run: {{storage: '{url}'}}\n")
    assert load_recipe(tmp_path / "r.yaml").recipe.run.storage == url
