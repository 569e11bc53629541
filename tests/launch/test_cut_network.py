"""The cable between two hosts is pulled in each phase of a training: both end in time, and the run goes on bitwise."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from finetune.files import read_lines
from tests.support.runs.launching import Started, by_srun, running, said, wait_all
from tests.support.runs.soak_resume import fingerprint, write_resume_recipe
from tests.support.runs.two_hosts import Host
from tests.support.stand_ins.cut_network import CUT

pytestmark = pytest.mark.slow
TIMEOUT = 15  # timeout_seconds of the recipe
STEPS = 8  # saved after 3 and 6, evaluated after 4 and 8
MOMENTS = ["load", "forward:5", "backward:5", "step:5", "evaluate:4", "save:6", "end"]
SRUN = [by_srun(rank, host=rank, nodes="10.77.0.[1-2]") for rank in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cut")


@pytest.fixture(scope="module")
def recipe(folder: Path) -> Path:
    return write_resume_recipe(folder, steps=STEPS, dropout=0.1)


@pytest.fixture(scope="module")
def expected(folder: Path, recipe: Path, hosts: tuple[Host, ...]) -> dict[str, Any]:
    with running(SRUN, recipe, folder / "whole", hosts, timeout_seconds=TIMEOUT) as processes:
        assert wait_all(processes, folder / "whole") == [0, 0], said(folder / "whole", 0)
    return fingerprint(folder / "whole")


@pytest.mark.parametrize("moment", MOMENTS)
def test_both_hosts_end_and_the_run_goes_on(
    moment: str, folder: Path, recipe: Path, hosts: tuple[Host, ...], expected: dict[str, Any]
) -> None:
    run_dir = folder / moment.replace(":", "-")
    parts = [Started(part.words, part.host, part.environment | {CUT: moment}) for part in SRUN]
    cut = Path(f"{run_dir}.cut")
    try:
        with running(
            parts, recipe, run_dir, hosts, script="tests/support/stand_ins/cut_network.py", timeout_seconds=TIMEOUT
        ) as processes:
            codes = wait_all(processes, run_dir, TIMEOUT + 60)
            took = time.time() - cut.stat().st_mtime
    finally:
        for host in hosts:
            subprocess.run(["ip", "-n", host.namespace, "link", "set", "cable", "up"], check=True)
    assert [line["phase"] for line in read_lines(cut) if "cut" in line] == [moment.partition(":")[0]]
    assert took < TIMEOUT + 20
    state = json.loads((run_dir / "run_state.json").read_text())
    if moment != "end":
        assert all(codes), codes
        assert state["state"] == "failed"
    with running(SRUN, recipe, run_dir, hosts, timeout_seconds=TIMEOUT) as processes:
        assert wait_all(processes, run_dir) == [0, 0], said(run_dir, 0)
    assert fingerprint(run_dir) == expected
