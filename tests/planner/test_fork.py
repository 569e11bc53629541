"""Functions in forked children: their results, their errors, and when there is no fork."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune.planner.depth import fork
from finetune.planner.depth.fork import run_in_forks

# A process of its own, in which nothing was trained before.
PROGRAM = """
import json, os, sys, time
from functools import partial
import torch
from finetune.planner.depth.fork import can_fork, run_in_forks
from finetune.planner.trace.fake_device import pretend_device

def trained(times):
    device = pretend_device()
    weight = torch.ones(3, requires_grad=True)
    (weight * times).sum().backward()
    return os.getpid(), weight.grad.tolist()

def spoilt():
    raise ValueError(f"in {os.getpid()}")

said = {"here": os.getpid(), "before": can_fork()}
with run_in_forks({2: partial(trained, 2), 5: partial(trained, 5)}) as result:
    said["first"], said["second"] = result(5), result(2)
with run_in_forks({7: partial(trained, 7), 8: spoilt}) as result:
    said["beside"] = result(7)
    try:
        result(8)
    except ValueError as error:
        said["error"] = str(error)
began = time.monotonic()
with run_in_forks({1: partial(time.sleep, 600), 2: os.getpid}) as result:
    result(2)
said["left"] = time.monotonic() - began < 300
said["children"] = len(__import__("multiprocessing").active_children())
said["still"] = can_fork()
with run_in_forks({1: os.getpid}) as result:
    said["alone"] = result(1)
trained(1)
for _ in range(600):  # autograd's thread gives itself its name
    if not can_fork():
        break
    time.sleep(0.1)
said["after"] = can_fork()
with run_in_forks({2: partial(trained, 2), 5: partial(trained, 5)}) as result:
    said["serial"] = result(5)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert not done.stderr, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks on Linux alone")


@pytest.mark.thorough
@needs_linux
def test_each_work_has_a_child_of_its_own(said: dict[str, Any]) -> None:
    assert (said["before"], said["still"]) == (True, True), "what children train leaves this process as it was"
    assert (said["first"][1], said["second"][1]) == ([5.0] * 3, [2.0] * 3)
    assert len({said["here"], said["first"][0], said["second"][0]}) == 3


@pytest.mark.thorough
def test_what_fails_there_is_raised_here(said: dict[str, Any]) -> None:
    assert said["error"] == f"in {said['here']}"
    assert said["beside"][1] == [7.0] * 3


@pytest.mark.thorough
def test_no_child_outlives_the_block(said: dict[str, Any]) -> None:
    assert (said["left"], said["children"]) == (True, 0)


@pytest.mark.thorough
def test_a_process_that_has_trained_and_a_single_work_need_no_child(said: dict[str, Any]) -> None:
    assert not said["after"]
    assert said["serial"] == [said["here"], [5.0] * 3]
    assert said["alone"] == said["here"]


def test_without_forks_all_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork, "can_fork", lambda: False)
    with run_in_forks({1: os.getpid, 2: os.getpid}) as result:
        assert {result(1), result(2)} == {os.getpid()}
