"""hub.checkpoints: the newest checkpoint on a branch, whatever the Hub or the pruning does meanwhile."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest

from finetune.cli.main import main
from finetune.hub.checkpoints import CheckpointPusher
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Recipe
from finetune.train import main as train
from tests.support.hub import Hub
from tests.support.hub.server import TOKEN
from tests.support.models.tiny import write_chats


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "recipe.yaml").write_text(
        "model: {name_or_path: some/model}\n"
        "data: {train: [{path: json, data_files: rows.jsonl}]}\n"
        f"output_dir: {tmp_path}/run\n"
        "hub: {repo_id: me/devils, checkpoints: steps}\n"
    )
    return load_recipe(tmp_path / "recipe.yaml").recipe


def checkpoint(recipe: Recipe, step: int) -> Path:
    folder = Path(recipe.run_dir) / "checkpoints" / f"step-{step:08}"
    folder.mkdir(parents=True)
    (folder / "model-00000.safetensors").write_bytes(b"\0" * 5000 + bytes([step]))
    (folder / "MANIFEST.json").write_text(json.dumps({"step": step}))
    return folder


def on_branch(hub: Hub) -> set[str]:
    return set(hub.repository("me/devils").files("steps")) - {".gitattributes"}


def names(step: int) -> set[str]:
    return {f"step-{step:08}/{name}" for name in ("model-00000.safetensors", "MANIFEST.json")}


def pusher_of(recipe: Recipe, hub: Hub, lines: list[str], **options: object) -> CheckpointPusher:
    return CheckpointPusher(recipe, lines.append, endpoint=hub.url, **{"pause": lambda _: None} | options)  # type: ignore[arg-type]


def test_the_branch_holds_the_newest_and_main_nothing(recipe: Recipe, hub: Hub) -> None:
    lines: list[str] = []
    pusher = pusher_of(recipe, hub, lines)
    for step in (2, 4):
        checkpoint(recipe, step)
        pusher.push(step)
        pusher.close(wait=True)
    assert on_branch(hub) == names(4)
    assert hub.content("me/devils", "step-00000004/model-00000.safetensors", "steps")[-1] == 4
    assert set(hub.repository("me/devils").files()) <= {".gitattributes"}
    assert hub.repository("me/devils").private
    assert [path.name for path in Path(recipe.run_dir).iterdir()] == ["checkpoints"], "nothing staged is left"


def test_a_checkpoint_pruned_while_it_is_sent_arrives_whole(recipe: Recipe, hub: Hub) -> None:
    pusher = pusher_of(recipe, hub, [])
    folder = checkpoint(recipe, 2)
    pusher.push(2)
    shutil.rmtree(folder)
    pusher.close(wait=True)
    assert on_branch(hub) == names(2)


def test_a_replaced_checkpoint_is_reported_and_only_the_newest_sent(recipe: Recipe, hub: Hub) -> None:
    lines: list[str] = []
    waiting, go_on = threading.Event(), threading.Event()

    def pause(_: float) -> None:
        waiting.set()
        assert go_on.wait(30)

    hub.fail("commit", status=503)
    pusher = pusher_of(recipe, hub, lines, pause=pause)
    for step in (2, 4, 6):
        checkpoint(recipe, step)
    pusher.push(2)
    assert waiting.wait(30)
    pusher.push(4)
    pusher.push(6)
    go_on.set()
    pusher.close(wait=True)
    assert on_branch(hub) == names(6)
    assert lines[0] == "hub.checkpoints: step 4 is replaced by the next one and is not pushed"
    assert hub.calls().count("commit") == 3, "step 2 twice, step 6"


@pytest.mark.sample(1)
@pytest.mark.parametrize("status", [403, 500])
def test_a_refusal_of_the_hub_is_reported_and_the_next_is_sent(recipe: Recipe, hub: Hub, status: int) -> None:
    lines: list[str] = []
    pusher = pusher_of(recipe, hub, lines)
    hub.fail("commit", status=status, times=1 if status == 403 else 3)
    for step in (2, 4):
        checkpoint(recipe, step)
        pusher.push(step)
        pusher.close(wait=True)
    assert f"hub.checkpoints: step 2 was not pushed: the Hub answered {status}" in "\n".join(lines)
    assert on_branch(hub) == names(4)
    assert TOKEN not in "\n".join(lines)


def test_without_a_branch_nothing_is_asked_of_the_hub(recipe: Recipe, hub: Hub) -> None:
    plain = recipe.model_copy(update={"hub": recipe.hub.model_copy(update={"checkpoints": None})})
    pusher = pusher_of(plain, hub, [])
    checkpoint(plain, 2)
    pusher.push(2)
    pusher.close(wait=True)
    assert hub.calls() == []


@pytest.mark.parametrize(
    ("hub_section", "text"),
    [
        ("{checkpoints: steps}", "hub.checkpoints: hub.repo_id is not set; add hub.repo_id: owner/name"),
        ("{repo_id: a/b, checkpoints: main}", "hub.checkpoints: is also hub.revision, the result's branch"),
    ],
)
def test_bad_sections_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hub_section: str, text: str
) -> None:
    sections = "model: {name_or_path: m}\ndata: {train: [{path: json, data_files: r.jsonl}]}\n"
    (tmp_path / "r.yaml").write_text(f"{sections}hub: {hub_section}\n")
    assert main(["check", str(tmp_path / "r.yaml")]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.thorough
def test_a_training_sends_its_checkpoints(
    tmp_path: Path, tiny_llama: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    chats = write_chats(tmp_path / "chats.jsonl", [30, 45])
    (tmp_path / "recipe.yaml").write_text(
        f"model: {{name_or_path: {tiny_llama}, dtype: float32}}\n"
        "lora: {r: 2}\n"
        f"data: {{train: [{{path: json, data_files: {chats}}}], max_length: 128}}\n"
        "training: {global_batch_size: 1, max_steps: 2, mixed_precision: 'no'}\n"
        "samples: {count: 0}\n"
        "save_steps: 1\n"
        f"output_dir: {tmp_path}/run\n"
        "hub: {repo_id: me/devils, checkpoints: steps}\n"
    )
    assert train([str(tmp_path / "recipe.yaml")]) == 0
    saved = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert on_branch(hub) == {f"step-00000002/{file.name}" for file in saved.iterdir()}
    for file in saved.iterdir():
        sent = hub.content("me/devils", f"step-00000002/{file.name}", "steps")
        assert sent == file.read_bytes()
        assert str(tmp_path).encode() not in sent
    assert "was not pushed" not in capsys.readouterr().out
