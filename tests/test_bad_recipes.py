"""Every recipe in bad_recipes/ is refused: exit code 2, each mistake at its place, nothing of the libraries' wording.

A new case is one file. Its first lines are comments: `# expect: TEXT`, once or more, each TEXT to be found on standard
error; then, if wanted, `# args: key=value ...`, overrides as typed in a shell. The expectations come before the
mistakes, so a line number counts them too.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from finetune.cli import main

FOLDER = Path(__file__).resolve().parent / "bad_recipes"
CASES = sorted(FOLDER.iterdir())
LIBRARY_WORDS = ("Input should be", "validation error", "EvalFraction", "ModelSection", "pydantic", "yaml.")


def test_every_case_is_seen() -> None:
    assert len(CASES) >= 200
    assert {case.suffix for case in CASES} == {".yaml"}


def header(case: Path) -> tuple[list[str], list[str]]:
    """What a case expects, and its overrides. Latin-1, since some cases are no UTF-8 on purpose."""
    expected: list[str] = []
    for line in case.read_bytes().decode("latin-1").splitlines():
        if line.startswith("# expect: "):
            expected.append(line.removeprefix("# expect: ").encode("latin-1").decode("utf-8"))
        elif line.startswith("# args: "):
            return expected, shlex.split(line.removeprefix("# args: "))
        else:
            break
    return expected, []


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Standard error of `finetune check`, which must refuse in the way that every mistake is told."""
    code = main(["check", *arguments])
    output = capsys.readouterr()
    assert code == 2, output.err
    assert output.out == ""
    assert "Traceback" not in output.err
    assert not [word for word in LIBRARY_WORDS if word in output.err], output.err
    heads = [line for line in output.err.splitlines() if line.startswith((arguments[0], "command line: "))]
    assert heads, output.err
    assert len(output.err.splitlines()) <= 4 * len(heads), output.err
    assert not [head for head in heads if "; " not in head], f"a mistake without a remedy: {output.err}"
    assert max(len(line) for line in output.err.splitlines()) < 400 + len(arguments[0]), output.err
    return output.err


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_is_refused(
    case: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected, overrides = header(case)
    assert expected, "a case says what it expects"
    told = refused([str(case), *overrides], capsys)
    assert not [text for text in expected if text not in told], told
    assert not list(tmp_path.iterdir()), "check leaves nothing behind"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "empty"),
        (b"\n\n", "empty"),
        (b"\xef\xbb\xbf", "empty"),
        (b"---\n", "empty"),
        (b"null\n", "empty"),
        (b"\x89PNG\r\n\x1a\n\x00", "UTF-8"),
        (b"# " + b"x" * 5_000_000, "large"),
        (b"[" * 100_000, "deep"),
    ],
    ids=["nothing", "blank", "byte-order-mark", "dashes", "null", "picture", "huge", "brackets"],
)
def test_what_no_case_file_can_hold(
    content: bytes, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_bytes(content)
    assert expected in refused([str(recipe)], capsys)


def test_no_such_file_and_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.yaml").write_text("")
    assert "recipe.yaml" in refused([str(tmp_path / "recipe.yml")], capsys)
    assert "folder" in refused([str(tmp_path)], capsys)
