"""Attention by document inside compiled layers, on a device with an autograd thread of its own, as a GPU has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import threaded_device

ROOT = Path(__file__).resolve().parents[2]


def on_the_device(*options: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which ends itself when it hangs: the device stays known to torch until the end."""
    command = [sys.executable, "-m", threaded_device.__name__, *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.thorough
def test_backward_does_not_wait_for_the_thread_that_waits_for_it() -> None:
    found = on_the_device()
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("right: ") == len(threaded_device.CASES) == 6


@pytest.mark.slow
def test_the_device_shows_the_deadlock() -> None:
    """Without the mend: the outer backward's thread waits for the operator's, which waits for the device's thread."""
    found = on_the_device("--unmended")
    assert found.returncode == 1
    assert "right: " not in found.stdout
    assert "in gradients" in found.stderr
    assert "in differentiated" in found.stderr
