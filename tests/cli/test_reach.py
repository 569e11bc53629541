"""What a verb writes, starts and connects to, by Python's audit events: what SECURITY.md says, and no more."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from finetune.cli.main import main
from finetune.train import main as train
from finetune.untrusted import programs as children
from tests.support.models.tiny import write_chats
from tests.support.rows.corpus_starts import make_starts
from tests.support.rows.others_configs import EXAMPLES
from tests.support.runs.recipes import tiny_lora, write_recipe
from tests.support.runs.watched import Watched, watched

Places = dict[str, Path]
# Of matplotlib, where the machine has no list of fonts yet; of this program, for as long as a verb runs.
FONTS = [Path.home() / ".config" / "matplotlib", Path.home() / ".cache" / "matplotlib"]
SCRATCH = f"{tempfile.gettempdir()}/finetune-"
# What looks at strangers' files, and what Python itself asks for the name of a processor.
CHILDREN = (f"{sys.executable} -I -c", "uname -p")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Places:
    folder = tmp_path_factory.mktemp("reach")
    run = make_starts(folder / "starts", tiny_llama)["measured"] / "run"
    chats = write_chats(folder / "chats.jsonl", [30, 40, 50, 60, 45, 35])
    content = tiny_lora(tiny_llama, chats, output_dir=str(folder / "trained"), training={"max_steps": 2})
    other = folder / "other.yaml"
    other.write_text(yaml.safe_dump(next(iter(EXAMPLES.values())).values), "utf-8")
    (folder / "here").mkdir()
    (folder / "samples").mkdir()
    return {
        "recipe": write_recipe(folder, content),
        "config": other,
        "chats": chats,
        "samples": folder / "samples",
        "run": run,
        "trained": folder / "trained",
        "cache": folder / "cache",
        "here": folder / "here",
    }


def left(found: Watched, *folders: Path) -> set[Path]:
    """What was written outside of these folders, of matplotlib's and of temporary ones."""
    return {path for path in found.outside(*FONTS, *folders) if not str(path).startswith(SCRATCH)}


def seen(work: Callable[[], int], places: Places, monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setenv("FINETUNE_CACHE", str(places["cache"]))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(children, "_found_here", {})  # nothing was looked at by an earlier test of this process
    monkeypatch.chdir(places["here"])
    with watched() as found:
        assert work() == 0
    return found


@pytest.mark.parametrize(
    ("words", "writes"),
    [
        ("list --gpus 1x24GB", []),
        ("check {recipe}", []),
        ("check --resolved {recipe}", []),
        ("launch {recipe}", []),
        ("import {config}", []),
        ("push --dry-run {run} me/it", []),
        ("plan --audit {run}", []),
        ("status {run}", []),
        ("report {run}", ["run"]),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_verb_that_reads(words: str, writes: list[str], places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process, no host, no file but where it says."""
    found = seen(lambda: main(words.format_map(places).split()), places, monkeypatch)
    assert left(found, *(places[name] for name in writes)) == set()
    assert found.asked == []
    assert found.started == []


@pytest.mark.sample(1, thorough=6)
@pytest.mark.parametrize(
    ("words", "writes"),
    [
        ("check --data {recipe}", ["cache"]),
        ("preview {recipe}", ["cache"]),
        ("chat {run} --prompt a --max-new-tokens 1", ["cache"]),
        ("eval {run} --loss-only", ["cache", "run"]),
        ("sample {run} --data {chats} -o {samples}/one --n 2 --limit 2 --metric exact", ["cache", "samples"]),
        ("merge --verify 0 {run}", ["cache", "run"]),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_verb_that_loads(words: str, writes: list[str], places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of processes only this Python, for what strangers' files compute; no host."""
    found = seen(lambda: main(words.format_map(places).split()), places, monkeypatch)
    assert left(found, *(places[name] for name in writes)) == set()
    assert found.asked == []
    assert [words for words in found.started if not words.startswith(CHILDREN)] == []


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("forget_the_last_run")
def test_a_training(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output_dir and the cache; a local model and local data need no host."""
    found = seen(lambda: train([str(places["recipe"])]), places, monkeypatch)
    assert left(found, places["cache"], places["trained"]) == set()
    assert [address for address in found.asked if "huggingface" in address] == []
    assert [words for words in found.started if not words.startswith(CHILDREN)] == []


def test_what_is_watched_is_seen(tmp_path: Path) -> None:
    """The watch itself: a file, a folder, a process and a host."""
    import socket
    import subprocess

    with watched() as found:
        (tmp_path / "a").write_text("x")
        (tmp_path / "b").mkdir()
        (tmp_path / "a").rename(tmp_path / "c")
        subprocess.run([sys.executable, "-c", ""], check=True)
        with socket.socket() as it, pytest.raises(OSError, match="refused"):
            it.connect(("127.0.0.1", 9))
    assert found.outside() == {tmp_path.resolve() / name for name in "abc"}
    assert len(found.started) == 1
    assert len(found.asked) == 1
    with watched() as later:
        (tmp_path / "a").exists()
    assert later.written == set()
