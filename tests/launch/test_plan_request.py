"""The planner is asked in a child process: it answers in time, or the answer is the reason why it did not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from threading import Thread

import psutil
import pytest

from finetune.launch import plan_request
from finetune.launch.plan_request import SHARED_ANSWER, PlanRequest, ask_once, ask_planner
from finetune.planner.run_plans import read_request

REQUEST = PlanRequest(
    recipe={}, documents=((7, 5), (9,)), micro_batches=1, flat=True, nodes=1, ranks_of_node=1, device="cpu",
    memory=2**30,
)  # fmt: skip


def planner_of(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell script in the planner's place."""
    file = folder / "planner"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(file))


def test_a_request_survives_json() -> None:
    assert read_request(json.loads(json.dumps(asdict(REQUEST)))) == REQUEST
    assert read_request({"recipe": {}, **json.loads(json.dumps(REQUEST.facts()))}) == REQUEST


def test_a_planner_that_fails_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planner_of("exit 1", tmp_path, monkeypatch)
    assert ask_planner(REQUEST, 60) == {"plan": None, "why": "the planner ended with 1", "changes": None}
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    assert "could not be started: " in ask_planner(REQUEST, 60)["why"]


def test_waiting_ends_with_the_last_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    planner_of("exec sleep 60", tmp_path, monkeypatch)
    assert ask_planner(REQUEST, 0.2)["why"] == "the planner has not answered within 0.2 seconds"
    first = '{"plan": {"fits": true}, "why": null, "changes": null}'
    planner_of(f"echo '{first}'; exec sleep 60", tmp_path, monkeypatch)
    assert ask_planner(REQUEST, 0.5, changes=True) == json.loads(first), "the changes would have come later"
    assert time.monotonic() - began < 20


def test_of_several_ranks_one_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    answer = {"plan": {"fits": True}, "why": None, "changes": []}

    def ask(request: PlanRequest, timeout: float, *, changes: bool) -> dict[str, object]:
        asked.append(changes)
        time.sleep(0.3)
        return answer

    monkeypatch.setattr(plan_request, "ask_planner", ask)
    answers: list[object] = []
    ranks = [Thread(target=lambda: answers.append(ask_once(REQUEST, 20, tmp_path))) for _ in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert answers == [answer] * 3
    assert asked == [True]
    (tmp_path / SHARED_ANSWER).write_text("")
    assert ask_once(REQUEST, 0.1, tmp_path)["why"] == "the rank that asked the planner has left no answer"
    assert ask_once(REQUEST, 0.1, tmp_path / "missing") == answer, "it asks for itself"


RUN = """
import sys
from finetune.launch.plan_request import PlanRequest, ask_planner
ask_planner(PlanRequest({}, ((7,),), 1, True, 1, 1, "cpu", 1), 600)
"""


@pytest.mark.slow
def test_no_planner_outlives_its_run(tmp_path: Path) -> None:
    """Killed as the kernel kills, when memory is short."""
    site = tmp_path / "sitecustomize.py"  # in the planner alone: it says its pid and waits after the kernel was asked
    site.write_text(
        "import os, sys, signal\n"
        "if '-m' in sys.orig_argv:\n"
        "    from finetune.launch import with_parent\n"
        "    ask = with_parent.die_with_parent\n"
        "    def waits(number):\n"
        "        ask(number)\n"
        f"        open({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}}\\n')\n"
        "        signal.pause()\n"
        "    with_parent.die_with_parent = waits\n"
    )
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    with subprocess.Popen([sys.executable, "-c", RUN], env=os.environ | {"PYTHONPATH": paths}) as run:
        try:
            end = time.monotonic() + 60
            while not (text := (tmp_path / "pid").read_text() if (tmp_path / "pid").exists() else "").endswith("\n"):
                assert time.monotonic() < end
                time.sleep(0.05)
            planner = psutil.Process(int(text))
        finally:
            run.kill()
    psutil.wait_procs([planner], timeout=20)
    assert not planner.is_running() or planner.status() == psutil.STATUS_ZOMBIE


def test_facts_leave_out_the_recipe() -> None:
    assert "recipe" not in REQUEST.facts()
    assert replace(REQUEST, width=4).facts()["width"] == 4
