"""A probe in a child: its result and its refusal are those of this process, which starts no thread for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.probe import forked
from finetune.probe.forked import probed_in_child
from finetune.probe.probe import ProbeResult
from tests.support.runs.recipes import least_recipe

HERE = os.getpid()


def found(**facts: Any) -> ProbeResult:
    return ProbeResult({"process": os.getpid(), **facts})


def probing(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], ProbeResult]) -> None:
    """Also where another test has trained in this process: no child of these computes."""
    monkeypatch.setattr(forked, "can_fork", lambda: True)
    monkeypatch.setattr(forked, "probe", lambda recipe, *, offline: answer())


def test_the_result_is_that_of_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    probing(monkeypatch, found)
    with probed_in_child(least_recipe()) as result:
        assert result().facts["process"] != HERE


@pytest.mark.parametrize("kind", [EnvironmentMismatch, FinetuneError])
def test_a_refusal_of_the_child_is_raised_here(kind: type[FinetuneError], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> ProbeResult:
        raise kind(f"packing differs in {os.getpid() != HERE}")

    probing(monkeypatch, refused)
    with probed_in_child(least_recipe()) as result, pytest.raises(kind, match="packing differs in True") as raised:
        result()
    assert raised.value.exit_code == kind.exit_code


def test_where_no_child_can_compute_this_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def here_alone() -> ProbeResult:
        if os.getpid() != HERE:
            raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing")
        return found()

    probing(monkeypatch, here_alone)
    with probed_in_child(least_recipe()) as result:
        assert result().facts["process"] == HERE


def test_the_child_ends_with_the_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def endless() -> ProbeResult:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(600)
        return found()

    probing(monkeypatch, endless)
    with probed_in_child(least_recipe()):
        pass
    assert not [path.name for path in tmp_path.iterdir() if Path("/proc", path.name).exists()]
