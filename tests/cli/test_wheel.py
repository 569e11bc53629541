"""The package as it is installed: a wheel holds all that it needs, and works in a folder without a checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.cli.main import main
from finetune.errors import EnvironmentMismatch
from finetune.paths import RECIPES, SHIPPED
from finetune.recipe import reference
from finetune.recipe.loader import load_recipe
from tests.support.runs.launching import REPOSITORY

SOURCES = ("finetune", "recipes", "accelerate_configs", "data", "pyproject.toml", "setup.py", "MANIFEST.in")
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
NOT_SHIPPED = ("make_devils_dictionary.py", "make_faq_de.py", "skills")  # of the sample data


def build(kind: str, sources: Path, folder: Path) -> Path:
    """`build_wheel`, `build_sdist` or `build_editable` by the backend that pip calls."""
    pytest.importorskip("setuptools", minversion="77")  # which pip fetches; here is no network
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(folder)], cwd=sources, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    for name in (*SOURCES, "README.md", "LICENSE"):
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(REPOSITORY / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(sources: Path) -> Path:
    return build("build_wheel", sources, sources.parent / "wheel")


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """As `pip install --no-deps --target` leaves it."""
    folder = wheel.parent / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def finetune(installed: Path, here: Path, *words: str, code: int = 0) -> str:
    """What `finetune WORDS` prints in the folder `here`."""
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment = plain | {"PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "finetune.cli.main", *words],
        cwd=here,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr * bool(code)


@pytest.mark.thorough
def test_the_wheel_has_every_file(wheel: Path, sources: Path) -> None:
    names = names_in(wheel)
    package = {str(path.relative_to(sources)) for path in (sources / "finetune").rglob("*") if path.is_file()}
    shipped = {
        f"finetune/shipped/{path.relative_to(sources)}"
        for folder in ("recipes", "accelerate_configs", "data")
        for path in (sources / folder).iterdir()
        if path.name not in NOT_SHIPPED
    }
    assert names == package | shipped
    assert len(shipped) >= 41 + 19 + 3


def test_every_file_that_a_shipped_recipe_names_is_shipped(wheel: Path) -> None:
    names, seen = names_in(wheel), 0
    for recipe in sorted((REPOSITORY / "recipes").glob("*.yaml")):
        content = yaml.safe_load(recipe.read_text("utf-8"))
        assert f"finetune/shipped/accelerate_configs/{content.get('accelerate_config', 'single')}.yaml" in names
        held_out = content["data"].get("eval")
        for entry in [*content["data"]["train"], *(held_out if isinstance(held_out, list) else [])]:
            if "data_files" in entry:
                assert f"finetune/shipped/{entry['data_files']}" in names
                seen += 1
    assert seen >= 3


@pytest.mark.slow
def test_verbs_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    run = (installed, tmp_path)
    listed = json.loads(finetune(*run, "list", "--json"))
    assert {Path(recipe["path"]).parent for recipe in listed["recipes"]} == {installed / "finetune/shipped/recipes"}
    assert len(listed["recipes"]) == len(list((REPOSITORY / "recipes").glob("*.yaml")))
    assert not listed["left_out"]
    assert finetune(*run, "check", "quickstart", "--data").startswith("quickstart: right")
    resolved = yaml.safe_load(finetune(*run, "check", "quickstart", "--resolved"))
    (entry,) = resolved["data"]["train"]
    assert entry["data_files"] == str(installed / "finetune/shipped/data/devils_dictionary.jsonl")
    assert resolved["output_dir"] == "runs/quickstart"
    assert "did you mean quickstart?" in finetune(*run, "check", "quickstrat", code=2)
    assert "choose one of 1f1b, " in finetune(*run, "check", "quickstart", "accelerate_config=fsdp3", code=2)
    script = finetune(*run, "launch", "llama3_fsdp")
    assert "-m finetune.train llama3_fsdp" in script
    assert str(installed) not in script, "another machine has the package elsewhere"
    assert "run it in a checkout" in finetune(*run, "check", "--schema", code=4)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_the_slower_verbs_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    run = (installed, tmp_path)
    picked = finetune(
        *run, "plan", "--pick", "--model", "meta-llama/Llama-3.2-1B", "--gpus", "1x24GB", "-o", "mine.yaml"
    )
    assert "accelerate_config" in picked
    assert finetune(*run, "check", "mine.yaml", "data.train=[{path: a/b}]").startswith("mine.yaml: right")
    assert "quickstart" in finetune(*run, "plan", "quickstart", "smollm2_135m_full_cpu")
    words = ["training.max_steps=2", "eval_steps=2", "save_steps=2", "data.max_length=64", "samples.max_new_tokens=2"]
    finetune(*run, "train", "quickstart", *words, "data.truncation=right")
    folder = tmp_path / "runs" / "quickstart"
    assert json.loads((folder / "receipt.json").read_text("utf-8"))
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()
    finetune(*run, "chat", "runs/quickstart", "--prompt", "Define: Wheel", "--max-new-tokens", "2")


@pytest.mark.slow
def test_an_sdist_builds_the_same_wheel_and_an_editable_install_has_the_checkouts(
    sources: Path, wheel: Path, tmp_path: Path
) -> None:
    shutil.unpack_archive(build("build_sdist", sources, tmp_path / "sdist"), tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert names_in(build("build_wheel", unpacked, tmp_path / "wheel")) == names_in(wheel)
    editable = names_in(build("build_editable", sources, tmp_path / "editable"))
    assert not any("shipped" in name for name in editable)
    shutil.rmtree(unpacked / "recipes")
    with pytest.raises(AssertionError, match=r"not beside setup.py: recipes/\*.yaml"):
        build("build_wheel", unpacked, tmp_path / "without")


# A recipe's name, and the files that it names, where the current folder is no checkout.


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def data_files(*words: str, name: str | Path = "quickstart") -> Any:
    return load_recipe(name, words).recipe.data.train[0].data_files


def test_files_that_a_shipped_recipe_names_come_with_it(elsewhere: Path) -> None:
    theirs = str(SHIPPED / "data" / "devils_dictionary.jsonl")
    assert data_files() == theirs
    assert data_files(name=RECIPES / "quickstart.yaml") == theirs
    assert load_recipe("quickstart").recipe.output_dir == "runs/quickstart"
    mine = elsewhere / "data"
    mine.mkdir()
    (mine / "devils_dictionary.jsonl").write_text("{}\n")
    assert data_files() == theirs, "the recipe's own, not one of the same name"
    (elsewhere / "quickstart.link").symlink_to(RECIPES / "quickstart.yaml")
    assert data_files(name="quickstart.link") == theirs


@pytest.mark.parametrize("key", ["data.train.0.data_files", "data.train.0", "data.train", "data"])
def test_what_is_overridden_is_here(elsewhere: Path, key: str) -> None:
    value: Any = "data/sample_chat.jsonl"
    for part in reversed("data.train.0.data_files".removeprefix(key).split(".")):
        if part == "0":
            value = [value]
        elif part:
            value = {part: value} | ({"path": "json"} if part == "data_files" else {})
    assert data_files(f"{key}={json.dumps(value)}") == "data/sample_chat.jsonl"
    assert data_files("training.seed=1") == str(SHIPPED / "data" / "devils_dictionary.jsonl")


def test_a_copy_of_it_is_ones_own(elsewhere: Path) -> None:
    shutil.copy(RECIPES / "quickstart.yaml", elsewhere / "mine.yaml")
    assert data_files(name="mine.yaml") == "data/devils_dictionary.jsonl"


def test_a_file_of_that_name_wins(elsewhere: Path) -> None:
    (elsewhere / "smollm2_hub").mkdir()  # a run's folder, say
    assert load_recipe("smollm2_hub").path == RECIPES / "smollm2_hub.yaml"
    (elsewhere / "quickstart").write_text("model: {name_or_path: a/b}\ndata: {train: [{path: c/d}]}\n")
    assert load_recipe("quickstart").recipe.model.name_or_path == "a/b"


@pytest.mark.parametrize("name", ["recipes/quickstart", "quickstart.yml", "./nothing", "no_such", "x" * 300])
def test_other_names_are_files(elsewhere: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", name]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert ("did you mean quickstart?" in said) == ("quickstart" in name)


def test_in_the_checkout_the_path_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert data_files() == data_files(name="recipes/quickstart.yaml") == "data/devils_dictionary.jsonl"


def test_the_reference_needs_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "REFERENCE_FILE", tmp_path / "docs" / "recipe.md")
    with pytest.raises(EnvironmentMismatch, match="run it in a checkout"):
        reference.write_generated()
    assert [*tmp_path.iterdir()] == []
