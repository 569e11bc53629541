"""A training that goes on in an empty folder, from its storage alone; and what such a start refuses."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from finetune.errors import FinetuneError
from finetune.hub.branch import HubBranch
from finetune.run_folder.checkpoint import step_folder
from finetune.storage import restart
from finetune.storage.journal import newest_entry, take_lease
from finetune.train import main
from finetune.training import loop, worst_step
from tests.support.hub import Hub
from tests.support.models.tiny import write_chats
from tests.support.runs.faulty_storage import FaultyStorage
from tests.support.runs.overfitting import STEPS, document, overfitting, write_sets
from tests.support.runs.recipes import tiny_lora, write_recipe


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", [30, 45, 60, 80, 25, 100, 40, 55])


@pytest.fixture
def recipe(tmp_path: Path, tiny_llama: Path, chats: Path) -> Path:
    steps: dict[str, Any] = {"training": {"max_steps": 4}, "eval_steps": 2, "save_steps": 1, "save_total_limit": 2}
    steps["run"] = {"storage": f"file://{tmp_path}/store"}
    return write_recipe(tmp_path, tiny_lora(tiny_llama, chats, **steps, output_dir=str(tmp_path / "first")))


@pytest.fixture(autouse=True)
def no_memory_of_records() -> Iterator[None]:
    """Each start is a process of its own; these share one."""
    restart._fetched_records.cache_clear()
    yield
    restart._fetched_records.cache_clear()


def test_a_folder_of_somebody_is_refused_before_anything_is_written(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frames = [tmp_path / "store" / f"{number:08d}" / "left.png" for number in range(3)]
    for frame in frames:
        frame.parent.mkdir(parents=True)
        frame.write_text("image")
    assert main([str(recipe)]) == 2
    assert "run.storage: file://" in (error := capsys.readouterr().err)
    assert "holds other files (00000000, 00000001, 00000002) and no run; name another place" in error
    assert all(frame.read_text() == "image" for frame in frames)
    assert not (tmp_path / "first").exists()


def lose_machine_after(monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    """The machine goes away after a step. The start ends by an error that saves nothing."""
    original, count = loop.optimizer_step, [0]
    assert worst_step.optimizer_step is original

    def lost(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] > last:
            raise ConnectionAbortedError("the machine went away")
        return original(*args, **kwargs)

    monkeypatch.setattr(loop, "optimizer_step", lost)


def lose(monkeypatch: pytest.MonkeyPatch, recipe: Path, last: int) -> None:
    with monkeypatch.context() as fault:
        lose_machine_after(fault, last)
        with pytest.raises(ConnectionAbortedError):
            main([str(recipe)])
    shutil.rmtree(recipe.parent / "first")
    restart._fetched_records.cache_clear()


def losses(run: Path) -> list[tuple[Any, ...]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["kind"], line["step"], line["loss"]) for line in lines if line["kind"] != "phase"]


def same_adapters(run: Path, other: Path) -> bool:
    ours, theirs = (load_file(each / "adapter" / "adapter_model.safetensors") for each in (run, other))
    return ours.keys() == theirs.keys() and all(bool((ours[name] == theirs[name]).all()) for name in ours)


def test_an_empty_machine_goes_on_to_the_bit(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(recipe), f"output_dir={tmp_path}/whole", "run.storage=null"]) == 0
    lose(monkeypatch, recipe, 3)
    capsys.readouterr()
    assert main([str(recipe), f"output_dir={tmp_path}/second"]) == 0
    told = capsys.readouterr()
    assert f"file://{tmp_path}/store: the checkpoint of step 3 is in {tmp_path}/second now" in told.err
    assert f"resumed from step 3 ({tmp_path}/second/checkpoints/step-00000003)" in told.err
    assert losses(tmp_path / "second") == losses(tmp_path / "whole")
    assert same_adapters(tmp_path / "second", tmp_path / "whole")
    # The run is finished there too: a third machine exports the same again.
    restart._fetched_records.cache_clear()
    assert main([str(recipe), f"output_dir={tmp_path}/third"]) == 0
    assert same_adapters(tmp_path / "third", tmp_path / "whole")


@pytest.mark.slow
def test_the_best_step_before_the_loss_is_exported_after_it(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one checkpoint kept, the best evaluation's own one is not the newest."""
    storage = {"storage": f"file://{tmp_path}/store"}
    recipe = overfitting(tmp_path, tiny_llama, write_sets(tmp_path), run=storage)
    assert main([str(recipe), f"output_dir={tmp_path}/whole", "run.storage=null"]) == 0
    best = document(tmp_path / "whole", "run_state.json")["exported"]["step"]
    assert best < STEPS - 2, "else this test says nothing"
    with monkeypatch.context() as fault:
        lose_machine_after(fault, STEPS - 2)
        with pytest.raises(ConnectionAbortedError):
            main([str(recipe)])
    restart._fetched_records.cache_clear()
    assert main([str(recipe), f"output_dir={tmp_path}/second"]) == 0
    assert document(tmp_path / "second", "run_state.json")["exported"]["step"] == best
    assert same_adapters(tmp_path / "second", tmp_path / "whole")


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("how", ["bit", "short", "huge", "gone", "no manifest"])
@pytest.mark.sample(1)
def test_a_damaged_newest_one_is_named_and_the_one_before_used(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    lose(monkeypatch, recipe, 3)
    entry = newest_entry(FaultyStorage(f"file://{tmp_path}/store"))
    assert entry is not None
    file = tmp_path / "store" / entry.checkpoints[-1].path("model-00000.safetensors")
    spoil: dict[str, Callable[[], Any]] = {
        "bit": lambda: damage(file),
        "short": lambda: file.write_bytes(file.read_bytes()[:-100]),
        "huge": lambda: os.truncate(file, 2**40),
        "gone": file.unlink,
        "no manifest": (file.parent / "MANIFEST.json").unlink,
    }
    spoil[how]()
    capsys.readouterr()
    assert main([str(recipe)]) == 0
    told = capsys.readouterr().err
    assert f"store/{entry.checkpoints[-1].folder}: step 3: damaged, not used: " in told
    assert "resumed from step 2" in told
    assert list((tmp_path / "first").glob("step-*")) == [], "what was passed over stays in no folder of the run"


@pytest.mark.slow
def test_all_damaged_is_one_line_and_nothing_is_written(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lose(monkeypatch, recipe, 3)
    for file in (tmp_path / "store").rglob("model-00000.safetensors"):
        damage(file)
    capsys.readouterr()
    assert main([str(recipe)]) == 2
    assert "none of its checkpoints is complete; delete it" in capsys.readouterr().err
    assert not (tmp_path / "first").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["training.learning_rate=0.5"], "/store: holds a run of another recipe:"),
        (["training.resume=never"], "/store: holds a run, saved at step 1, and training.resume is never; name another"),
    ],
)
@pytest.mark.sample(1)
def test_another_run_is_refused_before_anything_is_written(
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    line: str,
) -> None:
    lose(monkeypatch, recipe, 1)
    before = sorted(path.name for path in (tmp_path / "store").iterdir())
    capsys.readouterr()
    assert main([str(recipe), *words]) == 2
    assert line in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == before
    assert not (tmp_path / "first").exists()


@pytest.mark.slow
def test_a_folder_with_another_run_is_not_overwritten(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lose(monkeypatch, recipe, 2)
    other = tmp_path / "other"
    with monkeypatch.context() as fault:
        lose_machine_after(fault, 1)
        with pytest.raises(ConnectionAbortedError):
            main([str(recipe), f"output_dir={other}", "run.storage=null", "training.learning_rate=0.5"])
    state = (other / "run_state.json").read_bytes()
    capsys.readouterr()
    assert main([str(recipe), f"output_dir={other}"]) == 2
    assert f"{other}: holds a run of another recipe" in capsys.readouterr().err
    assert (other / "run_state.json").read_bytes() == state


@pytest.mark.slow
def test_a_folder_that_is_as_new_fetches_nothing(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as fault:
        lose_machine_after(fault, 3)
        with pytest.raises(ConnectionAbortedError):
            main([str(recipe)])
    for file in (tmp_path / "store").rglob("model-00000.safetensors"):
        damage(file)
    capsys.readouterr()
    assert main([str(recipe)]) == 0
    told = capsys.readouterr().err
    assert "resumed from step 3" in told
    assert "damaged" not in told


@pytest.mark.slow
def test_a_checkpoint_that_had_not_arrived_is_sent_by_the_next_start(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as fault:
        lose_machine_after(fault, 2)
        with pytest.raises(ConnectionAbortedError):
            main([str(recipe), "run.storage=null"])
        with pytest.raises(ConnectionAbortedError):
            main([str(recipe)])  # it ends in its first step, before any save
    entry = newest_entry(FaultyStorage(f"file://{tmp_path}/store"))
    assert entry is not None
    assert [saved.step for saved in entry.checkpoints] == [2]


def test_a_superseded_training_ends_at_its_next_step_with_one_line(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another start owns the run while this one is between two steps, as after a long sleep of its machine."""
    original, count, storage = loop.optimizer_step, [0], FaultyStorage(f"file://{tmp_path}/store")

    def superseded(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        while count[0] == 3:  # the owner may publish, or renew its lease, between two of these lines
            entry = newest_entry(storage)
            assert entry is not None
            storage.put(f"lease-{entry.owner:08d}.json", b'{"closed": true}')
            with suppress(FinetuneError):
                take_lease(storage, entry, lambda _: None).close()
                break
        return original(*args, **kwargs)

    monkeypatch.setattr(loop, "optimizer_step", superseded)
    assert main([str(recipe)]) == 2
    told = capsys.readouterr().err
    errors = [line for line in told.splitlines() if "has taken over this run" in line]
    assert len(errors) == 1, told
    assert json.loads((tmp_path / "first" / "run_state.json").read_text())["state"] == "failed"
    assert not (tmp_path / "first" / "adapter").exists()
    entry = newest_entry(storage)
    assert entry is not None
    assert all(saved.step <= 2 for saved in entry.checkpoints)


def test_a_fault_before_training_is_one_line_and_exit_2(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main([str(recipe), f"run.storage=file://{tmp_path}/file/x"]) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.startswith(f"run.storage: file://{tmp_path}/file/x: cannot be used (NotADirectoryError: ")
    assert told.endswith("; check the folder, its rights and its disk")
    assert not (tmp_path / "first").exists()


@pytest.mark.slow
def test_a_training_sends_its_checkpoints_to_the_hub(
    recipe: Path, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(restart, "open_storage", lambda url, private: HubBranch(url, private=private, endpoint=hub.url))
    words = [str(recipe), "run.storage=null", "hub.repo_id=me/devils", "hub.checkpoints=steps", "save_steps=2"]
    assert main(words) == 0
    assert "not sent" not in capsys.readouterr().out
    files = hub.repository("me/devils").files("steps")
    saved = step_folder(tmp_path / "first", 4)
    sent = {path for path in files if "/checkpoints/" in path}
    assert {path.rpartition("/")[2] for path in sent} == {file.name for file in saved.iterdir()}
    for path in sent:
        content = hub.content("me/devils", path, "steps")
        assert content == (saved / path.rpartition("/")[2]).read_bytes()
        assert str(tmp_path).encode() not in content
    shutil.move(tmp_path / "first", tmp_path / "whole")
    restart._fetched_records.cache_clear()
    assert main(words) == 0
    assert "resumed from step 4" in capsys.readouterr().err
    assert same_adapters(tmp_path / "first", tmp_path / "whole")
