"""A place that cannot be written is refused in one line before any work, by every verb that writes where it is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from finetune.cli.main import main
from finetune.errors import FinetuneError
from finetune.files import check_output

ROOT = Path(__file__).resolve().parents[2]
RECIPE = str(ROOT / "recipes" / "quickstart.yaml")
LONG = "n" * 300


def place(kind: str, folder: Path) -> str:
    """A path of this kind that nothing can be written to."""
    path = folder / "place"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder" | "file":
            path.mkdir() if kind == "folder" else path.write_text("mine")
        case "below a file":
            path.write_text("mine")
            path /= "below"
        case "link to itself":
            path.symlink_to(path)
        case "long name":
            path = folder / LONG
        case "below a long name":
            path = folder / LONG / "below"
        case "deep":
            path = folder.joinpath(*["d" * 200] * 30)
        case _:
            return {"empty": "", "device": "/dev/null", "proc": "/proc/finetune", "null": f"{folder}/a\0b"}[kind]
    return str(path)


BOTH = ["pipe", "below a file", "link to itself", "long name", "below a long name", "device", "proc", "null"]


@pytest.mark.parametrize("kind", [*BOTH, "folder", "empty"])
def test_a_file_that_cannot_be_written(kind: str, tmp_path: Path) -> None:
    with pytest.raises(FinetuneError, match=r"^--output: .*; name a") as caught:
        check_output(Path(place(kind, tmp_path)), "--output")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "place").is_file() or (tmp_path / "place").read_text() == "mine"


@pytest.mark.parametrize("kind", [*BOTH, "file", "deep"])
def test_a_folder_that_cannot_be_written(kind: str, tmp_path: Path) -> None:
    with pytest.raises(FinetuneError, match=r"^--to: .*; name a"):
        check_output(Path(place(kind, tmp_path)), "--to", folder=True)


def test_what_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    for name, folder in (("new.html", False), ("a/b/new", True), ("there", True), ("old.html", False)):
        path = tmp_path / name
        if name == "there":
            path.mkdir()
        if name == "old.html":
            path.write_text("old")
        check_output(path, "--output", folder=folder)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["old.html", "there"]
    assert (tmp_path / "old.html").read_text() == "old"


@pytest.mark.parametrize("kind", ["device", "proc", "long name", "pipe", "below a file"])
@pytest.mark.parametrize(
    "words",
    [
        ["preview", RECIPE, "--html"],
        ["import", "nowhere.yaml", "-o"],
        ["launch", RECIPE, "-o"],
        ["plan", "--pick", "--model", "x", "--gpus", "1x24GB", "-o"],
        ["report", "nowhere", "-o"],
        ["compare", RECIPE, "-o"],
        ["export", "nowhere", "--step", "1", "--to"],
    ],
    ids=lambda words: words[0],
)
def test_every_verb_refuses_it(words: list[str], kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, place(kind, tmp_path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith(("--html: ", "--output: ", "--to: "))


@pytest.mark.parametrize("value", ["", "."])
def test_the_page_of_a_preview_is_a_file(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preview", RECIPE, "--html", value]) == 2
    assert capsys.readouterr().err == "--html: . is a folder; name a file that may be written\n"


@pytest.mark.parametrize("jobs", ["absent", "empty", "a file", "without steps"])
def test_a_comparison_without_jobs_has_no_report(jobs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "compare.json").write_text("{}")
    match jobs:
        case "empty":
            (tmp_path / "jobs").mkdir()
        case "a file":
            (tmp_path / "jobs").write_text("")
        case "without steps":
            (tmp_path / "jobs" / "zero2").mkdir(parents=True)
    assert main(["report", str(tmp_path)]) == 2
    assert "has trained a step" in capsys.readouterr().err
