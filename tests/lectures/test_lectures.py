"""`python -m lectures`: one smoke test for each lecture, the command's mistakes, and the pages in both languages.

The smoke test runs a lecture as its page says and compares the output. Figures of a section that ends with
`[measured here]` are not compared.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.paths import CHECKOUT
from lectures import command
from lectures.__main__ import main
from lectures.command import LECTURES, lecture_function
from lectures.output import MEASURED, Chapter, LectureRequest, LectureResult

LEARN = CHECKOUT / "docs" / "learn"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r"!\[[^\]]*\]\([^)]*?([^/)]+)\)")
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?")


@pytest.mark.slow
@pytest.mark.parametrize("name", LECTURES)
def test_a_lecture_prints_what_its_page_shows(name: str, tmp_path: Path) -> None:
    for folder in ("recipes", "accelerate_configs", "data", "finetune", "lectures"):
        (tmp_path / folder).symlink_to(CHECKOUT / folder)
    blocks = FENCE.findall((LEARN / f"{name}.md").read_text("utf-8"))
    words = shlex.split(next(block for language, block in blocks if language == "bash"))
    assert words[:4] == ["python", "-m", "lectures", name]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(CHECKOUT)}
    process = subprocess.run(
        [sys.executable, *words[1:]], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert process.returncode == 0, process.stderr
    assert comparable(process.stdout) == comparable(next(block for language, block in blocks if language == "text"))
    assert (tmp_path / "runs" / f"lecture_{name}" / f"{name}.png").stat().st_size > 10_000


def comparable(output: str) -> list[str]:
    """The lines of an output; measured figures become #, and their columns one space wide."""
    lines, measured = [], False
    for line in output.strip().splitlines():
        measured = line.endswith(MEASURED) or (measured and bool(line.strip()))
        if measured:
            line = re.sub(r"[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", "#", line)
            line = re.sub(r"-{2,}", "--", " ".join(line.split()))
        lines.append(line.rstrip())
    return lines


def test_measured_figures_are_not_compared() -> None:
    shown = "A\n1.5 s\n\nB [measured here]\nx   10.25\n-----\n\nC\n2"
    same = "A\n1.5 s\n\nB [measured here]\nx  9.5\n----\n\nC\n2"
    assert comparable(shown) == comparable(same)
    assert comparable(shown) != comparable(same.replace("1.5 s", "1.6 s"))


def test_each_lecture_has_a_function_and_its_recipe() -> None:
    for name, lecture in LECTURES.items():
        assert callable(lecture_function(name))
        assert not lecture.recipe or (CHECKOUT / "recipes" / lecture.recipe).is_file()


@pytest.mark.parametrize("name", LECTURES)
def test_both_languages_show_the_same(name: str) -> None:
    pages = [(folder / f"{name}.md").read_text("utf-8") for folder in (LEARN, LEARN / "ko")]
    english, korean = [FENCE.sub("", page) for page in pages]
    assert FENCE.findall(pages[0]) == FENCE.findall(pages[1])
    assert PICTURE.findall(english) == PICTURE.findall(korean)
    # A translation moves numbers.
    figures = [sorted(NUMBER.findall(re.sub(r"\]\([^)]*\)", "]", prose))) for prose in (english, korean)]
    assert figures[0] == figures[1]
    assert re.search("[가-힣]", korean)
    assert all((LEARN / "pictures" / picture).is_file() for picture in PICTURE.findall(english))


def test_both_indexes_list_the_claims() -> None:
    tables = []
    for folder in (LEARN, LEARN / "ko"):
        text = (folder / "index.md").read_text("utf-8")
        assert all(f"({name}.md)" in text for name in LECTURES)
        rows = [line for line in text.splitlines() if re.match(r"\| \d+ ", line)]
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", "\n".join(rows)):
            assert (folder / link).resolve().is_file(), link
        tables.append([re.findall("`([^`]+)`", row) for row in rows])
    assert tables[0] == tables[1]
    assert len(tables[0]) == 22
    for test in re.findall(r"tests/[\w/]+\.py", str(tables[0])):
        assert (CHECKOUT / test).is_file(), test


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[LectureRequest]:
    """Requests of lectures that only write them down, in a folder of their own."""
    requests: list[LectureRequest] = []

    def result(request: LectureRequest) -> LectureResult:
        requests.append(request)
        chapters = [Chapter("One", ["a line"]), Chapter("Two", ["b"], measured=True)]
        return LectureResult(chapters, {"figure": 3}, Path.touch)

    monkeypatch.setattr(command, "lecture_function", lambda name: result)
    monkeypatch.chdir(tmp_path)
    return requests


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["memry"], "memry: there is no such lecture; did you mean memory?"),
        (["collectives", "recipes/quickstart.yaml"], "the lecture collectives has no recipe"),
        (["collectives", "mib=much"], "mib: much: is not a whole number from 1 on; write mib=12"),
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
    assert not [*tmp_path.rglob("*.png"), *tmp_path.rglob("*.json")]


def test_settings_are_not_overrides(asked: list[LectureRequest], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats", "mine.yaml", "numbers=2,3", "data.max_length=64"]) == 0
    assert (asked[0].recipe, asked[0].overrides) == (Path("mine.yaml"), ("data.max_length=64",))
    assert dict(asked[0].settings) == {"numbers": "2,3", "steps": LECTURES["formats"].settings["steps"]}
    assert "One\na line\n\nTwo [measured here]\nb\n\nruns/lecture_formats/formats.png" in capsys.readouterr().out


def test_without_a_recipe_it_takes_its_own(asked: list[LectureRequest], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "training.optim=adamw_8bit", "--json"]) == 0
    assert asked[0].recipe == CHECKOUT / "recipes" / LECTURES["memory"].recipe
    assert asked[0].overrides == (*LECTURES["memory"].overrides, "training.optim=adamw_8bit")
    assert json.loads(capsys.readouterr().out)["figure"] == 3
    assert json.loads(Path("runs/lecture_memory/memory.json").read_text("utf-8")) == {"lecture": "memory", "figure": 3}


def test_a_folder_with_something_else_is_refused(
    asked: list[LectureRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine").mkdir()
    Path("mine/thesis.txt").touch()
    assert main(["memory", "-o", "mine"]) == 2
    assert "mine: is not the folder of this lecture and not empty" in capsys.readouterr().err
    assert not asked


def test_a_stopped_lecture_leaves_its_folder_to_the_next(
    asked: list[LectureRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(request: LectureRequest) -> LectureResult:
        (request.folder / "half.txt").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(command, "lecture_function", lambda name: stopped)
        assert main(["memory", "-o", "mine"]) == 130
    assert json.loads(Path("mine/memory.json").read_text()) == {"lecture": "memory", "finished": False}
    assert main(["memory", "-o", "mine"]) == 0
    assert main(["formats", "-o", "mine"]) == 2, "the folder belongs to another lecture"
