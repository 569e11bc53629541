"""SECURITY.md: every line names a test that is there, and every verb has its row."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import typer

from finetune.cli.main import app
from tests.support.rows.cases import cases_in

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "SECURITY.md").read_text("utf-8")
NAMED = re.findall(r"`(tests/[^`\s]+)`", PAGE)


@cache
def names_in(path: Path) -> set[str]:
    """test_x, and TestX::test_x, of a file of tests."""
    names = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        inner = node.body if isinstance(node, ast.ClassDef) else []
        names |= {f"{node.name}::{each.name}" for each in inner if isinstance(each, ast.FunctionDef)}  # type: ignore[attr-defined]
        names |= {node.name} if isinstance(node, ast.FunctionDef) else set()
    return names


def is_there(name: str) -> bool:
    """Whether a named test, or a case of the corpus, or a file of tests, is there."""
    file, _, test = name.partition("::")
    path = ROOT / file
    if path.suffix == ".yaml":
        return path.is_file() and test in cases_in(path)
    return path.is_file() and (not test or test in names_in(path))


def claims() -> list[str]:
    """Each item of a list, its lines joined."""
    return [" ".join(item.split()) for item in re.findall(r"^- (.*?)(?=^- |^#|^\n|\Z)", PAGE, re.MULTILINE | re.DOTALL)]


@pytest.mark.parametrize("name", sorted(set(NAMED)))
def test_what_is_named_is_there(name: str) -> None:
    assert is_there(name)


def test_each_line_names_its_test() -> None:
    assert len(claims()) >= 20
    assert [claim for claim in claims() if "`tests/" not in claim] == []


def test_each_verb_has_its_row() -> None:
    rows = {row[0]: row for row in re.findall(r"^\| `(\w+)` \|(.*)\|$", PAGE, re.MULTILINE)}
    verbs = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert rows.keys() == verbs
    for verb, (_, cells) in rows.items():
        parts = [cell.strip() for cell in cells.split("|")]
        assert len(parts) == 5, verb
        assert all(parts), verb
        assert "`tests/" in parts[4], verb


def test_it_is_linked() -> None:
    for page in ("README.md", "docs/troubleshooting.md"):
        assert "SECURITY.md" in (ROOT / page).read_text("utf-8"), page


def test_a_name_that_is_none_is_seen() -> None:
    here = "tests/proofs/test_security_page.py"
    assert is_there(f"{here}::test_it_is_linked")
    assert not is_there(f"{here}::test_it_is_not")
    assert not is_there("tests/proofs/test_nothing.py")
    assert is_there("tests/hub/test_push.py::TestSecrets::test_in_a_recipe_before_training")
    assert not is_there("tests/hub/test_push.py::test_in_a_recipe_before_training")
