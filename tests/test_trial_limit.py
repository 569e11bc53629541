"""A trial that never ends: the process ends, with the stacks of all threads and one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from finetune import trial_limit
from finetune.trial_limit import limited, trials_end_process
from tests.support import threaded_device

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.thorough
def test_a_compiler_that_hangs_ends_the_run(tmp_path: Path) -> None:
    state = {"state": "running", "step": 0, "command": "finetune train r.yaml", "identity": {}}
    (tmp_path / "run_state.json").write_text(json.dumps(state | {"updated": "", "process": 1}))
    command = [sys.executable, "-m", threaded_device.__name__, "--trial", str(tmp_path)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert found.returncode == 4, found.stderr
    *stacks, line = found.stderr.strip().splitlines()
    assert re.fullmatch(r"training\.compile: Layer: .* not ended after .*; set training\.compile: false", line)
    assert sum("(most recent call first)" in each for each in stacks) >= 2
    assert any("endless_trial" in each for each in stacks)  # the main thread's stack
    recorded = json.loads((tmp_path / "run_state.json").read_text())
    assert recorded["state"] == "failed"
    assert recorded["phase"] == "worst step first"
    assert line in recorded["error"]


def test_a_trial_in_time_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_limit, "TRIAL_SECONDS", 0.05)
    ended = list[str]()
    with trials_end_process(ended.append), pytest.raises(ValueError, match="of its own"), limited("a", "b"):
        raise ValueError("of its own")
    with limited("a", "b"):  # no run is there to end
        time.sleep(0.1)
    time.sleep(0.1)
    assert ended == []
