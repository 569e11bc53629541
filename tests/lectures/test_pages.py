"""docs/learn/: what a page shows is what its command prints; both languages have equal commands and figures."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from lectures.command import LECTURES
from tests.support.lectures import LEARN, ROOT, comparable, held, page

SLOWEST_SECONDS = 180


def test_every_lecture_has_its_pages() -> None:
    for name in LECTURES:
        for file in (LEARN / f"{name}.md", LEARN / "ko" / f"{name}.md"):
            assert file.is_file(), file


@pytest.mark.parametrize("name", LECTURES)
def test_both_languages_show_the_same(name: str) -> None:
    english, korean = page(LEARN / f"{name}.md"), page(LEARN / "ko" / f"{name}.md")
    assert english.commands == korean.commands
    assert english.outputs == korean.outputs
    assert english.pictures == korean.pictures
    assert english.figures == korean.figures
    assert re.search("[가-힣]", korean.prose)
    assert english.pictures, "a picture"
    for picture in english.pictures:
        assert (LEARN / "pictures" / picture).is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", LECTURES)
def test_the_output_is_what_the_command_prints(name: str) -> None:
    shown = page(LEARN / f"{name}.md")
    words = shlex.split(shown.commands[0])
    assert words[:4] == ["python", "-m", "lectures", name]
    result = held(name, *words[4:])
    assert comparable(result.text) == comparable(shown.outputs[0])
    assert result.seconds < SLOWEST_SECONDS
    assert result.picture_bytes > 10_000


def rows(folder: Path = LEARN) -> list[list[str]]:
    """The cells of the table of claims, of the index in a folder."""
    lines = (folder / "index.md").read_text("utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| \d+ ", line)]


def test_the_index_has_every_claim() -> None:
    table = rows()
    assert [int(row[0]) for row in table] == list(range(1, 23))
    for row in table:
        assert len(row) == 5, row
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", " ".join(row)):
            assert (LEARN / link).resolve().is_file(), (row[0], link)
        for test in re.findall(r"`(tests/[\w/]+\.py)`", row[4]):
            assert (ROOT / test).is_file(), (row[0], test)


def links_to(cells: list[str], folder: Path) -> list[Path]:
    """The pages that cells link to, without the language of a lecture's."""
    found = re.findall(r"\]\(([^)#]+)[^)]*\)", " ".join(cells))
    pages = [(folder / link).resolve() for link in found]
    return [LEARN / page.name if page.parent == LEARN / "ko" else page for page in pages]


def test_the_korean_index_lists_the_same() -> None:
    korean = (LEARN / "ko" / "index.md").read_text("utf-8")
    for name in LECTURES:
        assert f"({name}.md)" in korean
    pairs = list(zip(rows(), rows(LEARN / "ko"), strict=True))
    assert len(pairs) == 22
    for here, there in pairs:
        assert re.findall("`([^`]+)`", " ".join(here)) == re.findall("`([^`]+)`", " ".join(there)), here[0]
        assert links_to(here, LEARN) == links_to(there, LEARN / "ko"), here[0]


def test_figures_and_measured_lines_are_compared_as_said(tmp_path: Path) -> None:
    shown = "A\n1.5 s\n\nB [measured here]\nx   10.25\n-----\n\nC\n2"
    same = "A\n1.5 s\n\nB [measured here]\nx  9.5\n----\n\nC\n2"
    assert comparable(shown) == comparable(same)
    assert comparable(shown) != comparable(same.replace("1.5 s", "1.6 s"))
    (tmp_path / "page.md").write_text("It is 1,024 and 0.5.\n\n```bash\nls 7\n```\n![a](b/c.png)\n", "utf-8")
    read = page(tmp_path / "page.md")
    assert (read.figures, read.commands, read.pictures) == (["0.5", "1,024"], ["ls 7\n"], ["c.png"])
