"""Every file that a run, an export or a merge writes has the mode that the umask asks for, whoever wrote it.

safetensors writes a temporary file of mode 0600 and renames it, whatever the umask.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune.cli.main import main as cli
from finetune.files import publish_folder, write_text
from finetune.train import main
from tests.support.models.tiny import save_tiny, write_chats
from tests.support.runs.launching import Started, running, wait_all
from tests.support.runs.recipes import merged, tiny_lora, write_recipe

LENGTHS = [30, 45, 60, 80, 25, 100, 40, 55, 70, 35, 65, 50]
UMASKS = [0o022, 0o077, 0o027, 0o002]
METHODS: dict[str, dict[str, Any]] = {"lora": {}, "full": {"lora": None}}


@pytest.fixture(params=UMASKS, ids=lambda umask: f"{umask:03o}")
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def wrong_modes(folder: Path, umask: int) -> dict[str, str]:
    """The files and folders below, and the folder itself, whose mode the umask would not give."""
    modes = {path: path.stat().st_mode for path in [folder, *folder.rglob("*")]}
    wanted = {path: (0o777 if stat.S_ISDIR(mode) else 0o666) & ~umask for path, mode in modes.items()}
    wrong = {path: mode for path, mode in modes.items() if stat.S_IMODE(mode) & 0o777 != wanted[path]}
    return {str(path.relative_to(folder)): f"{stat.S_IMODE(mode):03o}" for path, mode in wrong.items()}


def write(folder: Path, method: str, **top: Any) -> Path:
    base = save_tiny(folder / "base")
    content = tiny_lora(base, write_chats(folder / "chats.jsonl", LENGTHS), output_dir=str(folder / "run"))
    short = {"training": {"max_steps": 2}, "save_steps": 1, "save_total_limit": 9, "eval_steps": 1, **top}
    return write_recipe(folder, merged(content, short, METHODS[method]))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_run_an_export_and_a_merge(tmp_path: Path, method: str, umask: int) -> None:
    recipe = write(tmp_path, method)
    run = tmp_path / "run"
    assert main([str(recipe)]) == 0
    assert cli(["export", str(run), "--step", "1"]) == 0
    assert cli(["export", str(run), "--step", "1", "--to", str(tmp_path / "elsewhere")]) == 0
    if method == "lora":
        assert cli(["merge", str(run), "--verify", "0"]) == 0
    assert cli(["report", str(run)]) == 0
    weights = {path.relative_to(run).parts[0] for path in run.rglob("*.safetensors")}
    assert weights == {"checkpoints", "exports", *(["adapter", "merged"] if method == "lora" else ["model"])}
    assert wrong_modes(run, umask) == {}
    assert wrong_modes(tmp_path / "elsewhere", umask) == {}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_the_pieces_of_each_rank(tmp_path: Path, strategy: str, umask: int) -> None:
    recipe = write(tmp_path, "full")
    run = tmp_path / "run"
    words = [sys.executable, "-m", "finetune.cli.main"]
    options = {"accelerate_config": strategy, "budget.gpus": 0}
    with running([Started(words)], recipe, run, (), script="train", **options) as ranks:
        assert wait_all(ranks, run, 240) == [0]
    assert len(list((run / "checkpoints").rglob("*-00001.safetensors"))) >= 2
    assert wrong_modes(run, umask) == {}


def test_a_published_folder_takes_no_mode_from_what_was_there(tmp_path: Path, umask: int) -> None:
    """Files made private, executable or read-only by what wrote them, the product that is replaced, a folder inside."""
    for name, modes in (("target", (0o600, 0o600, 0o600)), (".tmp-target", (0o600, 0o755, 0o444))):
        (tmp_path / name / "inside").mkdir(parents=True)
        for file, mode in zip(("weights", "code.py", "inside/config.json"), modes, strict=True):
            (tmp_path / name / file).write_text(name)
            (tmp_path / name / file).chmod(mode)
    publish_folder(tmp_path / ".tmp-target", tmp_path / "target")
    assert wrong_modes(tmp_path / "target", umask) == {}
    assert sorted(path.name for path in (tmp_path / "target").rglob("*")) == [
        "code.py",
        "config.json",
        "inside",
        "weights",
    ]
    assert (tmp_path / "target" / "weights").read_text() == ".tmp-target"


def test_a_file_that_is_written_again(tmp_path: Path, umask: int) -> None:
    (tmp_path / "record.json").write_text("{}")
    (tmp_path / "record.json").chmod(0o600)
    write_text(tmp_path / "record.json", "{}\n")
    assert wrong_modes(tmp_path / "record.json", umask) == {}
