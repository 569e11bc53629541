"""The documentation as a site: every page is in its navigation, and mkdocs builds it without a warning."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from lectures.command import LECTURES

ROOT = Path(__file__).resolve().parents[2]
NAVIGATION = "nav"


def pages(entry: Any) -> Iterator[str]:
    """The files that a part of the navigation names."""
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry if isinstance(entry, list) else entry.values():
            yield from pages(part)


def navigation() -> list[Any]:
    """mkdocs.yml's own; the rest of it names a Python function, which no safe loader reads."""
    lines = (ROOT / "mkdocs.yml").read_text("utf-8").split(f"\n{NAVIGATION}:\n")
    return list(yaml.safe_load(lines[1]))


def test_the_navigation_has_every_page_once() -> None:
    listed = list(pages(navigation()))
    here = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted(here)
    assert {f"learn/ko/{name}.md" for name in LECTURES} <= set(listed)


def test_a_group_has_at_most_seven_pages() -> None:
    groups = [len(entries) for each in navigation() for entries in each.values() if isinstance(entries, list)]
    front = (ROOT / "docs" / "index.md").read_text("utf-8").split("\n## ")
    tables = [part.count("\n| ") - 1 for part in front if "|---|" in part]
    assert len(groups) >= 9
    assert len(tables) == 5
    assert max(*groups, *tables) <= 7


def test_the_front_page_names_every_page_of_its_folder() -> None:
    text = (ROOT / "docs" / "index.md").read_text("utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"]({page.name})" in text, page.name


def test_lists_and_tables_begin_after_an_empty_line() -> None:
    """GitHub does without; the site would run them into the paragraph above."""
    wrong = []
    for page in (ROOT / "docs").rglob("*.md"):
        inside, above = False, ""
        for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
            inside ^= line.startswith("```")
            begins = "- " if line.startswith("- ") else "|" if line.startswith("|") else ""
            continues = above.startswith((begins, "  ", "#")) or not above
            if not inside and begins and not continues:
                wrong.append(f"{page.name}:{number}: {line}")
            above = line
    assert wrong == []


@pytest.mark.skipif(find_spec("material") is None, reason="needs mkdocs-material, the extra docs")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "learn" / "ko" / "zero.html").is_file()
