"""The list of licences, and what the audit says where it cannot be made."""

from __future__ import annotations

import importlib.metadata
import subprocess
from collections.abc import Sequence
from email.message import Message

import pytest

from benchmarks.packages import UNKNOWN, audit, base_install, licence_in, licences_of, main
from finetune import DISTRIBUTION


def test_no_licence_of_the_base_install_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    names = base_install()
    assert {DISTRIBUTION, "torch", "transformers", "accelerate", "peft", "numpy", "safetensors"} <= set(names)
    assert not {"pytest", "bitsandbytes", "deepspeed", "hypothesis"} & set(names)  # of extras
    ours = [name for name in names if not name.startswith(("cuda-", "nvidia-"))]  # which a CUDA build of torch brings
    assert [name for name, (_, licence) in licences_of(ours) if licence == UNKNOWN] == []
    assert main(["--licences"]) == (0 if ours == names else 1)
    assert capsys.readouterr().out.count("\n") == len(names) + 1


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ([("License-Expression", "MIT"), ("License", "BSD")], "MIT"),
        ([("License", "Apache-2.0")], "Apache-2.0"),
        ([("License", "Permission is hereby granted\nto anybody"), ("Classifier", "License :: OSI Approved")], UNKNOWN),
        ([("License", "x" * 90), ("Classifier", "License :: OSI Approved :: MIT License")], "MIT License"),
        ([("License", "UNKNOWN")], UNKNOWN),
        ([], UNKNOWN),
    ],
)
def test_where_a_licence_stands(fields: list[tuple[str, str]], licence: str) -> None:
    message = Message()
    for name, value in fields:
        message[name] = value
    assert licence_in(message) == licence  # type: ignore[arg-type]


def test_an_unknown_licence_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("benchmarks.packages.licence_in", lambda _: UNKNOWN)
    assert main(["--licences"]) == 1
    assert "licence unknown: accelerate, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fails_at", "code", "output", "expected", "line"),
    [
        ("install", 1, "ERROR: No matching distribution found for pip-audit", 4, "not made: ERROR: No matching"),
        ("--progress-spinner", 1, "ConnectionError: no route", 4, "not made: ConnectionError: no route"),
        ("--progress-spinner", 1, "Found 2 known vulnerabilities in 1 package", 1, ""),
        ("--progress-spinner", 0, "No known vulnerabilities found", 0, ""),
    ],
)
def test_the_audit_in_a_line(
    fails_at: str,
    code: int,
    output: str,
    expected: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without a network, by what the commands answer; no environment is made."""
    monkeypatch.setattr("venv.create", lambda *_, **__: None)

    def run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        if fails_at in words:
            return subprocess.CompletedProcess(words, code, "", output)
        return subprocess.CompletedProcess(words, 0, "", "")

    assert audit(run) == expected
    told = capsys.readouterr().err
    assert line in told
    assert told.count("\n") == bool(line)


def test_what_is_installed_is_what_the_package_asks_for() -> None:
    needs = importlib.metadata.requires(DISTRIBUTION) or []
    assert any(need.startswith("torch") for need in needs)
