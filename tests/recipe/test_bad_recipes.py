"""Every recipe in bad_recipes.yaml is refused: exit code 2, each mistake at its place, no wording of a library's.

A case is a name and the recipe's text, or {bytes: ...}, one letter a byte, for what YAML cannot hold. Its first lines:
  # expect: TEXT       once or more: to be found in the messages, which begin after the file's name with :LINE:COLUMN:
  # mistakes: N        at most N messages; 1 without this line: a mistake must not draw others after it
  # args: key=value    overrides, as typed in a shell
These lines come before the mistakes, so a line number counts them too.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from finetune.cli.main import main
from tests.support.rows.cases import cases_in

CASES = cases_in(Path(__file__).resolve().parent / "bad_recipes.yaml")
LIBRARY_WORDS = ("Input should be", "validation error", "EvalFraction", "ModelSection", "pydantic", "yaml.scanner")


@dataclass
class Header:
    """What a case says of itself."""

    expected: list[str]
    mistakes: int
    overrides: list[str]


def content_of(name: str) -> bytes:
    """The recipe's bytes; some are not UTF-8 on purpose."""
    case = CASES[name]
    return case.encode() if isinstance(case, str) else case["bytes"].encode("latin-1")


def read_header(content: bytes) -> Header:
    """The comments that a case begins with."""
    header = Header([], 1, [])
    for line in content.split(b"\n"):
        key, _, value = line.removeprefix(b"# ").decode("utf-8", "replace").partition(": ")
        if not line.startswith(b"# ") or key not in ("expect", "mistakes", "args"):
            break
        if key == "expect":
            header.expected.append(value)
        elif key == "mistakes":
            header.mistakes = int(value)
        else:
            header.overrides = shlex.split(value)
    return header


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The messages of `finetune check`, without the file's name and the source lines below them."""
    code = main(["check", *arguments])
    output = capsys.readouterr()
    assert code == 2, output.err
    assert output.out == ""
    assert "Traceback" not in output.err
    assert not [word for word in LIBRARY_WORDS if word in output.err], output.err
    lines = output.err.splitlines()
    heads = [line.removeprefix(arguments[0]) for line in lines if line.startswith((arguments[0], "command line: "))]
    assert heads, output.err
    assert len(lines) <= 4 * len(heads), output.err
    assert not [head for head in heads if "; " not in head], f"a mistake without a remedy: {output.err}"
    assert max(len(head) for head in heads) < 600, output.err
    return heads


def test_every_case_is_seen() -> None:
    assert len(CASES) >= 250


@pytest.mark.sample(120)
@pytest.mark.parametrize("name", CASES)
def test_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    recipe, header = tmp_path / f"{name}.yaml", read_header(content_of(name))
    recipe.write_bytes(content_of(name))
    assert header.expected, "a case says what it expects"
    heads = refused([str(recipe), *header.overrides], capsys)
    printed = "\n".join(heads)
    assert not [text for text in header.expected if text not in printed], printed
    assert len(heads) <= header.mistakes, printed
    assert not list((tmp_path / "here").iterdir()), "check leaves nothing behind"


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
    assert expected in refused([str(recipe)], capsys)[0]


def test_no_such_file_and_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.yaml").write_text("")
    assert "recipe.yaml" in refused([str(tmp_path / "recipe.yml")], capsys)[0]
    assert "folder" in refused([str(tmp_path)], capsys)[0]
