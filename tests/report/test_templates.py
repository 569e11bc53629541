"""What the pages are made of is installed with the package."""

from __future__ import annotations

import tomllib
from pathlib import Path

import jinja2
import pytest

from finetune.report.html import render_page

ROOT = Path(__file__).resolve().parents[2]


def test_every_file_beside_the_modules_is_package_data() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["finetune"]
    package = ROOT / "finetune"
    listed = {file for pattern in patterns for file in package.glob(pattern)}
    files = {file for file in package.rglob("*") if file.is_file() and file.suffix not in (".py", ".pyc")}
    assert len([file for file in files if file.suffix == ".jinja"]) >= 4
    assert files <= listed


def test_a_value_that_a_template_lacks_raises() -> None:
    with pytest.raises(jinja2.UndefinedError):
        render_page("preview.html.jinja", title="t", lead="l")
