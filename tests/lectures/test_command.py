"""`python -m lectures`: its mistakes, its own settings, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.cli.compare_verb import recipe_and_overrides
from finetune.paths import CHECKOUT
from lectures import command
from lectures.__main__ import main
from lectures.command import LECTURES, lecture_function
from lectures.output import Chapter, LectureRequest, LectureResult, columns

SEEN: list[LectureRequest] = []


def result(asked: LectureRequest) -> LectureResult:
    SEEN.append(asked)
    return LectureResult([Chapter("One", ["a line"]), Chapter("Two", ["b"], measured=True)], {"figure": 3}, Path.touch)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Every lecture is `told`, in a folder of its own."""
    SEEN.clear()
    monkeypatch.setattr(command, "lecture_function", lambda name: result)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["memry"], "memry: there is no such lecture; did you mean memory?"),
        (["x"], "there is no such lecture; name one of memory, "),
        (["collectives", "recipes/quickstart.yaml"], "the lecture collectives has no recipe"),
        (["collectives", "mib=much"], "mib: much: is not a whole number from 1 on; write mib=12"),
        (["formats", "numbers=one"], "numbers: one: is not numbers; write numbers=0.1"),
        (["formats", "numbers=inf"], "numbers: inf: must be finite"),
        (["overlap", "gpu=H9"], "gpu: H9: the plan has no speeds of it; write gpu= and one of T4"),
        (["memory", "training.max_stepz=3"], "training.max_stepz"),
    ],
)
def test_a_mistake_is_a_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    output = capsys.readouterr()
    assert said in output.err
    assert "Traceback" not in output.err
    assert not list(tmp_path.rglob("*.png"))


def test_own_settings_are_told_from_overrides(played: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats", "mine.yaml", "numbers=2,3", "data.max_length=64"]) == 0
    assert SEEN[0].recipe == Path("mine.yaml")
    assert SEEN[0].overrides == ("data.max_length=64",)
    assert dict(SEEN[0].settings) == {"numbers": "2,3", "steps": LECTURES["formats"].settings["steps"]}
    out = capsys.readouterr().out
    assert "One\na line\n\nTwo [measured here]\nb\n\nruns/lecture_formats/formats.png" in out


def test_without_a_recipe_it_takes_its_own(played: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "training.optim=adamw_8bit", "--json"]) == 0
    assert SEEN[0].recipe == CHECKOUT / "recipes" / LECTURES["memory"].recipe
    assert SEEN[0].overrides == (*LECTURES["memory"].overrides, "training.optim=adamw_8bit")
    result = json.loads(capsys.readouterr().out)
    assert (result["ok"], result["lecture"], result["figure"]) == (True, "memory", 3)
    assert json.loads(Path("runs/lecture_memory/memory.json").read_text("utf-8")) == {"lecture": "memory", "figure": 3}


def test_a_folder_with_something_else_is_refused(played: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (played / "mine").mkdir()
    (played / "mine" / "thesis.txt").touch()
    assert main(["memory", "-o", "mine"]) == 2
    assert "mine: is not the folder of this lecture and not empty" in capsys.readouterr().err
    assert not SEEN


def test_the_folder_of_a_lecture_that_was_stopped_is_taken_again(
    played: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(asked: LectureRequest) -> LectureResult:
        (asked.folder / "half.txt").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "lecture_function", lambda name: stopped)
    assert main(["memory", "-o", "mine"]) == 130
    assert json.loads((played / "mine" / "memory.json").read_text()) == {"lecture": "memory", "finished": False}
    monkeypatch.setattr(command, "lecture_function", lambda name: result)
    assert main(["memory", "-o", "mine"]) == 0
    assert json.loads((played / "mine" / "memory.json").read_text()) == {"lecture": "memory", "figure": 3}
    assert main(["formats", "-o", "mine"]) == 2, "another lecture's"


def test_a_lecture_of_a_wrong_recipe_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["memory", "training.max_stepz=3"]) == 2
    assert not [*tmp_path.rglob("*.json")]


def test_every_lecture_has_a_function_and_a_recipe_that_is_there() -> None:
    assert set(LECTURES) >= {"memory", "formats", "collectives"}
    for name, lecture in LECTURES.items():
        assert callable(lecture_function(name))
        assert not lecture.recipe or (CHECKOUT / "recipes" / lecture.recipe).is_file()


@pytest.mark.parametrize(
    ("words", "recipe", "overrides"),
    [
        ([], None, []),
        (["a=1"], None, ["a=1"]),
        (["r.yaml", "a=1"], Path("r.yaml"), ["a=1"]),
    ],
)
def test_the_first_word_is_the_recipe(words: list[str], recipe: Path | None, overrides: list[str]) -> None:
    assert recipe_and_overrides(words) == (recipe, overrides)


def test_columns_stand_below_each_other() -> None:
    assert columns(("a", "long"), [("b", "1"), ("ccc", "22")]) == ["a    long", "---------", "b       1", "ccc    22"]
