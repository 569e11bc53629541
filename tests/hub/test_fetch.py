"""`finetune fetch`: through the loopback Hub into a folder, which then trains without a network."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.cli.main import main
from finetune.data.sources import resolve
from finetune.recipe.loader import load_recipe
from tests.support.hub import Hub
from tests.support.hub.data_sets import rows_of, serve
from tests.support.hub.processes import REPOSITORY, run_python
from tests.support.hub.server import TOKEN
from tests.support.hub.state import Blob
from tests.support.models.tiny import save_tiny, write_chats
from tests.support.runs.recipes import least, merged, write_recipe

NAME, DATA = "acme/tiny", "HuggingFaceH4/no_robots"
NOT_NEEDED = ("original/consolidated.00.pth", "pytorch_model.bin", "tiny.gguf", "run_me.py")


def served(hub: Hub, folder: Path, **config: Any) -> str:
    """The tiny model on the Hub, with files that no training needs. Returns its commit."""
    files = {}
    for file in save_tiny(folder, **config).iterdir():
        files[file.name] = _large(hub, file.read_bytes()) if file.suffix == ".safetensors" else Blob(file.read_bytes())
    files |= {name: Blob(b"a stranger's") for name in NOT_NEEDED}
    files["README.md"] = Blob(b"---\nlicense: apache-2.0\n---\n")
    files["LICENSE"] = Blob(b"Apache License")
    repository = hub.add(NAME, private=False)
    return repository.commit("main", files, "a model", "")


def _large(hub: Hub, content: bytes) -> Blob:
    sha256 = hashlib.sha256(content).hexdigest()
    hub.large[sha256] = content
    return Blob.pointer(sha256, len(content))


@pytest.fixture
def page(hub: Hub, tmp_path: Path) -> Path:
    """A recipe with a model and rows on the Hub, local held-out rows, and a push."""
    served(hub, tmp_path / "base")
    serve(hub, DATA, rows=40)
    write_chats(tmp_path / "held.jsonl", [40] * 8)
    train = {"path": DATA, "split": "train[:30]"}
    held = {"path": "json", "data_files": str(tmp_path / "held.jsonl")}
    more: dict[str, Any] = {
        "data": {"train": [train], "eval": [held], "max_length": 512, "truncation": "right"},
        "training": {"max_steps": 2, "global_batch_size": 2},
        "samples": {"count": 0},
        "hub": {"repo_id": "me/devils", "push": True},
        "output_dir": "runs/mine",
    }
    return write_recipe(tmp_path, merged(least(NAME), more), "mine.yaml")


def fetched(hub: Hub, page: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    cli = ["-m", "finetune.cli.main", "fetch", str(page), "--to", str(page.parent / "out"), *words]
    return run_python(hub, cli, page.parent / "home", **more)


def line_of(process: subprocess.CompletedProcess[str]) -> str:
    """The one line of a refusal, below the lines that say what is fetched and the client's progress."""
    assert process.returncode in (2, 4), process.stdout + process.stderr
    assert "Traceback" not in process.stderr
    return process.stderr.splitlines()[-1]


def test_it_brings_everything_and_pins_it(hub: Hub, page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = fetched(hub, page, "--json")
    assert process.returncode == 0, process.stderr
    commit, of_data = hub.repository(NAME).branches["main"], hub.repository(DATA, "dataset").branches["main"]
    facts = json.loads(process.stdout)
    assert facts["commits"] == {"model.name_or_path": commit, "data.train[0]": of_data}
    out = page.parent / "out"
    monkeypatch.chdir(out)
    loaded = load_recipe("recipe.yaml", here=True)
    recipe = loaded.recipe
    folder = f"hub/models--acme--tiny/snapshots/{commit}"
    assert (recipe.model.name_or_path, recipe.model.revision) == (folder, commit)
    assert (recipe.output_dir, recipe.hub.push) == ("runs/mine", False)
    assert set(loaded.auto_formats) == {"training.mixed_precision", "model.dtype"}  # the other machine's choice

    # The model: what a training reads, byte for byte, with its licence, and nothing else.
    names = {file.name for file in Path(folder).iterdir()}
    assert names == {file.name for file in (page.parent / "base").iterdir()} | {"README.md", "LICENSE"}
    for file in (page.parent / "base").iterdir():
        assert (Path(folder) / file.name).read_bytes() == file.read_bytes()

    # The rows: those of the split, in their order.
    (entry,), held = recipe.data.train, recipe.data.eval
    assert (entry.data_files, entry.split, entry.revision) == ("data/train-0/no_robots.parquet", "train", of_data)
    assert [row.values for row in resolve(entry).rows()] == rows_of(DATA, "default", "train", 40)[:30]
    assert isinstance(held, list)
    assert (page.parent / "held.jsonl").read_bytes() == Path(str(held[0].data_files)).read_bytes()
    assert held[0].data_files == "data/eval-0/held.jsonl"

    # No absolute path, no token, and nothing of a temporary kind.
    text = (out / "recipe.yaml").read_text("utf-8")
    assert str(page.parent) not in text
    assert yaml.safe_load(text)["model"]["dtype"] == "auto"
    everything = [file for file in out.rglob("*") if file.is_file()]
    assert [file for file in everything if TOKEN.encode() in file.read_bytes()] == []
    assert [file for file in out.rglob("*") if file.name.startswith((".tmp-", ".cache"))] == []
    assert sorted(path.name for path in out.iterdir()) == ["data", "fetch.json", "hub", "recipe.yaml"]


@pytest.mark.thorough
def test_the_files_of_launch_set_the_variable(
    hub: Hub, page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fetched(hub, page).returncode == 0
    monkeypatch.chdir(page.parent / "out")
    for on in ("slurm", "torchrun"):
        assert main(["launch", "recipe.yaml", "--on", on]) == 0
        lines = capsys.readouterr().out.splitlines()
        (place,) = (number for number, line in enumerate(lines) if line.startswith("export HF_HUB_OFFLINE=1"))
        sbatch = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
        start = [number for number, line in enumerate(lines) if "finetune.train" in line]
        assert max(sbatch, default=0) < place < min(start)  # Slurm reads no #SBATCH below a command
        assert main(["launch", str(page), "--on", on]) == 0
        assert "HF_HUB_OFFLINE" not in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize("call", ["the model", "the data set"])
def test_what_is_gated_stops_it_before_the_first_file(call: str, hub: Hub, page: Path) -> None:
    """The data set is asked last; the model's files do not come before."""
    hub.fail("resolve", status=403, code="GatedRepo", times=9, skip=0 if call == "the model" else 1)
    line = line_of(fetched(hub, page))
    key = {"the model": f"model.name_or_path: {NAME}", "the data set": f"data.train[0]: {DATA}"}[call]
    assert line.startswith(f"{key}: the Hub gives it to those alone who asked for access; ask on https://")
    assert line.endswith("then: hf auth login")
    assert not (page.parent / "out").exists()
    assert "download" not in hub.calls()


@pytest.mark.thorough
@pytest.mark.sample(1, thorough=6)
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("offline", "HF_HUB_OFFLINE is set; unset it, because this verb needs the network"),
        ("no model", "nobody/knows-it: the Hub has none with this name, or does not show it to this token"),
        ("no revision", "the Hub has no revision v9 of it; correct the revision"),
        ("pickles", f"model.name_or_path: {NAME} has no weights in safetensors; name a model that has them"),
        ("a token", "samples.prompts.0: holds"),
        ("away", "the Hub did not answer ("),
    ],
)
def test_one_line_and_no_folder(what: str, says: str, hub: Hub, page: Path) -> None:
    words, more = [], {}
    match what:
        case "offline":
            more["HF_HUB_OFFLINE"] = "1"
        case "no model":
            words = ["model.name_or_path=nobody/knows-it"]
        case "no revision":
            words = ["model.revision=v9"]
        case "pickles":
            hub.repository(NAME).commit(
                "main", {"pytorch_model.bin": Blob(b"x"), "config.json": Blob(b"{}")}, "old", ""
            )
        case "a token":
            words = [f"samples.prompts=[{TOKEN}]"]
        case "away":
            hub.fail("info", status=500, times=99)
    process = fetched(hub, page, *words, **more)
    assert says in line_of(process)
    assert TOKEN not in process.stderr
    assert not (page.parent / "out").exists()


@pytest.mark.thorough
def test_a_folder_with_something_else_is_one_line(hub: Hub, page: Path) -> None:
    out = page.parent / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    assert line_of(fetched(hub, page)) == f"--to: {out} holds other files; name an empty or a new folder"
    shutil.rmtree(out)
    assert fetched(hub, page).returncode == 0
    line = line_of(fetched(hub, page, "training.seed=7"))
    assert line == f"--to: {out} holds another recipe's files; name an empty or a new folder"
    assert fetched(hub, page).returncode == 0  # complete: nothing is left to do


@pytest.mark.thorough
def test_an_interrupted_one_continues_with_its_commit(hub: Hub, page: Path) -> None:
    """The connection breaks within the weights. Meanwhile the branch moves, and the second call keeps to its commit."""
    first = hub.repository(NAME).branches["main"]
    hub.fail("download", cut_answer_at=1000, times=99)
    line_of(fetched(hub, page))
    record = json.loads((page.parent / "out" / "fetch.json").read_text())
    assert (record["complete"], record["commits"]["model.name_or_path"]) == (False, first)
    assert not (page.parent / "out" / "recipe.yaml").exists()
    hub.faults.clear()
    served(hub, page.parent / "another", seed=7)
    hub.log.clear()
    assert fetched(hub, page).returncode == 0
    folder = page.parent / "out" / "hub" / "models--acme--tiny" / "snapshots" / first
    assert (folder / "model.safetensors").read_bytes() == (page.parent / "base" / "model.safetensors").read_bytes()
    # Files that were complete are not asked for again. The client begins a broken one from its start.
    assert [request.path for request in hub.log if request.path.endswith("/config.json")] == []
    weights = hashlib.sha256((page.parent / "base" / "model.safetensors").read_bytes()).hexdigest()
    assert [request.path for request in hub.log if request.method == "GET"].count(f"/{weights}") == 1


@pytest.mark.thorough
def test_a_file_that_changed_on_its_way_is_not_kept(hub: Hub, page: Path) -> None:
    hub.fail("download", wrong_hash=True, times=1)
    assert "is not what the Hub lists, and was removed; start this again" in line_of(fetched(hub, page))
    assert list((page.parent / "out").rglob("model.safetensors")) == []
    assert fetched(hub, page).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode != 0, reason="no unshare")
def test_without_a_network_it_checks_trains_evaluates_and_chats(hub: Hub, page: Path) -> None:
    assert fetched(hub, page).returncode == 0
    out = page.parent / "out"
    moved = out.rename(page.parent / "elsewhere")  # as on another machine
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_HOME": str(page.parent / "fresh"), "FINETUNE_CACHE": str(page.parent / "cache")}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}

    def run(*words: str) -> str:
        command = ["unshare", "-n", sys.executable, "-m", "finetune.cli.main", *words]
        process = subprocess.run(command, cwd=moved, env=environment, capture_output=True, text=True, timeout=900)
        assert process.returncode == 0, (words, process.stdout[-2000:], process.stderr[-2000:])
        return process.stdout

    run("check", "recipe.yaml", "--data", "--model")
    run("train", "recipe.yaml")
    receipt = json.loads((moved / "runs" / "mine" / "receipt.json").read_text())
    assert receipt["base"]["commit"] == hub.repository(NAME).branches["main"]
    run("eval", "runs/mine", "--loss-only")
    run("chat", "runs/mine", "--prompt", "a quiet river", "--max-new-tokens", "2")
    card = json.loads(run("push", "runs/mine", "me/devils", "--dry-run", "--json"))["card"]
    assert yaml.safe_load(card.split("---")[1])["base_model"] == NAME  # known by the folder's name
