"""The lowest and newest supported versions have environments and tests; README's commands take the small torch."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from finetune import DISTRIBUTION
from finetune.wording import install_command

ROOT = Path(__file__).resolve().parents[2]
SMALL_TORCH = "'torch<2.14'"  # of which this platform has a build for CPUs


@pytest.fixture
def versions() -> ModuleType:
    spec = importlib.util.spec_from_file_location("versions", ROOT / ".ci" / "versions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(page: str) -> list[str]:
    """The fenced blocks of a page."""
    return [block.partition("\n")[2] for block in page.split("```")[1::2]]


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return found


def test_readme_and_ci_take_the_small_torch() -> None:
    first, second, *_ = blocks((ROOT / "README.md").read_text("utf-8"))
    assert f"pip install -e '.[quickstart]' {SMALL_TORCH} " in first
    assert f"pip install -e '.[test]' {SMALL_TORCH} " in second
    assert SMALL_TORCH in (ROOT / ".ci" / "run").read_text("utf-8")


# Another project has the name `finetune` on the package index, so no page may install by name.
BY_NAME = (
    r"(?:pip3?|pipx|uv)(?: \w+)? (?:install|add|download)\b[^\n&|;`]*?[ '\"=](?:finetune|finetune-recipes)(?![\w./-])",
    r"finetune(?:-recipes)?\[\w",
    r"\.\[(?<!-e \.\[)(?<!-e '\.\[)(?:qlora|deepspeed|quickstart|trackers|excel|eval|ray|storage|test|bench|docs)\b",
)


def by_name(text: str) -> list[str]:
    return [match[0] for form in BY_NAME for match in re.finditer(form, text)]


def test_the_package_is_installed_in_the_checkout_alone() -> None:
    """No tracked text installs this package by its name, and the extras that pages name are there."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.split("\0") if (ROOT / name).is_file()]
    texts = {file.relative_to(ROOT): file.read_text("utf-8", "replace") for file in files}
    build = Path("pyproject.toml")
    texts[build] = texts[build].replace(f'test = [\n    "{DISTRIBUTION}[', "")  # the extra `test` names the others
    assert {name: found for name, text in texts.items() if (found := by_name(text))} == {}
    extras = {
        extra
        for text in texts.values()
        for each in re.findall(r"-e '\.\[([\w,]+)\]", text)
        for extra in each.split(",")
    }
    assert {"qlora", "deepspeed", "ray", "storage"} <= extras <= project()["optional-dependencies"].keys()
    assert project()["name"] == DISTRIBUTION != "finetune"


def test_other_ways_to_install_it_are_found() -> None:
    name, extra = "finetune", "[ray]"
    others = [f"pip install {name}", f"pip install --no-deps {name}, or", f"pip install '{name}{extra}'"]
    others += [
        f"uv pip install {name}-recipes",
        f"pipx install {name}",
        f"/opt/{name}{extra}",
        f"pip install '.{extra}'",
    ]
    assert [len(by_name(text)) > 0 for text in others] == [True] * len(others)
    right = f"pip install -e '.{extra}' 'torch<2.14' && accelerate launch {name}/train.py; pip install trl; {name} list"
    assert by_name(right) == []
    assert install_command("ray") == f"pip install -e '.{extra}'"


def test_the_bound_admits_the_newest_torch_that_was_tested() -> None:
    (torch,) = [Requirement(line) for line in project()["dependencies"] if line.startswith("torch>")]
    assert [torch.specifier.contains(version) for version in ("2.11.0", "2.13.0", "2.14.1", "2.15.0")] == [
        True, True, True, False,
    ]  # fmt: skip


def test_the_lowest_set_is_every_lower_bound(versions: ModuleType) -> None:
    lowest = {each.name: each for each in map(Requirement, versions.requirements("lowest"))}
    assert str(lowest["torch"].specifier) == "==2.11"
    assert {"transformers", "accelerate", "peft", "datasets", "huggingface_hub", "bitsandbytes", "pytest"} <= set(
        lowest
    )
    optional = project()["optional-dependencies"]
    every = [*project()["dependencies"], *(line for extra in versions.EXTRAS for line in optional[extra])]
    bounded = [Requirement(line) for line in every if ">=" in line]
    assert len(bounded) > 20
    for requirement in bounded:
        (bound,) = [each.version for each in requirement.specifier if each.operator == ">="]
        assert lowest[requirement.name].specifier.contains(Version(bound)), requirement
        assert str(lowest[requirement.name].specifier) == f"=={bound}"


def test_the_lowest_versions_run_what_depends_on_libraries(versions: ModuleType) -> None:
    assert versions.TESTS["lowest"] == ["architecture", "model", "strategies", "training", "proofs"]
    assert all((ROOT / "tests" / name).is_dir() for name in versions.TESTS["lowest"])
    assert "python3 .ci/versions.py lowest" in (ROOT / ".ci" / "run").read_text("utf-8").splitlines()


def test_ci_runs_all_tests_but_the_slow(versions: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pytest` alone leaves out the thorough ones too."""
    _, second, *_ = blocks((ROOT / "README.md").read_text("utf-8"))
    assert second.endswith("&& pytest -m 'not slow'\n")
    commands = list[list[str]]()
    monkeypatch.setattr(versions, "install", lambda kind: Path(sys.executable))
    monkeypatch.setattr(
        versions.subprocess, "run", lambda words, **_: commands.append(words) or subprocess.CompletedProcess(words, 0)
    )
    assert [versions.main(words) for words in (["lowest"], ["newest"], ["newest", "tests"])] == [0, 0, 0]
    assert all(words[words.index("-m", 2) + 1] == "not slow" for words in commands)


def test_an_environment_that_cannot_be_installed_fails(
    versions: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text("utf-8"))
    monkeypatch.setattr(versions.venv, "create", lambda *_, **__: None)

    def fail(command: list[str], **options: Any) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(versions.subprocess, "run", fail)
    assert versions.main(["lowest"]) == 4
    assert "the lowest supported versions cannot be installed" in capsys.readouterr().err


def test_another_name_is_told_the_usage() -> None:
    words = [sys.executable, str(ROOT / ".ci" / "versions.py"), "oldest"]
    process = subprocess.run(words, capture_output=True, text=True)
    assert process.returncode == 2
    assert "versions.py lowest" in process.stderr
